"""Paired differences over seeds, with intervals, and the sentence that they allow."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import fmean
from typing import Any

import numpy as np

from experiments.read import Reading
from experiments.study import MEAN_SCORE, PartConfig, StudyCell, StudyPlan
from pipeline.tasks.intervals import (
    LEVEL,
    Interval,
    RowVariance,
    interval_of,
    row_variance,
)

OPEN = "not decided"
SAME = "same in all seeds"
"""The verdict where nothing varies: no chance is seen, and none can be told."""
POOLED = ("all levels",)
"""Levels of an effect that averages those of its part."""
_LOWER_IS_BETTER = ("held_out_loss", "loss@", "train_loss.", "nats_per_char")
_NO_BETTER = ("entropy", "js_layers", "js_heads", "pieces_per_char")


Decision = tuple[str, tuple[str, ...]]
"""A metric and the pairs of runs."""


@dataclass(frozen=True)
class Effect:
    """An arm minus the part's first arm, at one combination of levels, in one metric."""

    part: str
    levels: tuple[str, ...]
    arm: str
    against: str
    metric: str
    pairs: dict[int, float]
    """Difference by seed."""
    lost: int
    """Seeds of which one run or both are missing or have no number."""
    interval: Interval | None
    """None without a pair."""
    runs: tuple[str, ...]
    """The pairs of runs, each sorted: equal ones in two parts are one comparison."""
    rows: RowVariance | None
    """What other rows of a task would change; None without rows that all seeds have."""
    stands: bool | None = None
    """Whether the difference stands after Holm's correction; None where none was found."""

    @property
    def decision(self) -> Decision:
        """What is decided: equal ones in two parts are one."""
        return self.metric, self.runs

    @property
    def verdict(self) -> str:
        """`better`, `worse`, `higher`, `lower`, `not decided` or `same in all seeds`."""
        if self.interval is None or not self.interval.is_decided:
            is_same = self.interval is not None and self.interval.method == "none"
            return SAME if is_same and len(self.pairs) > 1 else OPEN
        is_higher, sign = self.interval.mean > 0, direction(self.metric)
        if not sign:
            return "higher" if is_higher else "lower"
        return "better" if is_higher == (sign > 0) else "worse"


@dataclass(frozen=True)
class CellSummary:
    """The runs of one cell."""

    cell: StudyCell
    finished: int
    diverged: int
    stuck: int
    """Number of finished runs that are stuck."""
    open: int
    """Runs that failed otherwise, or are not done."""
    means: dict[str, float]
    deviations: dict[str, float]
    """Over seeds, with n - 1; without metrics of one seed."""


def direction(metric: str) -> int:
    """Return 1 where more is better, -1 where less is, 0 for what only describes."""
    if metric.startswith(_NO_BETTER):
        return 0
    return -1 if metric.startswith(_LOWER_IS_BETTER) else 1


def effects(
    plan: StudyPlan,
    readings: Mapping[str, Reading],
    known_rows: Mapping[Decision, RowVariance] | None = None,
) -> list[Effect]:
    """Compare the arms of each part with its first one, by seed.

    `known_rows` are of a page whose runs are not there any more.
    """
    compared = []
    for name, part in plan.parts.items():
        if plan.is_sweep(name):
            continue
        for metric, levels, arm in product(part.metrics, plan.levels(name), part.arms[1:]):
            cells = StudyCell(name, arm, levels), StudyCell(name, part.arms[0], levels)
            mine, first = (values_by_seed(plan, readings, cell, metric) for cell in cells)
            pairs = {
                s: mine[s] - first[s] for s in plan.of_cells[cells[0]] if s in mine and s in first
            }
            names = [(plan.of_cells[cells[0]][s], plan.of_cells[cells[1]][s]) for s in pairs]
            runs = tuple(pair_of(plan, *cells, seed) for seed in pairs)
            tasks = plan.tasks if metric == MEAN_SCORE else (metric,)
            rows = _rows(readings, names, tasks)
            if known_rows is not None:
                rows = known_rows.get((metric, runs))
            compared.append(
                Effect(
                    part=name,
                    levels=levels,
                    arm=arm,
                    against=part.arms[0],
                    metric=metric,
                    pairs=pairs,
                    lost=len(plan.of_cells[cells[0]]) - len(pairs),
                    interval=interval_by_seed(pairs, rows),
                    runs=runs,
                    rows=rows,
                )
            )
    return compared + _pooled(plan, compared)


