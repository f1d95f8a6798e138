"""The only reader (and writer) of environment variables, and what the processor can do."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from string import Template

from pipeline.errors import ConfigError

_GROUP_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MPI = {
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "MVAPICH": ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    "MPICH or Intel MPI": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
}
"""By MPI: variables with the number of processes, this one's, and this one's on its node."""
_IN_KUBERNETES = "KUBERNETES_SERVICE_HOST"
RUN_DIR_VARIABLE = "POSTNORM_RUN_DIR"
"""Set by `launch`, so that a rank can record how it ended."""
START_VARIABLE = "POSTNORM_START"
"""Set by `submit --local`: the start's number in the launcher's history, such as `local-1.0`."""
SCRATCH_VARIABLE = "POSTNORM_SCRATCH"
"""Set by `launch` to the `scratch` folder of the cluster profile, for configs to name."""


@dataclass(frozen=True)
class ProcessInfo:
    """Where this process stands in the process group."""

    rank: int
    """0 .. world_size - 1, over all nodes."""
    local_rank: int
    """0 .. on this node; picks the GPU."""
    world_size: int
    """Number of processes over all nodes."""
    host: str
    job: str
    """SLURM job id and restart count, such as `1234.0`, in an array `1234_5.0`; `local` outside
    SLURM. A start by hand has the number of its attempt behind it, such as `local-2`."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes what is written once."""
        return self.rank == 0


def process_info(environ: Mapping[str, str] | None = None) -> ProcessInfo:
    """Read the process group's variables as `torchrun` or a job script sets them.

    Raises:
        ConfigError: a variable is missing or is not a number.
    """
    environ = os.environ if environ is None else environ
    missing = [name for name in _GROUP_VARIABLES if not environ.get(name)]
    if missing == ["LOCAL_RANK"] and environ.get(_IN_KUBERNETES):
        raise ConfigError(
            f"LOCAL_RANK is not set, and this pod has {_num_gpus()} GPUs, so that RANK="
            f"{environ['RANK']} is that of the pod: start a process for each GPU in it, with "
            "`torchrun --nnodes=$WORLD_SIZE --node-rank=$RANK --nproc-per-node=N "
            "--master-addr=$MASTER_ADDR --master-port=$MASTER_PORT -m postnorm pretrain CONFIG`"
        )
    if missing:
        raise ConfigError(
            f"process-group variables not set: {', '.join(missing)}. On one machine start with "
            "`torchrun --standalone --nproc-per-node N -m postnorm pretrain CONFIG`, on several "
            "with torchrun on each, under SLURM with `postnorm submit CONFIG`. Set all of them or, "
            "for one process that trains or evaluates, none"
        )
    numbers = {name: environ[name] for name in _GROUP_VARIABLES if name != "MASTER_ADDR"}
    for name, text in numbers.items():
        # Not `isdigit`, which is true of ², a text that int() refuses.
        if not text.isdecimal():
            raise ConfigError(f"{name}={text!r} must be a whole number; set it right or unset it")
    rank, world_size = int(numbers["RANK"]), int(numbers["WORLD_SIZE"])
    if rank >= world_size:
        raise ConfigError(f"RANK={rank} must be below WORLD_SIZE={world_size}")
    local_rank, host = int(numbers["LOCAL_RANK"]), socket.gethostname()
    return ProcessInfo(rank, local_rank, world_size, host, _job(environ))


