"""Paired differences over seeds, with intervals, and the sentence that they allow."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.read import Reading
from experiments.study import StudyCell, StudyPlan

LEVEL = 0.95
# Student's t up to here: a bootstrap of so few pairs is too narrow.
_MOST_FOR_T = 5
"""Pairs up to which an interval is Student's: a bootstrap of so few is too narrow."""
_DRAWS = 10_000
_LOWER_IS_BETTER = ("held_out_loss", "loss@", "train_loss.")
_NO_BETTER = ("entropy", "top5", "js_layers", "js_heads", "cosine", "gradient.")


@dataclass(frozen=True)
class ConfidenceInterval:
    """A mean with its 95% interval; NaN limits with one pair."""

    mean: float
    low: float
    high: float
    method: str
    """`t` or `bootstrap`; `none` with one pair."""

    @property
    def is_decided(self) -> bool:
        """Whether 0 lies outside."""
        return self.low > 0 or self.high < 0


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
    interval: ConfidenceInterval | None
    """None without a pair."""

    @property
    def verdict(self) -> str:
        """`better`, `worse`, `higher`, `lower` or `not decided`."""
        if self.interval is None or not self.interval.is_decided:
            return "not decided"
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


def interval_of(differences: Sequence[float]) -> ConfidenceInterval:
    """Estimate the mean of paired differences.

    Up to five pairs Student's t; beyond, the middle of 10,000 bootstrap means, drawn from seed 0.
    """
    values = np.asarray(differences, np.float64)
    mean = float(values.mean())
    if len(values) < 2:
        return ConfidenceInterval(mean, math.nan, math.nan, "none")
    if len(values) <= _MOST_FOR_T:
        from scipy.stats import t

        half = float(t.ppf((1 + LEVEL) / 2, len(values) - 1) * values.std(ddof=1))
        half /= math.sqrt(len(values))
        return ConfidenceInterval(mean, mean - half, mean + half, "t")
    drawn = np.random.default_rng(0).integers(len(values), size=(_DRAWS, len(values)))
    low, high = np.quantile(values[drawn].mean(1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    return ConfidenceInterval(mean, low, high, "bootstrap")


def slope_of(x: Sequence[float], y: Sequence[float]) -> ConfidenceInterval:
    """Fit y = a + b x by least squares; return b with Student's interval.

    Two points or equal x leave it open.
    """
    given, wanted = np.asarray(x, np.float64), np.asarray(y, np.float64)
    spread = float(((given - given.mean()) ** 2).sum())
    if len(given) < 3 or not spread:
        return ConfidenceInterval(math.nan, math.nan, math.nan, "none")
    from scipy.stats import t

    slope = float(((given - given.mean()) * wanted).sum() / spread)
    rest = wanted - wanted.mean() - slope * (given - given.mean())
    error = math.sqrt(float((rest**2).sum()) / (len(given) - 2) / spread)
    half = float(t.ppf((1 + LEVEL) / 2, len(given) - 2)) * error
    return ConfidenceInterval(slope, slope - half, slope + half, "t")


def effects(plan: StudyPlan, readings: Mapping[str, Reading]) -> list[Effect]:
    """Compare the arms of each part with its first one, by seed."""
    found = []
    for name, part in plan.parts.items():
        for metric in part.metrics:
            for levels in plan.levels(name):
                first = _by_seed(plan, readings, StudyCell(name, part.arms[0], levels), metric)
                for arm in part.arms[1:]:
                    other = _by_seed(plan, readings, StudyCell(name, arm, levels), metric)
                    pairs = {
                        s: other[s] - first[s] for s in plan.seeds if s in other and s in first
                    }
                    found.append(
                        Effect(
                            part=name,
                            levels=levels,
                            arm=arm,
                            against=part.arms[0],
                            metric=metric,
                            pairs=pairs,
                            lost=len(plan.seeds) - len(pairs),
                            interval=interval_of(list(pairs.values())) if pairs else None,
                        )
                    )
    return found


def slopes(plan: StudyPlan, found: Sequence[Effect]) -> list[dict[str, object]]:
    """Fit the differences of metrics NAME@X to log X, all seeds together, where a part asks so."""
    lines: dict[tuple[str, str, str, tuple[str, ...]], list[tuple[float, float]]] = {}
    for each in found:
        name, _, at = each.metric.partition("@")
        if plan.parts[each.part].regress and at:
            place = each.part, each.arm, name, each.levels
            points = [(math.log(float(at)), value) for value in each.pairs.values()]
            lines.setdefault(place, []).extend(points)
    fitted = []
    for (part, arm, metric, levels), points in lines.items():
        slope = slope_of([x for x, _ in points], [y for _, y in points])
        fitted.append(
            {
                "part": part,
                "arm": arm,
                "against": plan.parts[part].arms[0],
                "metric": metric,
                "levels": levels,
                "pairs": len(points),
                "slope": slope.mean,
                "low": slope.low,
                "high": slope.high,
            }
        )
    return fitted


def _by_seed(
    plan: StudyPlan, readings: Mapping[str, Reading], cell: StudyCell, metric: str
) -> dict[int, float]:
    return {
        seed: readings[run].values[metric]
        for seed, run in plan.of_cells[cell].items()
        if metric in readings[run].values
    }


def summaries(plan: StudyPlan, readings: Mapping[str, Reading]) -> list[CellSummary]:
    """Summarise each cell over its seeds."""
    found = []
    for cell, runs in plan.of_cells.items():
        mine = [readings[run] for run in runs.values()]
        outcomes = [each.outcome for each in mine]
        values = {
            metric: np.array([each.values[metric] for each in mine if metric in each.values])
            for metric in plan.parts[cell.part].metrics
        }
        found.append(
            CellSummary(
                cell=cell,
                finished=outcomes.count("finished"),
                diverged=outcomes.count("diverged"),
                stuck=sum(each.stuck for each in mine),
                open=sum(each not in ("finished", "diverged") for each in outcomes),
                means={name: float(of.mean()) for name, of in values.items() if len(of)},
                deviations={
                    name: float(of.std(ddof=1)) for name, of in values.items() if len(of) > 1
                },
            )
        )
    return found


def verdicts(plan: StudyPlan, found: Sequence[Effect]) -> list[str]:
    """Name for each part the better arm in its first metric, at all X of a NAME@X."""
    lines = []
    for name, part in plan.parts.items():
        metric = part.metrics[0].partition("@")[0]
        mine = [e for e in found if e.part == name and e.metric.partition("@")[0] == metric]
        for arm in part.arms[1:]:
            of_arm = [each for each in mine if each.arm == arm]
            done = [each for each in of_arm if each.interval is not None]
            if not done:
                lines.append(f"{name}: {arm} against {part.arms[0]}: no pair of runs is finished")
                continue
            counted = {
                word: [each for each in done if each.verdict == word]
                for word in ("better", "worse", "higher", "lower", "not decided")
            }
            said = "; ".join(
                f"{word} in {len(those)} of {len(of_arm)}{_where(those, len(of_arm))}"
                for word, those in counted.items()
                if those
            )
            lines.append(f"{name}: {arm} against {part.arms[0]}, {metric}: {said}")
    return lines + [f"{each['part']}: {slope_text(each)}" for each in slopes(plan, found)]


def slope_text(fitted: Mapping[str, object]) -> str:
    """Describe what a fit of `slopes` found."""
    pair = f"{fitted['metric']}, {fitted['arm']} - {fitted['against']}"
    slope, low, high = (float(str(fitted[name])) for name in ("slope", "low", "high"))
    if math.isnan(low):
        return f"{pair}: too few numbers for a slope on the logarithm"
    word = "decided" if low > 0 or high < 0 else "not decided"
    return (
        f"{pair}: {slope:+.4f} for each factor of e, {LEVEL:.0%} interval {low:+.4f} .. "
        f"{high:+.4f} ({fitted['pairs']} pairs, least squares on the logarithm; {word})"
    )


def _where(those: Sequence[Effect], total: int) -> str:
    """Name places and differences of a few effects."""
    shown = []
    for each in those:
        assert each.interval is not None, "they are done"
        at = each.metric.partition("@")[2]
        place = "/".join((*each.levels, *([f"@{at}"] if at else [])))
        place += ": " * bool(place)
        limits = ""
        if each.interval.method != "none":
            limits = f" [{each.interval.low:+.4f}, {each.interval.high:+.4f}]"
        shown.append(f"{place}{each.interval.mean:+.4f}{limits}")
    return f" ({', '.join(shown)})" if shown and total else ""