def interval_by_seed(pairs: Mapping[int, float], rows: RowVariance | None) -> Interval | None:
    """Return the interval of a mean difference; without limits where all seeds have the same."""
    if not pairs:
        return None
    found = interval_of(list(pairs.values()), rows)
    if found.low == found.high:
        return Interval(found.mean, math.nan, math.nan, "none", math.nan)
    return found


def _pooled(plan: StudyPlan, compared: Sequence[Effect]) -> list[Effect]:
    """Average each seed's differences over the levels, where a part asks so.

    Levels of a seed share its order of the text, so that a seed is one number, whatever the levels.
    """
    places: dict[tuple[str, str, str], list[Effect]] = {}
    for effect in compared:
        if plan.parts[effect.part].pooled:
            places.setdefault((effect.part, effect.metric, effect.arm), []).append(effect)
    found = []
    for of in places.values():
        seeds = [seed for seed in of[0].pairs if all(seed in each.pairs for each in of)]
        pairs = {seed: fmean(each.pairs[seed] for each in of) for seed in seeds}
        names = [dict(zip(each.pairs, each.runs, strict=True)) for each in of]
        rows = _rows_at_most([each.rows for each in of])
        found.append(
            replace(
                of[0],
                levels=POOLED,
                pairs=pairs,
                lost=of[0].lost + len(of[0].pairs) - len(pairs),
                interval=interval_by_seed(pairs, rows),
                runs=tuple(", ".join(of_level[seed] for of_level in names) for seed in seeds),
                rows=rows,
            )
        )
    return found


def _rows_at_most(levels: Sequence[RowVariance | None]) -> RowVariance | None:
    """Bound what other rows do to the mean over levels, which are scored on the same ones."""
    known = [of for of in levels if of is not None]
    if not known:
        return None
    # Cauchy and Schwarz: as if rows moved all levels alike.
    deviation = sum(math.sqrt(of.variance) for of in known) / len(levels)
    return RowVariance(deviation**2, min(of.rows for of in known))


def _rows(
    readings: Mapping[str, Reading], runs: Sequence[tuple[str, str]], tasks: Collection[str]
) -> RowVariance | None:
    """Estimate what other rows of tasks would change in the mean of paired differences."""
    variances = [of for task in tasks if (of := _rows_of(readings, runs, task)) is not None]
    if not variances:
        return None
    # Of a mean over tasks, whose rows are drawn apart.
    total = sum(of.variance for of in variances) / len(tasks) ** 2
    return RowVariance(total, min(of.rows for of in variances))


def _rows_of(
    readings: Mapping[str, Reading], runs: Sequence[tuple[str, str]], task: str
) -> RowVariance | None:
    scores = [[readings[run].tasks.get(task) for run in pair] for pair in runs]
    known = [(mine, first) for mine, first in scores if mine is not None and first is not None]
    rows = [side.rows for pair in known for side in pair]
    # Seeds that draw classes have rows of their own, whose chance is in that of the seeds.
    if not rows or len(known) < len(scores) or any(other != rows[0] for other in rows):
        return None
    draws = np.stack([mine.draws[:, 0] - first.draws[:, 0] for mine, first in known], axis=1)
    return row_variance(draws, len(rows[0]))


