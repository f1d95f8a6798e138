"""What a cluster offers and how it wants to be asked: the root config of `python -m launch`."""

from dataclasses import dataclass

from pipeline.config.schema import param
from pipeline.errors import ConfigError


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
    max_restarts: int = param(
        50, "requeues of one job, by SLURM or by itself, before it stops", ge=0
    )
    max_attempts_without_progress: int = param(
        2, "attempts in a row without a new checkpoint before the job stops", ge=1
    )
    python: str = param(".venv/bin/python", "interpreter, on a path that all nodes see")
    setup: tuple[str, ...] = param(
        (), "shell lines before the start, such as `module load cuda/13.0`"
    )

    def __post_init__(self) -> None:
        if not self.gpus_per_node and not self.ranks_per_node:
            raise ConfigError("gpus_per_node=0 needs ranks_per_node, the processes of each node")
        if self.ranks_per_node not in (0, self.gpus_per_node) and self.gpus_per_node:
            raise ConfigError(
                f"ranks_per_node={self.ranks_per_node} must equal gpus_per_node="
                f"{self.gpus_per_node}: every rank drives one GPU; leave it out"
            )

    @property
    def num_ranks_per_node(self) -> int:
        """Processes of each node."""
        return self.gpus_per_node or self.ranks_per_node
