"""The config of `postnorm multitask`: which tasks, how often each is drawn, and how they count."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pipeline.config.data import DataConfig
from pipeline.config.load import build, find_config, load, to_yaml
from pipeline.config.origin import CONTINUE_FROM, continued
from pipeline.config.runs import TaskRunConfig
from pipeline.config.schema import REQUIRED, param, path_param, section
from pipeline.config.stages import StageConfig, Timeline, completed
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
from pipeline.runtime.run_folder import RunFolder
from pipeline.tasks.task import TaskConfig

MLM = "mlm"
MIX_FILE = "multitask.yaml"
"""In a run's folder: its config with all tasks."""
Method = Literal[
    "equal",
    "initial",
    "prior",
    "real_time",
    "generalised_mean",
    "uncertainty",
    "dwa",
    "random",
    "gradnorm",
    "gradient_norm",
    "pcgrad",
    "cagrad",
    "mgda",
    "main_and_helpers",
]
_WHOLE = {
    "real_time": "needs the loss of the whole step before it weights the gradient",
    "generalised_mean": "needs the losses of the whole step before it weights the gradients",
    "gradnorm": "measures the gradient of each task in the last layer",
    "gradient_norm": "measures the gradient of each task",
    "pcgrad": "compares the gradients of the tasks",
    "cagrad": "compares the gradients of the tasks",
    "mgda": "compares the gradients of the tasks",
    "main_and_helpers": "compares the gradients of the tasks",
}
"""Why a rule needs each task's own gradient, which the stages of ZeRO above 0 never hold."""
OF_LOSSES = ("real_time", "generalised_mean")
"""Rules that need the step's losses, but of the gradients only the sum over the ranks."""
OF_PRODUCTS = ("pcgrad", "cagrad", "mgda", "main_and_helpers")
"""Rules that need the products of the tasks' gradients."""


@dataclass(frozen=True, kw_only=True)
class CorruptConfig:
    """Noise in the inputs of supervised tasks, a pure function of seed, task and place."""

    rule: Literal["none", "tokens", "pairs"] = param(
        "none",
        "tokens: each by its own draw, 80% [MASK], 10% random, 10% kept; pairs: as RoFormerV2's "
        "published code, neighbours together, 80% both [MASK], else 90% of both random",
    )
    share: float = param(0.15, "of a row's tokens", gt=0, lt=1)


@dataclass(frozen=True, kw_only=True)
class DrawConfig:
    """What a mix says of a task; of mlm there is nothing more."""

    share: float | None = param(None, "draws relative to the other tasks'; null is 1", gt=0)
    loss_scale: float = param(1.0, "factor of its loss", gt=0)
    batch: int | None = param(
        None, "examples of a draw over all ranks; null: train.micro_batch", ge=1
    )
    parts: int = param(1, "forward passes that a rank's examples of a draw are computed in", ge=1)


