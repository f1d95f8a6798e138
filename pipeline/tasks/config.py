"""Sections of a task file that are alike for every kind of task."""

from dataclasses import dataclass, fields
from itertools import product
from typing import Literal

from pipeline.config.schema import param, path_param, section
from pipeline.config.train import TrainConfig
from pipeline.errors import ConfigError

Format = Literal[
    "auto", "json", "jsonl", "parquet", "csv", "tsv", "conll", "squad", "cmrc", "c3", "chid"
]


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
    optimizer: Literal["adamw", "muon"] = param(
        "adamw", "as of pre-training; an encoder that muon trained may need muon"
    )
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

    optimizer: tuple[Literal["adamw", "muon"], ...] = param((), "values of train.optimizer")
    lr: tuple[float, ...] = param((), "values of train.lr", gt=0)
    batch: tuple[int, ...] = param((), "values of train.batch", ge=1)
    epochs: tuple[float, ...] = param((), "values of train.epochs", gt=0)
    dropout: tuple[float, ...] = param((), "values of head.dropout", ge=0, lt=1)

    @property
    def points(self) -> list[dict[str, float | str]]:
        """Every combination of the values; none without values."""
        given = {
            field.name: values for field in fields(self) if (values := getattr(self, field.name))
        }
        return (
            [dict(zip(given, point, strict=True)) for point in product(*given.values())]
            if given
            else []
        )
