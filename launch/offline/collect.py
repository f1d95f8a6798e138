"""Fetches the wheels of everything that the project needs, for machines without a network."""

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from launch.offline import manifest
from launch.offline.manifest import Target
from launch.offline.pip import last_lines, pip_wheel, run_pip
from launch.offline.requirements import Needs, Rules, needs
from pipeline.errors import DataError

logger = logging.getLogger(__name__)

_GLIBC = 28
"""Wheels for glibc 2.28 and older, which is RHEL 8 of 2019: clusters are old."""
_SOURCE_ONLY = ("deepspeed",)
"""Published without wheels. One is built here, once."""
_BUILD = {
    "DS_BUILD_OPS": "0",  # DeepSpeed: no CUDA code; what a machine needs is compiled there
    # The same bytes every time; DeepSpeed lists its extras in the order of a set.
    "SOURCE_DATE_EPOCH": "1600000000",
    "PYTHONHASHSEED": "0",
}


def collect(known: Rules, project: Path, folder: Path) -> Needs:
    """Fetches until nothing is missing, then writes the manifest.

    Args:
        known: where requirements begin, the versions and the target.
        project: the folder of `constraints.txt`.
        folder: the wheelhouse, which holds pip.

    Raises:
        DataError: a package cannot be fetched or built; the message names it.
    """
    pip = pip_wheel(folder)
    while (state := needs(known, folder.glob("*.whl"))).missing:
        logger.info("fetching %s", ", ".join(sorted(state.missing.values())))
        built = [need for name, need in state.missing.items() if name in _SOURCE_ONLY]
        fetched = [need for name, need in state.missing.items() if name not in _SOURCE_ONLY]
        if fetched:
            _download(fetched, known.target, folder, pip)
        for need in built:
            _build(need, project, folder, pip)
        after = needs(known, folder.glob("*.whl"))
        still = sorted(set(state.missing.values()) & set(after.missing.values()))
        if still:
            raise DataError(f"{', '.join(still)}: pip fetched no such wheel, though it said so")
    for path in folder.glob("*.whl"):
        if path not in state.found.values():
            path.unlink()
    manifest.write(folder, known.target, known.torch, list(state.found.values()))
    return state


def _download(wanted: Sequence[str], target: Target, folder: Path, pip: Path) -> None:
    """Fetches wheels as they are published."""
    # pip takes each of these literally, from the newest to the oldest.
    platforms = [f"manylinux_2_{minor}_{target.machine}" for minor in range(_GLIBC, 4, -1)]
    platforms += [f"manylinux{year}_{target.machine}" for year in ("2014", "2010", "1")]
    done = run_pip(
        ["download", "--no-deps", "--only-binary=:all:", "--dest", str(folder),
         "--implementation", "cp", "--python-version", target.python,
         *(f"--platform={platform}" for platform in platforms), *sorted(wanted)],
        wheel=pip,
    )  # fmt: skip
    if done.returncode != 0:
        named = re.search(r"No matching distribution found for (\S+)", done.stdout)
        what = named[1] if named else "one of " + ", ".join(sorted(wanted))
        raise DataError(
            f"{what} cannot be fetched as a wheel for Python {target.python}, {target.machine} and "
            f"glibc up to 2.{_GLIBC}. Is there a network, and does PIP_INDEX_URL or "
            "PIP_EXTRA_INDEX_URL name an index that has it? Else choose another version in "
            f"constraints.txt, or TORCH. pip said:{last_lines(done.stdout)}"
        )


def _build(wanted: str, project: Path, folder: Path, pip: Path) -> None:
    """Makes the wheel of a package that is published as source only."""
    before = set(folder.glob("*.whl"))
    # The cache could hold a wheel that was built with other settings.
    done = run_pip(
        ["wheel", "--no-deps", "--no-cache-dir", "--wheel-dir", str(folder),
         "--build-constraint", str(project / "constraints.txt"), wanted],
        wheel=pip,
        **_BUILD,
    )  # fmt: skip
    if done.returncode != 0:
        raise DataError(f"{wanted} cannot be built from source:{last_lines(done.stdout)}")
    for path in set(folder.glob("*.whl")) - before:
        if not path.name.endswith("-none-any.whl"):
            path.unlink()
            raise DataError(
                f"{wanted} gave {path.name}, which runs on machines like this one only; "
                "expected a wheel without compiled code"
            )