@dataclass(frozen=True)
class Slope:
    """How the differences of a metric NAME@X grow with log X, where a part asks so."""

    part: str
    arm: str
    against: str
    metric: str
    levels: tuple[str, ...]
    by_seed: dict[int, float]
    """Slope of each seed's differences, by least squares."""
    interval: Interval
    stands: bool | None = None

    def plain(self) -> dict[str, Any]:
        """Return the values of a page's JSON."""
        of, whole = self.interval, {**asdict(self), "slope": self.interval.mean}
        whole |= {"low": of.low, "high": of.high, "p": of.p}
        return {name: value for name, value in whole.items() if name != "interval"}

    @property
    def text(self) -> str:
        """What the fit says."""
        place = f" ({'/'.join(self.levels)})" if self.levels else ""
        pair, of = f"{self.metric}, {self.arm} - {self.against}{place}", self.interval
        if math.isnan(of.low):
            return f"{pair}: too few seeds for an interval of the slope on the logarithm"
        words = {None: OPEN, True: "decided, stands after Holm", False: "decided, falls after Holm"}
        word = words[self.stands]
        return (
            f"{pair}: {of.mean:+.4f} for each factor of e, {LEVEL:.0%} interval {of.low:+.4f} .. "
            f"{of.high:+.4f} (slopes of {len(self.by_seed)} seeds on the logarithm; {word})"
        )


def slopes(plan: StudyPlan, compared: Sequence[Effect]) -> list[Slope]:
    """Fit each seed's differences of metrics NAME@X to log X, where a part asks so.

    The interval is over the seeds' slopes: the X of a seed share its pre-trained models.
    """
    lines: dict[tuple[str, str, str, tuple[str, ...]], dict[int, list[tuple[float, float]]]] = {}
    for effect in compared:
        name, _, at = effect.metric.partition("@")
        if plan.parts[effect.part].regress and at:
            place = lines.setdefault((effect.part, effect.arm, name, effect.levels), {})
            for seed, value in effect.pairs.items():
                place.setdefault(seed, []).append((math.log(float(at)), value))
    found = []
    for (part, arm, metric, levels), of_seeds in lines.items():
        fits = {seed: _slope(points) for seed, points in of_seeds.items() if len(points) > 1}
        if fits:
            against, interval = plan.parts[part].arms[0], interval_of(list(fits.values()))
            found.append(Slope(part, arm, against, metric, levels, fits, interval))
    return found


def _slope(points: Iterable[tuple[float, float]]) -> float:
    """Return the slope of the line through points that has the least squares."""
    x, y = (np.array(values) for values in zip(*points, strict=True))
    return float(((x - x.mean()) * y).sum() / ((x - x.mean()) ** 2).sum())


def pair_of(plan: StudyPlan, one: StudyCell, other: StudyCell, seed: int) -> str:
    """Name two runs that are compared, in the same order whichever is subtracted."""
    cells = one, other
    runs = [plan.study.arms[cell.arm].read_as(plan.of_cells[cell][seed]) for cell in cells]
    return " - ".join(sorted(runs))


def values_by_seed(
    plan: StudyPlan, readings: Mapping[str, Reading], cell: StudyCell, metric: str
) -> dict[int, float]:
    """Return a metric of a cell's runs by seed, of those that have it."""
    metric = plan.study.arms[cell.arm].read_as(metric)
    return {
        seed: readings[run].values[metric]
        for seed, run in plan.of_cells[cell].items()
        if metric in readings[run].values
    }


def summaries(plan: StudyPlan, readings: Mapping[str, Reading]) -> list[CellSummary]:
    """Summarise each cell over its seeds."""
    cells = []
    for cell, runs in plan.of_cells.items():
        mine = [readings[run] for run in runs.values()]
        outcomes = [reading.outcome for reading in mine]
        values = {
            metric: np.array(list(values_by_seed(plan, readings, cell, metric).values()))
            for metric in plan.parts[cell.part].metrics
        }
        cells.append(
            CellSummary(
                cell=cell,
                finished=outcomes.count("finished"),
                diverged=outcomes.count("diverged"),
                stuck=sum(reading.stuck for reading in mine),
                open=sum(state not in ("finished", "diverged") for state in outcomes),
                means={name: float(of.mean()) for name, of in values.items() if len(of)},
                deviations={
                    name: float(of.std(ddof=1)) for name, of in values.items() if len(of) > 1
                },
            )
        )
    return cells


