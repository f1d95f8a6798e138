"""rank: the relevance of texts for a query, learnt from lists of graded ones."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from pipeline.errors import ConfigError, DataError
from pipeline.tasks.cells import OTHER_LABEL, choices_of, name_of, text_of
from pipeline.tasks.formats import Row, TableFile
from pipeline.tasks.kinds.base import Answered, Arrays, Decided, Labels, UnitBatch, Values, short
from pipeline.tasks.kinds.choice import TextChoice
from pipeline.tasks.rows import RowWriter
from pipeline.tasks.scores import Table, Tables, ratio
from pipeline.tasks.types import Example, Gold, HeadSpec, PredictionRow, TaskRows, TokenRow

_DEPTH, _MOST = 10, 1000
"""Places that NDCG looks at, and the largest relevance: 2 to a larger one is infinite."""


class Ranking(TextChoice):
    """A score for each candidate of a query; the highest comes first.

    A row of a file is a query with a list of candidates and one of relevances, or a query with one
    candidate (`text_b`) and its relevance; the rows of a file with one query are one example then.
    """

    has_one_answer: ClassVar = False
    masks_scores: ClassVar = False
    head: ClassVar = "rank"
    form: ClassVar = [0.5]
    hugging_face: ClassVar = TextChoice.hugging_face._replace(
        texts='["a query"] * 2, ["a title", "another title"]', answer="output.logits[0].tolist()"
    )
    baseline: ClassVar = ""

    def rows(self, source: TableFile, rows: Iterator[Row]) -> Iterator[Row]:
        """Yield a row for each query, in the order of their first rows.

        The id of rows that were one candidate each is the list of theirs, joined by commas.

        Raises:
            ConfigError: the task names both of `text_b` and `choices`, or none.
            DataError: some rows of a query have a relevance and others have not.
        """
        has_lists, is_single = (source.column(name) is not None for name in ("choices", "text_b"))
        if has_lists == is_single:
            raise ConfigError(
                "task.kind=rank needs either data.fields.text_b, the key of a row's candidate, or "
                "data.fields.choices, that of its list of candidates; "
                f"{'both are' if has_lists else 'none is'} set"
            )
        if has_lists:
            yield from rows
            return
        label, id_ = source.column("label"), source.column("id") or "id"
        queries: dict[str, list[Row]] = {}
        for row in rows:
            gold = row.values.get(label)
            if gold is not None and name_of(gold, row) in source.data.drop_labels:
                source.counts[f"dropped: label {name_of(gold, row)!r}"] += 1
                continue
            queries.setdefault(text_of(source, row, "text"), []).append(row)
        for of_query in queries.values():
            first = of_query[0]
            golds = [row.values.get(label) for row in of_query]
            has_gold = {gold not in (None, "") for gold in golds}
            if len(has_gold) > 1:
                raise DataError(
                    f"{first.where}: of the {len(golds)} rows of this query some have no "
                    f"{label!r}: {golds[:20]}; give all of them one, or leave those out"
                )
            candidates = [text_of(source, row, "text_b") for row in of_query]
            gold = golds if all(has_gold) else None
            values = {**first.values, "choices": candidates, label: gold}
            if first.values.get(id_) is not None:
                values[id_] = ",".join(str(row.values.get(id_)) for row in of_query)
            yield first._replace(values=values)

    def choices(self, source: TableFile, row: Row) -> tuple[str, ...]:
        """Return the candidates."""
        if source.column("choices") is None:
            return tuple(row.values["choices"])
        return tuple(map(str, choices_of(source, row)[0]))

    def read_gold(self, source: TableFile, row: Row, example: Example, value: Any) -> Gold:
        """Read a relevance of each candidate: 0, or more for better ones."""
        if not isinstance(value, list) or len(value) != len(example.choices):
            raise DataError(
                f"{row.where}: {len(example.choices)} candidates, but the relevances are "
                f"{str(value)[:80]!r}; expected a list with one for each; {OTHER_LABEL}"
            )
        try:
            relevances: tuple[float, ...] = tuple(float(item) for item in value)
        except (TypeError, ValueError):
            relevances = (math.nan,)
        if not all(0 <= item <= _MOST for item in relevances):
            raise DataError(
                f"{row.where}: {str(value)[:80]!r} are not all relevances; expected numbers from 0 "
                f"(irrelevant) to {_MOST}, since gains are 2^r - 1; {OTHER_LABEL}"
            )
        source.counts["queries without a relevant candidate, not scored"] += not any(relevances)
        return relevances

    def encode(self, writer: RowWriter, number: int, example: Example) -> Iterator[TokenRow]:
        """Yield [CLS] query [SEP] candidate [SEP] for each candidate."""
        # In a file with a row a candidate, text_b is the first one, which stands in the list, too.
        plain = replace(example, text_b="")
        for part in range(len(example.choices)):
            yield self.row(writer, number, part, plain)

    def targets(self, spec: HeadSpec, batch: UnitBatch) -> Arrays:
        """Return `labels` (U, C) float32: shares of a query's relevance, 0 where it has none."""
        golds = batch.golds
        shares = np.zeros((len(golds), max(map(len, golds))), np.float32)
        for row, gold in zip(shares, golds, strict=True):
            row[: len(gold)] = np.array(gold) / (sum(gold) or 1)
        return {"labels": shares}

    def loss_of_zero_scores(self, spec: HeadSpec, data: TaskRows) -> float:
        """Return the mean entropy of equal probabilities, 0 of queries without relevance."""
        golds: list[Any] = [row.gold for row in data.examples]
        return float(np.mean([math.log(len(gold)) * any(gold) for gold in golds]))

    def prediction(self, spec: HeadSpec, example: Example, decided: Decided) -> Answered:
        """Return the score of each candidate, in their order in the file."""
        [(_, scores)] = decided[:1]
        return [short(score) for score in scores[: len(example.choices)]], None

    def problem(self, labels: Labels, row: PredictionRow) -> str:
        """Compare the numbers of scores and of relevances."""
        if row.gold is None or len(row.gold) == len(row.prediction):
            return ""
        return f"{len(row.prediction)} scores for {len(row.gold)} relevances"

    def submission(self, text: str, prediction: Any) -> None:
        """Return None: CLUE has no such task."""

    def tables(self, golds: Values, predictions: Values, labels: Labels, scorer: str) -> Tables:
        """Return the mean reciprocal rank and NDCG of queries with a relevant candidate.

        Candidates with equal scores stand in every order equally often.
        """
        pairs = [(g, p) for g, p in zip(golds, predictions, strict=True) if any(g)]
        return {
            "mrr": _of_queries([reciprocal_rank(*pair) for pair in pairs], len(golds)),
            "ndcg": _of_queries([ndcg(*pair) for pair in pairs], len(golds)),
        }

    def majority(
        self, golds: Values, *, labels: Labels = (), scorer: str = "squad"
    ) -> dict[str, float]:
        """Score equal scores for all candidates."""
        every = self.score(golds, [[0.0] * len(gold) for gold in golds])
        return {name: table.score for name, table in every.items()}

    def chance(self, golds: Values, labels: Labels, num_choices: Values = ()) -> dict[str, float]:
        """Return what random orders give, which is what equal scores give."""
        return self.majority(golds)


