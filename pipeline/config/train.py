"""How the model is optimised, saved and watched.

Which implementations compute a step: for speed and for comparisons, never for results.

When a rise of the loss is a spike, and what a run does about it.
"""

import json
from dataclasses import dataclass, fields
from typing import Literal

from pipeline.config.schema import REQUIRED, param, path_param
from pipeline.errors import ConfigError

Optimizer = Literal["adamw", "lamb", "muon", "stable_adamw"]
Schedule = Literal["linear", "cosine", "wsd", "piecewise", "time_budget", "stages"]


@dataclass(frozen=True, kw_only=True)
class SchedulePoint:
    """A corner of a piecewise linear learning rate."""

    step: int = param(REQUIRED, "optimizer steps applied before", unit="steps", ge=0)
    factor: float = param(REQUIRED, "learning rate there, as a share of the peak", ge=0, le=1)


@dataclass(frozen=True, kw_only=True)
class BatchRange:
    """Batches by their numbers from 0, as `batches.tsv` and `pipeline inspect` count them."""

    first: int = param(REQUIRED, "first batch", ge=0)
    last: int = param(REQUIRED, "last batch, included", ge=0)

    def __post_init__(self) -> None:
        if self.last < self.first:
            raise ConfigError(
                f"train.skip_batches: first={self.first}, last={self.last}; expected last to be "
                "first or later"
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Optimisation: batch, schedules, optimizer, precision."""

    num_steps: int = param(1000, "optimizer steps of the whole run", unit="steps", ge=1)
    global_batch: int = param(
        512, "sequences of one optimizer step, over all ranks", unit="sequences", ge=1
    )
    micro_batch: int = param(
        8, "sequences of one forward pass on one rank; accumulation follows", unit="sequences", ge=1
    )
    lr: float = param(5e-4, "peak learning rate", gt=0, usual=(1e-7, 0.05))
    min_lr_ratio: float = param(0.0, "learning rate at the end, as a share of the peak", ge=0, le=1)
    warmup_steps: int = param(
        100, "linear learning-rate warm-up of any schedule", unit="steps", ge=0
    )
    schedule: Schedule = param(
        "linear",
        "learning rate after the warm-up: linear or cosine down to min_lr_ratio at num_steps; wsd: "
        "constant, then down in decay_steps; piecewise: through lr_points; time_budget: linear in "
        "steps or in time, whichever is nearer its end, and the run ends with either; stages: as "
        "each stage says, what a run with stages has unless another is written",
    )
    decay_steps: int | None = param(
        None, "wsd: steps of the decay at the end of the run", unit="steps", ge=1
    )
    decay_shape: Literal["linear", "1-sqrt"] | None = param(
        None, "wsd: the decay falls linearly, or as 1 - sqrt(share of it that is done)"
    )
    lr_points: tuple[SchedulePoint, ...] = param(
        (), "piecewise: corners, linear between them, constant before the first and after the last"
    )
    budget_hours: float | None = param(
        None,
        "time_budget: time of training on rank 0, all attempts together, evaluations and saves "
        "included, start-up not",
        unit="hours",
        gt=0,
    )
    rate_may_rise: bool = param(
        False,
        "where a run is resumed with other settings, such as more num_steps, the learning rate may "
        "be above the one it would have had; otherwise that is refused",
    )
    alpha_warmup_steps: int = param(
        0,
        "steps in which the residual's alpha rises from 0 to 1; 0 keeps it at 1",
        unit="steps",
        ge=0,
    )
    optimizer: Optimizer = param(
        "adamw",
        "adamw; lamb: the same update, scaled for each matrix to the norm of its weights; "
        "stable_adamw: adamw, slower where a matrix' gradient jumped; muon: orthogonal "
        "updates of the matrices inside layers, and adamw for the rest",
    )
    lamb_bias_correction: bool | None = param(
        None, "lamb: whether averages are corrected for their start at 0"
    )
    muon_momentum: float = param(
        0.95, "muon: decay of the gradient average of matrices", ge=0, lt=1, usual=(0.8, 0.99)
    )
    muon_momentum_warmup_steps: int = param(
        0, "muon: steps in which muon_momentum is reached from 0.85", unit="steps", ge=0
    )
    muon_ns_steps: int = param(
        5, "muon: steps of Newton and Schulz' iteration", ge=1, usual=(3, 10)
    )
    adam_beta1: float = param(0.9, "decay of the gradient average", ge=0, lt=1)
    adam_beta2: float = param(
        0.98, "decay of the squared-gradient average", ge=0, lt=1, usual=(0.9, 1)
    )
    adam_eps: float = param(
        1e-6, "added to the root of the squared-gradient average", gt=0, usual=(0, 1e-3)
    )
    weight_decay: float = param(
        0.01, "decoupled weight decay of matrices; biases and gains have none", ge=0, usual=(0, 0.5)
    )
    grad_clip: float = param(1.0, "largest global gradient norm; 0 does not clip", ge=0)
    precision: Literal["bf16", "fp32"] = param(
        "bf16", "of forward and backward; master weights and accumulation are fp32 either way"
    )
    zero_stage: int = param(
        1,
        "what is split over the ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights "
        "too",
        ge=0,
        le=3,
    )
    deepspeed_config: str | None = path_param(
        None,
        "DeepSpeed config as JSON, for what tunes it alone: sizes of buckets, overlap, what "
        'it logs; other keys are errors unless their value is "auto"',
    )
    activation_checkpoint_layers: int | None = param(
        None,
        "activation checkpointing: keep the inputs of groups of this many layers, and compute what "
        "is inside again in the backward pass; null keeps all",
        unit="layers",
        ge=1,
    )
    compile: bool = param(
        False, "compile the layers with torch.compile, in the first steps; not at zero_stage 3"
    )
    max_skipped_in_a_row: int = param(
        10, "give up after this many non-finite steps in a row", unit="steps", ge=1
    )
    skip_batches: tuple[BatchRange, ...] = param(
        (), "batches that are read but not trained on; schedules stand still meanwhile"
    )
    hang_timeout_s: float = param(
        1800.0,
        "a rank that has not got on for so long writes its stacks to RUN/hangs and ends with exit "
        "code 1, in its start after 600 s at least; longer than a save or a pause of the storage",
        unit="s",
        gt=0,
    )
    collective_timeout_s: float = param(
        2400.0,
        "a rank that waits for others for so long fails; above hang_timeout_s, so that all ranks "
        "leave their stacks before",
        unit="s",
        gt=0,
    )

    def __post_init__(self) -> None:
        if self.zero_stage == 0 and self.deepspeed_config is not None:
            raise ConfigError(
                f"train.deepspeed_config={self.deepspeed_config} has no meaning with "
                "train.zero_stage=0, whose engine is not DeepSpeed's; leave it out, or set "
                "train.zero_stage=1, which computes the same with less memory"
            )
        if self.zero_stage == 3 and self.compile:
            raise ConfigError(
                "train.zero_stage=3 with train.compile=true is not supported: DeepSpeed 0.19.8 "
                "gathers a layer's weights when the layer is called, and compiled code sees the "
                "empty ones; set train.compile=false, or train.zero_stage=2"
            )
        if self.zero_stage == 3 and self.optimizer in _NOT_AT_STAGE_3:
            raise ConfigError(
                f"train.zero_stage=3 with train.optimizer={self.optimizer} is not supported: "
                f"{_NOT_AT_STAGE_3[self.optimizer]}; set train.zero_stage=2, or "
                "train.optimizer=adamw"
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
        self._require_fields_of("schedule", _SCHEDULE_FIELDS)
        self._require_fields_of("optimizer", _OPTIMIZER_FIELDS)
        if self.muon_momentum_warmup_steps and self.muon_momentum <= 0.85:
            raise ConfigError(
                f"train.muon_momentum_warmup_steps={self.muon_momentum_warmup_steps} raises the "
                f"momentum from 0.85, and train.muon_momentum={self.muon_momentum} is not above "
                "that; leave the warm-up out, or raise the momentum"
            )
        if self.schedule == "wsd":
            self._check_decay()
        if self.schedule == "piecewise":
            self._check_points()

    def _require_fields_of(self, choice: str, owners: dict[str, str]) -> None:
        """Refuse values that belong to a choice that was not made: nothing is ignored."""
        chosen = getattr(self, choice)
        unset = {field.name: field.default for field in fields(self)}
        for name, owner in owners.items():
            value = getattr(self, name)
            is_set = value != unset[name]
            if is_set and owner != chosen:
                raise ConfigError(
                    f"train.{name}={value} has no meaning with train.{choice}={chosen}; leave it "
                    f"out (train.{name}={json.dumps(unset[name])} on the command line), or set "
                    f"train.{choice}={owner}"
                )
            if not is_set and owner == chosen and unset[name] in (None, ()):
                raise ConfigError(f"train.{choice}={chosen} needs train.{name}; set it")

    def _check_decay(self) -> None:
        decay_steps = self.decay_steps or 0
        if self.warmup_steps + decay_steps > self.num_steps:
            raise ConfigError(
                f"train.warmup_steps={self.warmup_steps} and train.decay_steps={decay_steps} are "
                f"more than train.num_steps={self.num_steps}; shorten one, or lengthen the run"
            )

    def _check_points(self) -> None:
        if self.min_lr_ratio:
            raise ConfigError(
                f"train.min_lr_ratio={self.min_lr_ratio} has no meaning with train.schedule="
                "piecewise, whose last point says where it ends; leave it out"
            )
        previous = -1
        for number, point in enumerate(self.lr_points):
            if point.step <= previous:
                raise ConfigError(
                    f"train.lr_points.{number}.step={point.step} does not come after the point "
                    f"before it, at {previous}; list points by rising step"
                )
            previous = point.step
        first = self.lr_points[0]
        if first.step < self.warmup_steps:
            raise ConfigError(
                f"train.lr_points.0.step={first.step} lies in the warm-up of train.warmup_steps="
                f"{self.warmup_steps}; start with the step where the warm-up ends, or shorten it"
            )


# Which choice a field belongs to.
_SCHEDULE_FIELDS = {
    "decay_steps": "wsd",
    "decay_shape": "wsd",
    "lr_points": "piecewise",
    "budget_hours": "time_budget",
}
_OPTIMIZER_FIELDS = {
    "lamb_bias_correction": "lamb",
    "muon_momentum": "muon",
    "muon_momentum_warmup_steps": "muon",
    "muon_ns_steps": "muon",
}
_NOT_AT_STAGE_3 = {
    "lamb": "trust ratios are tested at stages 0 to 2",
    "stable_adamw": "its rates of matrices are tested at stages 0 to 2",
    "muon": "its exchange of matrices is made for stages 0 to 2, and DeepSpeed 0.19.8's own Muon "
    "clips the update in place of the gradient there",
}
"""Why some optimizers do not run at ZeRO stage 3."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state is saved and how much of it is kept."""

    every_steps: int = param(1000, "save after this many optimizer steps", unit="steps", ge=1)
    keep: int = param(3, "newest checkpoints kept", unit="checkpoints", ge=1)
    keep_every_steps: int | None = param(
        None, "checkpoints at multiples of this are kept for ever", unit="steps", ge=1
    )
    keep_best: int = param(
        0,
        "checkpoints of lowest held-out loss kept; those evaluated at their own step compete",
        unit="checkpoints",
        ge=0,
    )
    keep_first: bool = param(False, "save before the first step, too, and keep that for ever")
    background: bool = param(
        True,
        "training goes on while files are written, hashed and published, from a copy in host "
        "memory: 12 bytes a parameter, divided by the number of ranks",
    )
    copy_to: str | None = path_param(
        None,
        "folder that gets a copy of each checkpoint, such as on slower, safer storage; a "
        "resume takes it from there if run_dir has none that verifies",
    )
    probe_every: int = param(
        0,
        "saves at multiples of so many times every_steps are read back and checked by another "
        "process; 0: none",
        unit="saves",
        ge=0,
    )

    def __post_init__(self) -> None:
        often = self.keep_every_steps
        if often is not None and often % self.every_steps:
            raise ConfigError(
                f"checkpoint.keep_every_steps={often} must be a multiple of "
                f"checkpoint.every_steps={self.every_steps}, or there is nothing to keep at "
                f"step {often}; set {(often // self.every_steps + 1) * self.every_steps}"
            )


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """What is logged and how often the held-out text is evaluated."""

    log_every_steps: int = param(10, "console, metrics.jsonl and sinks", unit="steps", ge=1)
    eval_every_steps: int = param(1000, "held-out evaluation", unit="steps", ge=1)
    eval_sequences: int = param(
        2048, "at most this many held-out sequences", unit="sequences", ge=1
    )
    eval_mask_prob: float | None = param(
        None,
        "share of the held-out tokens to predict; null: data.mask_prob, in a run with stages 0.15",
        gt=0,
        lt=1,
    )
    sinks: tuple[str, ...] = param(
        ("tensorboard",),
        "what shows the numbers besides metrics.jsonl: tensorboard, wandb, mlflow, or the name of "
        "an entry point of the group postnorm.sinks",
    )
    probes: tuple[str, ...] = path_param(
        (),
        "task files, or names of shipped tasks, of kind classify, pair or coref; each evaluation "
        "scores a linear probe on the frozen vectors",
    )
    probe_root: str | None = path_param(
        None, "data.root of the probes' tasks; null leaves each task's own"
    )
    compare_replicas_every_steps: int = param(
        100,
        "compare the bits of what every rank has a copy of, then and before each save, and go back "
        "to the newest checkpoint where they differ; weights, at zero_stage 0 all state, at 3 "
        "nothing; 0: never",
        unit="steps",
        ge=0,
    )


@dataclass(frozen=True, kw_only=True)
class NotifyConfig:
    """Who is told of changes of the run's state."""

    command: str = param(
        "",
        "line for the shell that gets a JSON object on its standard input when the run starts, "
        "goes back, is requeued, stops, fails or is finished, and 10 s for it; empty: none",
    )


Implementation = Literal["auto", "reference", "fused"]


@dataclass(frozen=True, kw_only=True)
class KernelsConfig:
    """Fused kernels or plain PyTorch (reference); auto takes kernels on GPUs that can run them."""

    attention: Implementation = param(
        "auto",
        "attention: carried scores by our kernels, models without by flash attention over "
        "documents end to end",
    )
    residual_norm: Implementation = param(
        "auto", "residual, its alpha and dropout, and the RMSNorm behind it, in one pass"
    )
    loss: Implementation = param("auto", "cross-entropy and its gradient in one pass over logits")


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    """A step is high if its loss is above the median of the last `window_steps` by `rise_nats` and
    by `deviations`, or if it has lost half of what the run had learned, and a nat at least;
    `steps_in_a_row` high steps are a spike.

    Then the run goes back to the newest checkpoint from before it, and leaves out the batches of
    the spike and of `skip_before_steps` before it: what PaLM's authors did by hand (Chowdhery et
    al. 2022, section 5.1, https://arxiv.org/abs/2204.02311; about 100 steps back, 200 to 500
    batches left out).
    """

    rewind: bool = param(True, "go back; false only warns")
    window_steps: int = param(
        200, "steps that the median is taken of, when there are as many", unit="steps", ge=8
    )
    rise_nats: float = param(0.5, "least rise above the median", unit="nats a masked token", gt=0)
    deviations: float = param(
        8.0, "least rise in standard deviations, 1.4826 x the median distance from the median", ge=0
    )
    steps_in_a_row: int = param(
        8, "fewer are noise, or a batch that the run gets over", unit="steps", ge=2
    )
    skip_before_steps: int = param(
        50, "batches before the first high one that are left out too", unit="batches", ge=0
    )
    max_rewinds: int = param(
        3, "times to go back to the same checkpoint before giving up", unit="rewinds", ge=1
    )
