"""The exchange between the ranks of a run: its bytes, and how fast a cluster moves them. Pure.

A rank of n sends, and receives, in each step

    2 (n - 1) / n * bytes   of what is all-reduced (a reduce-scatter, then an all-gather),
      (n - 1) / n * bytes   of what is only reduce-scattered or only all-gathered, and of what a
                            rank gets of an all-to-all,

over the slowest of the links that the job uses: inside a node, or between nodes. The time of an
exchange is these bytes over the link's bus bandwidth, the unit of nccl-tests (NVIDIA/nccl-tests,
doc/PERFORMANCE.md) and of what preflight measures. Latency is not counted, and no pass hides it.
"""

import math
from dataclasses import dataclass

from launch.cluster import ClusterConfig
from pipeline.config.runs import RunConfig
from pipeline.model import cost

BUS_EFFICIENCY = 0.8
"""Share of a data sheet's bandwidth that an all-reduce reaches: 8 A100 have 230 of 300 GB/s."""
_GRADIENT_BYTES = 4
# Stage 3 keeps weights whose next use is nearer than this (stage3_max_reuse_distance).
_KEPT_ELEMENTS = 1e9


@dataclass(frozen=True)
class Bus:
    """The bus bandwidth of the slowest link that a job uses; infinite for a single rank."""

    bytes_per_s: float
    origin: str
    """Which link it is and where the number is from, in words."""


def bus_of(cluster: ClusterConfig) -> Bus | None:
    """Take measured bandwidths of a profile, else a share of the data sheet's; None: not known."""
    hardware, device = cluster.hardware, cost.limits(cluster.hardware.gpu)
    # It is between two nodes that preflight measures, or inside the only one.
    expected = cluster.preflight.bandwidth_gb_per_s or None
    links = []
    if cluster.num_ranks_per_node > 1:
        sheet = device.link if device else None
        in_node = expected if cluster.nodes == 1 else None
        links.append(("inside a node", hardware.intra_node_gb_per_s, in_node, sheet))
    if cluster.nodes > 1:
        cards = device.network * cluster.num_ranks_per_node if device and device.network else None
        links.append(("between nodes", hardware.inter_node_gb_per_s, expected, cards))
    buses = []
    for where, measured, of_preflight, sheet in links:
        if known := measured or of_preflight:
            speed = known * 1e9
            origin = "of the profile's hardware" if measured else "of the profile's preflight"
        elif sheet:
            speed = sheet * BUS_EFFICIENCY
            origin = f"{BUS_EFFICIENCY:.0%} of the data sheet's"
        else:
            return None
        buses.append(Bus(speed, f"{speed / 1e9:,.0f} GB/s {where}, {origin}"))
    return min(buses, key=lambda bus: bus.bytes_per_s, default=Bus(math.inf, ""))


def exchanged_bytes(
    config: RunConfig, parameters: int, passes: float, *, ranks: int = 1, muons: int = 0
) -> dict[str, float]:
    """Count the bytes of whole tensors in a step of so many backward passes, by collective.

    Of an all-to-all they are what each rank gets. `muons` are the elements of Muon's matrices.

    They are those of `pipeline/train/engine.py` with DeepSpeed 0.19.8, which
    `tests/distributed/test_moved.py` counts: gradients are added in fp32 whatever the precision.
    """
    stage = config.train.zero_stage
    gradients = float(_GRADIENT_BYTES * parameters)
    each = 2 if config.train.precision == "bf16" else 4
    weights = float(each * parameters)
    if stage < 3:
        # DeepSpeed all-reduces, although a rank keeps only its part; stage 2 for every micro-batch.
        found = {"all-reduce": gradients * (passes if stage == 2 else 1)}
        found |= {"all-gather": weights} if stage else {}
        # To their owners and back; at stage 0 every rank has what goes in, and wants all of it.
        there_and_back = 2 / ranks if stage else 1
        return found | ({"all-to-all": there_and_back * each * muons} if muons else {})
    # Weights are gathered for every micro-batch, and those of a model that is too large to be kept
    # for its backward pass twice.
    times = passes * (2 if 2 * parameters > _KEPT_ELEMENTS else 1)
    return {"reduce-scatter": gradients * passes, "all-gather": weights * times}


def sent_bytes(
    config: RunConfig, parameters: int, passes: float, ranks: int, muons: int = 0
) -> float:
    """Count the bytes that each rank sends, and receives, in a step."""
    whole = exchanged_bytes(config, parameters, passes, ranks=ranks, muons=muons)
    return sum(
        (2 if kind == "all-reduce" else 1) * (ranks - 1) / ranks * num_bytes
        for kind, num_bytes in whole.items()
    )
