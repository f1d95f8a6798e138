"""Schedules as tables of numbers, and the counters that move them."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from pipeline.checkpoints.state import TrainState
from pipeline.config import schedule
from pipeline.config.train import SchedulePoint, TrainConfig
from pipeline.runtime.summary import duration

COSINE: dict[str, Any] = {"schedule": "cosine"}
WSD: dict[str, Any] = {"schedule": "wsd", "decay_steps": 20, "decay_shape": "linear"}
SQRT: dict[str, Any] = {**WSD, "decay_shape": "1-sqrt"}
# RoFormerV2's, with its four corners a thousandth as far.
POINTS: dict[str, Any] = {
    "schedule": "piecewise", "warmup_steps": 4, "num_steps": 1000, "min_lr_ratio": 0.0,
    "lr_points": tuple(
        SchedulePoint(step=step, factor=factor)
        for step, factor in ((4, 1.0), (40, 0.5), (160, 0.1), (320, 0.01))
    ),
}  # fmt: skip
BUDGET: dict[str, Any] = {"schedule": "time_budget", "budget_hours": 1.0}
ALL = {"linear": {}, "cosine": COSINE, "wsd": WSD, "1-sqrt": SQRT, "piecewise": POINTS,
       "time_budget": BUDGET}  # fmt: skip


def config(changes: dict[str, Any]) -> TrainConfig:
    """Peak 2, end 0.2 unless changed."""
    base: dict[str, Any] = {"num_steps": 100, "warmup_steps": 10, "lr": 2.0, "min_lr_ratio": 0.1}
    return TrainConfig(**{**base, **changes})


@pytest.mark.parametrize(("changes", "step", "lr"), [
    ({}, 0, 0.2), ({}, 4, 1.0), ({}, 9, 2.0), ({}, 10, 2.0), ({}, 55, 1.1), ({}, 99, 0.22),
    ({}, 100, 0.2), ({}, 500, 0.2),
    ({"warmup_steps": 0}, 0, 2.0), ({"warmup_steps": 0}, 50, 1.1),
    (COSINE, 9, 2.0), (COSINE, 10, 2.0), (COSINE, 55, 1.1), (COSINE, 100, 0.2),
    (COSINE, 40, 0.2 + 1.8 * 0.75), (COSINE, 70, 0.2 + 1.8 * 0.25), (COSINE, 500, 0.2),
    (WSD, 4, 1.0), (WSD, 10, 2.0), (WSD, 80, 2.0), (WSD, 90, 1.1), (WSD, 99, 0.29),
    (WSD, 100, 0.2), (WSD, 101, 0.2),
    (SQRT, 79, 2.0), (SQRT, 80, 2.0), (SQRT, 85, 1.1), (SQRT, 90, 2.0 - 1.8 * 0.5**0.5),
    (SQRT, 100, 0.2),
    (POINTS, 0, 0.5), (POINTS, 3, 2.0), (POINTS, 4, 2.0), (POINTS, 22, 1.5), (POINTS, 40, 1.0),
    (POINTS, 100, 0.6), (POINTS, 160, 0.2), (POINTS, 240, 0.11), (POINTS, 320, 0.02),
    (POINTS, 999, 0.02),
])  # fmt: skip
def test_points_of_schedules(changes: dict[str, Any], step: int, lr: float) -> None:
    assert schedule.learning_rate(step, config(changes)) == pytest.approx(lr)


def stretched(made: TrainConfig, by: int) -> TrainConfig:
    """The same schedule with so many times the steps."""
    return replace(
        made, num_steps=by * made.num_steps, warmup_steps=by * made.warmup_steps,
        decay_steps=by * made.decay_steps if made.decay_steps else None,
        lr_points=tuple(replace(point, step=by * point.step) for point in made.lr_points),
    )  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_no_schedule_jumps(name: str) -> None:
    made = stretched(config(ALL[name]), 300)
    step_s = 3600 / (0.8 * made.num_steps)  # a time budget ends the run after 80% of its steps
    steps = range(made.num_steps + 2)
    rates = [schedule.learning_rate(step, made, step_s * step) for step in steps]
    steepest = max(abs(second - first) for first, second in pairwise(rates))
    # The warm-up is the steepest part, but for the beginning of 1 - sqrt.
    slope = 1.8 / math.sqrt(20 * 300) if name == "1-sqrt" else 2.0 / made.warmup_steps
    assert steepest == pytest.approx(slope)


@pytest.mark.parametrize(("step", "hours", "lr"), [
    # As `linear` while steps are ahead of the time.
    (0, 0.0, 0.2), (9, 0.05, 2.0), (55, 0.0, 1.1), (55, 0.55, 1.1), (100, 0.3, 0.2),
    # Time is ahead: 1 - 0.775 of the run is left, a quarter of what follows the warm-up.
    (20, 0.775, 0.2 + 1.8 * 0.25), (20, 1.0, 0.2), (20, 2.0, 0.2),
    # In the warm-up, the lower of both.
    (4, 0.775, 0.2 + 1.8 * 0.25), (0, 0.775, 0.2),
])  # fmt: skip
def test_points_of_a_time_budget(step: int, hours: float, lr: float) -> None:
    assert schedule.learning_rate(step, config(BUDGET), 3600 * hours) == pytest.approx(lr)


def test_a_run_is_over_with_its_steps_or_its_time() -> None:
    budget = config(BUDGET)
    assert not schedule.is_over(99, budget, 3599.9)
    assert schedule.is_over(100, budget, 0.0)
    assert schedule.is_over(3, budget, 3600.0)
    assert not schedule.is_over(99, config({}), 1e9)
    assert schedule.budget_left_s(budget, 600.0) == pytest.approx(3000.0)


@pytest.mark.parametrize("name", ALL)
def test_skipped_steps_are_counted_and_move_no_schedule(name: str) -> None:
    made, state = config(ALL[name]), TrainState()
    rates = []
    for applied in (True, False, False, True, False):
        rates.append(schedule.learning_rate(state.step, made, state.elapsed_s))
        state.advance(8, applied=applied)
    assert rates == [schedule.learning_rate(step, made) for step in (0, 1, 1, 1, 2)]
    assert len(set(rates)) == 3
    assert (state.step, state.cursor, state.skipped, state.skipped_in_a_row) == (2, 40, 3, 1)


@pytest.mark.parametrize(
    ("step", "warmup", "alpha"),
    [(0, 10, 0.0), (1, 10, 0.1), (5, 10, 0.5), (10, 10, 1.0), (11, 10, 1.0), (0, 0, 1.0)],
)
def test_alpha(step: int, warmup: int, alpha: float) -> None:
    assert schedule.alpha(step, warmup) == pytest.approx(alpha)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "00:00:00"), (3661, "01:01:01"), (200_000, "2d 07:33:20")]
)
def test_duration_text(seconds: float, text: str) -> None:
    assert duration(seconds) == text
