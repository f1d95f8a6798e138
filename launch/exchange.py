"""The exchange between ranks: what each ZeRO stage moves in a step, how long it takes, what hides.

Bytes are those of `pipeline/train/engine.py` with DeepSpeed 0.19.8, which
`tests/distributed/test_moved.py` counts: gradients are added in fp32 whatever the precision. Stages
1 and 2 all-reduce them, although a rank keeps only its part, and stages 2 and 3 do so for every
micro-batch. Stage 3 gathers weights for every micro-batch, and a model too large to be kept for its
backward pass twice.

Time is bytes over bus bandwidth, the unit of nccl-tests (NVIDIA/nccl-tests, doc/PERFORMANCE.md) and
of what preflight measures, plus latency. Collectives are rings over all ranks: they cross the
border of each node once, in pieces that all its network cards share, and all hops work at the same
time, so that the slowest sort of hop decides: the links inside a node, or its network cards.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import Literal

from launch.cluster import ClusterConfig
from pipeline.config.runs import PretrainConfig
from pipeline.model.cost import limits
from pipeline.train.deepspeed import deepspeed_config

NODE_COUNTS = (1, 4, 16, 64)
_GRADIENT_BYTES = 4
_FORWARD_SHARE = 1 / 3
"""Of a step's computation; the backward pass is twice as long (`cost.Flops`)."""
_REDUCE_BUCKET, _GATHER_BUCKET = 5e8, 5e7
"""Elements of one call: reduce_bucket_size, and stage3_prefetch_bucket_size, of DeepSpeed."""
_KEPT_ELEMENTS = 1e9
"""Stage 3 keeps weights whose next use is nearer than this (stage3_max_reuse_distance)."""
# Seconds of a hop inside a node and between nodes, by NCCL's own model (NVIDIA/nccl, v2.23,
# src/graph/tuning.cc, hwLat, protocol Simple): rings, and the trees of a large all-reduce.
_RING_HOP_S = (3.4e-6, 14e-6)
_TREE_HOP_S = (4.0e-6, 14e-6)


@dataclass(frozen=True)
class Collective:
    """Calls of one kind in one step."""

    kind: Literal["all-reduce", "reduce-scatter", "all-gather"]
    what: str
    num_bytes: float
    """Of whole tensors, over all calls."""
    calls: float
    hides_behind: Literal["", "forward", "backward"] = ""
    """The pass that goes on meanwhile; empty: nothing does."""

    def moved_bytes(self, ranks: int) -> float:
        """Count what a rank sends, and receives."""
        return (2 if self.kind == "all-reduce" else 1) * (ranks - 1) / ranks * self.num_bytes

    def seconds(self, nodes: int, per_node: int, links: "Links") -> float:
        """Compute the time of all calls; 0 for one rank."""
        ranks = nodes * per_node
        if ranks == 1:
            return 0.0
        inside, between = _TREE_HOP_S if self.kind == "all-reduce" else _RING_HOP_S
        if self.kind == "all-reduce":
            latency = 2 * ((per_node - 1) * inside + log2(nodes) * between)
        else:
            latency = (ranks - nodes) * inside + (nodes - 1) * between
        return self.moved_bytes(ranks) / links.slowest(nodes, per_node) + self.calls * latency


@dataclass(frozen=True)
class Links:
    """Bus bandwidths in bytes/s; None: not known."""

    inside: float | None
    between: float | None
    origin: str
    """Where the two are from, in words."""

    def slowest(self, nodes: int, per_node: int) -> float:
        """Return that of a job which `is_known`."""
        every = [self.inside] * (per_node > 1) + [self.between] * (nodes > 1)
        return min(speed for speed in every if speed)

    def is_known(self, nodes: int, per_node: int) -> bool:
        """Say whether the links that a job uses are known."""
        return bool((self.inside or per_node == 1) and (self.between or nodes == 1))


def links_of(cluster: ClusterConfig) -> Links:
    """Take measured bandwidths of a profile, else a share of those of the data sheets."""
    hardware, device = cluster.hardware, limits(cluster.hardware.gpu)
    # It is between two nodes that preflight measures, or inside the only one.
    expected = cluster.preflight.bandwidth_gb_per_s or None
    alone = cluster.nodes == 1
    link = device.link if device else None
    cards = device.network * cluster.num_ranks_per_node if device and device.network else None
    given = {
        "inside a node": (hardware.intra_node_gb_per_s, expected if alone else None, link),
        "between nodes": (hardware.inter_node_gb_per_s, None if alone else expected, cards),
    }
    speeds: dict[str, float | None] = {}
    said = []
    for where, (measured, of_preflight, sheet) in given.items():
        speeds[where] = speed = sheet * hardware.bus_efficiency if sheet else None
        origin = f"{hardware.bus_efficiency:.0%} (hardware.bus_efficiency) of the data sheet's"
        if known := measured or of_preflight:
            speeds[where] = speed = known * 1e9
            origin = "of the profile's hardware" if measured else "of the profile's preflight"
        if speed:
            said.append(f"{speed / 1e9:,.0f} GB/s {where}, {origin}")
    return Links(speeds["inside a node"], speeds["between nodes"], "; ".join(said))


