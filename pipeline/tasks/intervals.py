"""One interval for every comparison of runs, and Holm's correction over a page of them.

What is estimated is the mean of a quantity over seeds, mostly a paired difference: arm minus arm,
seed by seed. Two sources of chance count. Another seed would give another run, and other rows would
give other scores; rows and seeds are crossed, since every seed is scored on the same rows:

    variance of the mean = s^2 / S + c

`s^2` is the variance over S seeds, with n - 1; it holds what rows and seeds do together. `c` is the
covariance of two seeds' values when rows are drawn anew by bootstrap, the mean over pairs of seeds;
with one seed it is the variance of that seed's value. These are the components of variance of a
two-way layout (Cornfield and Tukey 1956; Owen 2007, "The pigeonhole bootstrap").

The interval adds the squares of the two margins, each with its own Student quantile:

    mean +- sqrt(t(S - 1)^2 s^2 / S + t(R - 1)^2 c)

which covers at least as often as it says, however the variance is shared out (Banerjee 1960,
"Approximate confidence interval for linear functions of means of k populations"). Welch's degrees
of freedom are narrower, and miss: with three seeds they covered 91% in a simulation.

Without rows, as for held-out losses, it is Student's interval over the seeds. With one seed it is
of the rows alone, and says so by its method: other seeds may differ by more.
"""

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import NormalDist, fmean, variance
from typing import Any, NamedTuple

import numpy as np

from pipeline.tasks.scores import Floats, Table

LEVEL = 0.95
DRAWS, KEY = 1000, 0
"""Draws of rows, and the key of their random numbers: draws of one key take the same rows."""
_DRAWS_AT_A_TIME = 50
SETTINGS = {"level": LEVEL, "draws": DRAWS, "key": KEY}
ROWS_ALONE = "Of one seed, intervals are over rows alone: other seeds may differ by more."
HOW_SURE = {
    "rows and t": "How sure: the interval is over rows (bootstrap) and seeds (Student's t).",
    "rows": f"How sure: by rows (bootstrap). {ROWS_ALONE}",
    "t": "How sure: by seeds (Student's t). A single row does not show how much rows differ.",
    "none": "How sure: not at all, one seed and one row have no interval.",
}
"""What the interval of a score tells, by its method."""
_EXPANDED_FROM = 30
"""Degrees of freedom from which Student's quantile is expanded around the normal one."""
_STEPS = 50


@dataclass(frozen=True)
class Interval:
    """A mean with its 95% interval; NaN limits where nothing says how far chance goes."""

    mean: float
    low: float
    high: float
    method: str
    """`t` (seeds), `rows`, `rows and t`, or `none`."""
    p: float
    """The level at which the interval begins to hold 0; NaN without limits."""

    @property
    def is_decided(self) -> bool:
        """Whether 0 lies outside."""
        return self.low > 0 or self.high < 0


class RowVariance(NamedTuple):
    """The variance that other rows would give to a mean over seeds: `c` above."""

    variance: float
    rows: int


def interval_of(values: Sequence[float], of_rows: RowVariance | None = None) -> Interval:
    """Estimate the mean of values, one a seed, mostly paired differences.

    Where there are no rows, or each seed has rows of its own, `of_rows` is None: what rows do is
    then in what seeds do.
    """
    mean, seeds = fmean(values), len(values)
    parts: dict[str, tuple[float, int]] = {}
    if of_rows is not None:
        parts["rows"] = of_rows.variance, of_rows.rows - 1
    if seeds > 1:
        parts["t"] = variance(values) / seeds, seeds - 1
    if not parts:
        return Interval(mean, math.nan, math.nan, "none", math.nan)
    half = _margin(parts.values(), 1 - LEVEL)
    p = _p(mean, parts.values())
    return Interval(mean, mean - half, mean + half, " and ".join(parts), p)


def row_draws(tables: Sequence[Table]) -> Floats:
    """Score rows that are drawn with replacement, the same for all seeds: [draws, seeds]."""
    # Models with equally many rows are drawn alike, so that differences of draws are paired.
    random, num_rows = np.random.default_rng((KEY, 0)), len(tables[0].lines)
    draws = np.empty((DRAWS, len(tables)))
    for batch in np.split(draws, range(_DRAWS_AT_A_TIME, DRAWS, _DRAWS_AT_A_TIME)):
        drawn = [random.integers(num_rows, size=num_rows) for _ in batch]
        weights = np.array([np.bincount(rows, minlength=num_rows) for rows in drawn], np.float64)
        batch[:] = np.stack([table.value(weights @ table.lines) for table in tables], axis=-1)
    return draws


