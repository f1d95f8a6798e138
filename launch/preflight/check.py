"""The check of one node, which runs on that node before training, and its report.

DIR/NODE.json             everything that the node reports about itself
DIR/NODE.bandwidth.json   its speed, which `postnorm bandwidth` writes
"""

import csv
import importlib.metadata
import json
import os
import platform
import random
import re
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from launch.cluster import ClusterConfig, PreflightConfig
from pipeline.checkpoints.manifest import newest_readable
from pipeline.config.data import DataConfig
from pipeline.config.runs import RunConfig
from pipeline.data.format import DatasetIndex
from pipeline.data.objects import open_index
from pipeline.data.reader import BlockReader
from pipeline.errors import PASSING, ConfigError, DataError, PostnormError, StorageError
from pipeline.runtime import env
from pipeline.runtime.files import temporary_beside, write_json_atomic
from pipeline.runtime.run_folder import RunFolder

_R = TypeVar("_R")

_GB = 10**9
_INFINIBAND = Path("/sys/class/infiniband")
_PACKAGES = frozenset(
    {"torch", "deepspeed", "numpy", "triton", "safetensors", "tokenizers", "sentencepiece", "numba"}
)
"""Packages that decide what a run computes; with all that start with `nvidia-`, such as NCCL."""
# Files that a folder must still take; checkpoints and logs of weeks need some thousands.
_LEAST_INODES = 10_000
_OF_STORAGE = ("run_dir", "dataset")
"""Checks that hang where storage does."""
_LEAST = {
    "min_free_gb": ("space", "remove files there, or lower that"),
    "min_open_files": ("open files", "raise it in `setup` of the profile"),
    "min_shm_gb": (
        "shared memory",
        "remove files that ended jobs left there, or give the container more (`--shm-size`)",
    ),
}
"""By the expectation that a value is compared with: the name of the check, and what to change."""


class CheckedConfig(Protocol):
    """What preflight asks of a run's config: of pre-training, or of training on many tasks."""

    @property
    def folder(self) -> RunFolder:
        """The run's folder."""

    @property
    def data(self) -> DataConfig | None:
        """The dataset; None if the run reads no text."""


Blame = Literal["node", "all"]
"""Whose fault a finding is if the job has one node: the node's, such as a broken GPU, or that of
the config or the site, since nothing tells them apart. Of several nodes it is the node's unless all
have it: then another node would have it, too."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    check: str
    """Name of the check; equal on all nodes that have the same trouble."""
    text: str
    """What was wrong, what was expected, what to change."""
    blame: Blame
    block: int | None = None
    """Row of the dataset's block that is damaged as this node reads it."""
    passes: bool = False
    """Whether it is storage that may come back, for which the ranks wait."""


@dataclass
class Record:
    """Everything that one node reports about itself."""

    node: str
    findings: list[Finding] = field(default_factory=list)
    gpus: list[str] | None = None
    """Names of the GPUs; None on nodes that need none."""
    driver: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    """Versions of Python and of the packages that training imports."""
    fingerprint: str = ""
    """Fingerprint of the dataset, as this node reads its index; empty if it could not."""
    free_gb: float | None = None
    """Free space in the run's folder."""
    is_finished: bool = False
    """False in the record that a check writes when it begins: its node is alive, though SLURM may
    end the check."""


@dataclass(frozen=True)
class BandwidthRound:
    """One all-reduce that a node took part in."""

    nodes: list[str]
    ranks: int
    gb_per_s: float
    """Bus bandwidth."""


@dataclass(frozen=True)
class Bandwidth:
    """The report of a node that `postnorm bandwidth` wrote."""

    node: str
    rounds: list[BandwidthRound]
    error: str
    """Why it could not go on; empty if it could."""
    missing: list[str]
    """Nodes that did not join, as far as they are known here."""


def write_record(folder: Path, record: Record) -> None:
    """Write a record for the judge."""
    write_json_atomic(folder / f"{record.node}.json", asdict(record))


def read_record(folder: Path, node: str) -> Record | None:
    """Read the record of a node; None if it left none that can be read."""
    return _read(folder / f"{node}.json", Record, "findings", Finding)


def read_bandwidth(folder: Path, node: str) -> Bandwidth | None:
    """Read the bandwidth report of a node; None if it left none that can be read."""
    return _read(folder / f"{node}.bandwidth.json", Bandwidth, "rounds", BandwidthRound)


