"""Schedules as tables of numbers, and the counters that move them."""

import pytest

from pipeline.config.train import TrainConfig
from pipeline.runtime.log import duration_text
from pipeline.train import schedule
from pipeline.train.state import TrainState

CONFIG = TrainConfig(num_steps=100, warmup_steps=10, lr=2.0, min_lr_ratio=0.1)


@pytest.mark.parametrize(
    ("step", "lr"),
    [(0, 0.2), (4, 1.0), (9, 2.0), (10, 2.0), (55, 1.1), (99, 0.22), (100, 0.2), (500, 0.2)],
)
def test_learning_rate(step: int, lr: float) -> None:
    assert schedule.learning_rate(step, CONFIG) == pytest.approx(lr)


def test_learning_rate_without_warmup_starts_at_the_peak() -> None:
    config = TrainConfig(num_steps=100, warmup_steps=0, lr=2.0)
    assert schedule.learning_rate(0, config) == 2.0
    assert schedule.learning_rate(50, config) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("step", "warmup", "alpha"),
    [(0, 10, 0.0), (1, 10, 0.1), (5, 10, 0.5), (10, 10, 1.0), (11, 10, 1.0), (0, 0, 1.0)],
)
def test_alpha(step: int, warmup: int, alpha: float) -> None:
    assert schedule.alpha(step, warmup) == pytest.approx(alpha)


def test_state_counts_applied_and_skipped_steps() -> None:
    state = TrainState()
    for applied in (True, False, False, True, False):
        state.advance(8, applied=applied)
    assert (state.step, state.cursor, state.skipped, state.skipped_in_a_row) == (2, 40, 3, 1)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "00:00:00"), (3661, "01:01:01"), (200_000, "2d 07:33:20")]
)
def test_duration_text(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
