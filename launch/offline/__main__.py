"""Installation on machines without a network: runs on a bare Python, before any installation."""

import argparse
import importlib.util
import json
import logging
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from launch.offline import wheelhouse
from launch.offline.wheelhouse import Manifest, Target, run, run_pip, this_machine
from pipeline.errors import DataError
from pipeline.runtime import cli

if TYPE_CHECKING:  # it imports pip, which is there only once a wheelhouse's own is on the path
    from launch.offline.requirements import Pins

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).parents[2]
_EXAMPLES = """\
  python3 -m launch.offline collect --python 3.12
  python3 -m launch.offline collect --python 3.12 --torch 2.13.0
  python3 -m launch.offline install
"""
_GLIBC = 28
"""Wheels for glibc 2.28 and older, which is RHEL 8 of 2019: clusters are old."""
_SOURCE_ONLY = ("deepspeed",)
"""Packages that are published without wheels; their wheel is built here, once."""
_BUILD = {
    "DS_BUILD_OPS": "0",  # DeepSpeed: no CUDA code; it is compiled on the machines that need it
    # For the same bytes every time; DeepSpeed lists its extras in the order of a set.
    "SOURCE_DATE_EPOCH": "1600000000",
    "PYTHONHASHSEED": "0",
}
_SYSTEM_PATHS_FILE = "system_torch.pth"
"""In the environment's site-packages: folders that Python searches last."""


def collect(pins: "Pins", torch: str | None, source: Path, folder: Path) -> Manifest:
    """Fetch the wheels that are missing from a wheelhouse with pip, then write the manifest."""
    missing = pins.missing(list(folder.glob("*.whl")))
    if missing:
        logger.info("fetching %s", ", ".join(missing))
    built = [pin for pin in missing if pin.partition("==")[0] in _SOURCE_ONLY]
    if fetched := [pin for pin in missing if pin not in built]:
        _download(["--no-deps", *fetched], pins.target, folder)
    for pin in built:
        _build(pin, source, folder)
    if torch is not None:
        pins.check_torch(torch, f"TORCH={torch}")
        logger.info("fetching torch==%s and its own packages", torch)
        # Not constraints.txt itself: pip would evaluate its conditions with the Python that runs.
        constraints = folder / "pins.txt"
        constraints.write_text("".join(f"{n}=={v}\n" for n, v in pins.versions.items()))
        _download(["--constraint", str(constraints), f"torch=={torch}"], pins.target, folder)
        constraints.unlink()
    if still := pins.missing(list(folder.glob("*.whl"))):
        raise DataError(f"{', '.join(still)}: pip fetched no such wheel, though it said so")
    return wheelhouse.complete(folder, pins.target, torch)


def _download(what: list[str], target: Target, folder: Path) -> None:
    # pip takes each platform literally, from the newest to the oldest.
    platforms = [f"manylinux_2_{minor}_{target.machine}" for minor in range(_GLIBC, 4, -1)]
    platforms += [f"manylinux{year}_{target.machine}" for year in ("2014", "2010", "1")]
    options = ["--only-binary=:all:", "--dest", str(folder), "--implementation", "cp"]
    options += ["--python-version", target.python, *(f"--platform={name}" for name in platforms)]
    failure = (
        f"a package cannot be fetched as a wheel for Python {target.python}, {target.machine} and "
        f"glibc up to 2.{_GLIBC}. Is there a network, and does PIP_INDEX_URL or "
        "PIP_EXTRA_INDEX_URL name an index that has it? Otherwise choose another version in "
        "constraints.txt, or TORCH. pip said:"
    )
    run_pip(folder, ["download", *options, *what], failure)


def _build(pin: str, source: Path, folder: Path) -> None:
    """Build the wheel of a package that is published as source only."""
    before = {*folder.glob("*.whl")}
    constraints = ["--build-constraint", str(source / "constraints.txt")]
    # --no-cache-dir: the cache could hold a wheel that was built with other settings.
    options = ["--no-deps", "--no-cache-dir", "--wheel-dir", str(folder), *constraints]
    run_pip(folder, ["wheel", *options, pin], f"{pin} cannot be built from source:", **_BUILD)
    for path in {*folder.glob("*.whl")} - before:
        if not path.name.endswith("-none-any.whl"):
            path.unlink()
            raise DataError(
                f"{pin} gave {path.name}, which runs on machines like this one only; expected a "
                "wheel without compiled code"
            )


