"""The cluster profile: what a cluster offers and how it wants to be asked.

The root config of `python -m launch`. Files are in `configs/cluster/`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from pipeline.config.load import load
from pipeline.config.schema import build, param, section
from pipeline.config.strict_yaml import YamlNode
from pipeline.errors import ConfigError
from pipeline.model.cost import KNOWN, limits
from pipeline.runtime.env import SCRATCH_VARIABLE

_NAMES = r"[\w.,@+-]+"
_VARIABLE = r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})"
_NAMES_TEXT = "a name as SLURM shows it, without white space"
# Both container engines separate the parts of a mount by `:` and mounts by `,`.
_MOUNT = r"/[^:,\s]*(:/[^:,\s]*(:[a-z+]+)?)?"
# As sbatch reads it: minutes, minutes:seconds, hours:minutes:seconds, or days-hours[:...].
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_MEMORY = re.compile(r"(\d+)([KMGT]?)B?", re.IGNORECASE)
_MIB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.ASCII)
_OPTION = re.compile(r"(?:--)?([a-z][a-z0-9-]*)(?:=(.+))?")

_EXAMPLES = {
    "apptainer": "/shared/images/train.sif",
    "singularity": "/shared/images/train.sif",
    "pyxis": "/shared/images/train.sqsh",
}
"""Images by engine."""
_LONGEST_CHAIN = 30
"""Restarts of a run whose jobs are all queued at once."""

# Variables that the launcher sets itself, or that would mislead it.
_OWN_VARIABLES = re.compile(
    r"RANK|LOCAL_RANK|WORLD_SIZE|MASTER_(ADDR|PORT)|(SLURM|SBATCH|SRUN|POSTNORM)_.*"
)
SET_OPTIONS = frozenset({
    "account", "array", "chdir", "cluster-constraint", "clusters", "comment", "cpus-per-task",
    "dependency", "error", "exclude", "export", "export-file", "get-user-env", "gpus",
    "gpus-per-node", "gpus-per-socket", "gpus-per-task", "job-name", "kill-on-invalid-dep", "mem",
    "no-kill", "no-requeue", "nodes",
    "ntasks", "ntasks-per-gpu", "ntasks-per-node", "open-mode", "output", "parsable", "partition",
    "qos", "requeue", "signal", "test-only", "time", "wait", "wrap",
})  # fmt: skip
"""Options of sbatch that the launcher sets, or that would break what its scripts rely on."""
_SET_BY_STEPS = (
    "chdir container-image container-mounts container-workdir cpu-bind cpus-per-task "
    "distribution error export jobid kill-on-bad-exit label multi-prog "
    "no-container-mount-home nodelist nodes ntasks ntasks-per-node output overlap relative "
    "time unbuffered wait"
)
SET_SRUN_OPTIONS = frozenset(_SET_BY_STEPS.split())
"""The same of srun, for the step of all ranks."""


@dataclass(frozen=True, kw_only=True)
class ContainerConfig:
    """The container that ranks run in; the job script itself runs outside of it."""

    kind: Literal["none", "apptainer", "singularity", "pyxis"] = param(
        "none",
        "the engine, which starts one container a rank: `apptainer exec`, `singularity exec`; "
        "pyxis: `srun --container-image`, with NVIDIA's plugin",
    )
    image: str = param(
        "",
        "file that all nodes see; or docker://NAME (apptainer, singularity), REGISTRY#NAME:TAG "
        "(pyxis)",
    )
    mounts: tuple[str, ...] = param(
        (),
        "SOURCE[:TARGET[:ro]] folders that the ranks see in addition to the folders of the run, "
        "which are always mounted",
    )
    arguments: tuple[str, ...] = param(
        (), "further words for the engine's command, or for srun (pyxis), such as --no-home"
    )

    def __post_init__(self) -> None:
        if self.kind == "none":
            for name in ("image", "mounts", "arguments"):
                if value := getattr(self, name):
                    raise ConfigError(
                        f"container.{name}={value!r} has no effect with container.kind=none; set "
                        f"container.kind to one of {', '.join(_EXAMPLES)}, or leave it out"
                    )
            return
        if not self.image:
            raise ConfigError(
                f"container.kind={self.kind} needs container.image, such as {_EXAMPLES[self.kind]}"
            )
        _require(r"[^\s]+", self.image, "container.image", "a path or name without white space")
        self._require_image_of_kind()
        expected = "SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro, whole paths without `,` and spaces"
        for mount in self.mounts:
            _require(_MOUNT, mount or " ", "container.mounts", expected)
        for word in self.arguments:
            _require(r"-[^\n]*", word or " ", "container.arguments", "options such as --no-home")

    def _require_image_of_kind(self) -> None:
        """Refuse what another engine would take as an image."""
        text, is_path = self.image, self.image[0] in "./"
        wrong = ""
        if self.kind == "pyxis" and text.endswith(".sqsh") and not is_path:
            wrong = (
                "pyxis takes a value that does not start with / or . as the name of an image in a "
                f"registry; write ./{text} or the whole path"
            )
        elif self.kind in ("apptainer", "singularity") and "#" in text:
            wrong = f"{self.kind} writes an image of a registry as docker://REGISTRY/NAME:TAG"
        if wrong:
            raise ConfigError(f"container.image={text!r}: {wrong}")

    @property
    def image_file(self) -> str:
        """The path of the image if it is a file; empty if a registry or the engine has it."""
        if self.kind == "pyxis":
            return self.image if self.image.startswith(("/", ".")) else ""
        return "" if "://" in self.image else self.image


@dataclass(frozen=True, kw_only=True)
class PreflightConfig:
    """What each node must have at every start of a job, before it trains."""

    enabled: bool = param(True, "whether nodes are checked")
    timeout_s: int = param(
        120,
        "for all checks of a node; a check that is not done by then counts as failed",
        unit="s",
        ge=1,
    )
    gpu: str = param(
        "",
        "text that the name of every GPU must contain, such as H100; empty only requires that all "
        "nodes have the same GPUs",
    )
    min_driver: str = param("", "lowest version of the GPU driver, such as 550.54; empty takes any")
    min_free_gb: float = param(
        20.0, "free in the folder of the run and in data.stage_dir", unit="GB", ge=0
    )
    min_shm_gb: float = param(
        1.0, "free in /dev/shm, which NCCL uses; a container may have 64 MB", unit="GB", ge=0
    )
    min_open_files: int = param(1024, "open files of a process, `ulimit -n`", ge=0)
    shards: int = param(
        4, "shards of which each node compares one random block with its hash", unit="shards", ge=0
    )
    bandwidth_gb_per_s: float = param(
        0.0,
        "bus bandwidth of an all-reduce over two nodes (over the GPUs of a node where the job has "
        "one) as nccl-tests reports it; 0 does not measure",
        unit="GB/s",
        ge=0,
    )
    bandwidth_share: float = param(
        0.7,
        "share of the nodes' median that a good node reaches, and share of bandwidth_gb_per_s that "
        "the median reaches",
        gt=0,
        le=1,
    )

    def __post_init__(self) -> None:
        expected = 'numbers with dots, such as "550.54.15", in quotes'
        _require(r"\d+(\.\d+)*", self.min_driver, "preflight.min_driver", expected)


@dataclass(frozen=True, kw_only=True)
class PrepJobsConfig:
    """Job arrays of data preparation, which needs cores and no GPU."""

    array_tasks: int = param(
        64,
        "maximum number of array tasks of a stage; more tasks than run at once make each task "
        "shorter",
        ge=1,
    )
    max_concurrent: int = param(
        0, "array tasks that run at once; 0 leaves it to SLURM", unit="array tasks", ge=0
    )
    max_array_size: int = param(
        1001,
        "largest number of array tasks in one array; where the site's MaxArraySize is lower, "
        "`submit` takes that; a stage with more array tasks gets several arrays",
        ge=1,
    )
    cores: int = param(4, "cores and processes of an array task", unit="cores", ge=1)
    mem: str = param("", "memory of an array task, such as 16G; empty takes what the plan expects")
    time_limit: str = param(
        "4:00:00",
        "of an array task, [days-]hours:minutes:seconds; a task that reaches it fails, and "
        "submitting again continues",
    )
    max_failures: int = param(
        3, "failures of an array task before it stops; preemptions do not count", ge=1
    )
    partition: str = param("", "SLURM partition; empty takes that of the profile")
    account: str = param("", "SLURM account; empty takes that of the profile")
    qos: str = param("", "SLURM quality of service; empty takes that of the profile")
    sbatch: tuple[str, ...] = param(
        (),
        "further options of sbatch for array tasks, such as --constraint=cpu; those of the "
        "profile are not taken",
    )

    def __post_init__(self) -> None:
        arrays = -(-self.array_tasks // self.max_array_size)
        if 0 < self.max_concurrent < arrays:
            raise ConfigError(
                f"prep.max_concurrent={self.max_concurrent} is less than one for each of the "
                f"{arrays} arrays that prep.array_tasks={self.array_tasks} makes at "
                f"prep.max_array_size={self.max_array_size}; raise it or lower array_tasks"
            )
        _ = self.time_limit_s
        for name in ("partition", "account", "qos"):
            _require(_NAMES, getattr(self, name), f"prep.{name}", _NAMES_TEXT)
        if self.mem:
            mebibytes(self.mem, "prep.mem")
        _require_options(self.sbatch, "prep.sbatch", SET_OPTIONS)

    @property
    def time_limit_s(self) -> int:
        """The time limit in seconds."""
        return seconds(self.time_limit, "prep.time_limit")


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """The speeds and sizes that `postnorm plan` computes with; jobs do not read them."""

    gpu: str = param("", "such as H100, H200 or A100 80GB; gives tflops and memory_gib")
    tflops: float | None = param(
        None, "dense bf16 peak of a rank; null takes the GPU's", unit="TFLOP/s", gt=0
    )
    memory_gib: float | None = param(
        None, "memory of a rank; null takes the GPU's", unit="GiB", gt=0
    )
    utilisation: float = param(
        0.4,
        "share of the peak that a rank reaches while it computes: a guess until a run has measured "
        "its MFU",
        gt=0,
        le=1,
    )
    intra_node_gb_per_s: float | None = param(
        None,
        "bus bandwidth of an all-reduce over the GPUs of a node, as preflight or nccl-tests "
        "measure it; null takes the GPU's NVLink times 0.8",
        unit="GB/s",
        gt=0,
    )
    inter_node_gb_per_s: float | None = param(
        None,
        "the same over nodes, all network cards together; null takes "
        "preflight.bandwidth_gb_per_s, else one card a GPU as in DGX nodes (A100 25 GB/s, H100 and "
        "H200 50 GB/s) times 0.8",
        unit="GB/s",
        gt=0,
    )
    write_gb_per_s: float = param(
        1.0,
        "speed at which all ranks together write a checkpoint; of a run `speed/save_s` and "
        "`speed/save_written_s`, added up, tell",
        unit="GB/s",
        gt=0,
    )
    start_s: float = param(
        300.0,
        "from the start of a job to its first step: nodes, imports, opening the data",
        unit="s",
        ge=0,
    )

    def __post_init__(self) -> None:
        if self.gpu and limits(self.gpu) is None:
            raise ConfigError(
                f"hardware.gpu={self.gpu!r} is not known; expected one of {', '.join(KNOWN)}, or "
                "leave it out and give hardware.tflops and hardware.memory_gib"
            )

    @property
    def flops_per_rank(self) -> float:
        """Peak FLOP/s of a rank; 0 if it is not known."""
        if self.tflops is not None:
            return self.tflops * 1e12
        device = limits(self.gpu)
        return device.bf16_flops if device else 0.0

    @property
    def speed(self) -> str:
        """What a plan takes a rank to compute, for people; it is known."""
        peak = self.flops_per_rank / 1e12
        shown = f"{peak:,.0f} TFLOP/s a rank" if peak >= 10 else f"{peak:.2g} TFLOP/s a rank"
        if self.utilisation == 1:
            return shown
        return f"{self.utilisation:.0%} of {shown} (hardware.utilisation is assumed)"

    @property
    def memory_bytes(self) -> float | None:
        """Memory of one rank; None if it is not known."""
        device = limits(self.gpu)
        gib = self.memory_gib or (device.memory_gib if device else None)
        return gib * 2**30 if gib else None


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """A cluster profile. The default is one GPU."""

    SHIPPED: ClassVar = ("cluster",)

    nodes: int = param(1, "nodes of the job", unit="nodes", ge=1)
    gpus_per_node: int = param(
        1, "GPUs and ranks of each node; 0 trains on CPUs with ranks_per_node", ge=0
    )
    ranks_per_node: int = param(
        0, "ranks of each node; 0 takes one a GPU, needed where gpus_per_node is 0", ge=0
    )
    gpu_request: Literal["gpus-per-node", "gres"] = param(
        "gpus-per-node", "option of sbatch that asks for GPUs: --gpus-per-node=N or --gres=gpu:N"
    )
    gpu_type: str = param(
        "", "as in `sinfo -o %G`, letter by letter, such as h200; empty takes any"
    )
    cpus_per_rank: int = param(8, "cores of each rank", unit="cores", ge=1)
    mem_per_node: str = param("", "such as 500G; empty takes the partition's default")
    time_limit: str = param("24:00:00", "[days-]hours:minutes:seconds, as SLURM reads it")
    stop_before_end_s: int = param(
        300,
        "saving starts this long before the time limit; SLURM checks every 30 s",
        unit="s",
        ge=60,
    )
    partition: str = param("", "SLURM partition; empty takes the default")
    account: str = param("", "SLURM account; empty takes the default")
    qos: str = param("", "SLURM quality of service; empty takes the default")
    constraint: str = param("", "features that nodes must have (`sinfo -o %f`), such as ib&h200")
    exclude: str = param("", "nodes never to take, such as node[3-5],node9")
    reservation: str = param("", "SLURM reservation (`scontrol show reservation`)")
    exclusive: bool = param(False, "whole nodes, shared with no other job")
    sbatch: tuple[str, ...] = param(
        (), "further options of sbatch that no field sets, such as --switches=1"
    )
    srun: tuple[str, ...] = param(
        (), "further options of srun for the step of all ranks, such as --mpi=none"
    )
    cpu_bind: str = param(
        "cores", "--cpu-bind of srun: each rank keeps to its own cores; empty leaves it to SLURM"
    )
    distribution: str = param(
        "block:block",
        "--distribution of srun: ranks in order over nodes and over the sockets of a node, so that "
        "on nodes of 8 GPUs ranks 0 to 3 get the cores of the socket that GPUs 0 to 3 usually hang "
        "on; empty leaves it to SLURM, which deals ranks out to the sockets in turn",
    )
    max_excluded_nodes: int = param(
        4,
        "nodes that a job may exclude after they failed its checks, before it stops",
        unit="nodes",
        ge=0,
    )
    max_restarts: int = param(
        50, "requeues of one job, by SLURM or by itself, before it stops", ge=0
    )
    requeue: bool = param(
        True,
        "whether jobs go back into the queue by themselves; false, where the site forbids that: "
        "max_restarts + 1 jobs are queued as an array of which one runs after the other",
    )
    max_attempts_without_progress: int = param(
        2,
        "attempts in a row without progress before the job stops: a new checkpoint, evaluation or "
        "finished part of a fine-tuning, or exit code 75 of a program",
        ge=1,
    )
    max_submit_jobs: int = param(
        0,
        "jobs that you may have in the queue, where each element of an array counts; 0 asks "
        "accounting for MaxSubmitJobs of your association and QOS",
        ge=0,
    )
    storage_patience_s: int = param(
        600,
        "how long a job waits for storage that fails, before it ends and names the path; a full "
        "disk ends it at once",
        unit="s",
        ge=0,
    )
    python: str = param(
        ".venv/bin/python",
        "interpreter, on a path that all nodes see; in the image, if there is one",
    )
    modules: tuple[str, ...] = param((), "for `module load`, such as cuda/13.0")
    network: tuple[str, ...] = param(
        (), "NAME=value variables for all ranks, such as NCCL_SOCKET_IFNAME=ib0; taken literally"
    )
    scratch: str = param(
        "",
        "folder on a disk of each node, such as /scratch/$USER or $TMPDIR; runs call it "
        f"${SCRATCH_VARIABLE}, as in data.stage_dir=${SCRATCH_VARIABLE}/shards",
    )
    setup: tuple[str, ...] = param((), "shell lines after modules and variables, before the start")
    container: ContainerConfig = section(ContainerConfig, "the container that ranks run in")
    hardware: HardwareConfig = section(HardwareConfig, "what plans compute with")
    prep: PrepJobsConfig = section(PrepJobsConfig, "job arrays of data preparation")
    preflight: PreflightConfig = section(PreflightConfig, "checks of the nodes before training")

    def __post_init__(self) -> None:
        if not self.gpus_per_node and not self.ranks_per_node:
            raise ConfigError("gpus_per_node=0 needs ranks_per_node, the processes of each node")
        if self.ranks_per_node not in (0, self.gpus_per_node) and self.gpus_per_node:
            raise ConfigError(
                f"ranks_per_node={self.ranks_per_node} must equal gpus_per_node="
                f"{self.gpus_per_node}: every rank drives one GPU; leave it out"
            )
        if self.gpu_type and not self.gpus_per_node:
            raise ConfigError(f"gpu_type={self.gpu_type!r} with gpus_per_node=0; leave out one")
        if self.time_limit_s <= self.stop_before_end_s:
            raise ConfigError(
                f"time_limit={self.time_limit!r} ({self.time_limit_s} s) must be longer than "
                f"stop_before_end_s={self.stop_before_end_s}: no time is left to train"
            )
        if not self.requeue and self.max_restarts > _LONGEST_CHAIN:
            raise ConfigError(
                f"requeue=false queues max_restarts + 1 = {self.max_restarts + 1} jobs of a run, "
                f"expected {_LONGEST_CHAIN + 1} at most: set max_restarts to some more than the "
                "jobs that `postnorm plan` says, such as 8; `postnorm resume` does the rest"
            )
        self._require_slurm_texts()
        self._require_shell_texts()

    def _require_slurm_texts(self) -> None:
        if self.mem_per_node:
            mebibytes(self.mem_per_node, "mem_per_node")
        for name in ("partition", "account", "qos", "reservation", "gpu_type"):
            _require(_NAMES, getattr(self, name), name, _NAMES_TEXT)
        expected = "features joined by & or |, without white space, such as ib&h200"
        _require(r"[\w.:=&|!*()\[\]-]+", self.constraint, "constraint", expected)
        expected = "node names without white space, such as node[3-5],node9"
        _require(r"[\w.,\[\]-]+", self.exclude, "exclude", expected)
        taken = SET_OPTIONS | {"constraint", "reservation", "exclusive"}
        taken |= {"gres"} if self.gpu_request == "gres" else set()
        taken |= {"mem-per-cpu", "mem-per-gpu"} if self.mem_per_node else set()
        _require_options(self.sbatch, "sbatch", taken)
        _require_options(self.srun, "srun", SET_SRUN_OPTIONS)
        expected = "a value of that option of srun, such as"
        _require(r"[\w:,-]+", self.cpu_bind, "cpu_bind", f"{expected} cores")
        _require(r"[\w:,*-]+", self.distribution, "distribution", f"{expected} block:block")

    def _require_shell_texts(self) -> None:
        _require(r"[^\n]+", self.python, "python", "one line")
        expected = "names as `module avail` shows them, one an item, such as [gcc/13, cuda/13.0]"
        for module in self.modules:
            _require(r"[\w./+@:=-]+", module or " ", "modules", expected)
        _require_variables(self.network, "network")
        pattern = rf"(/|{_VARIABLE})({_VARIABLE}|[\w./@+-])*"
        expected = (
            "a whole path, in which $NAME stands for a variable of the job, such as /scratch/$USER"
        )
        _require(pattern, self.scratch, "scratch", expected)

    @property
    def time_limit_s(self) -> int:
        """The time limit in seconds."""
        return seconds(self.time_limit, "time_limit")

    @property
    def num_ranks_per_node(self) -> int:
        """Number of ranks of each node."""
        return self.gpus_per_node or self.ranks_per_node

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the job."""
        return self.nodes * self.num_ranks_per_node


