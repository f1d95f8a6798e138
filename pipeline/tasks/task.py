"""Task files, `configs/tasks/NAME.yaml`, and suites of them: everything about one supervised task.

`KINDS` is the table of kinds: the fields that each takes from a row, its metrics and its default.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal

from pipeline.config.load import find_config, load
from pipeline.config.schema import REQUIRED, param, path_param, section
from pipeline.config.train import MonitorConfig, TrainConfig
from pipeline.errors import ConfigError

KindName = Literal[
    "classify", "pair", "choice", "tag", "spans", "qa", "multilabel", "regress", "cloze", "coref"
]
MetricName = Literal["accuracy", "f1", "macro_f1", "matthews", "pearson", "spearman", "em"]
Format = Literal[
    "auto", "json", "jsonl", "parquet", "csv", "tsv", "conll", "squad", "cmrc", "c3", "chid"
]


@dataclass(frozen=True)
class TaskKind:
    """What a kind of task reads from a row, and how it is scored; the first metric is default."""

    fields: tuple[str, ...]
    """Names in `FieldsConfig` that must be set."""
    metrics: tuple[str, ...]
    gold: str = "label"
    """The field that holds the gold, which unlabelled files lack."""
    optional: tuple[str, ...] = ()
    """Names in `FieldsConfig` that may be set beside those."""


_CLASSES = ("accuracy", "f1", "macro_f1", "matthews")
KINDS = {
    "classify": TaskKind(("text",), _CLASSES),
    "pair": TaskKind(("text", "text_b"), _CLASSES),
    "choice": TaskKind(("choices",), ("accuracy",), optional=("text", "text_b")),
    "tag": TaskKind(("text",), ("f1", "macro_f1"), gold="spans"),
    "spans": TaskKind(("text",), ("f1", "macro_f1"), gold="spans"),
    "qa": TaskKind(("text", "text_b"), ("f1", "em"), gold="answers"),
    "multilabel": TaskKind(("text",), ("f1", "macro_f1", "accuracy"), optional=("text_b",)),
    "regress": TaskKind(("text",), ("spearman", "pearson"), optional=("text_b",)),
    "cloze": TaskKind(("text", "choices"), ("accuracy",)),
    "coref": TaskKind(("text", "target"), _CLASSES),
}
_STRIDE = 128
RANDOM = "random:"
"""Before a model: its architecture and tokenizer with fresh weights."""
PROBED_KINDS = ("classify", "pair", "coref")
"""Kinds with one class a row, which `monitor.probes` takes."""
_DECODERS = {"tag": ("softmax", "crf"), "spans": ("pointer",)}
FIXED_FORMATS = {
    "conll": ("tag", "spans"),
    "squad": ("qa",),
    "cmrc": ("qa",),
    "c3": ("choice",),
    "chid": ("cloze",),
}
"""Kinds of task that a format with fixed field names holds, by format."""


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
class FieldsConfig:
    """The key of a JSON object or the column of a table that holds each field.

    Formats with fixed names (conll, squad, cmrc, c3, chid) need none.
    """

    id: str | None = param("id", "of a row; its number, from 0, where a row has none")
    text: str | None = param(None, "the first text: sentence, premise, passage")
    text_b: str | None = param(None, "the second text: hypothesis, question")
    label: str | None = param("label", "the class, a list of classes, the number or the choice")
    choices: str | tuple[str, ...] | None = param(
        None, "list of choices, or a list of the keys that have one each"
    )
    spans: str | None = param(
        "label", "entities: [[type, start, end], ...] or CLUENER's mapping; tags of a list of words"
    )
    answers: str | None = param(
        "answers", "answers to the question: [{text, answer_start}], [] if it has none"
    )
    target: str | None = param(
        "target", "mapping with span1_text, span1_index, span2_text and span2_index"
    )


@dataclass(frozen=True, kw_only=True)
class TaskDataConfig:
    """Files of the task and how rows become examples."""

    root: str | None = path_param(
        None, "folder that the files below are relative to; null takes the task file's own"
    )
    train: tuple[str, ...] = path_param((), "files to train on, joined")
    dev: tuple[str, ...] = path_param((), "files that choose the epoch and the settings")
    test: tuple[str, ...] = path_param((), "files that are reported; may be without labels")
    hold_out: float = param(
        0.0, "share of train's texts that is dev where dev names no file", ge=0, lt=1
    )
    format: Format = param("auto", "of the files; auto tells it from the name and the content")
    columns: tuple[str, ...] = param((), "names of a table's columns where it has no header")
    short_rows: Literal["refuse", "drop"] = param(
        "refuse", "what becomes of rows of a table with cells missing; dropped ones are counted"
    )
    fields: FieldsConfig = section(FieldsConfig, "where a row has what")
    labels: Literal["auto"] | tuple[str, ...] = param(
        "auto",
        "the classes or types in order; auto takes train's distinct ones, sorted; of tags that are "
        "numbers their names",
    )
    drop_labels: tuple[str, ...] = param((), "rows with these labels are left out and counted")
    joiner: str | None = param(
        None, "between the items of a text given as a list (keywords, turns, words), and of labels"
    )
    blank: str = param(r"#idiom\d*#", "pattern of a blank in the text of a cloze task")
    span_ends: Literal["inclusive", "exclusive"] = param(
        "exclusive", "whether a span's end is its last character; CLUENER's always is"
    )
    train_rows: int | None = param(None, "most rows taken, the same for every seed", ge=1)
    dev_rows: int | None = param(None, "most rows taken, the same for every seed", ge=1)
    test_rows: int | None = param(None, "most rows taken, the same for every seed", ge=1)

    @property
    def splits(self) -> dict[str, tuple[tuple[str, ...], int | None]]:
        """Files and most rows of each split."""
        return {
            "train": (self.train, self.train_rows),
            "dev": (self.dev, self.dev_rows),
            "test": (self.test, self.test_rows),
        }


@dataclass(frozen=True, kw_only=True)
class InputConfig:
    """How an example becomes tokens."""

    max_length: int = param(128, "longest row, special tokens included", unit="tokens", ge=8)
    truncate: Literal["tail", "head", "head_tail"] = param(
        "tail", "part of a long text that is cut off: its tail, its head, or what lies between both"
    )
    head_share: float = param(0.25, "share of the head that head_tail keeps", gt=0, lt=1)
    max_question: int = param(64, "longest question of qa", unit="tokens", ge=1)
    stride: int = param(
        0,
        "from one window of a qa passage to the next; 0 takes 128, of short windows half",
        unit="tokens",
        ge=0,
    )


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The layers on top of the encoder."""

    pool: Literal["cls", "mean", "first_last_avg", "pooler"] = param(
        "cls", "vector of a row: [CLS], mean of the last layer or of first and last, or pooler"
    )
    dropout: float = param(0.1, "before the head", ge=0, lt=1)
    decoder: Literal["softmax", "crf", "pointer"] | None = param(
        None, "of tag: softmax (null takes it) or crf; of spans: pointer; other kinds have none"
    )
    scheme: Literal["bio", "bioes"] = param("bio", "tags that a tag head writes entities with")
    max_answer: int = param(30, "longest answer of qa", unit="tokens", ge=1)
    null_threshold: float = param(0.0, "margin by which `no answer` must win in qa")


