"""multilabel: any number of the labels for each row."""

from collections import Counter
from typing import Any, ClassVar

import numpy as np

from pipeline.errors import DataError
from pipeline.tasks.cells import name_of
from pipeline.tasks.formats import Row, TableFile
from pipeline.tasks.kinds import base
from pipeline.tasks.scores import (
    Tables,
    accuracy,
    class_counts,
    gold_shares,
    macro_f1,
    micro_f1,
    ratio,
)
from pipeline.tasks.types import Example, Gold, HeadSpec, TaskRows

_LABEL_JOINER = ","
_ON, _OFF = {"1", "true"}, {"0", "false"}


class MultiLabel(base.Kind):
    """Any number of the labels for each row."""

    has_labels: ClassVar = True
    may_be_empty: ClassVar = True
    loss: ClassVar = "multi_label"
    form: ClassVar = ["label"]
    hugging_face: ClassVar = base.Kind.hugging_face._replace(
        answer="[name for i, name in model.config.id2label.items() if output.logits[0, i] > 0]",
        problem_type="multi_label_classification",
    )

    def read_gold(self, source: TableFile, row: Row, example: Example, value: Any) -> Gold:
        """Read a list of labels, a text of several, or a 0 or 1 for each of the labels."""
        if isinstance(value, str):
            value = [part for part in value.split(source.data.joiner or _LABEL_JOINER) if part]
        if not isinstance(value, list):
            value = [value]
        names = [name for item in value if (name := name_of(item, row))]
        if _is_multi_hot(names, source.data.labels):
            pairs = zip(source.data.labels, names, strict=True)
            names = [label for label, on in pairs if on in _ON]
        elif len(set(names)) < len(names):
            if set(names) <= _ON | _OFF:
                raise DataError(
                    f"{row.where}: {value!r} has a 0 or 1 for each label, so the labels need names:"
                    f" list all {len(names)} of them, in this order, in data.labels"
                )
            source.counts["rows with a label twice"] += 1
        return tuple(sorted(set(names)))

    def labels_in(self, value: Any) -> list[str]:
        """Return the labels."""
        return list(value or ())

    def targets(self, spec: HeadSpec, batch: base.UnitBatch) -> base.Arrays:
        """Return `labels` (B, K) bool."""
        places = base.place_of(spec)
        chosen = np.zeros((len(batch.units), len(places)), np.bool_)
        for number, gold in enumerate(batch.golds):
            chosen[number, [places[name] for name in gold]] = True
        return {"labels": chosen}

    def loss_of_zero_scores(self, spec: HeadSpec, data: TaskRows) -> float:
        """Return the mean of what `multi_label_losses` gives for zeros."""
        chosen = np.array([len(self.labels_in(row.gold)) for row in data.examples])
        return float(np.mean(np.log1p(len(spec.labels) - chosen) + np.log1p(chosen)))

    def prediction(self, spec: HeadSpec, example: Example, decided: base.Decided) -> base.Answered:
        """Return the labels with a score above 0."""
        [(_, scores)] = decided
        chosen = [label for label, score in zip(spec.labels, scores, strict=True) if score > 0]
        return chosen, [base.short(score) for score in scores]

    def tables(
        self, golds: base.Values, predictions: base.Values, labels: base.Labels, scorer: str
    ) -> Tables:
        """Return accuracy (all labels of a row right), micro and macro f1."""
        counts = class_counts(golds, predictions, labels)
        exact = accuracy(golds, predictions)
        return {
            "accuracy": exact,
            "f1": micro_f1(counts),
            "macro_f1": macro_f1(counts, of_all=True),
        }

    def constants(self, golds: base.Values, labels: base.Labels) -> list[list[str]]:
        """Return the commonest label alone, or each of two."""
        counts = Counter(name for gold in golds for name in set(gold))
        ordered = sorted(counts, key=lambda name: (-counts[name], name)) or [""]
        return [[name] for name in ordered[: 2 if len(labels) == 2 else 1]]

    def chance(
        self, golds: base.Values, labels: base.Labels, num_choices: base.Values = ()
    ) -> dict[str, float]:
        """Throw a coin for each label."""
        rate, shares = 1 / 2, gold_shares(golds, labels)
        micro = 2 * shares.sum() * rate / (shares.sum() + rate * len(labels))
        macro = float(ratio(2 * shares * rate, shares + rate).mean())
        return {"macro_f1": macro, "accuracy": rate ** len(labels), "f1": float(micro)}


def _is_multi_hot(names: list[str], labels: tuple[str, ...] | str) -> bool:
    """Whether a row has a 0 or 1 for each of the labels, which have other names."""
    if isinstance(labels, str) or len(names) != len(labels) or set(labels) <= _ON | _OFF:
        return False
    return set(names) <= _ON | _OFF


MULTILABEL = MultiLabel(
    "multilabel", ("text",), ("f1", "macro_f1", "accuracy"), optional=("text_b",)
)
