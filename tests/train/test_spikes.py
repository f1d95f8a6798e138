"""When a loss is a spike, and when it is noise."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest

from pipeline.config.spikes import SpikeConfig
from pipeline.train.spikes import LossHistory

CONFIG = SpikeConfig()


def _follow(losses: list[float], config: SpikeConfig = CONFIG) -> int | None:
    """The batch at which a spike is seen."""
    history = LossHistory()
    for batch, loss in enumerate(losses):
        history.add(batch, loss, config)
        if history.is_spike(config):
            return batch
    return None


def _learning(steps: int, noise: float, seed: int) -> np.ndarray:
    """A loss that falls from 10 to 2 as a power of the step, with normal noise."""
    draw = np.random.default_rng(seed)
    curve = 2 + 8 * (1 + np.arange(steps) / 50) ** -0.5
    return np.asarray(curve + noise * draw.standard_normal(steps))


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.5])
def test_noise_is_no_spike(noise: float) -> None:
    losses = _learning(50_000, noise, seed=1)
    # Single bad batches, of which the run gets over, are none either.
    losses[1000::997] += 5.0
    assert _follow(losses.tolist()) is None


@pytest.mark.parametrize("noise", [0.01, 0.05])
@pytest.mark.parametrize("shape", ["jump", "divergence"])
def test_a_jump_and_a_divergence_are_seen(noise: float, shape: str) -> None:
    losses = _learning(3000, noise, seed=2)
    behind = np.arange(1000)
    losses[2000:] += 1.5 if shape == "jump" else np.minimum(4.0, behind * 0.02)
    found = _follow(losses.tolist())
    # A rise of 0.02 a step takes 25 steps to be 0.5 above a median that follows it slowly.
    first = 2000 if shape == "jump" else 2025
    assert found is not None
    assert first + CONFIG.steps_in_a_row - 1 <= found <= first + 30


def test_high_steps_are_named_from_the_first_one() -> None:
    history = LossHistory()
    for batch in range(200):
        history.add(batch, 3.0, CONFIG)
    assert history.limit(CONFIG) == 3.5
    for batch in range(200, 208):
        history.add(batch, 4.0, CONFIG)
    assert history.is_spike(CONFIG)
    assert history.high == [(batch, 4.0) for batch in range(200, 208)]
    # They do not raise what they are compared with.
    assert history.limit(CONFIG) == 3.5


def test_too_little_history_and_no_loss() -> None:
    history = LossHistory()
    for batch in range(199):
        history.add(batch, 3.0, CONFIG)
    assert history.limit(CONFIG) == math.inf
    history.add(199, math.nan, CONFIG)
    assert len(history.usual) == 199


def test_a_history_goes_on_as_it_was_when_it_is_saved_at_any_step() -> None:
    losses = _learning(600, 0.3, seed=3)
    losses[400:406] += 3.0
    losses[500:520] += 3.0
    config = SpikeConfig(window_steps=50)
    straight = LossHistory()
    for batch, loss in enumerate(losses.tolist()):
        straight.add(batch, loss, config)
    for saved in (30, 403, 405, 450, 504, 519):
        history = LossHistory()
        for batch, loss in enumerate(losses.tolist()):
            if batch == saved:
                history = LossHistory.read(json.loads(json.dumps(asdict(history))))
            history.add(batch, loss, config)
        assert history == straight
