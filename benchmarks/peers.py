"""Environments of what benchmarks compare with: `--peers FOLDER` makes those that are missing.

Versions are those that the committed figures are of. Each environment is a virtual one below the
folder; with torch it takes about 1 GB.
"""

import subprocess
import sys
import venv
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
ENVIRONMENTS = {
    "litdata": ("-c", str(CONSTRAINTS), "torch", "numpy", "transformers", "webdataset",
                "litdata==0.2.76"),
    # It wants numpy below 2.2 and transformers below 5.
    "streaming": ("torch==2.13.0", "numpy==2.1.3", "transformers==4.57.6",
                  "mosaicml-streaming==0.13.0"),
    "datatrove": ("datatrove==0.10.1", "xxhash<4", "orjson"),
}  # fmt: skip

PEERS_HELP = "folder for the environments of the peers; what is missing is made by pip"


def python_of(name: str, folder: Path) -> str:
    """Return the Python of an environment; make it first if it is not there.

    Raises:
        SystemExit: pip could not install it; what it made is removed by the next call.
    """
    place = folder.resolve() / name
    python, done = place / "bin/python", place / ".done"
    if not done.is_file():
        sys.stderr.write(f"{place}: installing {' '.join(ENVIRONMENTS[name])}\n")
        venv.create(place, clear=True, with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *ENVIRONMENTS[name]]
        if subprocess.run(install, stdout=sys.stderr).returncode:
            raise SystemExit(
                f"{place}: pip could not install {name} (its message stands above): "
                "it needs a network; without --peers only what this Python has is measured"
            )
        done.touch()
    return str(python)


def pythons_of(names: tuple[str, ...], folder: Path | None) -> list[str]:
    """Return the Pythons of some environments; none without a folder."""
    return [] if folder is None else [python_of(name, folder) for name in names]