def collectives(config: PretrainConfig, parameters: int, accumulation: float) -> list[Collective]:
    """List the collectives of a step of so many backward passes, but those of a few numbers."""
    stage = config.train.zero_stage
    gradients = float(_GRADIENT_BYTES * parameters)
    weights = float((2 if config.train.precision == "bf16" else 4) * parameters)
    buckets = ceil(parameters / _REDUCE_BUCKET)
    if stage == 0:
        return [Collective("all-reduce", "gradients", gradients, buckets)]
    gather = Collective("all-gather", "weights", weights, buckets)
    if stage == 1:
        return [Collective("all-reduce", "gradients", gradients, buckets), gather]
    each, calls = gradients * accumulation, buckets * accumulation
    tuned = deepspeed_config(config.train)["zero_optimization"]
    hides: Literal["", "backward"] = "backward" if tuned.get("overlap_comm", stage == 3) else ""
    if stage == 2:
        return [Collective("all-reduce", "gradients", each, calls, hides), gather]
    times = accumulation * (2 if 2 * parameters > _KEPT_ELEMENTS else 1)
    reduce = Collective("reduce-scatter", "gradients", each, calls, hides)
    calls = ceil(parameters / _GATHER_BUCKET) * times
    ahead: Literal["", "forward"] = "forward" if hides else ""
    return [reduce, Collective("all-gather", "weights", weights * times, calls, ahead)]


@dataclass(frozen=True)
class Stretch:
    """Steps with equal batches, as the run has them."""

    steps: int
    size: int
    """Sequences of a batch."""
    micro_batch: int
    flops: float
    """Of a step."""


@dataclass(frozen=True)
class Speed:
    """What a run's time follows from beside its batches."""

    config: PretrainConfig
    parameters: int
    per_node: int
    flops_per_s: float
    """That a rank reaches without exchange."""
    links: Links


@dataclass(frozen=True)
class Scale:
    """A run on so many nodes. Times in seconds; None: its batch does not divide by the ranks."""

    nodes: int
    ranks: int
    batch: int
    """Sequences of the last batches."""
    step_s: float | None
    """Mean, without evaluations and saves."""
    exchange_s: float | None
    """The part of it in which ranks only exchange."""
    efficiency: float | None
    """Computation's share of the time: speed over that of as many single ranks."""
    train_s: float | None


def same_batch(stretches: Sequence[Stretch], speed: Speed, nodes: int) -> Scale:
    """Strong scaling: the run's own batches, divided by more ranks."""
    ranks = nodes * speed.per_node
    compute_s = exchange_s = 0.0
    for one in stretches:
        share, rest = divmod(one.size, ranks)
        if rest:
            return Scale(nodes, ranks, stretches[-1].size, None, None, None, None)
        # What a person would set where a share is less than a micro-batch, or no multiple.
        micro = next(n for n in range(min(one.micro_batch, share), 0, -1) if share % n == 0)
        each_s = one.flops / ranks / speed.flops_per_s
        compute_s += one.steps * each_s
        exchange_s += one.steps * exposed_s(speed, nodes, share // micro, each_s)
    steps = sum(one.steps for one in stretches)
    return _scale(nodes, ranks, stretches[-1].size, steps, compute_s, exchange_s)


def same_share(stretches: Sequence[Stretch], speed: Speed, nodes: int, of_nodes: int) -> Scale:
    """Weak scaling: each rank's part of a batch as on `of_nodes`; as much text in all."""
    ranks, own = nodes * speed.per_node, of_nodes * speed.per_node
    compute_s = exchange_s = 0.0
    for one in stretches:
        each_s = one.flops / own / speed.flops_per_s
        steps = one.steps * own / ranks
        compute_s += steps * each_s
        share = one.size // own
        exchange_s += steps * exposed_s(speed, nodes, share // one.micro_batch, each_s)
    steps = sum(one.steps for one in stretches) * own / ranks
    batch = stretches[-1].size * ranks // own
    return _scale(nodes, ranks, batch, steps, compute_s, exchange_s)


def _scale(
    nodes: int, ranks: int, batch: int, steps: float, compute_s: float, exchange_s: float
) -> Scale:
    train_s = compute_s + exchange_s
    step_s, efficiency = train_s / steps, compute_s / train_s
    return Scale(nodes, ranks, batch, step_s, exchange_s / steps, efficiency, train_s)


def exposed_s(speed: Speed, nodes: int, accumulation: float, compute_s: float) -> float:
    """Compute the seconds of a step's exchange that no pass hides.

    Args:
        speed: of the run.
        nodes: that it runs on.
        accumulation: backward passes of a step, on average.
        compute_s: seconds of a step without the exchange.
    """
    room = {"": 0.0, "forward": compute_s * _FORWARD_SHARE}
    room["backward"] = compute_s - room["forward"]
    return sum(
        max(0.0, each.seconds(nodes, speed.per_node, speed.links) - room[each.hides_behind])
        for each in collectives(speed.config, speed.parameters, accumulation)
    )


def assumptions(speed: Speed, accumulation: int, ranks: int) -> Iterator[str]:
    """Say what moves and what is assumed."""
    for each in collectives(speed.config, speed.parameters, accumulation):
        hides = f"hides behind the {each.hides_behind} pass" if each.hides_behind else "not hidden"
        yield (
            f"{each.kind} of {each.what}: {each.num_bytes / 1e9:,.2f} GB a step, "
            f"{each.moved_bytes(ranks) / 1e9:,.2f} GB out of each of {ranks} ranks, {hides}"
        )
    yield f"bus bandwidth: {speed.links.origin}"
    yield (
        "utilisation stays as it is on one rank (a share of fewer sequences may reach less); "
        "reading data, evaluations and saves are not counted"
    )
