"""CAN: uncertain class probabilities, corrected by the class frequencies of the training rows.

Each uncertain row is stacked alone under the confident rows; columns are normalised, weighted with
the prior, and rows are normalised, once. Source: kexue.fm/archives/8728 and arXiv 2109.13449. It
assumes that the rows are distributed over the classes as the training rows are, so that is checked.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.errors import ConfigError, DataError
from pipeline.finetune.result import RESULT, SeedRun, averaged, joined
from pipeline.tasks.intervals import interval_of, plain, row_draws, row_variance
from pipeline.tasks.kinds.table import KINDS
from pipeline.tasks.scores import Floats, Table
from pipeline.tasks.types import PredictionRow

# Above what sampling gives; a fixed bound would warn of noise at 119 classes and miss shifts at 2.
_SHIFT = 0.1


@dataclass(frozen=True)
class CanConfig:
    """What CAN takes as uncertain, and how it corrects."""

    top: int = 3
    """Largest probabilities whose entropy is the uncertainty; no more than there are classes."""
    tau: float = 0.9
    """Share of the largest entropy from which a row is uncertain."""
    alpha: float = 1.0
    """Power of the probabilities before their columns are normalised."""

    def __post_init__(self) -> None:
        if self.top < 2 or not 0 <= self.tau <= 1 or not self.alpha > 0:
            raise ConfigError(
                f"top={self.top}, tau={self.tau}, alpha={self.alpha}: expected 2 or more, a share "
                "from 0 to 1, and a power above 0"
            )


def softmax(scores: Floats) -> Floats:
    """Return probabilities of scores, [rows, classes]."""
    powers = np.exp(scores - scores.max(1, keepdims=True))
    probabilities: Floats = powers / powers.sum(1, keepdims=True)
    return probabilities


def uncertainty(probabilities: Floats, top: int) -> Floats:
    """Return the entropy of the renormalised `top` largest, over its maximum: 0 to 1, [rows]."""
    top = min(top, probabilities.shape[1])
    if top < 2:
        return np.zeros(len(probabilities))
    best = np.sort(probabilities, axis=1)[:, -top:]
    best = best / best.sum(1, keepdims=True)
    # 0 log 0 is 0.
    logs = np.log(best, out=np.zeros_like(best), where=best > 0)
    entropy: Floats = -(best * logs).sum(1) / np.log(top)
    return entropy


def adjust(
    probabilities: Floats, prior: Floats, config: CanConfig
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return corrected probabilities [rows, classes], and which rows were uncertain [rows]."""
    uncertain = uncertainty(probabilities, config.top) >= config.tau
    # Without a confident row the method would give every row the prior.
    if uncertain.all():
        return probabilities, uncertain
    powered = probabilities**config.alpha
    last = powered[uncertain]
    # A stack differs from another in its last row only, so the column sums of the confident rows
    # serve all: O(classes) a row.
    sums = powered[~uncertain].sum(0) + last
    weighted = np.divide(last, sums, out=np.zeros_like(last), where=sums > 0) * prior
    totals = weighted.sum(1, keepdims=True)
    adjusted = probabilities.copy()
    adjusted[uncertain] = np.divide(weighted, totals, out=adjusted[uncertain], where=totals > 0)
    return adjusted, uncertain


def shift(one: Floats, other: Floats) -> float:
    """Return the total variation distance of two distributions, 0 to 1."""
    return float(np.abs(one - other).sum() / 2)


def can_result(runs: Sequence[SeedRun], config: CanConfig) -> dict[str, Any]:
    """Return the key `can` of `result.json`: scores before and after, means over the seeds.

    `difference` is that of the task's metric, with its interval over rows and seeds.

    Raises:
        DataError: the kind of task has no classes, or the prior or the scores were not stored.
    """
    each = [_one_run(run, config) for run in runs]
    warnings = joined([run.seed for run in runs], [texts for _, texts, _ in each])
    splits = averaged([splits for splits, _, _ in each])
    for split, body in splits.items():
        body["difference"] = _difference([tables[split] for _, _, tables in each])
    return {"settings": asdict(config), "splits": splits, "warnings": warnings}


_Pair = tuple[Table, Table] | None
"""A split's metric before and after; None where it has no gold."""