def _read(path: Path, kind: type[_R], items: str, item: type) -> _R | None:
    try:
        body = json.loads(path.read_bytes())
        return kind(**{**body, items: [item(**one) for one in body[items]]})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_node(config: CheckedConfig, cluster: ClusterConfig, folder: Path, node: str) -> Record:
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

    # Abandoned when the time is up: a call into a file system or a driver that hangs cannot be
    # ended. Threads do not hold the process back, since it leaves by `os._exit`.
    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in parts]
    deadline = time.monotonic() + cluster.preflight.timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = f"not done within preflight.timeout_s={cluster.preflight.timeout_s}"
    done = dict(results)  # a thread that was given up may still add to the other
    for name in parts:
        passes = name in _OF_STORAGE
        unfinished = [Finding(f"{name} in time", f"{name}: {late}", "all", passes=passes)]
        record.findings += done.get(name, unfinished)
    record.is_finished = True
    write_record(folder, record)
    return record


def _parts(
    record: Record, config: CheckedConfig, cluster: ClusterConfig, folder: Path
) -> dict[str, Callable[[], list[Finding]]]:
    """Name the checks; besides their findings, each fills its own fields of the record."""
    expected, data = cluster.preflight, data_of(config)

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


def data_of(config: CheckedConfig) -> DataConfig | None:
    """Return the data that is trained on next: that of the stage which goes on."""
    if not isinstance(config, RunConfig) or not config.timeline.has_stages:
        return config.data
    newest = newest_readable(config.folder.checkpoints)
    own = next(stage for stage in config.timeline.stages if not stage.of)
    return (config.timeline.at(newest[1].cursor) if newest else own).data


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
        text = f"{where} cannot be written to: {error}"
        return None, [Finding(name, text, blame, passes=error.errno in PASSING)]
    free, more = f"{free_gb:.1f} GB free", f"{inodes.f_favail} more files can be created"
    findings = _at_least(config, "min_free_gb", free_gb, f"{where}: {free}", name, blame)
    # Some file systems have no fixed number of inodes and say 0.
    if inodes.f_files and inodes.f_favail < _LEAST_INODES:
        text = f"{where}: {more}, expected {_LEAST_INODES}; remove files there"
        findings.append(Finding(f"{name} inodes", text, blame))
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
        passes = isinstance(error, StorageError) or getattr(error, "errno", None) in PASSING
        return "", [Finding("dataset", str(error), "all", passes=passes)]
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
            findings.append(Finding("storage", str(error), "all", passes=True))
    return index.fingerprint, findings


def read_block(index: DatasetIndex, block: int) -> None:
    """Compare the size of a block's shard, its end, and the block's bytes with the index.

    A DataError says that they differ, a StorageError that they cannot be read at the moment.
    """
    BlockReader(index, [int(index.blocks.shard[block])]).check(block)


# What follows reads nvidia-smi. A field that a driver does not know makes it refuse the whole
# query, with `Field "NAME" is not a valid field to query.`; retired pages exist before Ampere only,
# throttle reasons had another name before driver 535. So those fields are asked for separately, and
# refused fields are left out. A value that a GPU does not have reads `[N/A]` or `[Not Supported]`;
# one that cannot be read `[GPU is lost]` or `ERR!`.
_FIELDS = ("index", "uuid", "name", "driver_version", "memory.total", "memory.used")
_ECC = "ecc.errors.uncorrected.volatile.total"
_HOT, _WEAK = "it is slowed down by its temperature", "it is slowed down by its power supply"
_HEALTH = {
    ("gpu", "uuid"): {
        _ECC: "uncorrected memory errors since its driver was loaded",
        "retired_pages.pending": "pages of memory wait to be retired",
        "clocks_event_reasons.hw_thermal_slowdown": _HOT,
        "clocks_throttle_reasons.hw_thermal_slowdown": _HOT,
        "clocks_event_reasons.hw_power_brake_slowdown": _WEAK,
        "clocks_throttle_reasons.hw_power_brake_slowdown": _WEAK,
    },
    ("remapped-rows", "gpu_uuid"): {
        "remapped_rows.pending": "rows of memory wait to be remapped",
        "remapped_rows.failure": "rows of memory could not be remapped",
    },
}
"""By query and the name of its UUID field: fields that are set where a GPU is not healthy."""
_REFUSED = re.compile(r'Field "([^"]+)" is not a valid field')
# Memory in use on an idle GPU at most: drivers and daemons hold some hundred MiB.
_MOST_USED_MIB = 2048
_MPS = "nvidia-cuda-mps-server"


class _SmiError(Exception):
    """nvidia-smi does not exist or gives no answer."""


@dataclass(frozen=True)
class Gpu:
    """A GPU of this node; numbers are texts as nvidia-smi prints them."""

    index: str
    uuid: str
    name: str
    driver: str
    total_mib: str
    used_mib: str

    @property
    def title(self) -> str:
        """Name of the GPU in messages."""
        return f"GPU {self.index} ({self.uuid})"


