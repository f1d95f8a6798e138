"""The collection of a wheelhouse on a machine with a network."""

import logging
from pathlib import Path

from launch.offline import wheelhouse
from launch.offline.requirements import Pins
from pipeline.errors import DataError

logger = logging.getLogger(__name__)

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


def collect(pins: Pins, torch: str | None, source: Path, folder: Path) -> wheelhouse.Manifest:
    """Fetch the wheels that are missing, then write the manifest.

    Args:
        pins: the packages.
        torch: version of torch to include with its own packages, or None.
        source: the folder of `constraints.txt`.
        folder: the wheelhouse, which holds pip.

    Raises:
        DataError: a package cannot be fetched or built; pip's words name it.
    """
    missing = pins.missing(list(folder.glob("*.whl")))
    built = [pin for pin in missing if pin.partition("==")[0] in _SOURCE_ONLY]
    fetched = [pin for pin in missing if pin not in built]
    if missing:
        logger.info("fetching %s", ", ".join(missing))
    if fetched:
        _download(["--no-deps", *fetched], pins, folder)
    for pin in built:
        _build(pin, source, folder)
    if torch is not None:
        pins.check_torch(torch, f"TORCH={torch}")
        logger.info("fetching torch==%s and its own packages", torch)
        # Not constraints.txt itself: pip would evaluate its conditions with the Python that runs.
        constraints = folder / "pins.txt"
        constraints.write_text("".join(f"{n}=={v}\n" for n, v in pins.versions.items()))
        _download(["--constraint", str(constraints), f"torch=={torch}"], pins, folder)
        constraints.unlink()
    if still := pins.missing(list(folder.glob("*.whl"))):
        raise DataError(f"{', '.join(still)}: pip fetched no such wheel, though it said so")
    return wheelhouse.complete(folder, pins.target, torch)


def _download(what: list[str], pins: Pins, folder: Path) -> None:
    """Fetch published wheels."""
    target = pins.target
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
    wheelhouse.run_pip(["download", *options, *what], failure, folder=folder)


def _build(pin: str, source: Path, folder: Path) -> None:
    """Build the wheel of a package that is published as source only."""
    before = {*folder.glob("*.whl")}
    constraints = ["--build-constraint", str(source / "constraints.txt")]
    # --no-cache-dir: the cache could hold a wheel that was built with other settings.
    options = ["--no-deps", "--no-cache-dir", "--wheel-dir", str(folder), *constraints]
    failure = f"{pin} cannot be built from source:"
    wheelhouse.run_pip(["wheel", *options, pin], failure, folder=folder, **_BUILD)
    for path in {*folder.glob("*.whl")} - before:
        if not path.name.endswith("-none-any.whl"):
            path.unlink()
            raise DataError(
                f"{pin} gave {path.name}, which runs on machines like this one only; expected a "
                "wheel without compiled code"
            )
