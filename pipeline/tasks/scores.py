"""Tables of metrics: classes, entities, numbers; and tags of entities.

Every metric is a table with a line a row (counts or moments) and a function of its column sums.
So a bootstrap draw is a weighting of the lines, and costs a matrix product. Scores are fractions.
What is scored are names, spans and texts of the file, never tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.tasks.types import Span

Floats = npt.NDArray[np.float64]
# BMES and BILOU write the tags of BIOES in other letters.
_OTHER_NAMES = {"M": "I", "L": "E", "U": "S"}


# Tags and entities


def split_tag(tag: str) -> tuple[str, str]:
    """Split a tag of BIO, BIOES, BMES or BILOU into one of B I E S O and its type."""
    prefix, _, kind = tag.partition("-")
    prefix = _OTHER_NAMES.get(prefix, prefix)
    return (prefix, kind) if prefix in ("B", "I", "E", "S") and kind else ("O", "")


def decode_tags(tags: Sequence[str]) -> list[Span]:
    """Read entities from tags as conlleval and seqeval's default mode do.

    Illegal sequences are repaired: an I or E that continues nothing of its type opens an entity.
    """
    spans: list[Span] = []
    start, kind, before = 0, "", "O"
    for position, tag in enumerate([*tags, "O"]):
        prefix, now = split_tag(tag)
        goes_on = prefix in ("I", "E") and before in ("B", "I") and now == kind
        if not goes_on:
            if before != "O":
                spans.append(Span(kind, start, position))
            start, kind = position, now
        before = prefix
    return spans


def encode_tags(spans: Sequence[Span], length: int, scheme: str) -> list[str] | None:
    """Write entities as tags of `bio` or `bioes`; None if two of them overlap."""
    tags = ["O"] * length
    for kind, start, end in spans:
        if any(tag != "O" for tag in tags[start:end]):
            return None
        tags[start:end] = [f"B-{kind}"] + [f"I-{kind}"] * (end - start - 1)
        if scheme == "bioes":
            tags[end - 1] = f"{'S' if end - start == 1 else 'E'}-{kind}"
    return tags


# Metrics


@dataclass(frozen=True)
class Table:
    """A metric's lines, a row of the data each, and its value from sums of lines."""

    lines: Floats
    """[rows, columns]"""
    value: Callable[[Floats], Floats]
    """Column sums [..., columns] to scores [...]"""

    @property
    def score(self) -> float:
        """The score of all rows."""
        return float(self.value(self.lines.sum(0)))


Tables = dict[str, Table]
"""Tables of metrics by name."""


def ratio(above: Floats, below: Floats) -> Floats:
    """Divide, with 0 where the denominator is 0."""
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


def mean_table(values: Sequence[float]) -> Table:
    """Return the mean of a value a row."""
    lines = np.array([values, np.ones(len(values))], dtype=np.float64).T
    return Table(lines, lambda sums: ratio(sums[..., 0], sums[..., 1]))


def items_of(value: Any) -> set[Any]:
    """Return what a row's gold or prediction holds: its label, its labels, or its spans."""
    if isinstance(value, (list, tuple, set)):
        return {tuple(item) if isinstance(item, (list, tuple)) else item for item in value}
    return {value}


def _class_of(item: Any) -> Any:
    return item[0] if isinstance(item, tuple) else item


def accuracy(golds: Sequence[Any], predictions: Sequence[Any]) -> Table:
    """Return the share of rows whose items are all right, and no others."""
    right = [items_of(g) == items_of(p) for g, p in zip(golds, predictions, strict=True)]
    return mean_table(right)