def cluster_of(path: str | None) -> ClusterConfig:
    """Load a profile; without a path, return the defaults."""
    if path is None:
        return build(ClusterConfig, YamlNode({}, "defaults"))
    return load(ClusterConfig, path).config


def seconds(text: str, name: str) -> int:
    """Convert a time limit to seconds; the error is for a text that sbatch would not accept."""
    match = _TIME.fullmatch(text)
    if not match:
        raise ConfigError(
            f"{name}={text!r}: expected minutes, hours:minutes:seconds or "
            'days-hours:minutes:seconds, such as "1-12:00:00"'
        )
    days, *rest = match.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is not None:
        units = (3600, 60, 1)  # days-hours:minutes:seconds
    else:
        units = (3600, 60, 1) if len(numbers) == 3 else (60, 1, 0)
    total = sum(number * unit for number, unit in zip(numbers, units, strict=False))
    return int(days or 0) * 86400 + total


def mebibytes(text: str, name: str) -> float:
    """Read a memory size as sbatch does: a whole number, of MiB unless it says K, M, G or T."""
    match = _MEMORY.fullmatch(text)
    if not match:
        raise ConfigError(
            f"{name}={text!r}: expected a whole number and K, M, G or T, such as 500G; leave it "
            "out for the partition's default"
        )
    return int(match[1]) * _MIB[match[2].upper()]


