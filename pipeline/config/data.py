"""What is read, in which order and batches, how it is packed and masked.

Batches are numbered from 0, skipped ones included; the cursor of a batch is the number of sequences
in all batches before it. Neither knows of ranks, so the same cursor means the same batch anywhere.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from pipeline.config.objective import MLM, ObjectiveConfig
from pipeline.config.schema import REQUIRED, param, path_param
from pipeline.errors import ConfigError
from pipeline.runtime.remote import is_address


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """A part of a run with batches of its own; what is left out is as in the rest of the run."""

    tokens: float = param(
        REQUIRED,
        "the phase ends with the batch in which sequences x seq_len reach this",
        unit="slots",
        gt=0,
    )
    seq_len: int | None = param(
        None, "slots of a packed sequence; null: data.seq_len", unit="tokens", ge=8, le=65536
    )
    global_batch: int | None = param(
        None, "sequences of a step; null: train.global_batch", unit="sequences", ge=1
    )
    micro_batch: int | None = param(
        None, "sequences of a forward pass; null: train.micro_batch", unit="sequences", ge=1
    )
    ramp_from: int | None = param(
        None,
        "the batch grows from this towards global_batch, by equal steps with equally many slots; "
        "null: it does not grow",
        unit="sequences",
        ge=1,
    )
    ramp_step: int | None = param(
        None, "by which the batch grows; null: ramp_from", unit="sequences", ge=1
    )


class BatchSpec(NamedTuple):
    """One batch of a run."""

    number: int
    """Batch number from 0; skipped batches count."""
    cursor: int
    """Sequences in the batches before it."""
    size: int
    """Its sequences, over all ranks."""
    micro_batch: int
    seq_len: int
    """Slots of its sequences."""
    stage: int = 0
    """Place of its stage in `stages`, from 0."""


class StageBatches(NamedTuple):
    """The equal batches of a stage."""

    steps: int
    seq_len: int
    global_batch: int
    micro_batch: int


class BatchPlan:
    """All batches of a run, without end."""

    def __init__(
        self,
        phases: tuple[PhaseConfig, ...],
        *,
        seq_len: int,
        global_batch: int,
        micro_batch: int,
        stages: Sequence[StageBatches] = (),
    ) -> None:
        """Lay phases and stages one after another.

        The values given hold for the rest of the run, or of its first stage, which has the phases.

        Raises:
            ConfigError: a ramp does not fit its ends, a batch its micro-batch, or the phases the
                first stage.
        """
        self._firsts: list[BatchSpec] = []
        """First batch of each stretch of equal batches."""
        self._names: list[tuple[str, str]] = []
        """What sets the size of each stretch's batches and of their micro-batches."""
        number = cursor = 0
        for which, phase in enumerate(phases):
            length, micro = phase.seq_len or seq_len, phase.micro_batch or micro_batch
            sizes = _sizes(phase, global_batch, f"phases.{which}")
            for size in sizes:
                names = (
                    f"phases.{which}: a batch of {size}",
                    f"{f'phases.{which}' if phase.micro_batch else 'train'}.micro_batch={micro}",
                )
                self._add(BatchSpec(number, cursor, size, micro, length), names)
                # Rounded up, one at least: a phase without a batch would hide its length and sizes
                # in silence.
                count = max(1, -int(-phase.tokens // (size * length * len(sizes))))
                number, cursor = number + count, cursor + count * size
        names = f"train.global_batch={global_batch}", f"train.micro_batch={micro_batch}"
        self._add(BatchSpec(number, cursor, global_batch, micro_batch, seq_len), names)
        stage_ends = 0
        for which, (before, stage) in enumerate(pairwise(stages), 1):
            stage_ends += before.steps
            if number >= stage_ends:
                raise ConfigError(
                    f"phases have {number} batches, and stages.0 ends after {stage_ends}: phases "
                    "are the beginning of the first stage; lengthen it, or shorten them"
                )
            cursor += (stage_ends - number) * before.global_batch
            number, size, micro = stage_ends, stage.global_batch, stage.micro_batch
            names = (
                f"stages.{which}: train.global_batch={size}",
                f"stages.{which}: train.micro_batch={micro}",
            )
            self._add(BatchSpec(number, cursor, size, micro, stage.seq_len, which), names)
        self._cursors = [first.cursor for first in self._firsts]

    def _add(self, first: BatchSpec, names: tuple[str, str]) -> None:
        if first.size % first.micro_batch:
            raise ConfigError(
                f"{names[0]} must be a multiple of {names[1]} (times the number of ranks); change "
                "one of the two"
            )
        self._firsts.append(first)
        self._names.append(names)

    @property
    def stretches(self) -> list[BatchSpec]:
        """The first batch of each stretch of equal batches, in order."""
        return list(self._firsts)

    @property
    def firsts_of_stages(self) -> list[BatchSpec]:
        """The first batch of each stage; of a run without stages, its first batch."""
        first_of = {first.stage: first for first in reversed(self._firsts)}
        return [first_of[stage] for stage in sorted(first_of)]

    @property
    def seq_lens(self) -> list[int]:
        """All lengths of sequences, in order of their first use."""
        return list(dict.fromkeys(first.seq_len for first in self._firsts))

    def at(self, cursor: int) -> BatchSpec:
        """Return the batch that starts at a cursor (ConfigError: none does)."""
        first = self._firsts[bisect_right(self._cursors, cursor) - 1]
        count, rest = divmod(cursor - first.cursor, first.size)
        if rest or cursor < 0:
            raise ConfigError(
                f"no batch starts at sequence {cursor}: from sequence {first.cursor} on they have "
                f"{first.size}; the run was made with other phases or another train.global_batch"
            )
        return first._replace(number=first.number + count, cursor=cursor)

    def number(self, number: int) -> BatchSpec:
        """Return the batch of a number, 0 or more."""
        first = [first for first in self._firsts if first.number <= number][-1]
        return self.at(first.cursor + (number - first.number) * first.size)

    def holding(self, sequence: int) -> BatchSpec:
        """Return the batch that holds a sequence of the run."""
        first = self._firsts[bisect_right(self._cursors, sequence) - 1]
        return self.at(sequence - (sequence - first.cursor) % first.size)

    def batches_from(self, cursor: int) -> Iterator[BatchSpec]:
        """Endless batches from a cursor on."""
        while True:
            place = self.at(cursor)
            yield place
            cursor += place.size

    def require_split(self, world_size: int) -> None:
        """Check that every batch can be split evenly over the ranks (ConfigError: one cannot)."""
        for first, (batch, micro_batch) in zip(self._firsts, self._names, strict=True):
            if first.size % (first.micro_batch * world_size):
                raise ConfigError(
                    f"{batch} must be a multiple of {micro_batch} x {world_size} ranks; change the "
                    "batch or the number of ranks"
                )


def _sizes(phase: PhaseConfig, global_batch: int, where: str) -> list[int]:
    """Sizes of a phase's batches, each for an equal part of its slots."""
    last = phase.global_batch or global_batch
    if phase.ramp_from is None:
        if phase.ramp_step is not None:
            raise ConfigError(
                f"{where}.ramp_step={phase.ramp_step} without ramp_from: set both or none"
            )
        return [last]
    step = phase.ramp_step or phase.ramp_from
    if phase.ramp_from >= last or (last - phase.ramp_from) % step:
        raise ConfigError(
            f"{where}: no batch grows from ramp_from={phase.ramp_from} by ramp_step={step} to "
            f"{last}; expected {last} - ramp_from to be a multiple of ramp_step, above 0"
        )
    return list(range(phase.ramp_from, last, step))


@dataclass(frozen=True, kw_only=True)
class MixConfig:
    """Another weight for a source than the dataset gives it."""

    source: str = param(REQUIRED, "name of a source of the dataset")
    weight: float = param(
        REQUIRED, "times that its documents are seen while a source of weight 1 is seen once", ge=0
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """A prepared dataset and the pure functions applied to it at load time."""

    dir: str = path_param(
        REQUIRED,
        "folder written by `postnorm prep run`, or address such as s3://bucket/data to which "
        "`prep publish` sent it",
    )
    stage_dir: str | None = param(
        None,
        "node-local folder that blocks are copied to and read from, or that keeps those of an "
        "address; null reads shards where they are; environment variables such as $TMPDIR are "
        "filled in, also $POSTNORM_SCRATCH, the `scratch` folder of a cluster profile",
    )
    stage_gb: float = param(
        64.0, "of blocks of an address that stage_dir keeps, at most", unit="GB", gt=0
    )
    seq_len: int = param(512, "slots of a packed sequence", unit="tokens", ge=8, le=65536)
    window_blocks: int = param(
        16, "blocks whose sequences are shuffled together; one block is read at a time", ge=1
    )
    mix: tuple[MixConfig, ...] = param(
        (), "weights of sources in place of those in the dataset; 0 leaves a source out"
    )
    masking: Literal["token", "whole_word", "span", "ngram"] = param(
        "whole_word",
        "unit that is masked: single tokens, all tokens of a word together, spans of up to ten "
        "words as in SpanBERT, or n-grams of words as in ALBERT",
    )
    ngram_weights: tuple[float, ...] | None = param(
        None,
        "of ngram: how often one, two, ... words are masked together; null is [6, 3, 2], 1/n as "
        "ALBERT's; [4, 3, 2, 1] is MacBERT's",
    )
    similar: str | None = path_param(
        None,
        "file of `postnorm similar`: in place of [MASK] stands a similar token, as in MacBERT; "
        "a random one where the file has none",
    )
    mask_selection: Literal["bernoulli", "exact"] = param(
        "bernoulli",
        "bernoulli: each unit by itself with mask_prob; exact: in random order until "
        "round(mask_prob * maskable tokens) of the sequence are used, no word cut",
    )
    mask_prob: float = param(0.15, "share of tokens to predict", gt=0, lt=1, usual=(0.05, 0.6))
    mask_prob_end: float | None = param(
        None, "share after mask_prob_steps, reached linearly; null keeps mask_prob", gt=0, lt=1
    )
    mask_prob_steps: int = param(
        0, "steps from mask_prob to mask_prob_end, skipped ones included", unit="steps", ge=0
    )
    mask_versions: int | None = param(
        None,
        "epochs after which a sequence's masks come again: 1 gives it the same always (static "
        "masks), 10 is BERT's dupe_factor; null draws them anew in each epoch (dynamic)",
        unit="epochs",
        ge=1,
    )
    at_least_one: bool = param(
        False,
        "a packed document of which nothing was selected gets its word with the least draw; "
        "raises the share where documents are short",
    )
    replace_mask_prob: float = param(0.8, "of those, share replaced by [MASK]", ge=0, le=1)
    replace_random_prob: float = param(
        0.1, "of those, share replaced by a random token; the rest stays as it is", ge=0, le=1
    )
    verify_at_start_gib: float = param(
        1.0,
        "hash every shard before training if all are at most this large; "
        "larger sets are hashed only block by block, when they are read",
        unit="GiB",
        ge=0,
    )
    check_blocks: Literal["first_touch", "never"] = param(
        "first_touch",
        "when a block's sha256 is compared with the index: whenever it is read from storage, or "
        "never, for storage that checks by itself; document ends are always checked, and blocks "
        "of an object store",
    )
    workers: int = param(
        0, "processes of each rank that make batches; 0: a thread of the rank itself", ge=0, le=64
    )
    prefetch_steps: int = param(
        2, "steps made ahead of the one that is computed, at least one a worker", unit="steps", ge=1
    )

    def __post_init__(self) -> None:
        if is_address(self.dir) and not self.stage_dir:
            raise ConfigError(
                f"data.dir={self.dir} is in an object store and data.stage_dir is not set: set it "
                "to a folder of each node, such as $POSTNORM_SCRATCH/blocks, in which at most "
                f"data.stage_gb={self.stage_gb:g} GB of blocks are kept"
            )
        if self.replace_mask_prob + self.replace_random_prob > 1:
            raise ConfigError(
                f"data.replace_mask_prob={self.replace_mask_prob} + data.replace_random_prob="
                f"{self.replace_random_prob} must be at most 1; lower one of the two"
            )
        weights = self.ngram_weights
        if weights is not None and (min(weights, default=-1.0) < 0 or not any(weights)):
            raise ConfigError(
                f"data.ngram_weights={list(weights)}: expected numbers from 0, one of them above 0"
            )
        if self.masking in ("span", "ngram") and self.mask_selection != "exact":
            raise ConfigError(
                f"data.masking={self.masking} takes words until a budget is used, and "
                f"data.mask_selection={self.mask_selection} has none; set data.mask_selection=exact"
            )
        if (self.mask_prob_end is None) != (self.mask_prob_steps == 0):
            raise ConfigError(
                f"data.mask_prob_end={'null' if self.mask_prob_end is None else self.mask_prob_end}"
                f" and data.mask_prob_steps={self.mask_prob_steps} make no schedule; set both (at "
                "least 1 step), or leave out both for a constant data.mask_prob"
            )


@dataclass(frozen=True, kw_only=True)
class TrainDataConfig:
    """All that decides which sequences a training step gets; a part of a run's config."""

    seed: int
    """Seed of the order."""
    data: DataConfig
    batches: BatchPlan
    """Sizes and lengths of the steps' batches."""
    objective: ObjectiveConfig = MLM


@dataclass(frozen=True, kw_only=True)
class EvalDataConfig:
    """All that decides which held-out sequences an evaluation gets."""

    data: DataConfig
    sequences: int
    """Largest number of sequences, over all ranks."""
    micro_batch: int
    """Sequences of a forward pass of one rank."""
    objective: ObjectiveConfig = MLM