@dataclass(frozen=True, kw_only=True)
class MemberConfig(TaskConfig, DrawConfig):
    """A task of the mix: a task file, `from: FILE`, and what the mix adds to it."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How often each task is drawn: proportional to min(its share or size, cap)^(1 / T)."""

    by: Literal["shares", "size"] = param(
        "shares", "`share` of each task, or its number of examples in train (of mlm: sequences)"
    )
    cap: int | None = param(None, "largest size that counts, as in T5", ge=1)
    temperature: float = param(1.0, "above 1 evens the tasks out", gt=0)


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """How much each task of a step counts; formulas in `balance.py` and `balancer.py`."""

    method: Method = param("gradient_norm", "the rule")
    norms: Literal["exact", "late", "output"] = param(
        "exact",
        "of gradient_norm: of this step; a moving average, measured now and then; or a moving "
        "average of the gradient of the encoder's output, at any ZeRO stage",
    )
    every: int = param(10, "late: steps from one measurement to the next", unit="steps", ge=1)
    decay: float = param(0.9, "of the moving averages", ge=0, lt=1)
    gamma: float = param(0.5, "of generalised_mean: 1 the mean, 0 the geometric one")
    temperature: float = param(2.0, "of dwa: large ones make the weights equal", gt=0)
    interval: int = param(100, "of dwa: steps that a task's mean loss is taken over", ge=1)
    lr: float = param(0.025, "of the weights that uncertainty and gradnorm learn", gt=0)
    main: tuple[str, ...] = param((), "of main_and_helpers: the tasks that are not helpers")

    @property
    def needs_gradients(self) -> bool:
        """Whether the rule needs each task's own gradient."""
        return self.method in _WHOLE and self.norms != "output"

    @property
    def averages_each(self) -> bool:
        """Whether ranks average each task's gradient by itself; `late`: where norms are taken."""
        return self.needs_gradients and self.method not in OF_LOSSES

    def __post_init__(self) -> None:
        if self.norms != "exact" and self.method != "gradient_norm":
            raise ConfigError(
                f"balance.norms={self.norms} belongs to balance.method=gradient_norm, not to "
                f"{self.method}; leave it out"
            )
        if bool(self.main) != (self.method == "main_and_helpers"):
            raise ConfigError(
                f"balance.main={list(self.main)} with balance.method={self.method}: "
                "main_and_helpers needs the names of its main tasks, the others take none"
            )
        for setting in fields(self):
            value, owners = getattr(self, setting.name), _OWNERS.get(setting.name, ())
            if owners and value != setting.default and not {self.method, self.norms} & {*owners}:
                raise ConfigError(
                    f"balance.{setting.name}={value} has no meaning with balance.method="
                    f"{self.method} and balance.norms={self.norms}, but with "
                    f"{' or '.join(owners)}; leave it out"
                )


_OWNERS = {
    "every": ("late",),
    "decay": ("late", "output"),
    "gamma": ("generalised_mean",),
    "temperature": ("dwa",),
    "interval": ("dwa",),
    "lr": ("uncertainty", "gradnorm"),
}
"""Rules and norms that read a setting."""


@dataclass(frozen=True, kw_only=True)
class MultiTaskTrainConfig(TrainConfig):
    """Optimisation, as of pre-training; a step is `tasks_per_step` draws."""

    warmup_steps: int | None = param(  # type: ignore[assignment]
        None, "linear learning-rate warm-up; null is 6% of num_steps", unit="steps", ge=0
    )
    zero_stage: int = param(
        0, "as of pre-training; rules that need each task's own gradient need 0", ge=0, le=3
    )
    tasks_per_step: int = param(8, "draws of a step; those of one task are one gradient", ge=1)
    micro_batch: int = param(16, "examples of a draw, over all ranks", unit="examples", ge=1)

    def __post_init__(self) -> None:
        # Not `super().__post_init__`: it would compare a warm-up of None with num_steps.
        assert self.single  # making it checks the values

    @property
    def single(self) -> TrainConfig:
        """The same in the trainer's terms: a sequence is a draw."""
        values = {field.name: getattr(self, field.name) for field in fields(TrainConfig)}
        sizes = {"global_batch": self.tasks_per_step, "micro_batch": self.tasks_per_step}
        if self.warmup_steps is None:
            sizes["warmup_steps"] = round(0.06 * self.num_steps)
        return TrainConfig(**{**values, **sizes})


