"""Scores of predictions: classes, entities, answers, numbers; baselines, and intervals over rows.

Every metric is a table with a line a row (counts or moments) and a function of its column sums.
So a bootstrap draw is a weighting of the lines, and costs a matrix product. Scores are fractions.
What is scored are names, spans and texts of the file, never tokens.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.errors import DataError
from pipeline.tasks.task import KINDS

Floats = npt.NDArray[np.float64]
_OTHER_NAMES = {"M": "I", "L": "E", "U": "S"}
"""BMES and BILOU write the tags of BIOES in other letters."""


class Span(NamedTuple):
    """A typed stretch of a text, from `start` to `end`, exclusive, in characters (or words)."""

    type: str
    start: int
    end: int


# Tags and entities


def split_tag(tag: str) -> tuple[str, str]:
    """Split a tag of BIO, BIOES, BMES or BILOU into one of B I E S O and its type."""
    prefix, _, kind = tag.partition("-")
    prefix = _OTHER_NAMES.get(prefix, prefix)
    return (prefix, kind) if prefix in ("B", "I", "E", "S") and kind else ("O", "")


def types_of(kind: str, labels: Sequence[str]) -> tuple[str, ...]:
    """Return the classes that `data.labels` names, of tags such as O, B-ORG, I-ORG their types."""
    types = [split_tag(label)[1] for label in labels if label != "O"]
    is_tags = kind in ("tag", "spans") and "O" in labels and all(types)
    return tuple(dict.fromkeys(types) if is_tags else labels)


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


# Answers


_CMRC_SIGNS = set("-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』")
# As nltk's word_tokenize, with which the official CMRC scorer splits what is not Chinese. A full
# stop is a word at the end, also before marks that close something.
_OPENS_QUOTE = re.compile(r'(?:^|(?<=[\s(\[{<]))"')
_APART = (
    r"\.{2,}|--|[,:](?!\d)|(?<=[^.])\.(?=[\])}>\"'»\s]*$)|n't\b|'(?:s|m|d|ll|re|ve)\b|``|''"
    r"|'(?=\s|$)|[?!;@#$%&()\[\]{}<>‒–—―«»]"
)
_WORDS = re.compile(rf"{_APART}|(?:(?!{_APART})\S)+")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ASCII_SIGNS = set("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


def squad_words(text: str) -> list[str]:
    """Return the words that SQuAD compares: lower case, without punctuation and articles.

    After `normalize_answer` of https://rajpurkar.github.io/SQuAD-explorer (evaluate-v2.0.py).
    """
    plain = "".join(char for char in text.lower() if char not in _ASCII_SIGNS)
    return _ARTICLES.sub(" ", plain).split()


def cmrc_plain(text: str) -> str:
    """Return the text that CMRC 2018 compares for equality: lower case, without its signs."""
    return "".join(char for char in text.lower().strip() if char not in _CMRC_SIGNS)


def cmrc_segments(text: str) -> list[str]:
    """Return the segments that CMRC 2018 compares: Chinese characters, and words between them.

    After `mixed_segmentation` of the official cmrc2018_evaluate.py; words without nltk.
    """
    segments, run = [], ""
    for char in [*cmrc_plain(text), ""]:
        if char and not "\u4e00" <= char <= "\u9fa5":
            run += char
            continue
        segments += _WORDS.findall(_OPENS_QUOTE.sub(" `` ", run).replace('"', " '' "))
        segments += [char] if char else []
        run = ""
    return segments


def longest_common_run(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the length of the longest contiguous run that stands in both."""
    best, above = 0, [0] * (len(other) + 1)
    for item in one:
        row = [0] * (len(other) + 1)
        for j, each in enumerate(other):
            if item == each:
                row[j + 1] = above[j] + 1
                best = max(best, row[j + 1])
        above = row
    return best


def _overlap_f1(common: int, predicted: int, gold: int) -> float:
    return 2 * common / (predicted + gold) if common else 0.0


