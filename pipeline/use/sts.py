"""`postnorm sts`: Spearman's correlation of the cosine of two vectors with a gold similarity.

The protocol of Reimers and Gurevych 2019 (arXiv 1908.10084) and of kexue.fm/archives/8069, where
the gold may be 0 or 1: whether two questions mean the same.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config.load import build
from pipeline.errors import ConfigError, DataError
from pipeline.model.heads import Pool
from pipeline.runtime.summary import table
from pipeline.tasks.readers import read_task
from pipeline.tasks.scores import correlations, ranks
from pipeline.tasks.task import TaskConfig, load_task
from pipeline.tasks.types import Example
from pipeline.use.model import Model
from pipeline.use.whiten import TRANSDUCTIVE, Floats, Vectors, Whitening, fit

_DATA_FILES = (".json", ".jsonl", ".csv", ".tsv", ".txt")
_NO_HEADER = (".tsv", ".txt")
_FIELDS = {"text": "sentence1", "text_b": "sentence2", "label": "label"}


@dataclass(frozen=True)
class TextPairs:
    """Pairs of texts with their gold similarity."""

    name: str
    first: tuple[str, ...]
    second: tuple[str, ...]
    gold: Floats

    @property
    def is_binary(self) -> bool:
        """Whether the gold has two values."""
        return len(np.unique(self.gold)) == 2


def read_pairs(source: str, split: str | None = None, overrides: Sequence[str] = ()) -> TextPairs:
    """Read pairs of a task of kind pair or regress, or of a plain file.

    Args:
        source: a task file or the name of a shipped task; or a file of data: .json, .jsonl and
            .csv have the names sentence1, sentence2 and label, .tsv and .txt these three columns
            without a header.
        split: of a task; None takes test where it has gold, else dev.
        overrides: of the task, such as data.fields.text=question1.

    Raises:
        ConfigError: the task has no pairs, or see `load_task`.
        DataError: see `read_task`; also that a gold is not a number, or all are the same.
    """
    if Path(source).suffix in _DATA_FILES:
        if split is not None:
            raise ConfigError(f"{source} is one file, without splits; leave out split={split}")
        columns = list(_FIELDS.values()) if Path(source).suffix in _NO_HEADER else []
        data = {"fields": _FIELDS, "columns": columns, "test": [source]}
        values = {"task": {"kind": "regress"}, "data": data}
        config, split = build(TaskConfig, values, source, overrides), "test"
    else:
        config = load_task(source, tuple(overrides))
    if config.task.kind not in ("pair", "regress") or config.data.fields.text_b is None:
        raise ConfigError(
            f"{source}: task.kind={config.task.kind} without pairs; expected pair, or regress with "
            "data.fields.text_b"
        )
    for name in (split,) if split else ("test", "dev"):
        rows = read_task(config, [name]).splits[name]
        if rows and all(row.gold is not None for row in rows):
            return _pairs(source if name == "test" else f"{source} ({name})", rows)
    raise DataError(
        f"{source}: {split or 'neither test nor dev'} has gold for all rows; choose another --split"
    )


def _pairs(name: str, rows: Sequence[Example]) -> TextPairs:
    gold = np.array([_number(row) for row in rows])
    if gold.min() == gold.max():
        raise DataError(
            f"{name}: the gold of all {len(gold):,} pairs is {gold[0]:g}; a correlation needs "
            "different ones"
        )
    return TextPairs(name, tuple(row.text for row in rows), tuple(row.text_b for row in rows), gold)


def _number(row: Example) -> float:
    try:
        number = float(row.gold)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(
            f"{row.where}: gold {row.gold!r} is not a number; similarity needs numbers, such as 0 "
            "and 1 (entailment is not similarity)"
        )
    return number


@dataclass(frozen=True)
class StsScore:
    """One line of the table."""

    pooling: Pool
    whitening: str | None
    """What it was fit on; None: vectors as they are."""
    size: int
    spearman: float
    auc: float | None
    """Share of (similar, other) pairs ranked right by cosine; None unless gold is binary."""
    num_zero: int
    """Pairs with a vector of zeros; their cosine counts as 0."""


def _score(
    pairs: TextPairs, first: Vectors, second: Vectors, pooling: Pool, whitening: str | None
) -> StsScore:
    cosine, num_zero = cosines(first, second)
    spearman = correlations(list(pairs.gold), list(cosine))["spearman"].score
    auc = None
    if pairs.is_binary:
        similar = pairs.gold == pairs.gold.max()
        ones, zeros = int(similar.sum()), int((~similar).sum())
        above = ranks(cosine)[similar].sum() - ones * (ones + 1) / 2
        auc = float(above / (ones * zeros))
    return StsScore(pooling, whitening, first.shape[1], spearman, auc, num_zero)


def cosines(first: Vectors, second: Vectors) -> tuple[Floats, int]:
    """Compute the (N,) cosines of two (N, D) vectors, and how many have a vector of zeros."""
    one, other = first.astype(np.float64), second.astype(np.float64)
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    dots: Floats = (one * other).sum(1)
    # Pairs of equal texts tie at 1, which rounding would leave a bit above or below.
    cosines = np.divide(dots, norms, out=np.zeros_like(dots), where=norms > 0).round(12)
    return cosines, int((norms == 0).sum())


@dataclass(frozen=True)
class StsEvaluation:
    """Scores of one model on one file of pairs."""

    pairs: str
    num_pairs: int
    num_cut: int
    """Different texts that were longer than `max_length` tokens."""
    max_length: int
    scores: tuple[StsScore, ...]
    notes: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """Show it as a table."""
        yield (
            f"{self.pairs}: {self.num_pairs:,} pairs; {self.num_cut:,} texts were cut at "
            f"{self.max_length} tokens"
        )
        auc = ("auc",) if self.scores[0].auc is not None else ()
        rows = [("pooling", "whitening", "size", "spearman", *auc)]
        for each in self.scores:
            numbers = (f"{value:.4f}" for value in (each.spearman, each.auc) if value is not None)
            rows.append((each.pooling, each.whitening or "-", str(each.size), *numbers))
        yield from table(rows, right=(2, 3, 4))
        yield from self.notes

    def json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


def evaluate(
    model: Model,
    pairs: TextPairs,
    poolings: Sequence[Pool | None] = (None,),
    *,
    whitening: Whitening | None = None,
    own_size: int | None = None,
    batch_size: int = 32,
    max_length: int | None = None,
) -> StsEvaluation:
    """Score a model's vectors as they are, and whitened.

    Args:
        model: to evaluate.
        pairs: see `read_pairs`.
        poolings: each of them in turn; None is the whitening's, or the mean.
        whitening: applied to the vectors of its pooling.
        own_size: of a whitening of each pooling that is fit on the pairs' own texts.
        batch_size: texts of a forward pass.
        max_length: as in `Model.encode`.

    Raises:
        PostnormError: as `Model.encode`.
    """
    if whitening is not None:
        _, max_length = model.setting(None, max_length, whitening)
        poolings = [pooling or whitening.pooling for pooling in poolings]
        if whitening.pooling not in poolings:
            model.setting(poolings[0], max_length, whitening)  # which names what differs
    different = list(dict.fromkeys((*pairs.first, *pairs.second)))
    number = {text: n for n, text in enumerate(different)}
    first, second = ([number[text] for text in side] for side in (pairs.first, pairs.second))
    scores: list[StsScore] = []
    notes: list[str] = []
    for given in poolings:
        pooling, length = model.setting(given, max_length)
        before = model.num_cut
        vectors = model.encode(different, pooling, batch_size, length)
        num_cut = model.num_cut - before
        seen: dict[str | None, Vectors] = {None: vectors}
        if whitening is not None and whitening.pooling == pooling:
            seen[whitening.texts] = whitening(vectors)
        if own_size is not None:
            about = {"texts": "these pairs", "fingerprint": model.fingerprint}
            own = fit(
                [vectors[first + second]], own_size, pooling=pooling, max_length=length, **about
            )
            seen[own.texts] = own(vectors)
            if own.size < own_size:
                notes.append(f"{pooling}: size {own_size} was cut to the rank {own.size}")
        for fit_on, each in seen.items():
            scores.append(_score(pairs, each[first], each[second], pooling, fit_on))
    notes += [
        f"{each.pooling}: {each.num_zero:,} pairs have a vector of zeros, cosine 0"
        for each in scores
        if each.num_zero
    ]
    if own_size is not None:
        notes.append(f"whitening on these pairs: {TRANSDUCTIVE}")
    return StsEvaluation(pairs.name, len(pairs.gold), num_cut, length, tuple(scores), tuple(notes))