@dataclass(frozen=True, kw_only=True)
class MultiTaskConfig:
    """One run over many tasks; architecture, tokenizer and weights come from `init_from`."""

    SHIPPED: ClassVar = ("multitask", "tasks")
    RECORD: ClassVar = MIX_FILE
    IN_MANIFESTS: ClassVar = False

    run_dir: str = path_param(
        REQUIRED, "folder for checkpoints, metrics and logs; resumed if it exists"
    )
    init_from: str = path_param(
        REQUIRED, "run or model folder to start from; random:FOLDER takes fresh weights"
    )
    seed: int = param(1, "of heads, draws, order and dropout", ge=0, le=2**32 - 1)
    data: DataConfig | None = param(None, "dataset of the task mlm, as in pre-training")
    root: str | None = path_param(None, "data.root of all tasks; null leaves each task's own")
    tasks: dict[str, Any] = param(
        REQUIRED, "by name: {from: TASK FILE, share: 5}; mlm: {share: 60}"
    )
    sampling: SamplingConfig = section(SamplingConfig, "how often each task is drawn")
    balance: BalanceConfig = section(BalanceConfig, "how much each task counts")
    corrupt: CorruptConfig = section(CorruptConfig, "noise in the inputs of supervised tasks")
    reported: tuple[str, ...] = param(
        (),
        "further task files that models will be scored on: training rows with a text of their dev "
        "and test rows are left out too",
    )
    decontaminate: bool = param(
        True, "leave out training rows that share a text with a dev or test row of any task"
    )
    train: MultiTaskTrainConfig = section(MultiTaskTrainConfig, "optimisation")
    kernels: KernelsConfig = section(KernelsConfig, "implementations, chosen for speed")
    spikes: SpikeConfig = section(SpikeConfig, "when the loss jumps")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "saving")
    monitor: MonitorConfig = section(MonitorConfig, "logging and evaluation")
    notify: NotifyConfig = section(NotifyConfig, "who is told of changes of the run's state")
    stages: tuple[StageConfig, ...] = param(
        (), "parts of the run, in order, as of pre-training; the tasks and their rows are the same"
    )
    continue_from: str | None = path_param(None, CONTINUE_FROM)

    @classmethod
    def completed(cls, root: YamlNode) -> YamlNode:
        """Fill in what follows from `continue_from` and `stages`."""
        return completed(continued(root, cls))

    def timeline_of(self, manifest: Manifest) -> Timeline:
        """Return the stages of the run that a checkpoint is of."""
        return build(TaskRunConfig, manifest.config, "the checkpoint's config").timeline

    @property
    def folder(self) -> RunFolder:
        """The folder `run_dir`."""
        return RunFolder(Path(self.run_dir))

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError(
                "tasks is empty: name at least one, such as tnews: {from: tnews.yaml}"
            )
        if (MLM in self.tasks) != (self.data is not None):
            raise ConfigError(
                "the task mlm and data belong together: data names the dataset that mlm reads; "
                "write both or none"
            )
        if MLM in self.tasks and len(self.tasks) == 1:
            raise ConfigError("mlm is the only task: use `postnorm pretrain`, or add a task")
        if self.train.global_batch != TrainConfig.global_batch:
            raise ConfigError(
                f"train.global_batch={self.train.global_batch} has no meaning here: a step is "
                "train.tasks_per_step draws of train.micro_batch examples; set those"
            )
        self._check_stages()
        if self.monitor.probes:
            raise ConfigError(
                f"monitor.probes={list(self.monitor.probes)}: a multi-task run scores dev of its "
                "own tasks and has no probes; leave it out"
            )
        balance, stage = self.balance, self.train.zero_stage
        if balance.needs_gradients and stage > 0:
            also = "; or balance.norms=output" if balance.method == "gradient_norm" else ""
            raise ConfigError(
                f"balance.method={balance.method} {_WHOLE[balance.method]}, which train.zero_stage="
                f"{stage} never holds as a whole: set train.zero_stage=0{also}"
            )
        unknown = [name for name in balance.main if name not in self.tasks]
        if unknown:
            raise ConfigError(
                f"balance.main names {', '.join(unknown)}, but the tasks are "
                f"{', '.join(self.tasks)}"
            )

    def _check_stages(self) -> None:
        for number, stage in enumerate(self.stages):
            sizes = [f"train.{name}" for name in ("global_batch", "micro_batch")]
            given = [f"data.{name}" for name in stage.data]
            given += [f"train.{name}" for name in stage.train if f"train.{name}" in sizes]
            if given or stage.tokens is not None:
                raise ConfigError(
                    f"stages.{number}: {', '.join(given) or 'tokens'}: a stage of a multi-task run "
                    "has steps, and may change model (rotary_base, dropouts) and the rate, the "
                    "clipping and the weight decay of train; rows and draws stay the same"
                )


