"""When a loss has diverged: on made-up curves of other levels and noise, and what is said then."""

import json
import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from pipeline.checkpoints.state import LossHistory
from pipeline.config.train import SpikeConfig
from pipeline.train.doctor import Divergence, Doctor, LastStep, Plateau
from tests.train.test_plateau import Floats, make_doctor

CONFIG = SpikeConfig()


def _doctor(entropy: float | None, guess: float | None, **train: Any) -> Doctor:
    given = {"num_steps": 1000, "lr": 3e-4, "alpha_warmup_steps": 0} | train
    return make_doctor(entropy=entropy, guess=guess, **given)


def _told(
    doctor: Doctor, losses: Floats, guess: float | None, *, begin: int = 0, lr: float = 3e-4
) -> list[tuple[int, Plateau | Divergence]]:
    """Give the doctor a log line every five steps; return what it says, by step."""
    history, told = LossHistory(), []
    for step, loss in enumerate(losses.tolist(), 1):
        history.add(step - 1, loss, CONFIG, guess)
        if step % 5 or step <= begin:
            continue
        last = LastStep(step, step - 1, 1.0, lr, 0.5, {}, 4096.0)
        means = {"loss": float(losses[step - 5 : step].mean()), "accuracy": 0.05}
        if found := doctor.look(means, last, history):
            told.append((step, found))
    return told


def _curve(first: float, last: float, steps: int, noise: float, seed: int = 0) -> Floats:
    """A loss that falls as a power of the step, with normal noise."""
    fall = (1 + np.arange(steps) / 20) ** -0.5
    draws = np.random.default_rng(seed).standard_normal(steps)
    return np.asarray(last + (first - last) * fall + noise * draws)


@pytest.mark.parametrize(("first", "last"), [(8.3, 2.0), (10.4, 1.2), (0.7, 0.2), (20.0, 6.0)])
@pytest.mark.parametrize("noise", [0.01, 0.3])
@pytest.mark.parametrize("at", [12, 60, 700])
def test_it_is_told_at_once_wherever_it_begins(
    first: float, last: float, noise: float, at: int
) -> None:
    guess = None if first < 1 else min(first, 10.4)
    losses = _curve(first, last, 1000, noise)
    losses[at:] = first + 3.0
    [(step, found), *more] = _told(_doctor(None, guess), losses, guess)
    assert not more
    assert isinstance(found, Divergence)
    # Eight high steps are needed, and a log line.
    assert at + 8 <= step <= at + 13
    assert found.since_batch == at
    assert found.loss == pytest.approx(first + 3.0)
    assert found.best < found.limit < found.loss


@pytest.mark.parametrize("seed", range(5))
def test_early_bumps_and_noise_are_none(seed: int) -> None:
    losses = _curve(8.3, 3.0, 1000, 0.3, seed)
    losses[30:60] += 0.6  # when the rate is at its highest
    losses[100::40] += 5.0  # single bad batches
    assert not _told(_doctor(None, math.log(4096)), losses, math.log(4096))


def test_a_loss_that_was_never_low_is_told_after_the_warm_ups() -> None:
    guess = math.log(4096)
    high = _curve(30.0, guess + 2.0, 400, 0.1)
    [(step, found)] = _told(_doctor(6.3, guess), high, guess)
    assert isinstance(found, Divergence)
    assert step == 155  # 50 steps of warm-up and 100 updates
    # Between the guess and a nat above it nothing was learned, and nothing was lost.
    told = _told(_doctor(6.3, guess), np.full(400, guess + 0.5), guess)
    assert [type(each) for _, each in told] == [Plateau]


def test_the_words_of_the_plateau_are_not_used_for_it() -> None:
    guess = math.log(4096)
    losses = np.full(900, 75.6)
    losses[:3] = 7.9
    losses[400:] = 9.2
    told = _told(_doctor(6.3, guess), losses, guess)
    assert [type(each) for _, each in told] == [Divergence]


def test_it_is_told_again_when_it_happens_again() -> None:
    losses = _curve(8.3, 3.0, 1000, 0.05)
    losses[200:300] = losses[500:600] = 12.0
    told = _told(_doctor(None, math.log(4096)), losses, math.log(4096))
    assert [step // 100 for step, _ in told] == [2, 5]


def test_likely_causes_come_in_order() -> None:
    guess = math.log(4096)

    def first_cause(at: int, begin: int = 0, lr: float = 3e-4, of_run: float = 3e-4) -> str:
        losses = _curve(8.3, 3.0, 1000, 0.05)
        losses[at:] = 12.0
        doctor = _doctor(6.3, guess, lr=of_run)
        [(_, found)] = _told(doctor, losses, guess, begin=begin, lr=lr)
        assert f"high since batch {at}" in found.advice
        return found.advice.split("\n1. ")[1].split("\n")[0]

    assert "train.lr=0.03" in first_cause(60, of_run=3e-2)
    assert "train.lr=0.03" in first_cause(700, of_run=3e-2)
    # A stage has a rate a hundred times as high as the run's.
    assert "0.03 at step" in first_cause(700, lr=3e-2)
    assert "inspect mine --batch 700" in first_cause(700)
    assert "checkpoint verify" in first_cause(703, begin=700)


def test_a_history_stays_small_and_goes_on_where_it_was_saved() -> None:
    losses = np.concatenate([_curve(8.3, 3.0, 300, 0.1), np.full(5000, 20.0)])
    losses[250:256] += 3.0
    straight, saved = LossHistory(), LossHistory()
    for batch, loss in enumerate(losses.tolist()):
        straight.add(batch, loss, CONFIG, 8.3)
        if batch in (5, 253, 290, 305, 900, 5000):
            saved = LossHistory.from_dict(json.loads(json.dumps(asdict(saved))))
        saved.add(batch, loss, CONFIG, 8.3)
    assert straight == saved
    assert straight.high[0][0] == 300
    assert len(straight.high) == CONFIG.window_steps + 1
    assert straight.has_diverged(CONFIG)
    # Those of a manifest without a start and a best one begin anew.
    old = LossHistory.from_dict({"usual": [3.0] * 50, "high": []})
    assert old.limit(CONFIG) == math.inf
    old.add(50, 3.0, CONFIG, 8.3)
    assert (old.best, old.start) == (3.0, 3.0)


def test_the_patience_fits_short_runs() -> None:
    assert _doctor(6.3, 8.3, num_steps=300, warmup_steps=100).patience_steps == 100
    assert _doctor(6.3, 8.3, num_steps=150, warmup_steps=10).patience_steps == 70
    assert _doctor(6.3, 8.3, num_steps=100, warmup_steps=10).patience_steps == 50
    assert _doctor(6.3, 8.3, num_steps=100_000).patience_steps == 2000
    short = _doctor(6.3, math.log(4096), num_steps=150, warmup_steps=10)
    [(step, found)] = _told(short, np.full(150, 6.3), math.log(4096))
    assert (step, type(found)) == (80, Plateau)
