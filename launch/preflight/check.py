"""The check of one node, which runs on that node before training.

Every part runs in a thread of its own, which is abandoned when the time is up: a call into a file
system or a driver that hangs cannot be ended. Such threads do not hold the process back, since it
leaves by `os._exit`.
"""

import importlib.metadata
import os
import platform
import random
import resource
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from launch.cluster import ClusterConfig, PreflightConfig
from launch.preflight.gpus import check_gpus
from launch.preflight.record import Blame, Finding, Record, write_record
from pipeline.config.data import DataConfig
from pipeline.config.runs import PretrainConfig
from pipeline.data.format import DatasetIndex
from pipeline.data.objects import open_index
from pipeline.data.reader import BlockReader
from pipeline.errors import ConfigError, DataError, PostnormError
from pipeline.multitask.config import MultiTaskConfig
from pipeline.runtime import env
from pipeline.runtime.files import temporary_beside

_GB = 10**9
_INFINIBAND = Path("/sys/class/infiniband")
_PACKAGES = frozenset(
    {"torch", "deepspeed", "numpy", "triton", "safetensors", "tokenizers", "sentencepiece", "numba"}
)
"""Packages that decide what a run computes; with all that start with `nvidia-`, such as NCCL."""
_LEAST = {
    "min_free_gb": ("space", "remove files there, or lower that"),
    "min_free_inodes": ("inodes", "remove files there"),
    "min_open_files": ("open files", "raise it in `setup` of the profile"),
    "min_shm_gb": (
        "shared memory",
        "remove files that ended jobs left there, or give the container more (`--shm-size`)",
    ),
}
"""By the expectation that a value is compared with: the name of the check, and what to change."""


def check_node(
    config: PretrainConfig | MultiTaskConfig, cluster: ClusterConfig, folder: Path, node: str
) -> Record:
    """Run all checks, for at most `preflight.timeout_s`, and write the record into its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    record = Record(node)
    # srun kills all tasks if it cannot start one: this record tells those that could start.
    write_record(folder, record)
    parts = _parts(record, config, cluster, folder)
    results: dict[str, list[Finding]] = {}

    def run(name: str) -> None:
        try:
            results[name] = parts[name]()
        except Exception as error:  # noqa: BLE001 - an error in a thread is a finding like others
            results[name] = [Finding(name, f"{name}: {type(error).__name__}: {error}", "all")]

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in parts]
    deadline = time.monotonic() + cluster.preflight.timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = f"not done within preflight.timeout_s={cluster.preflight.timeout_s}"
    done = dict(results)  # a thread that was given up may still add to the other
    for name in parts:
        unfinished = [Finding(f"{name} in time", f"{name}: {late}", "all")]
        record.findings += done.get(name, unfinished)
    record.is_finished = True
    write_record(folder, record)
    return record


def _parts(
    record: Record,
    config: PretrainConfig | MultiTaskConfig,
    cluster: ClusterConfig,
    folder: Path,
) -> dict[str, Callable[[], list[Finding]]]:
    """Name the checks; besides their findings, each fills its own fields of the record."""
    expected, data = cluster.preflight, config.data

    def gpus() -> list[Finding]:
        if not cluster.gpus_per_node:
            return []
        every, findings = check_gpus(expected, cluster.gpus_per_node, env.child_environment())
        record.gpus = [gpu.name for gpu in every]
        record.driver = every[0].driver if every else ""
        return findings

    def run_folder() -> list[Finding]:
        record.free_gb, findings = check_folder(expected, "run_dir", config.folder.path, "all")
        return findings

    def dataset() -> list[Finding]:
        if data is None:  # a multi-task run without the task mlm
            return []
        seed = f"{folder.name} {record.node}"
        record.fingerprint, findings = check_dataset(data, expected.shards, seed)
        return findings

    def versions() -> list[Finding]:
        record.packages = packages()
        return []

    return {
        "GPUs": gpus,
        "run_dir": run_folder,
        "data.stage_dir": lambda: check_stage_dir(expected, data.stage_dir) if data else [],
        "limits": lambda: check_limits(expected),
        "/dev/shm": lambda: check_shared_memory(expected),
        "packages": versions,
        "dataset": dataset,
    }


def check_folder(
    config: PreflightConfig, name: str, folder: Path, blame: Blame
) -> tuple[float | None, list[Finding]]:
    """Check that a folder can be written to, and its space; it is made if it does not exist.

    Return the free space in GB, None if it cannot be measured, and the findings.
    """
    where = f"{name}={folder}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free_gb = shutil.disk_usage(folder).free / _GB
        inodes = os.statvfs(folder)
        _write_through(folder / "preflight")
    except OSError as error:
        return None, [Finding(name, f"{where} cannot be written to: {error}", blame)]
    free, more = f"{free_gb:.1f} GB free", f"{inodes.f_favail} more files can be created"
    findings = _at_least(config, "min_free_gb", free_gb, f"{where}: {free}", name, blame)
    # Some file systems have no fixed number of inodes and say 0.
    left = inodes.f_favail if inodes.f_files else config.min_free_inodes
    findings += _at_least(config, "min_free_inodes", left, f"{where}: {more}", name, blame)
    return free_gb, findings


def _at_least(
    config: PreflightConfig, field: str, value: float, what: str, of: str = "", blame: Blame = "all"
) -> list[Finding]:
    """Compare a value with the least that the profile expects."""
    least, (check, advice) = getattr(config, field), _LEAST[field]
    text = f"{what}, expected preflight.{field}={least}; {advice}"
    return [] if value >= least else [Finding(f"{of} {check}".strip(), text, blame)]


def check_stage_dir(config: PreflightConfig, stage_dir: str | None) -> list[Finding]:
    """Check the node's own folder for shards, if the run stages them."""
    if not stage_dir:
        return []
    try:
        folder = Path(env.expand(stage_dir, "data.stage_dir"))
    except ConfigError as error:
        return [Finding("data.stage_dir", str(error), "all")]
    return check_folder(config, "data.stage_dir", folder, "all")[1]


