"""What every run has, and the root config of `postnorm pretrain`."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from pipeline.config.data import BatchPlan, DataConfig, EvalDataConfig, PhaseConfig, TrainDataConfig
from pipeline.config.load import Loaded, load
from pipeline.config.model import ModelConfig
from pipeline.config.objective import MLM, ObjectiveConfig
from pipeline.config.origin import CONTINUE_FROM, continued
from pipeline.config.schema import REQUIRED, param, path_param, section
from pipeline.config.stages import BY_STAGES, RunStage, StageConfig, Timeline, completed
from pipeline.config.strict_yaml import YamlNode
from pipeline.config.train import (
    CheckpointConfig,
    KernelsConfig,
    MonitorConfig,
    NotifyConfig,
    SpikeConfig,
    TrainConfig,
)
from pipeline.errors import ConfigError
from pipeline.runtime.checkpoints import Manifest
from pipeline.runtime.files import sha256_file
from pipeline.runtime.run_folder import RESOLVED_FILE, RunFolder

_EVAL_MASK_PROB = 0.15
"""As ModernBERT, Ettin and mmBERT, which mask more in training."""
_HOW_DATA_IS_READ = {
    "dir",
    "stage_dir",
    "stage_gb",
    "verify_at_start_gib",
    "check_blocks",
    "workers",
    "prefetch_steps",
}
"""Settings of data that change neither order nor masks."""


def data_identity(data: DataConfig) -> dict[str, Any]:
    """Return the settings of data that fix its order and masks, as plain values."""
    values = {name: value for name, value in asdict(data).items() if name not in _HOW_DATA_IS_READ}
    if data.similar is not None:  # another table under the same name makes other masks
        table = Path(data.similar)
        values["similar_sha256"] = sha256_file(table) if table.is_file() else None
    return values


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run, whatever it learns: all that the trainer knows of its config.

    The cluster it runs on is not part of it.
    """

    run_dir: str = path_param(
        REQUIRED, "folder for checkpoints, metrics and logs; resumed if it exists"
    )
    seed: int = param(1, "of initialisation, order, masks and dropout", ge=0, le=2**32 - 1)
    init_from: str | None = path_param(
        None, "run, RUN@STEP, RUN@best or model whose weights a new run starts from; null: random"
    )
    model: ModelConfig = section(ModelConfig, "architecture")
    train: TrainConfig = section(TrainConfig, "optimisation")
    kernels: KernelsConfig = section(KernelsConfig, "implementations, chosen for speed")
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
        saves, evaluations = self.checkpoint.every_steps, self.monitor.eval_every_steps
        if self.checkpoint.keep_best and saves % evaluations:
            raise ConfigError(
                f"checkpoint.keep_best={self.checkpoint.keep_best} compares held-out losses of "
                f"checkpoints, but the one of step {saves} (checkpoint.every_steps) would have "
                f"none: set monitor.eval_every_steps={evaluations} to {saves} or a divisor of it"
            )

    @property
    def origin(self) -> Path | None:
        """The other run's checkpoint that this run begins from, if it does."""
        of = [stage.of for stage in self.timeline.stages if stage.of]
        return Path(of[-1]) if of else None

    @property
    def data_dirs(self) -> list[str]:
        """The datasets of its stages, each once, without those that another run did before."""
        return list(dict.fromkeys(s.data.dir for s in self.timeline.stages if not s.of))

    @property
    def folder(self) -> RunFolder:
        """The folder `run_dir`."""
        return RunFolder(Path(self.run_dir))

    @property
    def timeline(self) -> Timeline:
        """The run's stages; reading this checks phases and stages."""
        raise NotImplementedError

    @property
    def batches(self) -> BatchPlan:
        """The run's batches."""
        return self.timeline.batches

    def warnings(self) -> list[str]:
        """Describe what is allowed, but more often a slip than meant."""
        found, spikes = self.timeline.warnings(), self.spikes
        if spikes.steps_in_a_row > spikes.window_steps:
            found.append(
                f"spikes.steps_in_a_row={spikes.steps_in_a_row} is above spikes.window_steps="
                f"{spikes.window_steps}, the steps that are kept, so that no spike is ever found"
            )
        return found

    def identity_at(self, cursor: int = 0) -> dict[str, Any]:
        """Values that fix weights' shapes, order and masks until a cursor: no resume changes them.

        Steps, learning rate, schedules, intervals and paths may change, and stages not begun.
        """
        raise NotImplementedError

    def _identity(
        self, cursor: int, phases: tuple[PhaseConfig, ...], objective: ObjectiveConfig
    ) -> dict[str, Any]:
        trained = self.timeline.trained(cursor)
        values: dict[str, Any] = {
            "seed": self.seed,
            **_stage_identity(trained),
            "phases": [
                # Accumulation changes no sample of a step, so a resume may change it with the
                # number of ranks.
                {name: value for name, value in asdict(phase).items() if name != "micro_batch"}
                for phase in phases
            ],
        }
        if objective != MLM:  # checkpoints from before there were others say nothing of it
            values["objective"] = asdict(objective)
        if trained.number:
            values["stages_before"] = [
                _stage_identity(stage) | {"end": self.timeline.end(stage)}
                for stage in self.timeline.stages[: trained.number]
            ]
            values["continues"] = self.timeline.continues(trained.number)
        # Compared with a manifest's, and JSON turns tuples into lists.
        as_read: dict[str, Any] = json.loads(json.dumps(values))
        return as_read


