"""`Kind`: all that the project asks a kind of task, apart from what needs torch.

A kind is a file beside this one and a line in `table.py`; kinds that are alike share a file. The
layers on the encoder are in `pipeline.finetune.heads`, in the module that `Kind.head` names.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.errors import ConfigError, DataError
from pipeline.tasks.config import HeadConfig, InputConfig
from pipeline.tasks.formats import Row, TableFile
from pipeline.tasks.rows import RowWriter, labelled
from pipeline.tasks.scores import Tables
from pipeline.tasks.types import Example, Gold, HeadSpec, PredictionRow, Span, TaskRows, TokenRow

Arrays = dict[str, npt.NDArray[Any]]
Values = Sequence[Any]
"""Golds or predictions, as files of predictions have them."""
Labels = Sequence[str]
Decided = Sequence[tuple[TokenRow, Any]]
"""The first row of each unit of an example, and what the head decoded of the unit."""
Answered = tuple[Any, list[float | None] | None]
"""An answer in the terms of the file, and the scores that are kept beside it."""
_STRIDE = 128
_ROWS = 64


class HuggingFace(NamedTuple):
    """How transformers runs a kind."""

    auto: str
    """Class behind AutoModelFor."""
    texts: str = '"a text"'
    """Arguments of the tokenizer on the model card."""
    answer: str = "model.config.id2label[int(output.logits.argmax(-1))]"
    """Expression of the answer on the model card."""
    problem_type: str = "single_label_classification"
    truncation: str = "True"


@dataclass(frozen=True)
class UnitBatch:
    """Units of a batch, each of which is scored as a whole: a row, or those of its choices."""

    data: TaskRows
    units: Sequence[Sequence[int]]
    """Numbers of the rows of each unit."""
    shape: tuple[int, int]
    """Rows and slots."""

    @property
    def rows(self) -> list[TokenRow]:
        """Rows of all units."""
        return [self.data.rows[row] for unit in self.units for row in unit]

    @property
    def examples(self) -> list[Example]:
        """Example of each unit."""
        return [self.data.examples[self.data.rows[unit[0]].example] for unit in self.units]

    @property
    def golds(self) -> list[Any]:
        """Gold of each unit."""
        return [example.gold for example in self.examples]

    @property
    def text(self) -> npt.NDArray[np.bool_]:
        """(B, S) true at the slots that may be labelled."""
        text = np.zeros(self.shape, np.bool_)
        for number, row in enumerate(self.rows):
            text[number, labelled(row, self.data.examples[row.example])] = True
        return text


def text_sizes(data: TaskRows) -> list[int]:
    """Return the number of slots of each row that may be labelled."""
    return [len(labelled(row, data.examples[row.example])) for row in data.rows]


@dataclass(frozen=True)
class Kind:
    """A kind of task: what it reads from a row, its targets, predictions and scores.

    Settings of a single kind are fields; those of a family are class attributes.
    """

    name: str
    fields: tuple[str, ...]
    """Names in `FieldsConfig` that must be set."""
    metrics: tuple[str, ...]
    """Names of its scores; the first is the default."""
    optional: tuple[str, ...] = ()
    """Names in `FieldsConfig` that may be set beside those."""
    formats: tuple[str, ...] = ()
    """Formats with fixed names of fields that hold rows for it."""

    gold: ClassVar[str] = "label"
    """Name in `FieldsConfig` of the gold, which unlabelled files lack."""
    has_labels: ClassVar[bool] = False
    """Whether its gold is made of the labels of the task."""
    has_classes: ClassVar[bool] = False
    """Whether each row has exactly one of the labels, and a score for each of them."""
    has_one_answer: ClassVar[bool] = False
    """Whether the highest of a row's scores is its answer, so that training shows an accuracy."""
    has_offsets: ClassVar[bool] = False
    """Whether gold or marks are characters of the text, so that it cannot be a list."""
    has_words: ClassVar[bool] = False
    """Whether the text may be a list of words, each with its tag."""
    may_be_empty: ClassVar[bool] = False
    """Whether an empty text is gold (of no labels), not the lack of gold."""
    masks_scores: ClassVar[bool] = False
    """Whether some of a row's scores may be None, those of choices that stand before."""
    scores_tokens: ClassVar[bool] = False
    """Whether each slot of a row has scores, (B, S, K)."""
    truncations: ClassVar[tuple[str, ...]] = ("tail", "head", "head_tail")
    """Values of `input.truncate`."""
    cut_problem: ClassVar[str] = ""
    """Reason why texts cannot be cut in the other ways."""
    decoders: ClassVar[tuple[str, ...]] = ()
    """Values of `head.decoder`."""
    decoder: ClassVar[str] = "softmax"
    """Decoder where the task names none."""
    head: ClassVar[str] = "pooled"
    """Module in `pipeline.finetune.heads` that has its layers."""
    loss: ClassVar[Literal["single_label", "multi_label", "regression"]] = "single_label"
    """Loss of a pooled head, as in `pipeline.model.heads.class_losses`."""
    batch_rows: ClassVar[int] = _ROWS
    """Rows of a forward pass without gradients."""
    form: ClassVar[Any] = "label"
    """Example of a prediction, by which files of predictions are checked."""
    gold_form: ClassVar[Any] = None
    """Example of a gold, where it differs from a prediction."""
    long_texts: ClassVar[str] = ""
    """Note on how a run reads long texts, where a tokenizer alone reads them otherwise."""
    hugging_face: ClassVar[HuggingFace] = HuggingFace("SequenceClassification")
    not_in_hugging_face: ClassVar[Mapping[str, str]] = {}
    """Decoders that transformers has no class for: what they are, and a remedy after "; "."""
    baseline: ClassVar[str] = "ngrams"
    """Model of n-grams ("ngrams"), of the words seen ("dictionary"), or none ("")."""

    # The task file

    def check(self, given: InputConfig, head: HeadConfig) -> None:
        """Refuse settings that do not fit.

        Raises:
            ConfigError: names the setting, its value and what is expected.
        """
        if given.truncate not in self.truncations:
            raise ConfigError(
                f"input.truncate={given.truncate} does not fit task.kind={self.name}: "
                f"{self.cut_problem}; use {' or '.join(self.truncations)}"
            )
        if head.decoder not in (None, *self.decoders):
            raise ConfigError(
                f"head.decoder={head.decoder} does not fit task.kind={self.name}; expected "
                f"{' or '.join(self.decoders or ('none',))}"
            )

    def stride(self, given: InputConfig) -> int:
        """Return the stride of windows where the task names none."""
        return _STRIDE

    # Rows of files

    def rows(self, source: TableFile, rows: Iterator[Row]) -> Iterator[Row]:
        """Yield the rows that become examples, of those of the file."""
        return rows

    def choices(self, source: TableFile, row: Row) -> tuple[str, ...]:
        """Return the choices of a row."""
        return ()

    def marks(self, source: TableFile, row: Row, text: str) -> tuple[Span, ...]:
        """Return the places of a text that the question is about."""
        return ()

    def read_gold(self, source: TableFile, row: Row, example: Example, value: Any) -> Gold:
        """Read the gold of a row (DataError: it does not fit; names the place and the field)."""
        raise NotImplementedError

    def types(self, labels: Sequence[str]) -> tuple[str, ...]:
        """Return the classes or types that `data.labels` names."""
        return tuple(labels)

    def labels_in(self, value: Any) -> list[str]:
        """Return the labels in a gold or prediction; none in None."""
        return []

    # Rows of tokens

    def encode(self, writer: RowWriter, number: int, example: Example) -> Iterator[TokenRow]:
        """Yield the rows of an example: [CLS] text [SEP], or [CLS] text [SEP] text_b [SEP]."""
        texts = [example.text, example.text_b] if example.text_b else [example.text]
        yield writer.row(number, 0, [writer.plain(text) for text in texts])

    def scoring_groups(self, rows: Sequence[TokenRow]) -> list[list[int]]:
        """Return the numbers of the rows that are scored together, a unit each."""
        return [[number] for number in range(len(rows))]

    # Batches

    def outputs(self, spec: HeadSpec) -> tuple[str, ...]:
        """Return the names of the head's outputs."""
        return spec.labels

    def inputs(self, batch: UnitBatch) -> Arrays:
        """Return what the head needs beside the tokens."""
        return {}

    def targets(self, spec: HeadSpec, batch: UnitBatch) -> Arrays:
        """Return what the loss needs; every example has gold."""
        raise NotImplementedError

    # Losses before training, by which multi-task runs are balanced

    def loss_of_zero_scores(self, spec: HeadSpec, data: TaskRows) -> float:
        """Return the mean loss over the rows of a head whose scores are all 0."""
        raise NotImplementedError

    def loss_of_prior(self, golds: Values) -> float | None:
        """Return the mean loss of the frequencies of the answers; None if it is not known."""
        return None

    # Predictions

    def prediction(self, spec: HeadSpec, example: Example, decided: Decided) -> Answered:
        """Return the answer for an example."""
        raise NotImplementedError

    def settle(self, examples: Sequence[Example], made: list[PredictionRow]) -> None:
        """Change predictions, in place, that depend on those of other examples."""

    def problem(self, labels: Labels, row: PredictionRow) -> str:
        """Describe what is wrong with a row whose parts have the right form; "" if nothing is."""
        if row.scores is None or len(row.scores) == len(labels):
            return ""
        return f"{len(row.scores)} scores, expected one for each of {len(labels)} labels"

    def submission(self, text: str, prediction: Any) -> dict[str, Any] | None:
        """Return what a line of CLUE's submission files has beside the id; None if it has none."""
        return None

    def tables(self, golds: Values, predictions: Values, labels: Labels, scorer: str) -> Tables:
        """Return the metrics by name; see `score`."""
        raise NotImplementedError

    def constants(self, golds: Values, labels: Labels) -> list[Any]:
        """Return the constant predictions of which the best is `majority`."""
        raise NotImplementedError

    def chance(self, golds: Values, labels: Labels, num_choices: Values = ()) -> dict[str, float]:
        """Return what guesses give on average; of correlations, spans and answers it is 0.

        `num_choices` is the number of choices of each row. F1 is that of the average counts.
        """
        return dict.fromkeys(self.metrics, 0.0)

    def score(
        self, golds: Values, predictions: Values, *, labels: Labels = (), scorer: str = "squad"
    ) -> Tables:
        """Return the metrics of predictions, by name; `labels` are the classes in order.

        Golds and predictions are those of `predictions-*.jsonl`: labels under their own names,
        indices of choices, spans [type, start, end], numbers; for qa a list of answers, and a text.

        Spearman's draws keep the ranks of all rows.

        Raises:
            DataError: there are no rows, or not as many predictions as golds.
        """
        if len(golds) != len(predictions) or not golds:
            raise DataError(
                f"{len(golds)} golds and {len(predictions)} predictions cannot be scored"
            )
        return self.tables(golds, predictions, labels, scorer)

    def majority(
        self, golds: Values, *, labels: Labels = (), scorer: str = "squad"
    ) -> dict[str, float]:
        """Score the best constant prediction: the commonest gold, the mean, no span, no answer."""
        every = [
            self.score(golds, [constant] * len(golds), labels=labels, scorer=scorer)
            for constant in self.constants(golds, labels)
        ]
        # Of two classes either may be best: the rarer one has the higher f1 where it is the second.
        return {name: max(tables[name].score for tables in every) for name in every[0]}


def short(score: float) -> float:
    """Return a score with six digits, as files of predictions have it."""
    return float(f"{score:.6g}")


def place_of(spec: HeadSpec) -> Mapping[str, int]:
    """Return the number of each label."""
    return {label: number for number, label in enumerate(spec.labels)}