def squad_scores(answers: Sequence[str], prediction: str) -> tuple[float, float]:
    """Return (em, f1) of one question by SQuAD's rules; no answers: "" is right."""
    words = squad_words(prediction)
    best = (0.0, 0.0)
    # As officially, an answer of which nothing is left counts only where all are so.
    for gold in [gold for answer in answers if (gold := squad_words(answer))] or [[]]:
        common = (Counter(gold) & Counter(words)).total()
        f1 = _overlap_f1(common, len(words), len(gold)) if gold and words else float(gold == words)
        best = (max(best[0], float(gold == words)), max(best[1], f1))
    return best


def cmrc_scores(answers: Sequence[str], prediction: str) -> tuple[float, float]:
    """Return (em, f1) of one question by CMRC 2018's rules: f1 of the longest common run."""
    plain, segments = cmrc_plain(prediction), cmrc_segments(prediction)
    best = (0.0, 0.0)
    for answer in answers:
        gold = cmrc_segments(answer)
        f1 = _overlap_f1(longest_common_run(gold, segments), len(segments), len(gold))
        best = (max(best[0], float(cmrc_plain(answer) == plain)), max(best[1], f1))
    return best


_SCORERS = {"squad": squad_scores, "cmrc": cmrc_scores}


# Choices


def assign(scores: Floats) -> list[int]:
    """Return for each row (blank) a column (candidate) of its own, with the highest sum of scores.

    `scores` [rows, columns], with as many columns as rows at least. ChID's blanks of a group have
    distinct answers. Source: the Hungarian method by shortest augmenting paths (Jonker and
    Volgenant 1987).

    Raises:
        DataError: a score is infinite or NaN, or there are more rows than columns.
    """
    num_rows, num_columns = scores.shape
    if num_rows > num_columns or not np.isfinite(scores).all():
        raise DataError(
            f"{num_rows} blanks cannot take {num_columns} candidates once each by these scores: "
            "expected no more blanks than candidates, and finite scores"
        )
    costs = -scores
    row_price, column_price = np.zeros(num_rows), np.zeros(num_columns)
    owner = np.full(num_columns, -1)
    for new in range(num_rows):
        shortest, before = np.full(num_columns, np.inf), np.full(num_columns, -1)
        done = np.zeros(num_columns, dtype=bool)
        row, column, length = new, -1, 0.0
        while row >= 0:
            through = length + costs[row] - row_price[row] - column_price
            is_better = ~done & (through < shortest)
            shortest[is_better], before[is_better] = through[is_better], column
            column = int(np.argmin(np.where(done, np.inf, shortest)))
            length, row = shortest[column], owner[column]
            done[column] = True
        for each in np.flatnonzero(done & (owner >= 0)):
            row_price[owner[each]] += length - shortest[each]
        row_price[new] += length
        column_price[done] -= length - shortest[done]
        while column >= 0:
            owner[column] = owner[before[column]] if before[column] >= 0 else new
            column = int(before[column])
    return [int(np.flatnonzero(owner == row)[0]) for row in range(num_rows)]


# Metrics


# A bootstrap draw is then a product, paired for two models by the same key.
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


def _ratio(above: Floats, below: Floats) -> Floats:
    """Divide, with 0 where the denominator is 0."""
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


def _mean(values: Sequence[float]) -> Table:
    lines = np.array([values, np.ones(len(values))], dtype=np.float64).T
    return Table(lines, lambda sums: _ratio(sums[..., 0], sums[..., 1]))


def _items(value: Any) -> set[Any]:
    """Return what a row's gold or prediction holds: its label, its labels, or its spans."""
    if isinstance(value, (list, tuple, set)):
        return {tuple(item) if isinstance(item, (list, tuple)) else item for item in value}
    return {value}


def _class_of(item: Any) -> Any:
    return item[0] if isinstance(item, tuple) else item