@dataclass(frozen=True)
class TaskMix:
    """A run's config with the config of each of its tasks."""

    config: MultiTaskConfig
    tasks: dict[str, TaskConfig]
    """Supervised ones, by name, in the order of the file."""
    members: dict[str, DrawConfig]
    """All of them."""
    scored: tuple[TaskConfig, ...] = ()
    """Tasks beside them whose dev and test rows are left out, too."""

    def batch_of(self, name: str) -> int:
        """Return the examples of a draw, over all ranks."""
        return self.members[name].batch or self.config.train.micro_batch


def require_split(mix: TaskMix, world_size: int) -> None:
    """Refuse draws that do not split evenly over the ranks (ConfigError)."""
    for name, member in mix.members.items():
        if mix.batch_of(name) % (member.parts * world_size):
            raise ConfigError(
                f"tasks.{name}: a draw of {mix.batch_of(name)} examples must be a multiple of its "
                f"{member.parts} parts times {world_size} ranks; change batch, train.micro_batch "
                "or parts"
            )


def load_mix(path: str, overrides: Sequence[str] = ()) -> TaskMix:
    """Read a multi-task config and its tasks.

    Raises:
        ConfigError: see `load`; of a task, with its name.
    """
    loaded = load(MultiTaskConfig, path, overrides)
    config = loaded.config
    members: dict[str, DrawConfig] = {}
    for name, values in config.tasks.items():
        where = f"{path}, tasks.{name}"
        if not name.isidentifier() and not name.replace("-", "_").isidentifier():
            raise ConfigError(
                f"tasks.{name}: expected letters, digits, - and _, and no digit first"
            )
        if name == MLM:
            members[name] = build(DrawConfig, values or {}, where)
            continue
        if not isinstance(values, Mapping):
            raise ConfigError(f"tasks.{name} = {values!r}: expected {{from: TASK FILE, share: 1}}")
        member = build(MemberConfig, dict(values), where)
        root = config.root or member.data.root
        if root is None:
            # The folder of the file that names the training data, as for a task on its own.
            origin = loaded.origins.get(f"tasks.{name}.data.train", path)
            # Origins are FILE:LINE, but for those of the command line.
            root = str(Path(origin.rpartition(":")[0] or origin).parent)
        data = replace(member.data, root=root)
        members[name] = replace(member, name=name, data=data)
    tasks = {name: task for name, task in members.items() if isinstance(task, MemberConfig)}
    return TaskMix(config, {name: as_task(task) for name, task in tasks.items()}, members)


def as_task(member: MemberConfig) -> TaskConfig:
    """Return the task file's part of a member."""
    return TaskConfig(**{field.name: getattr(member, field.name) for field in fields(TaskConfig)})


def mix_text(mix: TaskMix, work_dir: str = "") -> str:
    """Write the config with all tasks in it, whose files are found from anywhere."""
    tasks: dict[str, Any] = json.loads(json.dumps({n: asdict(m) for n, m in mix.members.items()}))
    for each in tasks.values():
        if "data" in each:
            each["data"]["root"] = str(Path(work_dir, each["data"]["root"] or ".").resolve())
    config = replace(mix.config, tasks=tasks, root=None)
    if config.reported:  # which have no root of their own
        root = mix.config.root and str(Path(work_dir, mix.config.root).resolve())
        files = {text: Path(work_dir, text).resolve() for text in config.reported}
        own = tuple(str(file) if file.is_file() else text for text, file in files.items())
        config = replace(config, root=root, reported=own)
    return to_yaml(config)


def is_mix(path: str) -> bool:
    """Return whether a config file is that of a multi-task run, and not of pre-training."""
    file = find_config(path, ("train", "", "multitask"))
    # A list of tasks is that of a suite, or of `postnorm transfer`.
    is_mapping = re.compile(r"^tasks:(?!\s*[\[-])", re.M)
    return file.is_file() and is_mapping.search(file.read_text("utf-8")) is not None
