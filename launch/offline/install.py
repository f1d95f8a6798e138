"""The installation from a wheelhouse on a machine without a network."""

import importlib.util
import json
import logging
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from launch.offline import wheelhouse
from launch.offline.requirements import Pins
from launch.offline.wheelhouse import Manifest, last_lines
from pipeline.errors import DataError
from pipeline.runtime.env import child_environment

logger = logging.getLogger(__name__)

_SYSTEM_PATHS_FILE = "system_torch.pth"
"""In the environment's site-packages: folders that Python searches last."""


def install(pins: Pins, held: Manifest, source: Path, folder: Path, venv: Path) -> None:
    """Make the environment, with the wheelhouse's torch or the running Python's.

    Args:
        pins: the packages.
        held: the wheelhouse's manifest, whose files were compared with it.
        source: the folder of `pyproject.toml`, installed as editable.
        folder: the wheelhouse.
        venv: the environment's folder.

    Raises:
        DataError: a wheel is missing, there is no torch or a second one, or pip fails.
    """
    wheels = [folder / name for name in held.files]
    python = pins.target.python
    if missing := pins.missing(wheels):
        raise DataError(
            f"{folder} lacks {', '.join(missing)}: it was collected for another state of "
            "pyproject.toml or constraints.txt; where there is a network, run "
            f"`make wheelhouse PYTHON={python}`"
        )
    version, paths = (held.torch, []) if held.torch else _system_torch(pins, folder)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    path_file = venv / "lib" / f"python{python}" / "site-packages" / _SYSTEM_PATHS_FILE
    path_file.unlink(missing_ok=True)
    if paths:
        # Not `venv --system-site-packages`: where this Python is itself of an environment, that
        # would show the packages of the Python behind it, which has no torch.
        path_file.write_text("".join(f"{path}\n" for path in paths), encoding="utf-8")
    for what in (map(str, wheels), ["--no-build-isolation", "--editable", str(source)]):
        wheelhouse.run_pip(
            # --isolated and PIP_CONFIG_FILE: whatever the machine's pip settings are.
            ["--isolated", "install", "--quiet", "--no-index", "--no-deps", *what],
            "the wheels cannot be installed:",
            folder=folder,
            python=str(venv / "bin" / "python"),
            PIP_CONFIG_FILE="/dev/null",
        )
    _check(venv, version)


def _system_torch(pins: Pins, folder: Path) -> tuple[str, list[str]]:
    """Find version and package folders of the running Python's torch, without loading it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise DataError(
            f"{sys.executable} has no torch, and {folder} holds none; name a Python that has one "
            "(make setup OFFLINE=1 PYTHON=/path/to/python3), or, where there is a network, run "
            f"`make wheelhouse PYTHON={pins.target.python} TORCH=VERSION`"
        )
    home, version = str(Path(spec.origin).parents[1]), metadata.version("torch")
    pins.check_torch(version, f"torch {version} in {home}")
    packages = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return version, list(dict.fromkeys([*packages, home]))


def _check(venv: Path, version: str) -> None:
    """Load torch in the new environment, and compare its version with the expected one."""
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
    actual, path = json.loads(done.stdout.splitlines()[-1])
    if actual.partition("+")[0] != version.partition("+")[0]:
        raise DataError(
            f"{venv} has torch {actual} ({path}), expected {version}; it belongs to an earlier "
            "installation: run `make clean` first"
        )
    logger.info("installed, with torch %s of %s", actual, path)
