"""What a node has beside its GPUs: space, limits, packages, clock."""

import importlib.metadata
import os
import platform
import resource
import shutil
import time
from pathlib import Path

from launch.preflight.config import PreflightConfig
from launch.preflight.record import Blame, Finding
from pipeline.errors import ConfigError
from pipeline.runtime import env
from pipeline.runtime.files import temporary_beside

_GB = 10**9
_INFINIBAND = Path("/sys/class/infiniband")
_LEAST_STACK = 1 << 20
_PACKAGES = (
    "torch", "deepspeed", "numpy", "triton", "safetensors", "tokenizers", "sentencepiece", "numba"
)  # fmt: skip
"""That decide what a run computes; with them all that start with `nvidia-`, such as NCCL."""


def check_folder(
    config: PreflightConfig, name: str, folder: Path, blame: Blame
) -> tuple[float | None, list[Finding]]:
    """Looks whether a folder can be written to, and how much; it is made if it does not exist.

    Args:
        config: what is expected.
        name: of the config field.
        folder: of the run, or for staging.
        blame: whose fault it is if the folder is bad on a lone node.

    Returns:
        Free space in GB, None if it cannot be told, and what is wrong.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free_gb = shutil.disk_usage(folder).free / _GB
        inodes = os.statvfs(folder)
        probe = temporary_beside(folder / "preflight")
        try:
            _write_through(probe)
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        text = f"{name}={folder} cannot be written to: {error}"
        return None, [Finding(name, text, blame)]
    found = []
    if free_gb < config.min_free_gb:
        text = (
            f"{name}={folder}: {free_gb:.1f} GB free, expected preflight.min_free_gb="
            f"{config.min_free_gb:g}; remove files there, or lower that"
        )
        found.append(Finding(f"{name} space", text, blame))
    # Some file systems have no fixed number of inodes and say 0.
    if inodes.f_files and inodes.f_favail < config.min_free_inodes:
        text = (
            f"{name}={folder}: {inodes.f_favail} more files can be made, expected "
            f"preflight.min_free_inodes={config.min_free_inodes}; remove files there"
        )
        found.append(Finding(f"{name} inodes", text, blame))
    return free_gb, found


def check_stage_dir(config: PreflightConfig, stage_dir: str) -> list[Finding]:
    """Looks at the node's own folder for shards."""
    try:
        folder = Path(env.expand(stage_dir, "data.stage_dir"))
    except ConfigError as error:
        return [Finding("data.stage_dir", str(error), "all")]
    return check_folder(config, "data.stage_dir", folder, "few")[1]


def check_limits(config: PreflightConfig) -> list[Finding]:
    """Looks at what this process may use."""
    found = []
    files = _soft_limit(resource.RLIMIT_NOFILE)
    if files < config.min_open_files:
        text = (
            f"`ulimit -n` is {files:.0f}, expected preflight.min_open_files="
            f"{config.min_open_files}; raise it in `setup` of the profile"
        )
        found.append(Finding("open files", text, "all"))
    locked = _soft_limit(resource.RLIMIT_MEMLOCK)
    if locked != float("inf") and _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()):
        text = (
            f"`ulimit -l` is {locked / 1024:.0f} KiB, expected unlimited where there is "
            "InfiniBand: its memory is locked; `ulimit -l unlimited` in `setup` of the profile, or "
            "LimitMEMLOCK=infinity for slurmd"
        )
        found.append(Finding("locked memory", text, "all"))
    stack = _soft_limit(resource.RLIMIT_STACK)
    if stack < _LEAST_STACK:
        text = f"`ulimit -s` is {stack / 1024:.0f} KiB, expected 1024 at least; raise it in `setup`"
        found.append(Finding("stack", text, "all"))
    return found


def check_shared_memory(config: PreflightConfig, folder: Path = Path("/dev/shm")) -> list[Finding]:
    """Looks at the space for memory that processes share."""
    try:
        free_gb = shutil.disk_usage(folder).free / _GB
    except OSError as error:
        return [Finding("shared memory", f"{folder} cannot be looked at: {error}", "all")]
    if free_gb >= config.min_shm_gb:
        return []
    text = (
        f"{folder}: {free_gb:.3f} GB free, expected preflight.min_shm_gb={config.min_shm_gb:g}; "
        "remove what ended jobs left there, or give the container more (`--shm-size`)"
    )
    return [Finding("shared memory", text, "all")]


def packages() -> dict[str, str]:
    """Versions of Python and of the packages that decide what a run computes."""
    found = {"python": platform.python_version()}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        if name in _PACKAGES or name.startswith("nvidia-"):
            found[name] = distribution.version
    return dict(sorted(found.items()))


def ahead_of_file_server(folder: Path) -> tuple[float, float]:
    """Between how many seconds this clock is ahead of the one that stamps files.

    NFS stamps a written file by the server's clock, Lustre by the client's: then it is about 0.

    Raises:
        OSError: nothing can be written there.
    """
    before = time.time()
    path = temporary_beside(folder / "clock")
    try:
        _write_through(path)
        # A stamp is cut to the system's clock tick, or to whole seconds on old file systems.
        stamp = path.stat().st_mtime
        coarse = 1.0 if stamp == int(stamp) else 0.02
        after = time.time()
    finally:
        path.unlink(missing_ok=True)
    return before - stamp - coarse, after - stamp


def _write_through(path: Path) -> None:
    """Makes a small file and waits until the storage has it."""
    with path.open("wb") as file:
        file.write(b"x" * 4096)
        file.flush()
        os.fsync(file.fileno())


def _soft_limit(kind: int) -> float:
    limit = resource.getrlimit(kind)[0]
    return float("inf") if limit == resource.RLIM_INFINITY else float(limit)