def check_gpus(
    config: PreflightConfig, num_gpus: int, environ: Mapping[str, str]
) -> tuple[list[Gpu], list[Finding]]:
    """Check the GPUs that a job was given on this node; nvidia-smi ignores CUDA_VISIBLE_DEVICES."""
    try:
        listed = [Gpu(*row) for row in _query("gpu", _FIELDS)]
    except _SmiError as error:
        text = f"{error}; expected {num_gpus} GPUs: look at the driver of the node"
        return [], [Finding("GPUs", text, "all")]
    visible = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    gpus = listed[:num_gpus]  # ranks count from 0
    # Where no cgroup hides the GPUs of other jobs, SLURM names ours in the environment.
    if visible and all(name.isdecimal() or name.startswith("GPU-") for name in visible):
        gpus = [gpu for gpu in listed if {gpu.index, gpu.uuid} & set(visible)]
    findings = [*_misfits(config, gpus, num_gpus, len(listed)), *_in_use(gpus), *_health(gpus)]
    return gpus, findings


def _misfits(
    config: PreflightConfig, gpus: list[Gpu], num_gpus: int, num_listed: int
) -> Iterator[Finding]:
    if len(gpus) < num_gpus:
        text = (
            f"{len(gpus)} GPUs, expected gpus_per_node={num_gpus}; nvidia-smi lists {num_listed}, "
            "and CUDA_VISIBLE_DEVICES may leave some out"
        )
        yield Finding("GPU count", text, "all")
    names = sorted({gpu.name for gpu in gpus})
    if len(names) > 1:
        yield Finding("GPU names", f"GPUs differ: {', '.join(names)}", "node")
    if others := [name for name in names if config.gpu not in name]:
        text = f"GPUs are {', '.join(others)}, expected preflight.gpu={config.gpu!r}"
        yield Finding("GPU names", text, "all")
    lowest = _version(config.min_driver)
    for driver in sorted({gpu.driver for gpu in gpus if _version(gpu.driver) < lowest}):
        text = f"GPU driver {driver}, expected preflight.min_driver={config.min_driver} or newer"
        yield Finding("GPU driver", text, "all")


def _version(text: str) -> tuple[int, ...]:
    """Split a driver's version into numbers; () where it has none."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def _in_use(gpus: list[Gpu]) -> Iterator[Finding]:
    """Find memory and processes of others: this job has started nothing yet."""
    for gpu in gpus:
        if not gpu.used_mib.isdecimal():
            text = f"{gpu.title} does not answer: its used memory reads {gpu.used_mib!r}"
            yield Finding("GPU state", text, "node")
        elif int(gpu.used_mib) > _MOST_USED_MIB:
            text = (
                f"{gpu.title}: {gpu.used_mib} of {gpu.total_mib} MiB are in use before the job "
                f"has started anything, expected at most {_MOST_USED_MIB}"
            )
            yield Finding("GPU in use", text, "node")
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    try:
        rows = _query("compute-apps", ("gpu_uuid", "pid", "process_name"))
    except _SmiError:
        return
    for uuid, process, name in rows:
        if uuid in by_uuid and _MPS not in name:
            text = f"{by_uuid[uuid].title} is used by process {process}, {name}"
            yield Finding("GPU in use", text, "node")


def _health(gpus: list[Gpu]) -> Iterator[Finding]:
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    for (what, uuid_field), meanings in _HEALTH.items():
        for uuid, values in _known_values(what, uuid_field, list(meanings)):
            for name, value in values.items():
                is_set = value in ("Yes", "Active") or (value.isdecimal() and int(value) > 0)
                if is_set and uuid in by_uuid:
                    trouble = f"{value} {meanings[name]}" if name == _ECC else meanings[name]
                    text = f"{by_uuid[uuid].title}: {trouble} ({name}); reset it, or drain the node"
                    yield Finding("GPU health", text, "node")


def _known_values(what: str, uuid_field: str, names: list[str]) -> list[tuple[str, dict[str, str]]]:
    """Return the UUID of each GPU with those of the fields that this driver knows."""
    while names:
        try:
            rows = _query(what, (uuid_field, *names))
            return [(uuid, dict(zip(names, row, strict=True))) for uuid, *row in rows]
        except _SmiError as error:
            refused = _REFUSED.search(str(error))
            if refused is None or refused[1] not in names:
                return []
            names.remove(refused[1])
    return []


def _query(what: str, fields: tuple[str, ...]) -> list[list[str]]:
    """Return the rows of a query, without units."""
    command = ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except OSError as error:
        raise _SmiError(f"nvidia-smi cannot be started: {error.strerror}") from error
    output = done.stdout.strip()
    if done.returncode or "Unable to determine the device handle" in output:
        raise _SmiError(f"nvidia-smi failed ({done.returncode}): {output}")
    rows = csv.reader(output.splitlines(), skipinitialspace=True)
    return [[value.strip() for value in row] for row in rows if len(row) == len(fields)]
