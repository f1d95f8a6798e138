"""The memory of a run's micro-batches: which size fits, and what scores cost that layers hand on.

Bytes of activations are counted on a layer that runs in another process, for all in one call
(`pipeline.model.cost.activation_bytes`, some 5 s).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from launch.cluster import ClusterConfig
from pipeline.config.data import BatchSpec
from pipeline.config.model import ModelConfig
from pipeline.config.runs import PretrainConfig, RunConfig
from pipeline.kernels.choose import REFERENCE, Choice, expected_on_gpu
from pipeline.model import cost


@dataclass(frozen=True)
class CarriedScores:
    """Bytes of a micro-batch with the run's longest sequences, with and without carried scores."""

    seq_len: int
    micro_batch: int
    activation_bytes: int
    without_bytes: int
    """With model.score_residual=none."""
    group: int
    """The train.activation_checkpoint_layers that keeps least."""
    grouped_bytes: int
    """With that."""


@dataclass(frozen=True)
class BatchMemory:
    """Bytes of the micro-batches of equal batches."""

    activation_bytes: int
    """What a micro-batch takes beside the state."""
    largest_micro_batch: int | None
    """The largest that fits, of those that divide a rank's share; None: none, or not known."""


@dataclass(frozen=True)
class MemoryNeed:
    """What a run's micro-batches need."""

    batches: tuple[BatchMemory, ...]
    """For each stretch of equal batches."""
    carried: CarriedScores | None
    """None where the model carries no scores."""


def measure(
    config: PretrainConfig,
    stretches: Sequence[BatchSpec],
    cluster: ClusterConfig,
    vocab_size: int,
    room: float | None,
) -> MemoryNeed | None:
    """Count the bytes that the micro-batches of stretches of equal batches take beside the state.

    Args:
        config: of the run.
        stretches: first batch of each.
        cluster: its ranks share a batch, and its GPUs decide which kernels run.
        vocab_size: rows of the embedding.
        room: bytes that a GPU has for them; None: not known, and no size is said to fit.

    Returns:
        None where torch is not installed.
    """
    fused = fused_of(config, cluster)
    configured = [_pass_of(config, place, fused, vocab_size) for place in stretches]
    sizes = [
        [replace(one, rows=size) for size in _divisors(place.size // cluster.num_ranks)]
        if room is not None
        else []
        for one, place in zip(configured, stretches, strict=True)
    ]
    longest = max(configured, key=lambda one: (one.seq_len, one.rows))
    plain = replace(longest.config, score_residual="none")
    without = replace(longest, config=plain, fused=fused_of(config, cluster, plain))
    grouped = replace(longest, checkpoint_layers=_best_group(longest.config.num_layers))
    carries = longest.config.score_residual != "none"
    passes = [*configured, *chain(*sizes), *([without, grouped] if carries else [])]
    needed = _bytes_of(list(dict.fromkeys(passes)))
    if needed is None:
        return None
    batches = [
        BatchMemory(
            needed[one],
            max((size.rows for size in of_one if needed[size] <= (room or 0.0)), default=None),
        )
        for one, of_one in zip(configured, sizes, strict=True)
    ]
    carried = None
    if carries:
        carried = CarriedScores(
            seq_len=longest.seq_len,
            micro_batch=longest.rows,
            activation_bytes=needed[longest],
            without_bytes=needed[without],
            group=grouped.checkpoint_layers or 1,
            grouped_bytes=needed[grouped],
        )
    return MemoryNeed(tuple(batches), carried)


def carried_text(found: CarriedScores, config: PretrainConfig) -> Iterator[str]:
    """Yield what carried scores cost, and what there is to choose, as lines for people."""
    shape = f"{found.micro_batch} x {found.seq_len:,} slots"
    yield (
        f"scores       {shape} take {_gib(found.activation_bytes)} GiB beside the state, "
        f"{_gib(found.without_bytes)} without scores that layers hand on "
        f"(model.score_residual={config.model.score_residual}): they grow with the square of "
        "seq_len"
    )
    group = ""
    if config.train.activation_checkpoint_layers != found.group:
        group = (
            f"train.activation_checkpoint_layers={found.group} ({_gib(found.grouped_bytes)} GiB), "
        )
    yield (
        f"             less: {group}a smaller micro_batch, a shorter seq_len, or "
        "model.score_residual=none from the first step on, as in roformer_v2; attention has no "
        "narrower window, and a stage cannot switch the scores off"
    )


def fused_of(config: RunConfig, cluster: ClusterConfig, model: ModelConfig | None = None) -> Choice:
    """Predict the kernels that a run will choose, if its GPUs support fused ones."""
    if not cluster.gpus_per_node:
        return REFERENCE
    return expected_on_gpu(config.kernels, model or config.model, config.train.precision)


def one_row(
    config: RunConfig, model: ModelConfig, seq_len: int, fused: Choice
) -> cost.TrainingPass:
    """Return the forward pass of a single sequence."""
    return cost.TrainingPass(
        model,
        1,
        seq_len,
        config.train.precision,
        checkpoint_layers=config.train.activation_checkpoint_layers,
        fused=fused,
    )


def _pass_of(
    config: PretrainConfig, place: BatchSpec, fused: Choice, vocab_size: int
) -> cost.TrainingPass:
    stage = config.timeline.stages[place.stage]
    model = replace(stage.model, vocab_size=vocab_size)
    return replace(
        one_row(config, model, place.seq_len, fused),
        rows=place.micro_batch,
        masked_share=max(stage.data.mask_prob, stage.data.mask_prob_end or 0.0),
        objective=config.objective,
    )


def _divisors(share: int) -> list[int]:
    return [size for size in range(1, share + 1) if share % size == 0]


def _best_group(num_layers: int) -> int:
    """Return the layers of a group with which scores are kept least often.

    Those between groups stay, and those of one group at a time.
    """
    return min(range(1, num_layers + 1), key=lambda size: math.ceil(num_layers / size) + size)


def _bytes_of(passes: list[cost.TrainingPass]) -> dict[cost.TrainingPass, int] | None:
    counted = cost.activation_bytes(passes)
    if counted is None:
        return None
    return {
        # Backward has the gradient of the scores that a layer got, and of those that it gave.
        one: kept["total"]
        + 2 * cost.carried_bytes(one.config, one.rows, one.seq_len, one.fused, one.precision)
        for one, kept in zip(passes, counted, strict=True)
    }


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f}"