def class_counts(golds: Sequence[Any], predictions: Sequence[Any], labels: Sequence[str]) -> Floats:
    """Count right, predicted and gold items: [rows, classes, 3].

    Classes are the labels in their order, then others that stand in golds or predictions.
    """
    there = {_class_of(item) for value in (*golds, *predictions) for item in items_of(value)}
    classes = [*labels, *sorted(there - set(labels))]
    place = {name: i for i, name in enumerate(classes)}
    counts = np.zeros((len(golds), len(classes), 3))
    for row, gold, prediction in zip(counts, golds, predictions, strict=True):
        right, predicted = items_of(gold), items_of(prediction)
        for column, items in enumerate((right & predicted, predicted, right)):
            for item in items:
                row[place[_class_of(item)], column] += 1
    return counts


def gold_shares(golds: Sequence[Any], labels: Sequence[str]) -> Floats:
    """Return the share of the rows that have each label, [labels]."""
    shares: Floats = class_counts(golds, golds, labels)[..., 2].mean(0)
    return shares


def _f1(sums: Floats) -> Floats:
    return ratio(2 * sums[..., 0], sums[..., 1] + sums[..., 2])


def micro_f1(counts: Floats) -> Table:
    """Return F1 of all items together."""
    return Table(counts.sum(1), _f1)


def macro_f1(counts: Floats, *, of_all: bool = False) -> Table:
    """Average over the classes that stand in gold or prediction, as scikit-learn does.

    `of_all`: over all of them, absent ones as 0, as scikit-learn does where a row has several.
    """

    def value(sums: Floats) -> Floats:
        by_class = sums.reshape(*sums.shape[:-1], -1, 3)
        present = (by_class[..., 1] + by_class[..., 2] >= (0 if of_all else 1)).astype(np.float64)
        return ratio((_f1(by_class) * present).sum(-1), present.sum(-1))

    return Table(counts.reshape(len(counts), -1), value)


def binary_f1(counts: Floats) -> Table:
    """F1 of the second of two classes; of more classes it is micro, which equals accuracy."""
    return Table(counts[:, 1], _f1) if counts.shape[1] == 2 else micro_f1(counts)


def matthews(counts: Floats) -> Table:
    """Correlate classes, by Gorodkin's form for any number of them; 0 if one side is constant."""

    def value(sums: Floats) -> Floats:
        by_class = sums.reshape(*sums.shape[:-1], -1, 3)
        right, predicted, gold = by_class[..., 0].sum(-1), by_class[..., 1], by_class[..., 2]
        rows = gold.sum(-1)
        above = right * rows - (predicted * gold).sum(-1)
        below = (rows**2 - (predicted**2).sum(-1)) * (rows**2 - (gold**2).sum(-1))
        return ratio(above, np.sqrt(np.maximum(below, 0)))

    return Table(counts.reshape(len(counts), -1), value)


def ranks(values: Floats) -> Floats:
    """Return ranks from 1; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + 1 + ends) / 2)[inverse]


def _correlation(one: Floats, other: Floats) -> Table:
    """Correlate linearly; 0 if one side is constant, where it is undefined."""
    one, other = one - one.mean(), other - other.mean()  # against cancellation in the moments
    lines = np.stack([np.ones_like(one), one, other, one * one, other * other, one * other], axis=1)

    def value(sums: Floats) -> Floats:
        n, x, y, xx, yy, xy = np.moveaxis(sums, -1, 0)
        spread = np.maximum(n * xx - x * x, 0) * np.maximum(n * yy - y * y, 0)
        # Rounding leaves a constant side a spread of about 1e-16 of its squares.
        floor = 1e-24 * (n * xx) * (n * yy)
        return ratio(n * xy - x * y, np.sqrt(np.where(spread > floor, spread, 0)))

    return Table(lines, value)


def correlations(golds: Sequence[float], predictions: Sequence[float]) -> Tables:
    """Return Pearson's and Spearman's correlations; draws of the latter keep all rows' ranks."""
    gold, predicted = np.array(golds, np.float64), np.array(predictions, np.float64)
    return {
        "pearson": _correlation(gold, predicted),
        "spearman": _correlation(ranks(gold), ranks(predicted)),
    }