@dataclass(frozen=True, kw_only=True)
class TaskRunConfig(RunConfig):
    """A run that learns tasks: made of a task file or of a mix, in no file itself."""

    data: DataConfig
    """The text that a mix learns beside tasks; `seq_len` is that of the longest rows."""
    stages: tuple[StageConfig, ...] = ()
    """Of a mix."""

    # It writes to `__dict__`, past the frozen dataclass; the plan is asked for at every step.
    @cached_property
    def timeline(self) -> Timeline:
        """See `RunConfig.timeline`."""
        return Timeline(self.data, self.model, self.train, stages=self.stages)

    def identity_at(self, cursor: int = 0) -> dict[str, Any]:
        """See `RunConfig.identity_at`."""
        return self._identity(cursor, (), MLM)


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(RunConfig):
    """One pre-training run; the cluster it runs on is not part of it."""

    SHIPPED: ClassVar = ("train", "")
    RECORD: ClassVar = RESOLVED_FILE
    """In a run's folder: its config as it was started."""
    IN_MANIFESTS: ClassVar = True
    """Whether checkpoints hold this config, and not one that was made of it."""

    objective: ObjectiveConfig = section(ObjectiveConfig, "what is predicted and minimised")
    data: DataConfig = section(DataConfig, "dataset, packing and masking")
    phases: tuple[PhaseConfig, ...] = param(
        (),
        "what comes first, with other lengths of sequences or batches; train and data hold for "
        "the rest",
    )
    stages: tuple[StageConfig, ...] = param(
        (),
        "parts of the run, in order; each holds what differs from the sections data, model and "
        "train, for its steps",
    )
    continue_from: str | None = path_param(None, CONTINUE_FROM)

    @classmethod
    def completed(cls, root: YamlNode) -> YamlNode:
        """Fill in what follows from `continue_from` and `stages`."""
        return completed(continued(root, cls))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train.schedule == BY_STAGES and not self.stages:
            raise ConfigError(
                "train.schedule=stages, and the run has no stages: list them, or choose another "
                "schedule"
            )
        for stage in self.timeline.stages:
            self._check_data(stage.data, f"stage {stage.name}: " * bool(self.stages))
        if self.objective.pairs and not (self.model.pooler and self.model.type_vocab_size >= 2):
            raise ConfigError(
                f"objective.kind={self.objective.kind} reads pairs of segments from the pooled "
                f"[CLS], but model.pooler={str(self.model.pooler).lower()} and "
                f"model.type_vocab_size={self.model.type_vocab_size}; set model.pooler=true and "
                "model.type_vocab_size=2"
            )

    def _check_data(self, data: DataConfig, where: str) -> None:
        changes = data.replace_random_prob > 0 or data.similar is not None
        if self.objective.kind == "rtd" and changes:
            raise ConfigError(
                f"{where}objective.kind=rtd has a generator, which sees [MASK] or the token itself "
                f"and no other; data.replace_random_prob={data.replace_random_prob} and "
                f"data.similar={data.similar} put others there: set data.replace_mask_prob=0.85 "
                "data.replace_random_prob=0, and leave out data.similar"
            )
        if self.objective.kind == "mlm_sbo" and data.masking != "span":
            raise ConfigError(
                f"{where}objective.kind=mlm_sbo predicts spans from their boundaries, data.masking="
                f"{data.masking} makes none; set data.masking=span (and with it "
                "data.mask_selection=exact), or objective.kind=mlm"
            )

    def timeline_of(self, manifest: Manifest) -> Timeline:
        """Return the stages of the run that a checkpoint is of."""
        return self.timeline

    @cached_property
    def timeline(self) -> Timeline:
        """See `RunConfig.timeline`."""
        given = self.data, self.model, self.train
        return Timeline(*given, stages=self.stages, phases=self.phases)

    def identity_at(self, cursor: int = 0) -> dict[str, Any]:
        """See `RunConfig.identity_at`."""
        return self._identity(cursor, self.phases, self.objective)

    def train_data_of(self, stage: RunStage) -> TrainDataConfig:
        """What a training loader needs of this config for a stage."""
        return TrainDataConfig(
            seed=self.seed, data=stage.data, batches=self.batches, objective=self.objective
        )

    @property
    def train_data(self) -> TrainDataConfig:
        """What a training loader needs of this config, in the first stage."""
        return self.train_data_of(self.timeline.stages[0])

    def eval_data_of(self, stage: RunStage) -> EvalDataConfig:
        """What a loader of held-out text needs of this config for a stage's data.

        The masks are those of the first stage and the share of `monitor.eval_mask_prob`, whatever
        the stage trains with: losses of one text are comparable from the first step to the last.
        """
        data, share = self.timeline.stages[0].data, self.monitor.eval_mask_prob
        if share is None:
            share = _EVAL_MASK_PROB if self.timeline.has_stages else data.mask_prob
        return EvalDataConfig(
            data=replace(
                data,
                dir=stage.data.dir,
                seq_len=stage.data.seq_len,
                mix=stage.data.mix,
                mask_prob=share,
                mask_prob_end=None,
                mask_prob_steps=0,
            ),
            objective=self.objective,
            sequences=self.monitor.eval_sequences,
            micro_batch=stage.train.micro_batch,
        )

    @property
    def eval_data(self) -> EvalDataConfig:
        """What a loader of held-out text needs of this config, in the first stage."""
        return self.eval_data_of(self.timeline.stages[0])


def _stage_identity(stage: RunStage) -> dict[str, Any]:
    train, model = asdict(stage.train), asdict(stage.model)
    # Checkpoints from before these switches do not have them, and computed as their default.
    later = {"rotary_value": False}
    return {
        # () is equal to no value of a field, so that all other names stay.
        "model": {name: value for name, value in model.items() if later.get(name, ()) != value},
        "data": data_identity(stage.data),
        "train": {name: train[name] for name in ("global_batch", "precision", "optimizer")},
    }


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> Loaded[PretrainConfig]:
    """Read the config of a pre-training run; see `pipeline.config.load.load`."""
    return load(PretrainConfig, path, overrides)
