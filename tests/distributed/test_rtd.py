"""Replaced-token detection on two ranks at several ZeRO stages, against one plain process.

Its tables are used three times in a forward pass: by both encoders, and as an output matrix.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.checkpoints.state import read_weights
from pipeline.objectives.base import add_up
from tests.distributed import engine_main
from tests.distributed import rtd_main as case
from tests.support.ranks import Starter, state_of

JOBS = [":0", ":1", "2-1:1", ":2", ":3", "2-1:3"]
PLACES = ["2-0", "2-1", "2-2", "2-3", "2-1:2-1", "2-1:2-3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, start_command: Starter) -> Path:
    """What one launch of two ranks leaves."""
    folder = tmp_path_factory.mktemp("rtd")
    command = [sys.executable, "-m", "tests.distributed.rtd_main", str(folder), *JOBS]
    processes = start_command(command, 2, folder / "output")
    try:
        codes = [process.wait(180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(codes), (folder / "output").read_text()
    return folder


@pytest.fixture(scope="module")
def reference() -> list[tuple[dict[str, Tensor], dict[str, float], float]]:
    """One process, torch's AdamW, a clip of its own: weights, means and norm of each step."""
    model = case.model(seed=1).train()
    named = dict(model.named_parameters())
    config = case.train_config(0)
    optimizer = torch.optim.AdamW(
        [{"params": [weight for weight in named.values() if weight.ndim >= 2],
          "weight_decay": config.weight_decay},
         {"params": [weight for weight in named.values() if weight.ndim < 2],
          "weight_decay": 0.0}],
        betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps,
    )  # fmt: skip
    steps = []
    for step in range(case.NUM_STEPS):
        model.set_alpha(0.5 + step / 10)
        model.zero_grad()
        sums = add_up([case.OBJECTIVE(model, batch) for batch in case.micro_batches(step)])
        means = {name: total / weight for name, (total, weight) in sums.items()}
        (means["loss"] + 50 * means["discriminator"]).backward()
        norm = torch.cat([weight.grad.flatten() for weight in named.values()]).norm().item()
        for weight in named.values():
            weight.grad *= min(1.0, engine_main.GRAD_CLIP / norm)
        for group in optimizer.param_groups:
            group["lr"] = engine_main.learning_rate(step)
        optimizer.step()
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
        found[int(step)] = (
            {
                name: (total + other[name][0]) / (weight + other[name][1])
                for name, (total, weight) in sums.items()
                if weight + other[name][1]
            },
            norm,
        )
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
    assert masters.keys() == begun.keys()
    after = reference[-1][0]
    error, moved = (
        torch.cat([(end[name] - start[name]).detach().flatten() for name in begun]).norm()
        for start, end in ((after, masters), (begun, after))
    )
    assert error < 1e-4 * moved


def test_resuming_gives_the_same_bits(folder: Path) -> None:
    straight = state_of(folder / "2-1" / str(case.NUM_STEPS))
    resumed = state_of(folder / "2-1:2-1" / str(case.NUM_STEPS))
    assert straight.keys() == resumed.keys()
    for name, value in straight.items():
        assert torch.equal(value, resumed[name]), name
