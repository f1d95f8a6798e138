"""Replaced-token detection on two ranks at several ZeRO stages, against one plain process.

Its tables are used three times in a forward pass: by both encoders, and as an output matrix.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from pipeline.checkpoints.state import read_weights
from pipeline.objectives.base import add_up
from tests.distributed import engine_main
from tests.distributed import rtd_main as case
from tests.distributed.conftest import LeftBy
from tests.distributed.plain_adamw import PlainAdamW, distance
from tests.support.ranks import assert_same_bits

JOBS = [":0", ":1", "2-1:1", ":2", ":3", "2-1:3"]
PLACES = ["2-0", "2-1", "2-2", "2-3", "2-1:2-1", "2-1:2-3"]


@pytest.fixture(scope="module")
def folder(left_by: LeftBy) -> Path:
    return left_by("rtd_main", *JOBS)


@pytest.fixture(scope="module")
def reference() -> list[tuple[dict[str, Tensor], dict[str, float], float]]:
    """One process, torch's AdamW, a clip of its own: weights, means and norm of each step."""
    model = case.model(seed=1).train()
    named = dict(model.named_parameters())
    optimizer, steps = PlainAdamW(named, case.train_config(0)), []
    for step in range(case.NUM_STEPS):
        model.set_alpha(0.5 + step / 10)
        model.zero_grad()
        sums = add_up([case.OBJECTIVE(model, batch) for batch in case.micro_batches(step)])
        means = {name: total / weight for name, (total, weight) in sums.items()}
        (means["loss"] + 50 * means["discriminator"]).backward()
        norm = optimizer.step(engine_main.GRAD_CLIP, engine_main.learning_rate(step))
        weights = {name: weight.detach().clone() for name, weight in named.items()}
        steps.append((weights, {name: mean.item() for name, mean in means.items()}, norm))
    return steps


def _results(folder: Path) -> dict[int, tuple[dict[str, float], float]]:
    """Means over both ranks and gradient norm, by step."""
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("results-*.json"))]
    found = {}
    for step, (sums, norm) in ranks[0].items():
        other, other_norm = ranks[1][step]
        assert other_norm == norm
        both = {name: np.add(pair, other[name]) for name, pair in sums.items()}
        means = {name: total / weight for name, (total, weight) in both.items() if weight}
        found[int(step)] = (means, norm)
    return found


@pytest.mark.parametrize("place", PLACES)
def test_stage_trains_as_one_plain_process_does(
    folder: Path, reference: list[tuple[dict[str, Tensor], dict[str, float], float]], place: str
) -> None:
    losses = case.OBJECTIVE.losses
    for step, (means, norm) in _results(folder / place).items():
        expected = reference[step]
        assert set(losses) <= set(means)
        assert means == pytest.approx({name: expected[1][name] for name in means}, rel=1e-5)
        assert norm == pytest.approx(expected[2], rel=1e-4)
    masters = read_weights(folder / place / str(case.NUM_STEPS))
    begun = dict(case.model(seed=1).named_parameters())
    after = reference[-1][0]
    assert distance(masters, after) < 1e-4 * distance(after, begun)


def test_resuming_gives_the_same_bits(folder: Path) -> None:
    assert_same_bits(*(folder / place / str(case.NUM_STEPS) for place in ("2-1", "2-1:2-1")))
