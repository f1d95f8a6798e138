"""What a cluster offers and how it wants to be asked: the root config of `python -m launch`."""

from dataclasses import dataclass
from typing import Literal

from launch.container import ContainerConfig
from launch.fields import (
    SET_OPTIONS,
    mebibytes,
    require,
    require_options,
    require_variables,
    seconds,
)
from launch.preflight.config import PreflightConfig
from pipeline.config.load import load
from pipeline.config.schema import build, param, section
from pipeline.config.strict_yaml import Node
from pipeline.errors import ConfigError
from pipeline.model.cost import KNOWN, limits
from pipeline.runtime.env import SCRATCH_VARIABLE

_NAMES = r"[\w.,@+-]+"
_VARIABLE = r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})"
_NAMES_TEXT = "a name as SLURM shows it, without white space"


@dataclass(frozen=True, kw_only=True)
class PrepJobsConfig:
    """Job arrays of data preparation, which needs cores and no GPU."""

    array_tasks: int = param(
        64, "array tasks of a stage, fewer where it has less to do; more of them than run at once "
        "make each shorter", ge=1,
    )  # fmt: skip
    max_concurrent: int = param(
        0, "array tasks that run at once; 0 leaves it to SLURM", unit="array tasks", ge=0
    )
    max_array_size: int = param(
        1001, "array tasks of one array, at most; where the site's MaxArraySize is lower, "
        "`submit` takes that; a stage with more array tasks gets several arrays", ge=1,
    )  # fmt: skip
    cores: int = param(4, "cores and processes of an array task", unit="cores", ge=1)
    mem: str = param("", "of an array task, such as 16G; empty takes what the plan expects")
    time_limit: str = param(
        "4:00:00", "of an array task, [days-]hours:minutes:seconds; one that reaches it fails, and "
        "submitting again continues",
    )  # fmt: skip
    max_failures: int = param(
        3, "failures of an array task before it stops; preemptions do not count", ge=1
    )
    partition: str = param("", "SLURM partition; empty takes that of the profile")
    account: str = param("", "SLURM account; empty takes that of the profile")
    qos: str = param("", "SLURM quality of service; empty takes that of the profile")
    sbatch: tuple[str, ...] = param(
        (), "further options of sbatch for array tasks, such as --constraint=cpu; those of the "
        "profile are not taken",
    )  # fmt: skip

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
            require(_NAMES, getattr(self, name), f"prep.{name}", _NAMES_TEXT)
        if self.mem:
            mebibytes(self.mem, "prep.mem")
        require_options(self.sbatch, "prep.sbatch", SET_OPTIONS)

    @property
    def time_limit_s(self) -> int:
        """The time limit in seconds.

        Raises:
            ConfigError: sbatch would not read it.
        """
        return seconds(self.time_limit, "prep.time_limit")


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """What `python -m launch plan` reckons with; jobs do not read it."""

    gpu: str = param("", "such as H100, H200 or A100 80GB; gives tflops and memory_gib")
    tflops: float | None = param(
        None, "dense bf16 peak of a rank; null takes the GPU's", unit="TFLOP/s", gt=0
    )
    memory_gib: float | None = param(
        None, "memory of a rank; null takes the GPU's", unit="GiB", gt=0
    )
    utilisation: float = param(
        0.4, "share of the peak that training reaches: a guess until a run has measured its MFU",
        gt=0, le=1,
    )  # fmt: skip
    node_mtbf_hours: float = param(
        6000.0, "mean time between failures of one node; the default is what Llama 3's 16,384 GPUs "
        "had, 419 interruptions in 54 days (arXiv 2407.21783, section 3.3.4), on nodes of 8",
        unit="hours", gt=0,
    )  # fmt: skip
    write_gb_per_s: float = param(
        1.0, "at which all ranks together write a checkpoint; `train/save_s` of a run tells",
        unit="GB/s", gt=0,
    )  # fmt: skip

    start_s: float = param(
        300.0, "from the start of a job to its first step: nodes, imports, opening the data",
        unit="s", ge=0,
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.gpu and limits(self.gpu) is None:
            raise ConfigError(
                f"hardware.gpu={self.gpu!r} is not known; expected one of {', '.join(KNOWN)}, or "
                "leave it out and give hardware.tflops and hardware.memory_gib"
            )

    @property
    def flops_per_rank(self) -> float:
        """Peak FLOP/s; 0 if nothing is known."""
        if self.tflops is not None:
            return self.tflops * 1e12
        found = limits(self.gpu)
        return found.bf16_flops if found else 0.0

    @property
    def memory_bytes(self) -> float | None:
        """Of one rank; None if nothing is known."""
        found = limits(self.gpu)
        gib = self.memory_gib or (found.memory_gib if found else None)
        return gib * 2**30 if gib else None


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """A cluster profile; files are in `configs/cluster/`. The default is one GPU."""

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
        300, "saving starts this long before the time limit; SLURM looks every 30 s", unit="s",
        ge=60,
    )  # fmt: skip
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
    max_excluded_nodes: int = param(
        4, "nodes that a job may be kept off after they failed its checks, before it stops",
        unit="nodes", ge=0,
    )  # fmt: skip
    max_restarts: int = param(
        50, "requeues of one job, by SLURM or by itself, before it stops", ge=0
    )
    max_attempts_without_progress: int = param(
        2, "attempts in a row without a new checkpoint before the job stops", ge=1
    )
    python: str = param(
        ".venv/bin/python",
        "interpreter, on a path that all nodes see; in the image, if there is one",
    )
    modules: tuple[str, ...] = param((), "for `module load`, such as cuda/13.0")
    module_purge: bool = param(False, "`module purge` before, so that a login shell's do not count")
    network: tuple[str, ...] = param(
        (), "NAME=value variables for all ranks, such as NCCL_SOCKET_IFNAME=ib0; taken as they are"
    )
    scratch: str = param(
        "", "folder on a disk of each node, such as /scratch/$USER or $TMPDIR; runs call it "
        f"${SCRATCH_VARIABLE}, as in data.stage_dir=${SCRATCH_VARIABLE}/shards",
    )  # fmt: skip
    setup: tuple[str, ...] = param((), "shell lines after modules and variables, before the start")
    container: ContainerConfig = section(ContainerConfig, "what ranks run in")
    hardware: HardwareConfig = section(HardwareConfig, "what plans reckon with")
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
        self._require_slurm_texts()
        self._require_shell_texts()

    def _require_slurm_texts(self) -> None:
        if self.mem_per_node:
            mebibytes(self.mem_per_node, "mem_per_node")
        for name in ("partition", "account", "qos", "reservation", "gpu_type"):
            require(_NAMES, getattr(self, name), name, _NAMES_TEXT)
        require(
            r"[\w.:=&|!*()\[\]-]+", self.constraint, "constraint",
            "features joined by & or |, without white space, such as ib&h200",
        )  # fmt: skip
        require(
            r"[\w.,\[\]-]+", self.exclude, "exclude",
            "node names without white space, such as node[3-5],node9",
        )  # fmt: skip
        taken = SET_OPTIONS | {"constraint", "reservation", "exclusive"}
        taken |= {"gres"} if self.gpu_request == "gres" else set()
        taken |= {"mem-per-cpu", "mem-per-gpu"} if self.mem_per_node else set()
        require_options(self.sbatch, "sbatch", taken)

    def _require_shell_texts(self) -> None:
        require(r"[^\n]+", self.python, "python", "one line")
        for module in self.modules:
            require(
                r"[\w./+@:=-]+", module or " ", "modules",
                "names as `module avail` shows them, each by itself, such as [gcc/13, cuda/13.0]",
            )  # fmt: skip
        require_variables(self.network, "network")
        require(
            rf"(/|{_VARIABLE})({_VARIABLE}|[\w./@+-])*", self.scratch, "scratch",
            "a whole path, in which $NAME stands for a variable of the job, such as /scratch/$USER",
        )  # fmt: skip

    @property
    def time_limit_s(self) -> int:
        """The time limit in seconds.

        Raises:
            ConfigError: sbatch would not read it.
        """
        return seconds(self.time_limit, "time_limit")

    @property
    def num_ranks_per_node(self) -> int:
        """Processes of each node."""
        return self.gpus_per_node or self.ranks_per_node


def cluster_of(path: str | None) -> ClusterConfig:
    """The profile in a file; without one, the defaults.

    Raises:
        ConfigError: it is wrong.
    """
    if path is None:
        return build(ClusterConfig, Node({}, "defaults"))
    return load(ClusterConfig, path).config
