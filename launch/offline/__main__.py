"""Installation on machines without a network: runs on a bare Python, before any installation."""

import argparse
import logging
import re
import subprocess
import sys
from pathlib import Path

from launch.offline.wheelhouse import (
    Target,
    begin,
    fetch_pip,
    open_for,
    pip_wheel,
    this_machine,
)
from pipeline.errors import DataError
from pipeline.runtime import cli

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).parents[2]
_EXAMPLES = """\
  python3 -m launch.offline collect --python 3.12
  python3 -m launch.offline collect --python 3.12 --torch 2.13.0
  python3 -m launch.offline install
"""


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
    folder = arguments.folder
    target = Target(_python_version(arguments.python), this_machine().machine)
    begin(folder, target)
    fetch_pip(_SOURCE, folder)
    # Other modules import packages that come with pip.
    sys.path.insert(0, str(pip_wheel(folder)))
    from launch.offline.collect import collect
    from launch.offline.requirements import read_pins

    manifest = collect(read_pins(_SOURCE, target), arguments.torch, _SOURCE, folder)
    size = sum((folder / name).stat().st_size for name in manifest.files) / 1e6
    torch = f"torch {arguments.torch} included" if arguments.torch else "without torch"
    what = f"{len(manifest.files)} wheels, {size:.0f} MB, for Python {target.python}"
    logger.info("%s: %s on %s, %s", folder, what, target.machine, torch)
    return 0


def _install(arguments: argparse.Namespace) -> int:
    held = open_for(arguments.folder, this_machine())
    sys.path.insert(0, str(pip_wheel(arguments.folder)))
    from launch.offline.install import install
    from launch.offline.requirements import read_pins

    pins = read_pins(_SOURCE, held.target)
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
