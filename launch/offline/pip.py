"""The pip that lies in a wheelhouse: run from its wheel, so that neither machine needs its own."""

import re
import subprocess
import sys
from pathlib import Path

from pipeline.errors import DataError
from pipeline.runtime.env import child_environment


def pip_wheel(folder: Path) -> Path:
    """The wheel of pip in a wheelhouse.

    Raises:
        DataError: there is none.
    """
    found = sorted(folder.glob("pip-*-py3-none-any.whl"))
    if len(found) != 1:
        raise DataError(
            f"{folder} holds {len(found)} wheels of pip, expected one; collect it again"
        )
    return found[0].resolve()


def run_pip(
    arguments: list[str], *, wheel: Path | None, python: str = sys.executable, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Runs pip and hands back how it ended, with all it said.

    Args:
        arguments: pip's command line.
        wheel: pip to run; None: the one that the interpreter has.
        python: interpreter to run it with.
        environ: variables to set for it.
    """
    if wheel is not None:
        environ["PYTHONPATH"] = str(wheel)
    return subprocess.run(
        [python, "-m", "pip", "--disable-pip-version-check", *arguments],
        env=child_environment(**environ),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )


def fetch_pip(project: Path, folder: Path) -> None:
    """Fetches the pinned pip, which then does everything else.

    Args:
        project: the folder of `constraints.txt`.
        folder: the wheelhouse.

    Raises:
        DataError: no version is pinned, or it cannot be fetched.
    """
    text = (project / "constraints.txt").read_text(encoding="utf-8")
    pin = re.search(r"^pip==\S+$", text, flags=re.MULTILINE)
    if pin is None:
        raise DataError("constraints.txt has no version of pip; add a line pip==VERSION")
    wanted = f"{pin[0].replace('==', '-')}-py3-none-any.whl"
    for path in folder.glob("pip-*.whl"):
        if path.name != wanted:
            path.unlink()
    if not (folder / wanted).exists():
        done = run_pip(["download", "--no-deps", "--dest", str(folder), pin[0]], wheel=None)
        if done.returncode != 0:
            raise DataError(
                f"{pin[0]} cannot be fetched with this Python's own pip:{last_lines(done.stdout)}"
            )


def last_lines(text: str, count: int = 12) -> str:
    """The end of what a program said, indented."""
    return "".join(f"\n  {line}" for line in text.strip().splitlines()[-count:])
