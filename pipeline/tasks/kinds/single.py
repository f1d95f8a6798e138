"""classify, pair, coref: one of the labels for each row."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from pipeline.errors import DataError
from pipeline.tasks.cells import name_of, require_text
from pipeline.tasks.formats import Row, TableFile
from pipeline.tasks.kinds import base
from pipeline.tasks.rows import RowWriter
from pipeline.tasks.scores import (
    Tables,
    accuracy,
    binary_f1,
    class_counts,
    gold_shares,
    macro_f1,
    matthews,
    ratio,
)
from pipeline.tasks.types import Example, HeadSpec, Span, TaskRows, TokenRow

_METRICS = ("accuracy", "f1", "macro_f1", "matthews")
_MARKS = {"span1": ("_", "_"), "span2": ("[", "]")}  # as CLUE's own baseline marks WSC


class SingleLabel(base.Kind):
    """One of the labels for each row."""

    has_labels: ClassVar = True
    has_classes: ClassVar = True
    has_one_answer: ClassVar = True

    def read_gold(self, source: TableFile, row: Row, example: Example, value: Any) -> str:
        """Read a label."""
        return name_of(value, row)

    def labels_in(self, value: Any) -> list[str]:
        """Return the label."""
        return [] if value is None else [value]

    def targets(self, spec: HeadSpec, batch: base.UnitBatch) -> base.Arrays:
        """Return `labels` (B,) int64."""
        places = base.place_of(spec)
        return {"labels": np.array([places[gold] for gold in batch.golds], np.int64)}

    def loss_of_zero_scores(self, spec: HeadSpec, data: TaskRows) -> float:
        """Return the entropy of equal probabilities."""
        return math.log(len(spec.labels))

    def loss_of_prior(self, golds: base.Values) -> float:
        """Return the entropy of the labels' frequencies."""
        shares = np.array(list(Counter(map(str, golds)).values())) / len(golds)
        return float(-(shares * np.log(shares)).sum())

    def prediction(self, spec: HeadSpec, example: Example, decided: base.Decided) -> base.Answered:
        """Return the label with the highest score."""
        [(_, scores)] = decided
        return spec.labels[int(np.argmax(scores))], [base.short(score) for score in scores]

    def submission(self, text: str, prediction: Any) -> dict[str, Any]:
        """Return the label."""
        return {"label": str(prediction)}

    def tables(
        self, golds: base.Values, predictions: base.Values, labels: base.Labels, scorer: str
    ) -> Tables:
        """Return accuracy, f1 (of the second of two labels), its mean and Matthews' coefficient."""
        counts = class_counts(golds, predictions, labels)
        return {
            "accuracy": accuracy(golds, predictions),
            "f1": binary_f1(counts),
            "macro_f1": macro_f1(counts),
            "matthews": matthews(counts),
        }

    def constants(self, golds: base.Values, labels: base.Labels) -> list[str]:
        """Return the commonest label, or both of two."""
        counts = Counter(golds)
        ordered = sorted(counts, key=lambda name: (-counts[name], name))
        return ordered[: 2 if len(labels) == 2 else 1]

    def chance(
        self, golds: base.Values, labels: base.Labels, num_choices: base.Values = ()
    ) -> dict[str, float]:
        """Guess uniformly among the labels."""
        rate = 1 / len(labels)
        shares = gold_shares(golds, labels)
        by_label = ratio(2 * shares * rate, shares + rate)
        f1 = float(by_label[1]) if len(labels) == 2 else rate
        macro = float(by_label.mean())
        return {"macro_f1": macro, "accuracy": rate, "f1": f1, "matthews": 0.0}


class LabelOfPair(SingleLabel):
    """One of the labels for each pair of texts."""

    hugging_face: ClassVar = base.HuggingFace("SequenceClassification", '"a text", "another text"')


class Coreference(SingleLabel):
    """Whether two marked spans mean the same."""

    has_offsets: ClassVar = True
    hugging_face: ClassVar = base.HuggingFace(
        "SequenceClassification", '"_the mark of the first span_ and [that of the second]"'
    )

    def marks(self, source: TableFile, row: Row, text: str) -> tuple[Span, ...]:
        """Read both spans."""
        target: Any = row.values.get(source.column("target") or "")
        marks = []
        for name in ("span1", "span2"):
            try:
                part, start = str(target[f"{name}_text"]), int(target[f"{name}_index"])
            except (KeyError, TypeError, ValueError):
                raise DataError(
                    f"{row.where}: expected {name}_text and {name}_index, got {target!r}; name the "
                    "key of the mapping with both spans in data.fields.target"
                ) from None
            require_text(row, text, part, start)
            marks.append(Span(name, start, start + len(part)))
        return tuple(marks)

    def encode(self, writer: RowWriter, number: int, example: Example) -> Iterator[TokenRow]:
        """Yield the text with marks around both spans."""
        text, places = _marked(example)
        row = writer.row(number, 0, [writer.located(text)])
        kept = [bool(np.any((row.offsets[:, 0] <= at) & (at < row.offsets[:, 1]))) for at in places]
        writer.counts["marked spans behind the cut"] += not all(kept)
        yield replace(row, offsets=np.full_like(row.offsets, -1))  # they were of the marked text


def _marked(example: Example) -> tuple[str, list[int]]:
    """Write the marks of coref around their spans; also return where the signs are."""
    signs = []
    for name, start, end in example.marks:
        before, behind = _MARKS[name]
        # At one place what closes comes first, then what opens; the longer span lies outside.
        signs += [(end, 0, end - start, behind), (start, 1, start - end, before)]
    text, places = example.text, []
    for number, (place, _, _, sign) in enumerate(sorted(signs)):
        places.append(place + number)
        text = text[: places[-1]] + sign + text[places[-1] :]
    return text, places


CLASSIFY = SingleLabel("classify", ("text",), _METRICS)
PAIR = LabelOfPair("pair", ("text", "text_b"), _METRICS)
COREF = Coreference("coref", ("text", "target"), _METRICS)