@dataclass(frozen=True, kw_only=True)
class TaskTrainConfig:
    """Optimisation; the loop is the trainer's."""

    epochs: float = param(3.0, "passes over train", gt=0)
    steps: int | None = param(None, "optimiser steps, in place of epochs", ge=1)
    batch: int = param(32, "examples a step", ge=1)
    accumulate: int = param(1, "parts that a step's examples are computed in", ge=1)
    lr: float = param(2e-5, "peak rate of the encoder", gt=0, usual=(1e-7, 0.01))
    head_lr: float | None = param(None, "peak rate of the head; null takes lr", gt=0)
    layer_decay: float = param(1.0, "rate of a layer over that of the one above it", gt=0, le=1)
    warmup: float = param(0.1, "share of the steps that the rate rises in", ge=0, lt=1)
    decay: Literal["linear", "none"] = param("linear", "of the rate after the warm-up, to zero")
    weight_decay: float = param(0.01, "of matrices", ge=0, usual=(0, 0.5))
    beta2: float = param(
        TrainConfig.adam_beta2, "Adam's decay of its squares' mean", ge=0, lt=1, usual=(0.9, 1)
    )
    eps: float = param(TrainConfig.adam_eps, "Adam's, added to their root", gt=0, usual=(0, 1e-3))
    clip: float = param(1.0, "largest norm of the gradient", gt=0)
    class_weights: Literal["none", "balanced"] = param(
        "none", "weights of the classes in the loss: equal, or rows / (classes x rows of the class)"
    )
    dropout: float | None = param(
        None, "of hidden states and attention in the encoder; null keeps the model's", ge=0, lt=1
    )
    precision: Literal["auto", "bf16", "fp32"] = param(
        "auto", "of forward and backward; auto is bf16 on a GPU and fp32 on a CPU"
    )
    keep: Literal["best", "last"] = param("best", "the epoch reported: best on dev, or the last")
    seeds: tuple[int, ...] = param((1,), "of head, order and dropout; a run each")

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ConfigError(
                f"train.seeds={list(self.seeds)} must name at least one seed, and none twice"
            )
        if self.batch % self.accumulate:
            raise ConfigError(
                f"train.batch={self.batch} must be a multiple of train.accumulate="
                f"{self.accumulate}; change one of the two"
            )


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """Values to try on dev; the runs are their product. An empty list keeps train's value."""

    lr: tuple[float, ...] = param((), "values of train.lr")
    batch: tuple[int, ...] = param((), "values of train.batch")
    epochs: tuple[float, ...] = param((), "values of train.epochs")
    dropout: tuple[float, ...] = param((), "values of head.dropout")

    @property
    def points(self) -> list[dict[str, float]]:
        """Every combination of the values; none without values."""
        given = {
            field.name: values for field in fields(self) if (values := getattr(self, field.name))
        }
        return (
            [dict(zip(given, point, strict=True)) for point in product(*given.values())]
            if given
            else []
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
            room = self.input.max_length - 3 - self.input.max_question
            stride = max(1, min(_STRIDE, room // 2)) if name == "qa" else _STRIDE
            object.__setattr__(self, "input", replace(self.input, stride=stride))
        if self.task.metric is not None and self.task.metric not in kind.metrics:
            raise ConfigError(
                f"task.metric={self.task.metric} does not fit task.kind={name}; expected one of "
                f"{', '.join(kind.metrics)}"
            )
        kinds = FIXED_FORMATS.get(self.data.format)
        if kinds is not None and name not in kinds:
            raise ConfigError(
                f"data.format={self.data.format} holds rows for task.kind {' or '.join(kinds)}, "
                f"not for {name}; change one of the two"
            )
        missing = [each for each in kind.fields if getattr(self.data.fields, each) is None]
        if missing and kinds is None and self.data.format != "auto":
            raise ConfigError(missing_fields(name, missing))
        if self.data.hold_out and self.data.dev:
            raise ConfigError(
                f"data.hold_out={self.data.hold_out} takes dev from train, but data.dev names "
                f"{', '.join(self.data.dev)}; remove one of the two"
            )
        if self.input.truncate == "head_tail" and self.kind.gold == "spans":
            raise ConfigError(
                f"input.truncate=head_tail does not fit task.kind={name}: an entity could lie over "
                "the gap; use tail or head"
            )
        if self.input.truncate != "tail" and name in ("qa", "cloze"):
            raise ConfigError(
                f"input.truncate={self.input.truncate} does not fit task.kind={name}, whose texts "
                "are cut into windows; take it out"
            )
        if self.head.decoder not in (None, *_DECODERS.get(name, ())):
            raise ConfigError(
                f"head.decoder={self.head.decoder} does not fit task.kind={name}; expected "
                f"{' or '.join(_DECODERS.get(name, ('none',)))}"
            )
        if self.input.stride >= self.input.max_length and name == "qa":
            raise ConfigError(
                f"input.stride={self.input.stride} must be below input.max_length="
                f"{self.input.max_length}: windows would leave out parts of a passage"
            )

    def at(self, point: Mapping[str, float]) -> "TaskConfig":
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
    def kind(self) -> TaskKind:
        """The kind's row of `KINDS`."""
        return KINDS[self.task.kind]

    @property
    def metric(self) -> str:
        """The score that chooses and is reported first."""
        return self.task.metric or self.kind.metrics[0]


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
        data, kind = config.data, config.task.kind
        if name in tasks:
            raise ConfigError(
                f"monitor.probes: {text} is the second task named {name}; rename one of the files"
            )
        if kind not in PROBED_KINDS:
            raise ConfigError(
                f"monitor.probes: {text} has task.kind={kind}, expected one of "
                f"{', '.join(PROBED_KINDS)}, which have classes; take it out"
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
