"""When a loss is a spike, and when it is noise."""

import math
from pathlib import Path

import numpy as np
import pytest

from pipeline.checkpoints.state import LossHistory
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.config.train import SpikeConfig
from pipeline.data.record import BatchRecord
from pipeline.train.faults import SkippedBatches, trained_in_spite
from tests.support.grids import first_in_ci

CONFIG = SpikeConfig()


def _follow(losses: list[float]) -> int | None:
    """The batch at which a spike is seen."""
    history = LossHistory()
    for batch, loss in enumerate(losses):
        history.add(batch, loss, CONFIG)
        if history.is_spike(CONFIG):
            return batch
    return None


def _learning(steps: int, noise: float, seed: int) -> np.ndarray:
    """A loss that falls from 10 to 2 as a power of the step, with normal noise."""
    draw = np.random.default_rng(seed)
    curve = 2 + 8 * (1 + np.arange(steps) / 50) ** -0.5
    return np.asarray(curve + noise * draw.standard_normal(steps))


@pytest.mark.long
@pytest.mark.parametrize("noise", first_in_ci([0.1, 0.01, 0.5]))
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
    # Without a full window what has diverged is high: a nat above the best.
    assert history.limit(CONFIG) == 4.0
    history.add(199, math.nan, CONFIG)
    assert len(history.usual) == 199


def test_batches_that_were_trained_on_cannot_be_left_out_any_more(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("run_dir: r\ndata: {dir: d}\n")
    ranges = "train.skip_batches=[{first: 2, last: 3}, {first: 6, last: 9}]"
    config = load(PretrainConfig, path, [ranges]).config
    assert [batch for batch in range(12) if batch in SkippedBatches(config, [])] == [
        2, 3, 6, 7, 8, 9,
    ]  # fmt: skip
    # Batch 3 was left out; the lines of 7 and later are of an attempt that is repeated.
    records = [BatchRecord(n, 8 * n, 8, 64, None if n == 3 else n + 1, 0) for n in range(10)]
    assert trained_in_spite(config, records, before=7) == [2, 6]