def _of_queries(values: Sequence[float], num_rows: int) -> Table:
    """Return the mean of values; rows that have none are lines of zeros, and count for nothing."""
    lines = np.zeros((num_rows, 2))
    lines[: len(values)] = np.array([values, np.ones(len(values))]).T.reshape(-1, 2)
    return Table(lines, lambda sums: ratio(sums[..., 0], sums[..., 1]))


def _ties(gold: Sequence[float], scores: Sequence[float]) -> Iterator[tuple[int, list[float]]]:
    """Yield the relevances of candidates with equal scores, and the number of those above."""
    above, order = 0, np.array(scores, np.float64)
    for score in np.unique(order)[::-1]:
        tied = [gold[place] for place in np.flatnonzero(order == score).tolist()]
        yield above, tied
        above += len(tied)


def reciprocal_rank(gold: Sequence[float], scores: Sequence[float]) -> float:
    """Return 1 / the place of the first relevant candidate, the mean over all orders of ties."""
    for above, tied in _ties(gold, scores):
        num, relevant = len(tied), sum(value > 0 for value in tied)
        if relevant:
            # The chance that the first relevant one of the tied has `before` others before it.
            orders = math.comb(num, relevant)
            return sum(
                math.comb(num - before - 1, relevant - 1) / orders / (above + before + 1)
                for before in range(num - relevant + 1)
            )
    return 0.0


def ndcg(gold: Sequence[float], scores: Sequence[float]) -> float:
    """Return the discounted gain of the first 10 places over that of the best order.

    The gain of relevance r is 2^r - 1, the discount of place p 1 / log2(p + 1) (Burges et al.
    2005). Candidates with equal scores share the mean of their gains (McSherry and Najork 2008).
    """
    discounts = 1 / np.log2(np.arange(2, len(gold) + 2))
    discounts[_DEPTH:] = 0
    gains = np.exp2(np.array(gold, np.float64)) - 1
    total = 0.0
    for above, tied in _ties(gains.tolist(), scores):
        total += float(np.mean(tied) * discounts[above : above + len(tied)].sum())
    best = float((np.sort(gains)[::-1] * discounts).sum())
    return total / best if best else 0.0


RANK = Ranking("rank", ("text",), ("ndcg", "mrr"), optional=("text_b", "choices"))