def _counts(golds: Sequence[Any], predictions: Sequence[Any], classes: Sequence[Any]) -> Floats:
    """Count right, predicted and gold items: [rows, classes, 3]."""
    place = {name: i for i, name in enumerate(classes)}
    counts = np.zeros((len(golds), len(classes), 3))
    for row, gold, prediction in zip(counts, golds, predictions, strict=True):
        one, other = _items(gold), _items(prediction)
        for column, items in enumerate((one & other, other, one)):
            for item in items:
                row[place[_class_of(item)], column] += 1
    return counts


def _f1(sums: Floats) -> Floats:
    return _ratio(2 * sums[..., 0], sums[..., 1] + sums[..., 2])


def _micro_f1(counts: Floats) -> Table:
    return Table(counts.sum(1), _f1)


def _macro_f1(counts: Floats) -> Table:
    """Average over the classes that stand in gold or prediction, as scikit-learn does."""

    def value(sums: Floats) -> Floats:
        each = sums.reshape(*sums.shape[:-1], -1, 3)
        present = (each[..., 1] + each[..., 2] > 0).astype(np.float64)
        return _ratio((_f1(each) * present).sum(-1), present.sum(-1))

    return Table(counts.reshape(len(counts), -1), value)


def _binary_f1(counts: Floats) -> Table:
    """F1 of the second of two classes; of more classes it is micro, which equals accuracy."""
    return Table(counts[:, 1], _f1) if counts.shape[1] == 2 else _micro_f1(counts)


def _matthews(counts: Floats) -> Table:
    """Correlate classes, by Gorodkin's form for any number of them; 0 if one side is constant."""

    def value(sums: Floats) -> Floats:
        each = sums.reshape(*sums.shape[:-1], -1, 3)
        right, predicted, gold = each[..., 0].sum(-1), each[..., 1], each[..., 2]
        rows = gold.sum(-1)
        above = right * rows - (predicted * gold).sum(-1)
        below = (rows**2 - (predicted**2).sum(-1)) * (rows**2 - (gold**2).sum(-1))
        return _ratio(above, np.sqrt(np.maximum(below, 0)))

    return Table(counts.reshape(len(counts), -1), value)


def _correlation(one: Floats, other: Floats) -> Table:
    """Correlate linearly; 0 if one side is constant, where it is undefined."""
    one, other = one - one.mean(), other - other.mean()  # against cancellation in the moments
    lines = np.stack([np.ones_like(one), one, other, one * one, other * other, one * other], axis=1)

    def value(sums: Floats) -> Floats:
        n, x, y, xx, yy, xy = np.moveaxis(sums, -1, 0)
        spread = np.maximum(n * xx - x * x, 0) * np.maximum(n * yy - y * y, 0)
        # Rounding leaves a constant side a spread of about 1e-16 of its squares.
        floor = 1e-24 * (n * xx) * (n * yy)
        return _ratio(n * xy - x * y, np.sqrt(np.where(spread > floor, spread, 0)))

    return Table(lines, value)


