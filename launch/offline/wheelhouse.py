"""A wheelhouse: a folder of wheels, pip among them, with a manifest of what it is for.

pip is run from its wheel, so that neither machine needs a pip of its own.
"""

import json
import platform
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.errors import DataError
from pipeline.runtime.env import child_environment
from pipeline.runtime.files import sha256_file, write_json_atomic

_MANIFEST_FILE = "manifest.json"
"""Written last: a wheelhouse without it is not complete."""


@dataclass(frozen=True)
class Target:
    """The machines that a wheelhouse is for: CPython on Linux."""

    python: str
    """Such as 3.12."""
    machine: str
    """As `uname -m` prints it: compiled wheels hold its instructions."""


def this_machine() -> Target:
    """Describe the running Python and its machine."""
    return Target(".".join(platform.python_version_tuple()[:2]), platform.machine())


@dataclass(frozen=True)
class Manifest:
    """The contents of a wheelhouse."""

    target: Target
    torch: str | None
    """Version of torch among the wheels; None: the machine has a torch of its own."""
    files: dict[str, str]
    """sha256 by file name."""

    def damage(self, folder: Path) -> dict[str, str]:
        """Describe what is wrong with files, by name; empty if all are as collected."""
        texts = {}
        for name, expected in self.files.items():
            if not (folder / name).is_file():
                texts[name] = "does not exist"
            elif (sha256 := sha256_file(folder / name)) != expected:
                texts[name] = f"has sha256 {sha256}, expected {expected}"
        return texts


def begin(folder: Path, target: Target) -> None:
    """Leave in a folder only wheels that an earlier collection for the same target completed."""
    folder.mkdir(parents=True, exist_ok=True)
    before = _read(folder)
    keep = set[str]()
    if before and before.target == target:
        keep = before.files.keys() - before.damage(folder).keys()
    (folder / _MANIFEST_FILE).unlink(missing_ok=True)
    for path in folder.glob("*.whl"):
        if path.name not in keep:
            path.unlink()


def complete(folder: Path, target: Target, torch: str | None) -> Manifest:
    """Write the manifest of all wheels in a folder, which declares it complete."""
    files = {path.name: sha256_file(path) for path in sorted(folder.glob("*.whl"))}
    manifest = Manifest(target, torch, files)
    write_json_atomic(folder / _MANIFEST_FILE, asdict(manifest))
    return manifest


def open_for(folder: Path, here: Target) -> Manifest:
    """Read the manifest of a wheelhouse, which must be whole and for machines like this one."""
    again = f"where there is a network, run `make wheelhouse PYTHON={here.python}`"
    manifest = _read(folder)
    if manifest is None:
        raise DataError(
            f"{folder / _MANIFEST_FILE} does not exist, so {folder} is not a complete wheelhouse; "
            f"{again} and copy the folder here"
        )
    target = manifest.target
    if target != here:
        elsewhere = "" if target.machine == here.machine else f" on {here.machine}"
        raise DataError(
            f"{folder} holds wheels for Python {target.python} on {target.machine}, this is Python "
            f"{here.python} on {here.machine}; {again}{elsewhere}"
        )
    if damage := manifest.damage(folder):
        lines = "".join(f"\n  {name} {text}" for name, text in damage.items())
        raise DataError(f"{folder} is not as it was collected; copy these files again:{lines}")
    return manifest


def _read(folder: Path) -> Manifest | None:
    path = folder / _MANIFEST_FILE
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        return Manifest(Target(**value["target"]), value["torch"], dict(value["files"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not the manifest of a wheelhouse ({error!r}); remove {folder} and collect "
            "it again"
        ) from error


def fetch_pip(constraints: Path, folder: Path) -> None:
    """Fetch the pip that `constraints.txt` pins, which then does everything else."""
    pin = re.search(r"^pip==(\S+)$", constraints.read_text(encoding="utf-8"), re.MULTILINE)
    if pin is None:
        raise DataError("constraints.txt has no version of pip; add a line pip==VERSION")
    for path in folder.glob("pip-*.whl"):
        if path.name != f"pip-{pin[1]}-py3-none-any.whl":
            path.unlink()
    if not any(folder.glob("pip-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
        run([*command, pin[0]], f"{pin[0]} cannot be fetched with this Python's own pip:")


def pip_wheel(folder: Path) -> Path:
    """Return the one wheel of pip in a wheelhouse."""
    wheels = sorted(folder.glob("pip-*-py3-none-any.whl"))
    if len(wheels) != 1:
        raise DataError(
            f"{folder} holds {len(wheels)} wheels of pip, expected one; collect it again"
        )
    return wheels[0].resolve()


def run_pip(
    folder: Path, words: list[str], failure: str, python: str = sys.executable, **environ: str
) -> None:
    """Run the pip of a wheelhouse; if it fails, the error is `failure` and pip's last lines."""
    command = [python, "-m", "pip", "--disable-pip-version-check", *words]
    run(command, failure, PYTHONPATH=str(pip_wheel(folder)), **environ)


def run(command: list[str], failure: str, **environ: str) -> str:
    """Return what a program prints; if it fails, the error is `failure` and its last lines."""
    done = subprocess.run(
        command, env=child_environment(**environ), text=True, capture_output=True, check=False
    )
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines()[-12:]
        raise DataError(failure + "".join(f"\n  {line}" for line in lines))
    return done.stdout