def _difference(pairs: Sequence[_Pair]) -> dict[str, Any] | None:
    known = [pair for pair in pairs if pair is not None]
    if not known:
        return None
    before, after = ([pair[side] for pair in known] for side in (0, 1))
    values = [new.score - old.score for old, new in zip(before, after, strict=True)]
    rows = row_variance(row_draws(after) - row_draws(before), len(before[0].lines))
    found = plain(interval_of(values, rows), None)
    return {key: value for key, value in found.items() if key != "stands"}


def _one_run(run: SeedRun, config: CanConfig) -> tuple[dict[str, Any], list[str], dict[str, _Pair]]:
    if not run.config.kind.has_classes:
        known = ", ".join(kind.name for kind in KINDS.values() if kind.has_classes)
        raise DataError(
            f"{run.folder}: --can corrects probabilities of classes; task.kind="
            f"{run.config.task.kind} has none (expected {known})"
        )
    prior, splits, warnings, tables = _prior(run), {}, [], {}
    for split, rows in run.predictions.items():
        splits[split], texts, tables[split] = _one_split(run, split, rows, prior, config)
        warnings += [f"{split}: {text}" for text in texts]
    return splits, warnings, tables


def _prior(run: SeedRun) -> Floats:
    counts: Any = run.stored.get("prior")
    is_whole = isinstance(counts, dict) and set(counts) <= set(run.labels)
    is_whole = is_whole and all(type(num) is int and num >= 0 for num in counts.values())
    num_rows = sum(counts.values()) if is_whole else 0
    if not num_rows or run.stored.get("rows", {}).get("train", num_rows) != num_rows:
        raise DataError(
            f"{run.folder / RESULT}: prior is {counts!r}; expected how many of the rows of train "
            f"have each label ({', '.join(run.labels[:20])}), which --can needs"
        )
    rows = np.array([counts.get(label, 0) for label in run.labels], dtype=np.float64)
    prior: Floats = rows / rows.sum()
    return prior


def _one_split(
    run: SeedRun, split: str, rows: list[PredictionRow], prior: Floats, config: CanConfig
) -> tuple[dict[str, Any], list[str], _Pair]:
    if any(row.scores is None for row in rows):
        raise DataError(f"{run.folder}: predictions of {split} have no scores, which --can needs")
    scores = np.array([row.scores for row in rows], dtype=np.float64)
    adjusted, uncertain = adjust(softmax(scores), prior, config)
    before = [row.prediction for row in rows]
    best = [run.labels[i] for i in adjusted.argmax(1)]
    is_corrected = uncertain & ~uncertain.all()
    after = [
        new if is_new else old for old, new, is_new in zip(before, best, is_corrected, strict=True)
    ]
    confident = [name for name, is_no in zip(before, uncertain, strict=True) if not is_no]
    golds = [row.gold for row in rows if row.gold is not None]
    body: dict[str, Any] = {
        "uncertain": int(uncertain.sum()),
        "changed": sum(old != new for old, new in zip(before, after, strict=True)),
        "before": run.scored.body[split],
        "after": None,
    }
    pair: _Pair = None
    if golds:
        old, new = (
            run.config.kind.score(
                golds,
                [name for row, name in zip(rows, names, strict=True) if row.gold is not None],
                labels=run.labels,
            )
            for names in (before, after)
        )
        body["after"] = {name: table.score for name, table in new.items()}
        pair = old[run.config.metric], new[run.config.metric]
    warnings = []
    if not uncertain.any() or uncertain.all():
        which = "all rows are" if uncertain.any() else "no row is"
        warnings.append(f"{which} uncertain at tau={config.tau}: CAN changes nothing")
    for name, classes in (("confident predictions", confident), ("gold", golds)):
        key = f"shift_{name.split()[0]}"
        body[key] = None
        if classes:
            body[key], text = _check(name, classes, run.labels, prior)
            warnings += text
    return body, warnings, pair


def _check(
    name: str, classes: Sequence[str], labels: Sequence[str], prior: Floats
) -> tuple[float, list[str]]:
    """Return how far classes are distributed from the prior, and a warning if that is far."""
    found = Counter(classes)
    counts = np.array([found[label] for label in labels], dtype=np.float64)
    far = shift(counts / counts.sum(), prior)
    # Drawn from the prior itself, classes would be so far away on average.
    by_chance = float(np.sqrt(2 * prior * (1 - prior) / (np.pi * len(classes))).sum() / 2)
    if far <= by_chance + _SHIFT:
        return far, []
    return far, [
        f"{name} and training rows are distributed {far:.2f} apart (total variation; "
        f"{by_chance:.2f} by chance, warned from {_SHIFT} more): CAN assumes that they are alike"
    ]
