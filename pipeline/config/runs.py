"""The root config of `python -m pipeline pretrain`."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from pipeline.config.data import BatchPlan, DataConfig, EvalDataConfig, PhaseConfig, TrainDataConfig
from pipeline.config.model import ModelConfig
from pipeline.config.objective import ObjectiveConfig
from pipeline.config.schema import REQUIRED, param, path_param, section
from pipeline.config.train import (
    CheckpointConfig,
    KernelsConfig,
    MonitorConfig,
    NotifyConfig,
    SpikeConfig,
    TrainConfig,
)
from pipeline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """One pre-training run; the cluster it runs on is not part of it."""

    SHIPPED: ClassVar = ("train", "")

    run_dir: str = path_param(
        REQUIRED, "folder for checkpoints, metrics and logs; resumed if it exists"
    )
    seed: int = param(1, "of initialisation, order, masks and dropout", ge=0, le=2**32 - 1)
    init_from: str | None = path_param(
        None, "run or model folder whose weights a new run starts from; null starts at random"
    )
    model: ModelConfig = section(ModelConfig, "architecture")
    objective: ObjectiveConfig = section(ObjectiveConfig, "what is predicted and minimised")
    data: DataConfig = section(DataConfig, "dataset, packing and masking")
    train: TrainConfig = section(TrainConfig, "optimisation")
    kernels: KernelsConfig = section(KernelsConfig, "implementations, chosen for speed")
    phases: tuple[PhaseConfig, ...] = param(
        (),
        "what comes first, with other lengths of sequences or batches; train and data hold for "
        "the rest",
    )
    spikes: SpikeConfig = section(SpikeConfig, "when the loss jumps")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "saving")
    monitor: MonitorConfig = section(MonitorConfig, "logging and evaluation")
    notify: NotifyConfig = section(NotifyConfig, "who is told of changes of the run's state")

    def __post_init__(self) -> None:
        longest = max(self.batches.seq_lens)
        limit = self.model.longest_document
        if limit is not None and longest > limit:
            raise ConfigError(
                f"data.seq_len={longest} is longer than the {limit} learned positions of the "
                "model; shorten it (phases have lengths, too), or raise model.max_positions"
            )
        changes = self.data.replace_random_prob > 0 or self.data.similar is not None
        if self.objective.kind == "rtd" and changes:
            raise ConfigError(
                f"objective.kind=rtd has a generator, which sees [MASK] or the token itself and no "
                f"other; data.replace_random_prob={self.data.replace_random_prob} and data.similar="
                f"{self.data.similar} put others there: set data.replace_mask_prob=0.85 "
                "data.replace_random_prob=0, and leave out data.similar"
            )
        if self.objective.pairs and not (self.model.pooler and self.model.type_vocab_size >= 2):
            raise ConfigError(
                f"objective.kind={self.objective.kind} reads pairs of segments from the pooled "
                f"[CLS], but model.pooler={str(self.model.pooler).lower()} and "
                f"model.type_vocab_size={self.model.type_vocab_size}; set model.pooler=true and "
                "model.type_vocab_size=2"
            )
        if self.objective.kind == "mlm_sbo" and self.data.masking != "span":
            raise ConfigError(
                f"objective.kind=mlm_sbo predicts spans from their boundaries, data.masking="
                f"{self.data.masking} makes none; set data.masking=span (and with it "
                "data.mask_selection=exact), or objective.kind=mlm"
            )
        saves, evaluations = self.checkpoint.every_steps, self.monitor.eval_every_steps
        if self.checkpoint.keep_best and saves % evaluations:
            raise ConfigError(
                f"checkpoint.keep_best={self.checkpoint.keep_best} compares held-out losses of "
                f"checkpoints, but the one of step {saves} (checkpoint.every_steps) would have "
                f"none: set monitor.eval_every_steps={evaluations} to {saves} or a divisor of it"
            )

    @cached_property
    def batches(self) -> BatchPlan:
        """The run's batches; reading this checks the phases."""
        return BatchPlan(
            self.phases,
            seq_len=self.data.seq_len,
            global_batch=self.train.global_batch,
            micro_batch=self.train.micro_batch,
        )

    @property
    def train_data(self) -> TrainDataConfig:
        """What a training loader needs of this config."""
        return TrainDataConfig(
            seed=self.seed, data=self.data, batches=self.batches, objective=self.objective
        )

    @property
    def eval_data(self) -> EvalDataConfig:
        """What a loader of held-out text needs of this config."""
        return EvalDataConfig(
            data=self.data,
            objective=self.objective,
            sequences=self.monitor.eval_sequences,
            micro_batch=self.train.micro_batch,
        )