def _require(pattern: str, text: str, name: str, expected: str) -> None:
    """Check a text that is not empty against a pattern, which must match all of it."""
    if text and not re.fullmatch(pattern, text):
        raise ConfigError(f"{name}={text!r}: expected {expected}")


def _require_variables(texts: Iterable[str], name: str) -> None:
    """Check `NAME=value` texts: their form, each once, none that the launcher sets itself."""
    seen: dict[str, str] = {}
    for text in texts:
        match = _ASSIGNMENT.fullmatch(text)
        if not match:
            raise ConfigError(
                f"{name}: {text!r} is not a variable; expected NAME=value on one line, such as "
                "NCCL_SOCKET_IFNAME=ib0"
            )
        if _OWN_VARIABLES.fullmatch(match[1]):
            raise ConfigError(
                f"{name}: {text!r}: the launcher sets {match[1]} itself; leave it out"
            )
        if match[1] in seen:
            raise ConfigError(
                f"{name}: {match[1]} is given twice, {seen[match[1]]!r} and {text!r}; keep one"
            )
        seen[match[1]] = text


def _require_options(texts: Iterable[str], name: str, taken: Iterable[str]) -> None:
    """Check further options of SLURM, such as `--switches=1`, each once and none of `taken`."""
    seen: set[str] = set()
    for text in texts:
        match = _OPTION.fullmatch(text)
        if not match:
            raise ConfigError(
                f"{name}: {text!r} is not an option; expected --name or --name=value on one line, "
                "such as --switches=1"
            )
        # SLURM accepts any prefix of a name that fits one option only (getopt_long).
        same = sorted(option for option in taken if option.startswith(match[1]))
        if same:
            raise ConfigError(
                f"{name}: {text!r}: the launcher or another field sets --{same[0]}; leave it out"
            )
        if match[1] in seen:
            raise ConfigError(f"{name}: --{match[1]} is given twice; keep one")
        seen.add(match[1])


def option(text: str) -> tuple[str, str | bool]:
    """Split an option that a profile accepted; the value is True if it has none."""
    name, _, value = text.removeprefix("--").partition("=")
    return name, value or True
