"""Makes the virtual environment from a wheelhouse, without any network."""

import importlib.util
import json
import logging
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from launch.offline.manifest import Manifest
from launch.offline.pip import last_lines, pip_wheel, run_pip
from launch.offline.requirements import Rules, check_torch, needs
from pipeline.errors import DataError
from pipeline.runtime.env import child_environment

logger = logging.getLogger(__name__)

_SYSTEM_PATHS_FILE = "system_torch.pth"
"""In the environment's site-packages: folders in which Python looks last."""


@dataclass(frozen=True)
class SystemTorch:
    """The torch that the running Python has."""

    version: str
    folders: tuple[str, ...]
    """Where that Python looks for packages, torch's folder among them."""


def system_torch() -> SystemTorch | None:
    """Finds the torch of the running Python without loading it; None if it has none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    home = str(Path(spec.origin).parents[1])
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return SystemTorch(metadata.version("torch"), tuple(dict.fromkeys([*packages, home])))


def install(known: Rules, held: Manifest, project: Path, folder: Path, venv: Path) -> None:
    """Makes the environment, with the wheelhouse's torch or the running Python's.

    Args:
        known: what the project needs.
        held: the wheelhouse's manifest, whose files were compared with it.
        project: the folder of `pyproject.toml`, installed as editable.
        folder: the wheelhouse.
        venv: the environment's folder.

    Raises:
        DataError: a wheel is missing, there is no torch or two, or pip fails.
    """
    wheels = [folder / name for name in held.files]
    missing = needs(known, wheels).missing
    if missing:
        raise DataError(
            f"{folder} lacks {', '.join(sorted(missing.values()))}: it was collected for another "
            "state of pyproject.toml or constraints.txt; where there is a network, run "
            f"`make wheelhouse PYTHON={known.target.python}`"
        )
    own = None if held.torch else _checked_system_torch(known, folder)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    paths = venv / "lib" / f"python{known.target.python}" / "site-packages" / _SYSTEM_PATHS_FILE
    paths.unlink(missing_ok=True)
    if own is not None:
        # Not `venv --system-site-packages`: where this Python is itself of an environment, that
        # would show the packages of the Python behind it, which has no torch.
        paths.write_text("".join(f"{path}\n" for path in own.folders), encoding="utf-8")
    pip = pip_wheel(folder)
    _pip(venv, pip, [str(path) for path in wheels])
    _pip(venv, pip, ["--no-build-isolation", "--editable", str(project)])
    _check(venv, held.torch or (own.version if own else ""))


def _checked_system_torch(known: Rules, folder: Path) -> SystemTorch:
    own = system_torch()
    if own is None:
        raise DataError(
            f"{sys.executable} has no torch, and {folder} holds none; name a Python that has one "
            "(make setup OFFLINE=1 PYTHON=/path/to/python3), or, where there is a network, run "
            f"`make wheelhouse PYTHON={known.target.python} TORCH=VERSION`"
        )
    check_torch(known.roots, own.version, f"torch {own.version} in {own.folders[-1]}")
    return own


def _pip(venv: Path, pip: Path, what: list[str]) -> None:
    """Installs into the environment exactly what is named, whatever the machine's pip settings."""
    done = run_pip(
        ["--isolated", "install", "--quiet", "--no-index", "--no-deps", *what],
        wheel=pip,
        python=str(venv / "bin" / "python"),
        PIP_CONFIG_FILE="/dev/null",
    )
    if done.returncode != 0:
        raise DataError(f"the wheels cannot be installed:{last_lines(done.stdout)}")


def _check(venv: Path, version: str) -> None:
    """Loads torch in the new environment, and compares its version with the one that is meant."""
    code = "import json, torch; print(json.dumps([str(torch.__version__), torch.__file__]))"
    done = subprocess.run(
        [str(venv / "bin" / "python"), "-c", code],
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise DataError(f"torch cannot be loaded in {venv}:{last_lines(done.stderr)}")
    found, path = json.loads(done.stdout.splitlines()[-1])
    if found.partition("+")[0] != version.partition("+")[0]:
        raise DataError(
            f"{venv} has torch {found} ({path}), expected {version}; it is of an earlier "
            "installation: run `make clean` first"
        )
    logger.info("installed, with torch %s of %s", found, path)