def verdicts(
    plan: StudyPlan,
    compared: Sequence[Effect],
    fits: Sequence[Slope],
    cells: Sequence[CellSummary],
) -> list[str]:
    """Name for each part the better arm in its first metric, at all X of a NAME@X.

    `!` marks what stands after Holm's correction. A sweep names the best levels of each arm.
    """
    lines = []
    for name, part in plan.parts.items():
        if plan.is_sweep(name):
            lines += _best_levels(name, part, cells)
            continue
        metric = part.metrics[0].partition("@")[0]
        mine = [e for e in compared if e.part == name and e.metric.partition("@")[0] == metric]
        for arm in part.arms[1:]:
            every = [effect for effect in mine if effect.arm == arm]
            of_arm = [effect for effect in every if effect.levels != POOLED]
            done = [effect for effect in of_arm if effect.interval is not None]
            if not done:
                lines.append(
                    f"{name}: {arm} against {part.arms[0]}: no pair of runs has {metric} yet"
                )
                continue
            counted = {
                word: [effect for effect in done if effect.verdict == word]
                for word in ("better", "worse", "higher", "lower", SAME, OPEN)
            }
            said = "; ".join(
                f"{word} in {len(those)} of {len(of_arm)}{_where(those)}"
                for word, those in counted.items()
                if those
            )
            lines.append(f"{name}: {arm} against {part.arms[0]}, {metric}: {said}")
            lines += [
                f"{name}: {arm} against {part.arms[0]}, {each.metric}, mean of its levels by seed: "
                f"{each.verdict}{_where([each])}"
                for each in every
                if each.levels == POOLED and each.interval is not None
            ]
    return lines + [f"{fit.part}: {fit.text}" for fit in fits]


def _best_levels(name: str, part: PartConfig, cells: Sequence[CellSummary]) -> list[str]:
    """Name the level at which each arm of a sweep is best, by the levels of other factors.

    It is of the last factor with several levels: a sweep over one level says nothing.
    """
    metric, found = part.metrics[0], dict[tuple[str, ...], tuple[float, str]]()
    sign, mine = direction(metric), [of for of in cells if of.cell.part == name]
    swept = [
        n
        for n, of in enumerate(zip(*(of.cell.levels for of in mine), strict=True))
        if len(set(of)) > 1
    ]
    for summary in mine:
        if swept and metric in summary.means:
            others = list(summary.cell.levels)
            level, value = others.pop(swept[-1]), summary.means[metric]
            key = summary.cell.arm, *others
            if key not in found or sign * value > sign * found[key][0]:
                found[key] = value, level
    said = [f"{', '.join(key)} at {level} ({value:.4f})" for key, (value, level) in found.items()]
    return [f"{name}: by single runs, best {metric} of {'; of '.join(said)}"] if said else []


def _where(those: Sequence[Effect]) -> str:
    """Name places and differences of a few effects."""
    shown = []
    for effect in those:
        assert effect.interval is not None, "they are done"
        at = effect.metric.partition("@")[2]
        levels = () if effect.levels == POOLED else effect.levels
        place = "/".join((*levels, *([f"@{at}"] if at else [])))
        place += ": " * bool(place)
        limits = ""
        if effect.interval.method != "none":
            limits = f" [{effect.interval.low:+.4f}, {effect.interval.high:+.4f}]"
        shown.append(f"{place}{effect.interval.mean:+.4f}{limits}{'!' * bool(effect.stands)}")
    return f" ({', '.join(shown)})"
