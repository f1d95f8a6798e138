"""What is read, in which order, how it is packed and masked."""

from dataclasses import dataclass
from typing import Literal

from pipeline.config.batches import BatchPlan
from pipeline.config.schema import REQUIRED, param
from pipeline.errors import ConfigError


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

    dir: str = param(REQUIRED, "folder written by `python -m data_prep run`")
    stage_dir: str | None = param(
        None,
        "node-local folder that shards are copied to and read from; null reads them where they "
        "are; environment variables such as $TMPDIR are filled in, also $POSTNORM_SCRATCH, the "
        "`scratch` folder of a cluster profile",
    )
    seq_len: int = param(512, "slots of a packed sequence", unit="tokens", ge=8, le=65536)
    window_blocks: int = param(
        16, "blocks whose sequences are shuffled together; one block is read at a time", ge=1
    )
    mix: tuple[MixConfig, ...] = param(
        (), "weights of sources in place of those in the dataset; 0 leaves a source out"
    )
    masking: Literal["token", "whole_word", "span"] = param(
        "whole_word",
        "unit that is masked: single tokens, all tokens of a word together, or spans of up to ten "
        "words as in SpanBERT",
    )
    mask_selection: Literal["bernoulli", "exact"] = param(
        "bernoulli",
        "bernoulli: each unit by itself with mask_prob; exact: in random order until "
        "round(mask_prob * maskable tokens) of the sequence are used, no word cut",
    )
    mask_prob: float = param(0.15, "share of tokens to predict", gt=0, lt=1)
    mask_prob_end: float | None = param(
        None, "share after mask_prob_steps, reached linearly; null keeps mask_prob", gt=0, lt=1
    )
    mask_prob_steps: int = param(
        0, "steps from mask_prob to mask_prob_end, skipped ones included", unit="steps", ge=0
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
        "larger sets are hashed block by block at first touch",
        unit="GiB",
        ge=0,
    )
    check_blocks: Literal["first_touch", "never"] = param(
        "first_touch",
        "when a block's sha256 is compared with the index: when this process first reads it, or "
        "never, for storage that checks by itself; document ends are always checked",
    )
    workers: int = param(
        0, "processes of each rank that make batches; 0: a thread of the rank itself", ge=0, le=64
    )
    prefetch_steps: int = param(
        2, "steps made ahead of the one that is computed, at least one a worker", unit="steps", ge=1
    )

    def __post_init__(self) -> None:
        if self.replace_mask_prob + self.replace_random_prob > 1:
            raise ConfigError(
                f"data.replace_mask_prob={self.replace_mask_prob} + data.replace_random_prob="
                f"{self.replace_random_prob} must be at most 1; lower one of the two"
            )
        if self.masking == "span" and self.mask_selection != "exact":
            raise ConfigError(
                "data.masking=span takes spans until a budget is used, and data.mask_selection="
                f"{self.mask_selection} has none; set data.mask_selection=exact"
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
    """Of the order."""
    data: DataConfig
    batches: BatchPlan
    """Sizes and lengths of the steps' batches."""


@dataclass(frozen=True, kw_only=True)
class EvalDataConfig:
    """All that decides which held-out sequences an evaluation gets."""

    data: DataConfig
    sequences: int
    """At most so many, of all ranks together."""
    micro_batch: int
    """Sequences of a forward pass of one rank."""