def check_limits(config: PreflightConfig) -> list[Finding]:
    """Check the resource limits of this process."""
    files = _soft_limit(resource.RLIMIT_NOFILE)
    findings = _at_least(config, "min_open_files", files, f"`ulimit -n` is {files:.0f}")
    locked = _soft_limit(resource.RLIMIT_MEMLOCK)
    if locked != float("inf") and _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()):
        text = (
            f"`ulimit -l` is {locked / 1024:.0f} KiB, expected unlimited, since InfiniBand locks "
            "memory; put `ulimit -l unlimited` into `setup` of the profile, or "
            "LimitMEMLOCK=infinity for slurmd"
        )
        findings.append(Finding("locked memory", text, "all"))
    stack = _soft_limit(resource.RLIMIT_STACK)
    if stack < 1 << 20:
        text = f"`ulimit -s` is {stack / 1024:.0f} KiB, expected 1024 at least; raise it in `setup`"
        findings.append(Finding("stack", text, "all"))
    return findings


def _soft_limit(kind: int) -> float:
    limit = resource.getrlimit(kind)[0]
    return float("inf") if limit == resource.RLIM_INFINITY else float(limit)


def check_shared_memory(config: PreflightConfig, folder: Path = Path("/dev/shm")) -> list[Finding]:
    """Check the space for memory that processes share."""
    try:
        free_gb = shutil.disk_usage(folder).free / _GB
    except OSError as error:
        return [Finding("shared memory", f"{folder} cannot be read: {error}", "all")]
    return _at_least(config, "min_shm_gb", free_gb, f"{folder}: {free_gb:.3f} GB free")


def packages() -> dict[str, str]:
    """Read the versions of Python and of the packages that decide what a run computes."""
    versions = {"python": platform.python_version()}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        if name in _PACKAGES or name.startswith("nvidia-"):
            versions[name] = distribution.version
    return dict(sorted(versions.items()))


def _write_through(beside: Path) -> None:
    """Write a small file, and wait until the storage has it."""
    path = temporary_beside(beside)
    try:
        with path.open("wb") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)


def check_dataset(data: DataConfig, num_shards: int, seed: str) -> tuple[str, list[Finding]]:
    """Read the index, and a random block of each of some random shards.

    The seed differs for each node and each start. Return the fingerprint, empty if the index cannot
    be read, and the findings.
    """
    try:
        index = open_index(data)
    except (PostnormError, OSError) as error:
        return "", [Finding("dataset", str(error), "all")]
    chance = random.Random(seed)
    findings = []
    for shard in chance.sample(range(len(index.shards)), min(num_shards, len(index.shards))):
        rows = (index.blocks.shard == shard).nonzero()[0].tolist()
        if not rows:
            continue
        block = chance.choice(rows)
        try:
            read_block(index, block)
        except DataError as error:
            findings.append(Finding("shards", str(error), "node", block))
        except (PostnormError, OSError) as error:
            findings.append(Finding("storage", str(error), "all"))
    return index.fingerprint, findings


def read_block(index: DatasetIndex, block: int) -> None:
    """Compare the size of a block's shard, its end, and the block's bytes with the index.

    A DataError says that they differ, a StorageError that they cannot be read at the moment.
    """
    BlockReader(index, [int(index.blocks.shard[block])]).check(block)
