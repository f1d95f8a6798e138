"""How the model is optimised, saved and watched."""

from dataclasses import dataclass
from typing import Literal

from pipeline.config.schema import param
from pipeline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Optimisation: batch, schedules, AdamW, precision."""

    num_steps: int = param(1000, "optimizer steps of the whole run", unit="steps", ge=1)
    global_batch: int = param(
        512, "sequences of one optimizer step, over all ranks", unit="sequences", ge=1
    )
    micro_batch: int = param(
        8, "sequences of one forward pass on one rank; accumulation follows", unit="sequences",
        ge=1,
    )  # fmt: skip
    lr: float = param(5e-4, "peak learning rate", gt=0)
    min_lr_ratio: float = param(0.0, "learning rate at the end, as a share of the peak", ge=0, le=1)
    warmup_steps: int = param(100, "linear learning-rate warm-up", unit="steps", ge=0)
    alpha_warmup_steps: int = param(
        0, "steps in which the residual's alpha rises from 0 to 1; 0 keeps it at 1", unit="steps",
        ge=0,
    )  # fmt: skip
    adam_beta1: float = param(0.9, "decay of the gradient average", ge=0, lt=1)
    adam_beta2: float = param(0.98, "decay of the squared-gradient average", ge=0, lt=1)
    adam_eps: float = param(1e-6, "added to the root of the squared-gradient average", gt=0)
    weight_decay: float = param(
        0.01, "decoupled weight decay of matrices; biases and gains have none", ge=0
    )
    grad_clip: float = param(1.0, "largest global gradient norm; 0 does not clip", ge=0)
    precision: Literal["bf16", "fp32"] = param(
        "bf16", "of forward and backward; master weights and accumulation are fp32 either way"
    )
    zero_stage: int = param(
        1, "what is split over the ranks: 1 optimizer state, 2 gradients too, 3 weights too", ge=0,
        le=3,
    )  # fmt: skip
    max_skipped_in_a_row: int = param(
        10, "give up after this many non-finite steps in a row", unit="steps", ge=1
    )

    def __post_init__(self) -> None:
        if self.zero_stage == 0:
            raise ConfigError(
                "train.zero_stage=0: DeepSpeed 0.19.8 has no fp32 accumulation for bf16 there, "
                "takes a step before the first, and lets non-finite gradients into fp32 weights; "
                "set 1, which computes the same with less memory"
            )
        if self.warmup_steps >= self.num_steps:
            raise ConfigError(
                f"train.warmup_steps={self.warmup_steps} must be below "
                f"train.num_steps={self.num_steps}; shorten the warm-up or lengthen the run"
            )
        if self.alpha_warmup_steps >= self.num_steps:
            raise ConfigError(
                f"train.alpha_warmup_steps={self.alpha_warmup_steps} must be below train.num_steps="
                f"{self.num_steps}: a model that never saw alpha = 1 cannot be used; shorten it"
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state is saved and how much of it is kept."""

    every_steps: int = param(1000, "save after this many optimizer steps", unit="steps", ge=1)
    keep: int = param(3, "newest checkpoints kept", unit="checkpoints", ge=1)


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """What is logged and how often the held-out text is evaluated."""

    log_every_steps: int = param(
        10, "console, metrics.jsonl and TensorBoard; also how often a stop signal is looked at",
        unit="steps", ge=1,
    )  # fmt: skip
    eval_every_steps: int = param(1000, "held-out evaluation", unit="steps", ge=1)
    eval_sequences: int = param(
        2048, "at most this many held-out sequences", unit="sequences", ge=1
    )