def process_info_or_alone(environ: MutableMapping[str, str] | None = None) -> ProcessInfo:
    """Read what `process_info` does; outside a launcher this process becomes a group of its own.

    Then the variables of that group are set, for torch and DeepSpeed.

    Raises:
        ConfigError: some variables are missing or are not numbers, or SLURM or mpirun started
            several processes and none of them has the variables.
    """
    environ = os.environ if environ is None else environ
    # Kubeflow and others set all but this one. Where a pod has one GPU or none, there can be no
    # other process of the run beside this one.
    is_alone = environ.get(_IN_KUBERNETES) and environ.get("RANK") and _num_gpus() <= 1
    if is_alone and not environ.get("LOCAL_RANK"):
        environ["LOCAL_RANK"] = "0"
    if any(environ.get(name) for name in _GROUP_VARIABLES[:3]):
        return process_info(environ)
    # Nothing is guessed: N tasks would start N runs of one process each, all writing to one folder.
    # A step has its own number of tasks; a job script itself is not a step.
    num_tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or "1"
    if num_tasks != "1":
        raise ConfigError(
            f"SLURM has {num_tasks} tasks here, and none of {', '.join(_GROUP_VARIABLES)} is set: "
            "each task would do the whole work by itself. Submit with `postnorm submit`, or set "
            "them from SLURM_PROCID, SLURM_LOCALID and SLURM_NTASKS as its job scripts do; for one "
            "process start it with `srun --ntasks=1`"
        )
    for program, (size, rank, local_rank) in _MPI.items():
        if environ.get(size, "1") != "1":
            raise ConfigError(
                f"{program} has started {environ[size]} processes ({size}), and none of "
                f"{', '.join(_GROUP_VARIABLES)} is set: each would do the whole work by itself. "
                "Start one process a node with torchrun, or set them: `mpirun ... bash -c "
                f"'RANK=${rank} WORLD_SIZE=${size} LOCAL_RANK=${local_rank} MASTER_ADDR=HOST "
                "MASTER_PORT=29500 exec postnorm pretrain CONFIG'`"
            )
    # With port 0 rank 0 takes any port that is free; no other rank has to know it.
    environ.update(
        # Port 0: a free port that is looked up first can be taken before it is used.
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    return process_info(environ)


def _num_gpus() -> int:
    """Count the GPUs that this machine, or this pod, shows."""
    return len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdecimal()])


def _job(environ: Mapping[str, str]) -> str:
    # Before SLURM's: ranks of `submit --local` may run within somebody's allocation.
    if environ.get(START_VARIABLE):
        return environ[START_VARIABLE]
    if "SLURM_JOB_ID" not in environ:
        return "local"
    job = environ["SLURM_JOB_ID"]
    if environ.get("SLURM_ARRAY_JOB_ID"):
        job = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return f"{job}.{environ.get('SLURM_RESTART_COUNT', '0')}"


def master_address() -> tuple[str, int]:
    """Get the host and port at which rank 0 waits; `process_info` has checked them."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def node_name() -> str:
    """Get the name of this node as SLURM writes it; outside SLURM the short host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def expand(text: str, field: str) -> str:
    """Fill in a home folder, `~` or `~USER`, `$NAME` and `${NAME}`; `$$` is a dollar sign.

    Raises:
        ConfigError: a variable is not set or empty, a `$` has no name, or the user is not known.
    """
    values = {name: value for name, value in os.environ.items() if value}
    at_home = os.path.expanduser(text)
    if at_home.startswith("~"):
        raise ConfigError(
            f"{field}={text!r}: a home folder of that name is not known here; write the folder in "
            "full, or ./~ for one that begins so"
        )
    try:
        return Template(at_home).substitute(values)
    except KeyError as error:
        raise ConfigError(
            f"{field}={text!r}: the environment variable {error.args[0]} is not set, or empty; "
            f"set it on every node, or write the value into {field}"
        ) from None
    except ValueError:
        raise ConfigError(
            f"{field}={text!r}: a $ must stand before a variable's name, such as $TMPDIR; write $$ "
            "for a dollar sign"
        ) from None


def launched_run_dir() -> str | None:
    """Get the run folder that the launcher knows, in case the config cannot be read."""
    return os.environ.get(RUN_DIR_VARIABLE)


def child_environment(**changes: str) -> dict[str, str]:
    """Copy this process's environment with changes, for a child process."""
    return {**os.environ, **changes}


@contextmanager
def restored() -> Iterator[None]:
    """Undo all changes of variables that a block makes."""
    before = dict(os.environ)
    try:
        yield
    finally:
        # In place: only changes of this object reach C code and child processes.
        os.environ.clear()
        os.environ.update(before)


def module_command(name: str) -> list[str]:
    """Get the words that run a module of this code, whatever the current folder."""
    return [sys.executable, str(Path(__file__).with_name("start.py")), name]


def run_script(
    script: str, *words: object, cwd: Path, variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a text of Python in a process of its own; what it prints is captured."""
    command = [sys.executable, "-c", script, *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=variables, check=False
    )


def set_default(name: str, value: str) -> None:
    """Set a variable for libraries that read it, unless the user already has."""
    os.environ.setdefault(name, value)


def multiplies_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor multiplies bf16 itself; others take 5 to 40 times as long as in fp32.

    True where the system does not tell.
    """
    words = cpuinfo.read_text().split() if cpuinfo.exists() else []
    return not words or not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(words)