def ranks(values: Floats) -> Floats:
    """Return ranks from 1; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + 1 + ends) / 2)[inverse]


def tables(
    kind: str,
    golds: Sequence[Any],
    predictions: Sequence[Any],
    *,
    labels: Sequence[str] = (),
    scorer: str = "squad",
) -> dict[str, Table]:
    """Return the metrics of a kind of task, by name; `labels` are its classes in order.

    Golds and predictions are those of `predictions-*.jsonl`: labels under their own names,
    indices of choices, spans [type, start, end], numbers; for qa a list of answers, and a text.

    Spearman's draws keep the ranks of all rows.

    Raises:
        DataError: there are no rows, or not as many predictions as golds.
    """
    if len(golds) != len(predictions) or not golds:
        raise DataError(f"{len(golds)} golds and {len(predictions)} predictions cannot be scored")
    if kind == "qa":
        pairs = [_SCORERS[scorer](g, p) for g, p in zip(golds, predictions, strict=True)]
        return {"em": _mean([em for em, _ in pairs]), "f1": _mean([f1 for _, f1 in pairs])}
    if kind == "regress":
        one, other = np.array(golds, dtype=np.float64), np.array(predictions, dtype=np.float64)
        return {
            "pearson": _correlation(one, other),
            "spearman": _correlation(ranks(one), ranks(other)),
        }
    right = [float(_items(g) == _items(p)) for g, p in zip(golds, predictions, strict=True)]
    accuracy = {"accuracy": _mean(right)}
    if kind in ("choice", "cloze"):
        return accuracy
    there = {_class_of(item) for each in (*golds, *predictions) for item in _items(each)}
    counts = _counts(golds, predictions, [*labels, *sorted(there - set(labels))])
    macro = {"macro_f1": _macro_f1(counts)}
    if kind in ("tag", "spans"):
        return {"f1": _micro_f1(counts)} | macro
    if kind == "multilabel":
        return accuracy | {"f1": _micro_f1(counts)} | macro
    return accuracy | {"f1": _binary_f1(counts)} | macro | {"matthews": _matthews(counts)}


# Baselines and intervals


def majority(
    kind: str, golds: Sequence[Any], *, labels: Sequence[str] = (), scorer: str = "squad"
) -> dict[str, float]:
    """Score the best constant prediction: the commonest gold, the mean, no span, no answer.

    Of two classes either counts: the rarer one has the higher f1 where it is the second.
    """
    constants: list[Any]
    if kind == "qa":
        constants = [""]
    elif kind in ("tag", "spans"):
        constants = [[]]
    elif kind == "regress":
        constants = [float(np.mean(golds))]
    else:
        counts = Counter(item for gold in golds for item in _items(gold))
        constants = sorted(counts, key=lambda item: (-counts[item], str(item))) or [""]
        constants = constants[: 2 if len(labels) == 2 else 1]
        if kind == "multilabel":
            constants = [[name] for name in constants]
    every = [
        tables(kind, golds, [constant] * len(golds), labels=labels, scorer=scorer)
        for constant in constants
    ]
    return {name: max(each[name].score for each in every) for name in every[0]}


def chance(
    kind: str, golds: Sequence[Any], *, labels: Sequence[str] = (), num_choices: Sequence[int] = ()
) -> dict[str, float]:
    """Return what guesses give on average: uniform over classes or choices, or coins for labels.

    F1 is that of the average counts. Correlations, spans and answers have 0.
    """
    if kind in ("choice", "cloze"):
        return {"accuracy": float(np.mean([1 / num for num in num_choices]))}
    if kind in ("tag", "spans", "qa", "regress"):
        return dict.fromkeys(KINDS[kind].metrics, 0.0)
    is_multi = kind == "multilabel"
    rate = 1 / 2 if is_multi else 1 / len(labels)
    gold = _counts(golds, golds, labels)[..., 2].mean(0)
    each = _ratio(2 * gold * rate, gold + rate)
    macro = {"macro_f1": float(each.mean())}
    if is_multi:
        micro = 2 * gold.sum() * rate / (gold.sum() + rate * len(labels))
        return macro | {"accuracy": rate ** len(labels), "f1": float(micro)}
    f1 = float(each[1]) if len(labels) == 2 else rate
    return macro | {"accuracy": rate, "f1": f1, "matthews": 0.0}


def bootstrap(seeds: Sequence[Table], num_draws: int = 1000, key: int = 0) -> Floats:
    """Draw rows, and runs of several seeds, with replacement; mean scores of the draws, [draws].

    Draws of one key take the same rows of two models, so their difference is a paired one.
    """
    rows, runs = np.random.default_rng((key, 0)), np.random.default_rng((key, 1))
    num_rows = len(seeds[0].lines)
    picks = runs.integers(len(seeds), size=(num_draws, len(seeds)))
    draws = np.empty(num_draws)
    for draw in range(num_draws):
        weights = np.bincount(rows.integers(num_rows, size=num_rows), minlength=num_rows)
        scores = np.array([table.value(weights @ table.lines) for table in seeds])
        draws[draw] = scores[picks[draw]].mean()
    return draws


def interval(draws: Floats, level: float = 0.95) -> tuple[float, float]:
    """Return the bounds that hold the middle share `level` of the draws."""
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
