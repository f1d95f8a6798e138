"""The interval against scipy's, its coverage in simulated experiments, and Holm's correction."""

import math
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import scipy.stats

from pipeline.tasks.intervals import (
    Interval,
    RowVariance,
    holm,
    interval_of,
    judged,
    row_draws,
    row_variance,
)
from pipeline.tasks.scores import Table

RANDOM = np.random.default_rng(7)
Floats = npt.NDArray[np.float64]


@pytest.mark.parametrize("count", [2, 3, 5, 6, 40])
def test_interval_over_seeds_is_students_at_any_number(count: int) -> None:
    values = RANDOM.normal(0.3, 1.0, count)
    expected = scipy.stats.ttest_1samp(values, 0.0)
    found = interval_of(values.tolist())
    assert found.method == "t"
    limits = expected.confidence_interval(0.95)
    np.testing.assert_allclose([found.low, found.high], limits, rtol=1e-6)
    assert found.mean == pytest.approx(values.mean(), abs=1e-15)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-4)
    assert found.is_decided == (expected.pvalue < 0.05)


def test_interval_of_one_value_and_of_equal_ones() -> None:
    found = interval_of([0.5])
    assert (found.mean, found.method, found.is_decided) == (0.5, "none", False)
    assert math.isnan(found.low)
    assert math.isnan(found.p)
    found = interval_of([0.5, 0.5])
    assert (found.low, found.high, found.p) == (0.5, 0.5, 0.0)
    found = interval_of([0.0, 0.0])
    assert (found.is_decided, found.p) == (False, 1.0)


def test_draws_of_rows_are_the_same_for_all_seeds_and_models() -> None:
    lines = [np.stack([RANDOM.random(50), np.ones(50)], axis=1) for _ in range(3)]
    tables = [Table(each, lambda sums: sums[..., 0] / sums[..., 1]) for each in lines]
    draws = row_draws(tables)
    assert draws.shape == (1000, 3)
    for number, table in enumerate(tables):
        np.testing.assert_array_equal(draws[:, number], row_draws([table])[:, 0])


def _simulated(seeds: int, rows: int, spread: tuple[float, float, float]) -> tuple[float, float]:
    """How often the interval holds the truth, and its half width over that of known variances.

    A value is that of its seed, of its row and of both, normal with these deviations.
    """
    random, (of_seed, of_row, of_both) = np.random.default_rng(0), spread
    weights = random.multinomial(rows, np.full(rows, 1 / rows), size=200) / rows
    hits, widths, times = 0, 0.0, 1000
    for _ in range(times):
        values = random.normal(0, of_both, (seeds, rows))
        values += random.normal(0, of_seed, (seeds, 1)) + random.normal(0, of_row, rows)
        found = interval_of(values.mean(1).tolist(), row_variance(weights @ values.T, rows))
        hits += found.low <= 0 <= found.high
        widths += (found.high - found.low) / 2
    variance = of_seed**2 / seeds + of_row**2 / rows + of_both**2 / (seeds * rows)
    return hits / times, widths / times / (1.96 * math.sqrt(variance))


@pytest.mark.long
# 1,000 simulations know a share of 95% to 0.7 points. Few seeds may be too sure by no more than
# that, and too careful: Student's quantile is 2.2 times the normal one for three of them.
@pytest.mark.parametrize(
    ("seeds", "rows", "spread", "most", "width"),
    [
        pytest.param(20, 40, (0.1, 0.3, 0.3), 0.97, 1.1, id="many seeds few rows"),
        pytest.param(20, 40, (0.0, 0.5, 0.5), 0.97, 1.1, id="many seeds that change nothing"),
        pytest.param(3, 400, (0.1, 0.3, 0.3), 0.97, 2.2, id="few seeds many rows"),
        pytest.param(3, 400, (0.02, 0.5, 0.5), 0.995, 1.7, id="few seeds of both"),
        pytest.param(3, 100, (0.0, 0.0, 0.7), 0.975, 2.2, id="rows and seeds together"),
        pytest.param(1, 60, (0.0, 0.5, 0.5), 0.97, 1.1, id="one seed, which changes nothing"),
    ],
)
def test_coverage(
    seeds: int, rows: int, spread: tuple[float, float, float], most: float, width: float
) -> None:
    covered, found = _simulated(seeds, rows, spread)
    assert 0.935 <= covered <= most
    assert 0.95 <= found <= width


def test_one_seed_does_not_know_of_others() -> None:
    covered, _ = _simulated(1, 400, (0.1, 0.3, 0.3))
    assert covered < 0.6, "which is why it calls itself `rows`"
    assert interval_of([0.1], RowVariance(0.0, 400)).method == "rows"
    assert interval_of([0.1, 0.2], RowVariance(0.0, 400)).method == "rows and t"


def test_p_is_the_level_at_which_the_interval_ends_at_0() -> None:
    """Both sources: the p is that of a wider interval's quantiles, by scipy."""
    values = [0.30, 0.22, 0.41]
    draws = RANDOM.normal(0, 0.1, (500, 1)) + np.array(values)
    found = interval_of(values, row_variance(draws, 200))
    seeds = np.var(values, ddof=1) / 3
    rows = np.cov(draws.T)[0, 1] * 200 / 199
    quantiles = [scipy.stats.t.ppf(1 - found.p / 2, df) for df in (2, 199)]
    margin = math.sqrt(quantiles[0] ** 2 * seeds + quantiles[1] ** 2 * rows)
    assert margin == pytest.approx(found.mean, rel=1e-4)
    limits = [scipy.stats.t.ppf(0.975, df) for df in (2, 199)]
    half = math.sqrt(limits[0] ** 2 * seeds + limits[1] ** 2 * rows)
    assert found.high - found.mean == pytest.approx(half, rel=1e-5)


def test_holm_steps_down_from_the_smallest() -> None:
    p = {"a": 0.011, "b": 0.02, "c": 0.04, "d": 0.001}
    # By hand: 4 x 0.001, 3 x 0.011, 2 x 0.02, 1 x 0.04; none may be below the one before.
    found = holm(p)
    assert found == {key: pytest.approx(of) for key, of in
                     {"d": 0.004, "a": 0.033, "b": 0.04, "c": 0.04}.items()}  # fmt: skip
    assert holm({"a": 0.03, "b": 0.04}) == {"a": 0.06, "b": 0.06}
    assert holm({}) == {}
    values = {number: float(value) for number, value in enumerate(RANDOM.random(50))}
    ordered = sorted(holm(values).items(), key=lambda item: values[item[0]])
    assert all(one <= other <= 1 for (_, one), (_, other) in pairwise(ordered))


def _of(p: float) -> Interval:
    return Interval(1.0, 0.5, 1.5, "t", p)


def test_decisions_of_a_page_are_judged_together() -> None:
    stands, said = judged({"a": _of(0.04), "b": _of(0.001), "c": _of(0.5), "d": None})
    assert stands == {"a": False, "b": True}, "nothing was found in c"
    assert "2 of 3 decisions" in said
    assert "and 1 after Holm's correction for all 3" in said
    nothing, said = judged({"a": interval_of([0.5])})
    assert nothing == {}
    assert "not at all" in said


def test_holm_keeps_false_alarms_of_a_page_below_one_in_twenty() -> None:
    pages = np.random.default_rng(0).random((2000, 20))
    alarms = [min(holm(dict(enumerate(page))).values()) < 0.05 for page in pages.tolist()]
    assert 0.03 < np.mean(alarms) < 0.065