def install(pins: "Pins", held: Manifest, source: Path, folder: Path, venv: Path) -> None:
    """Make the environment, with the wheelhouse's torch or the running Python's."""
    wheels = [folder / name for name in held.files]
    if missing := pins.missing(wheels):
        raise DataError(
            f"{folder} lacks {', '.join(missing)}: it was collected for another state of "
            "pyproject.toml or constraints.txt; where there is a network, run "
            f"`make wheelhouse PYTHON={pins.target.python}`"
        )
    version, paths = (held.torch, []) if held.torch else _system_torch(pins, folder)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    path_file = venv / "lib" / f"python{pins.target.python}" / "site-packages" / _SYSTEM_PATHS_FILE
    path_file.unlink(missing_ok=True)
    if paths:
        # Not `venv --system-site-packages`: where this Python is itself of an environment, that
        # would show the packages of the Python behind it, which has no torch.
        path_file.write_text("".join(f"{path}\n" for path in paths), encoding="utf-8")
    for what in (map(str, wheels), ["--no-build-isolation", "--editable", str(source)]):
        # --isolated and PIP_CONFIG_FILE: whatever the machine's pip settings are.
        words = ["--isolated", "install", "--quiet", "--no-index", "--no-deps", *what]
        failure, python = "the wheels cannot be installed:", str(venv / "bin" / "python")
        run_pip(folder, words, failure, python, PIP_CONFIG_FILE="/dev/null")
    _check(venv, version)


def _system_torch(pins: "Pins", folder: Path) -> tuple[str, list[str]]:
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
    command = [str(venv / "bin" / "python"), "-c", code]
    output = run(command, f"torch cannot be loaded in {venv}:")
    actual, path = json.loads(output.splitlines()[-1])
    if actual.partition("+")[0] != version.partition("+")[0]:
        raise DataError(
            f"{venv} has torch {actual} ({path}), expected {version}; it belongs to an earlier "
            "installation: run `make clean` first"
        )
    logger.info("installed, with torch %s of %s", actual, path)


def _pins(folder: Path, target: Target) -> "Pins":
    """Read the pins with the wheelhouse's pip, which holds the packages that parse them."""
    sys.path.insert(0, str(wheelhouse.pip_wheel(folder)))
    from launch.offline.requirements import read_pins

    return read_pins(_SOURCE, target)


def _python_version(text: str) -> str:
    """Return a version such as `3.12` as it is, or ask the named interpreter for its version."""
    if re.fullmatch(r"\d+\.\d+", text):
        return text
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        return subprocess.check_output([text, "-c", code], text=True).strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise DataError(
            f"PYTHON={text} does not run ({error}); a version is enough: PYTHON=3.12"
        ) from error


def _collect(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.folder
    target = Target(_python_version(arguments.python), this_machine().machine)
    wheelhouse.begin(folder, target)
    wheelhouse.fetch_pip(_SOURCE / "constraints.txt", folder)
    manifest = collect(_pins(folder, target), arguments.torch, _SOURCE, folder)
    size = sum((folder / name).stat().st_size for name in manifest.files) / 1e6
    torch = f"torch {arguments.torch} included" if arguments.torch else "without torch"
    what = f"{len(manifest.files)} wheels, {size:.0f} MB, for Python {target.python}"
    logger.info("%s: %s on %s, %s", folder, what, target.machine, torch)
    return 0


def _install(arguments: argparse.Namespace) -> int:
    held = wheelhouse.open_for(arguments.folder, this_machine())
    pins = _pins(arguments.folder, held.target)
    install(pins, held, _SOURCE, arguments.folder, arguments.venv)
    return 0


def main() -> int:
    """Run the command that was asked for."""
    parser = cli.make_parser("launch.offline", __doc__ or "", _EXAMPLES)
    commands = parser.add_subparsers(required=True, metavar="command")
    collect = commands.add_parser("collect", help="fetch the wheels; needs a network")
    collect.add_argument("--python", required=True, help="version, such as 3.12, or interpreter")
    collect.add_argument("--torch", help="version of torch to include; left out: none")
    collect.set_defaults(run=_collect)
    install = commands.add_parser("install", help="make the environment; needs no network")
    install.add_argument("--venv", type=Path, default=_SOURCE / ".venv", help="its folder")
    install.set_defaults(run=_install)
    for command in (collect, install):
        command.add_argument(
            "--folder", type=Path, default=_SOURCE / "wheelhouse", help="the wheelhouse"
        )
    return cli.run(parser)


if __name__ == "__main__":
    sys.exit(main())
