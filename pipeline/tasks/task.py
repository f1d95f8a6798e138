"""Task files, `configs/tasks/NAME.yaml`, and suites: everything about one supervised task."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from pipeline.config.load import find_config, load
from pipeline.config.schema import REQUIRED, param, path_param, section
from pipeline.config.train import MonitorConfig
from pipeline.errors import ConfigError
from pipeline.tasks.config import (
    HeadConfig,
    InputConfig,
    SearchConfig,
    TaskDataConfig,
    TaskTrainConfig,
)
from pipeline.tasks.formats import FIXED_FORMATS
from pipeline.tasks.kinds.base import Kind
from pipeline.tasks.kinds.table import KINDS, METRICS, kinds_of_format
from pipeline.tasks.types import HeadSpec

if TYPE_CHECKING:
    KindName: TypeAlias = str
    MetricName: TypeAlias = str
else:  # the table alone names what there is; a type checker cannot read it
    KindName, MetricName = Literal[tuple(KINDS)], Literal[METRICS]

RANDOM = "random:"
"""Before a model: its architecture and tokenizer with fresh weights."""


@dataclass(frozen=True, kw_only=True)
class KindConfig:
    """What is asked and how the answers are scored."""

    kind: KindName = param(REQUIRED, "what the model is asked")
    metric: MetricName | None = param(
        None, "the score that chooses and is reported first; null takes the kind's own"
    )
    scorer: Literal["squad", "cmrc"] = param(
        "squad", "official rules for em and f1 of answers: SQuAD's words or CMRC 2018's characters"
    )


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """One supervised task: data, input, head, training and score."""

    SHIPPED: ClassVar = ("tasks",)

    name: str | None = param(None, "of the task in results; null takes the file's")
    model: str | None = path_param(
        None, "what a run starts from, where the command does not say it"
    )
    run_dir: str | None = path_param(None, "folder of the run, where the command does not say it")
    task: KindConfig = section(KindConfig, "kind and metric")
    data: TaskDataConfig = section(TaskDataConfig, "files and fields")
    input: InputConfig = section(InputConfig, "tokens")
    head: HeadConfig = section(HeadConfig, "head")
    train: TaskTrainConfig = section(TaskTrainConfig, "optimisation")
    search: SearchConfig = section(SearchConfig, "grid of values to choose from on dev")

    def __post_init__(self) -> None:
        kind, name = self.kind, self.task.kind
        if not self.input.stride:
            filled = replace(self.input, stride=kind.stride(self.input))
            # Filled in on a frozen object, once: the right stride follows from the kind, which the
            # section of the input does not know.
            object.__setattr__(self, "input", filled)
        if self.task.metric is not None and self.task.metric not in kind.metrics:
            raise ConfigError(
                f"task.metric={self.task.metric} does not fit task.kind={name}; expected one of "
                f"{', '.join(kind.metrics)}"
            )
        is_fixed = self.data.format in FIXED_FORMATS
        if is_fixed and self.data.format not in kind.formats:
            raise ConfigError(
                f"data.format={self.data.format} holds rows for task.kind "
                f"{kinds_of_format(self.data.format)}, not for {name}; change one of the two"
            )
        missing = [field for field in kind.fields if getattr(self.data.fields, field) is None]
        if missing and not is_fixed and self.data.format != "auto":
            raise ConfigError(missing_fields(name, missing))
        if self.data.hold_out and self.data.dev:
            raise ConfigError(
                f"data.hold_out={self.data.hold_out} takes dev from train, but data.dev names "
                f"{', '.join(self.data.dev)}; remove one of the two"
            )
        if self.train.class_weights != "none" and not kind.has_classes:
            raise ConfigError(
                f"train.class_weights={self.train.class_weights} does not fit task.kind={name}, "
                "whose rows do not have one class each; leave it out"
            )
        kind.check(self.input, self.head)
        if self.search.epochs and self.train.steps is not None:
            raise ConfigError(
                f"search.epochs={list(self.search.epochs)} beside train.steps={self.train.steps}, "
                "which takes the place of epochs: all would be the same run; leave out one of them"
            )
        if len(set(self.data.labels)) < len(self.data.labels) and self.data.labels != "auto":
            raise ConfigError(f"data.labels={list(self.data.labels)}: name each of them once")
        for point in self.search.points:
            self.at(point)  # refuses what would end the search at its turn
        for field in {"text_b", "choices"} - {*kind.fields, *kind.optional}:
            if getattr(self.data.fields, field) is not None:
                raise ConfigError(
                    f"data.fields.{field} is not read by task.kind={name}; take it out, or take "
                    "another kind, such as pair for two texts"
                )

    def at(self, point: Mapping[str, float | str]) -> "TaskConfig":
        """Return the task with the values of a point of `search`, and without a search."""
        head: dict[str, Any] = {n: value for n, value in point.items() if n == "dropout"}
        train: dict[str, Any] = {n: value for n, value in point.items() if n != "dropout"}
        return replace(
            self,
            head=replace(self.head, **head),
            train=replace(self.train, **train),
            search=SearchConfig(),
        )

    @property
    def kind(self) -> Kind:
        """All that its kind decides."""
        return KINDS[self.task.kind]

    @property
    def metric(self) -> str:
        """The score that chooses and is reported first."""
        return self.task.metric or self.kind.metrics[0]

    def head_spec(self, name: str, labels: tuple[str, ...]) -> HeadSpec:
        """Return what a model with these labels needs to know of the task."""
        kind, head = self.kind, self.head
        return HeadSpec(
            name, kind.name, labels, head.pool, head.dropout, head.decoder or kind.decoder,
            head.scheme, self.input.max_length, head.max_answer, head.null_threshold,
        )  # fmt: skip


def missing_fields(kind: str, names: list[str]) -> str:
    """Name the fields of `data.fields` that a kind of task lacks."""
    wanted = ", ".join(f"data.fields.{name}" for name in names)
    return f"task.kind={kind} needs {wanted}: name the key or column of a row that holds it"


def load_task(text: str, overrides: tuple[str, ...] = ()) -> TaskConfig:
    """Read a task file, or the shipped task of that name; `data.root` is set in what returns.

    Raises:
        ConfigError: see `load`.
    """
    config = load(TaskConfig, text, overrides).config
    file = find_config(text, TaskConfig.SHIPPED)
    config = replace(config, name=config.name or file.stem)
    if config.data.root is not None:
        return config
    return replace(config, data=replace(config.data, root=str(file.parent)))


def probe_tasks(monitor: MonitorConfig, work_dir: str = "") -> dict[str, TaskConfig]:
    """Read the task files of `monitor.probes`, by name; relative paths start at `work_dir`.

    Raises:
        ConfigError: see `load`; also that a task has no classes or no dev, or lacks a file.
    """
    tasks: dict[str, TaskConfig] = {}
    overrides = (
        () if monitor.probe_root is None else (f"data.root={json.dumps(monitor.probe_root)}",)
    )
    for text in monitor.probes:
        beside, name = Path(work_dir, text), Path(text).stem
        try:
            config = load_task(str(beside) if beside.is_file() else text, overrides)
        except ConfigError as error:
            raise ConfigError(f"monitor.probes: {error}") from None
        data = config.data
        if name in tasks:
            raise ConfigError(
                f"monitor.probes: {text} is the second task named {name}; rename one of the files"
            )
        if not config.kind.has_classes:
            known = (kind.name for kind in KINDS.values() if kind.has_classes)
            raise ConfigError(
                f"monitor.probes: {text} has task.kind={config.task.kind}, expected one of "
                f"{', '.join(known)}, which have classes; take it out"
            )
        if not data.train or not (data.dev or data.hold_out):
            raise ConfigError(
                f"monitor.probes: {text} needs rows to learn from and others to score; name "
                "data.train, and data.dev or data.hold_out"
            )
        for path in (Path(work_dir, data.root or "", file) for file in (*data.train, *data.dev)):
            if not path.is_file():
                raise ConfigError(
                    f"monitor.probes: {text} reads {path}, which does not exist; set "
                    "monitor.probe_root, or data.root of the task, to the folder of its files"
                )
        tasks[name] = config
    return tasks


@dataclass(frozen=True, kw_only=True)
class PublishedConfig:
    """Scores that somebody published for the tasks of a suite."""

    model: str = param(REQUIRED, "name of the model")
    split: Literal["dev", "test"] = param(REQUIRED, "rows that the scores are of")
    protocol: str = param(REQUIRED, "how the scores came about, in a few words")
    source: str = param(REQUIRED, "where they stand")
    scores: tuple[float | None, ...] = param(
        REQUIRED, "in percent, in the order of the suite's tasks; null where none is given"
    )


@dataclass(frozen=True, kw_only=True)
class SuiteConfig:
    """Tasks that one table shows, `configs/suites/NAME.yaml`."""

    SHIPPED: ClassVar = ("suites",)

    tasks: tuple[str, ...] = path_param(REQUIRED, "task files, or names of shipped tasks")
    root: str | None = path_param(None, "data.root of all tasks; null leaves each task's own")
    overrides: tuple[str, ...] = param(
        (), "section.key=value for every task, or TASK.section.key=value for one"
    )
    published: tuple[PublishedConfig, ...] = param((), "rows to stand beside the measured ones")

    def __post_init__(self) -> None:
        for row in self.published:
            if len(row.scores) != len(self.tasks):
                raise ConfigError(
                    f"published scores of {row.model!r}: {len(row.scores)} numbers for "
                    f"{len(self.tasks)} tasks; write null where none is known"
                )

    def overrides_of(self, task: str, given: Sequence[str]) -> tuple[str, ...]:
        """Return those of some overrides that are of a task, by its name, or of all of them."""
        names = [Path(text).stem for text in self.tasks]
        # TASK.section.key=value is of that task alone.
        mine = [text.removeprefix(f"{task}.") for text in given if text.startswith(f"{task}.")]
        return (*(text for text in given if text.partition(".")[0] not in names), *mine)
