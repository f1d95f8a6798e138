"""The section `preflight` of a cluster profile: what a node must have before a job trains on it."""

import re
from dataclasses import dataclass

from pipeline.config.schema import param
from pipeline.errors import ConfigError

_VERSION = re.compile(r"\d+(\.\d+)*")


@dataclass(frozen=True, kw_only=True)
class PreflightConfig:
    """Checks of each node at every start of a job, before it trains."""

    enabled: bool = param(True, "whether nodes are looked at")
    timeout_s: int = param(
        120, "that the checks of a node may take; what is not done by then counts as failed",
        unit="s", ge=1,
    )  # fmt: skip
    gpu: str = param(
        "", "text that the name of every GPU must have in it, such as H100; empty asks only that "
        "all nodes have the same",
    )  # fmt: skip
    min_driver: str = param("", "lowest version of the GPU driver, such as 550.54; empty takes any")
    min_free_gb: float = param(
        20.0, "free in the folder of the run and in data.stage_dir", unit="GB", ge=0
    )
    min_free_inodes: int = param(10_000, "files that can still be made in both", ge=0)
    min_shm_gb: float = param(
        1.0, "free in /dev/shm, which NCCL uses; a container may have 64 MB", unit="GB", ge=0
    )
    min_open_files: int = param(1024, "of a process, `ulimit -n`", ge=0)
    max_clock_skew_s: float = param(
        30.0, "that a node's clock may differ from the others'", unit="s", gt=0
    )
    shards: int = param(
        4, "shards of which each node compares one random block with its hash", unit="shards", ge=0
    )
    bandwidth_gb_per_s: float = param(
        0.0, "bus bandwidth of an all-reduce over two nodes (over the GPUs of a node where the job "
        "has one) as nccl-tests reports it; 0 does not measure", unit="GB/s", ge=0,
    )  # fmt: skip
    bandwidth_share: float = param(0.7, "share of it that a good node reaches", gt=0, le=1)

    def __post_init__(self) -> None:
        if self.min_driver and not _VERSION.fullmatch(self.min_driver):
            raise ConfigError(
                f"preflight.min_driver={self.min_driver!r}: expected numbers with dots, such as "
                '"550.54.15", in quotes'
            )


def version_of(text: str) -> tuple[int, ...]:
    """A driver's version as numbers, to be compared; () where it has none."""
    found = _VERSION.match(text)
    return tuple(int(number) for number in found[0].split(".")) if found else ()