def row_variance(draws: Floats, num_rows: int) -> RowVariance | None:
    """Estimate what rows do to the mean over seeds, of [draws, seeds]; None for a single row."""
    seeds = draws.shape[1]
    if num_rows < 2:
        return None
    if seeds == 1:
        of_mean = float(draws.var(ddof=1))
    else:
        # The seeds' own variances hold what is of one seed and its rows alone, which s^2 / S has.
        covariance = np.cov(draws.T)
        between = (covariance.sum() - np.trace(covariance)) / (seeds * (seeds - 1))
        of_mean = max(0.0, float(between))
    return RowVariance(of_mean * num_rows / (num_rows - 1), num_rows)


def score_interval(seeds: Sequence[Table]) -> Interval:
    """Estimate the mean score of seeds, a table each, on the same rows."""
    return interval_of(
        [table.score for table in seeds], row_variance(row_draws(seeds), len(seeds[0].lines))
    )


def judged(compared: Mapping[Hashable, Interval | None]) -> tuple[dict[Hashable, bool], str]:
    """Judge all comparisons of a page together.

    Args:
        compared: by a key that is equal for equal comparisons, which so count once.

    Returns:
        Whether the difference stands after Holm's correction, for those whose interval leaves out
        0, and the sentence on how sure the page is.
    """
    p = {key: of.p for key, of in compared.items() if of is not None and not math.isnan(of.p)}
    if not p:
        text = "How sure: not at all, no difference has the two pairs that an interval needs."
        return {}, text
    adjusted = holm(p)
    stands = {key: adjusted[key] < 1 - LEVEL for key in p if p[key] < 1 - LEVEL}
    text = (
        f"How sure: {len(stands)} of {len(p)} decisions find a difference by their {LEVEL:.0%} "
        f"interval (by chance alone about {(1 - LEVEL) * len(p):.1f} would), and "
        f"{sum(stands.values())} after Holm's correction for all {len(p)}. The same runs compared "
        "in two tables are one decision."
    )
    return stands, text


def plain(of: Interval | None, stands: bool | None) -> dict[str, Any]:
    """Return a comparison as values of JSON: None for what is not known, or not comparable."""
    keys = [field.name for field in fields(Interval)]
    values = {key: getattr(of, key, None) for key in keys}
    known = {key: None if value != value else value for key, value in values.items()}  # NaN
    return {**known, "stands": stands}


def in_percent(difference: Mapping[str, Any]) -> str:
    """Show what `plain` returned in percent: `!` where it stands after Holm's correction."""
    if difference["mean"] is None:
        return "other rows"
    mean, low, high = (
        "?" if difference[key] is None else f"{100 * difference[key]:+.1f}"
        for key in ("mean", "low", "high")
    )
    return f"{mean} [{low}, {high}]{'!' * bool(difference['stands'])}"


def holm(p: Mapping[Hashable, float]) -> dict[Hashable, float]:
    """Adjust p values: the k-th smallest of n times n - k + 1, and never below the one before.

    Those that stay below 0.05 hold all together, but in one page of twenty (Holm 1979).
    """
    adjusted: dict[Hashable, float] = {}
    largest, left = 0.0, len(p)
    for key, value in sorted(p.items(), key=lambda item: item[1]):
        largest = max(largest, min(1.0, left * value))
        adjusted[key], left = largest, left - 1
    return adjusted


def _margin(parts: Collection[tuple[float, int]], level: float) -> float:
    """Add margins, of variances with their degrees of freedom, by their squares."""
    return math.sqrt(sum(_student(level, df) ** 2 * variance for variance, df in parts))


def _p(mean: float, parts: Collection[tuple[float, int]]) -> float:
    """Find the level at which the interval ends at 0."""
    if mean == 0 or not any(variance for variance, _ in parts):
        return float(mean == 0)
    # The levels' logarithm, since Holm compares small ones.
    return math.exp(_bisect(lambda log: _margin(parts, math.exp(log)) - abs(mean), -700.0, 0.0))


def _student(level: float, df: int) -> float:
    """Return what |t| exceeds with a probability, for whole degrees of freedom."""
    if level >= 1:
        return 0.0
    z = -NormalDist().inv_cdf(level / 2)
    if df >= _EXPANDED_FROM:
        # Abramowitz and Stegun 26.7.5.
        terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
        third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
        return z + terms[0] / df + terms[1] / df**2 + third / df**3
    # In the angle, whose tangent is t / sqrt(df), and which is bounded.
    angle = _bisect(lambda angle: _outside(angle, df) - level, 0.0, math.pi / 2)
    return math.sqrt(df) * math.tan(angle)


def _outside(angle: float, df: int) -> float:
    """Return the probability of |t| > sqrt(df) tan(angle): Abramowitz and Stegun 26.7.3, 26.7.4."""
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = df % 2
    term, total = (cosine, 0.0) if is_odd else (1.0, 0.0)
    for k in range(1 + is_odd, df, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    inside = 2 / math.pi * (angle + sine * total) if is_odd else sine * total
    return 1.0 - inside


def _bisect(falling: Callable[[float], float], low: float, high: float) -> float:
    """Find where a falling function is 0."""
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2
