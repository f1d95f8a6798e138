"""Steps whose number, size and length of micro-batches change, with and without a resume."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.checkpoints.state import SavedState, read_weights
from pipeline.data.loader import MicroBatch, document_bounds
from pipeline.model.layout import rows
from tests.distributed import engine_main as case
from tests.distributed.conftest import LeftBy
from tests.distributed.plain_adamw import PlainAdamW, distance
from tests.support.grids import first_in_ci
from tests.support.ranks import assert_same_bits

NUM_STEPS = len(case.ACCUMULATION)


@dataclass(frozen=True)
class Outcome:
    """What the ranks left, and which they were."""

    folder: Path
    world_size: int
    precision: str

    def results(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        return list(json.loads((self.folder / f"results-{rank}.json").read_text())[kind])

    def counters(self, name: str) -> tuple[int, int]:
        """Updates that DeepSpeed counted until a save, and how many of them it skipped."""
        found = SavedState(self.folder / name).counters
        return found["global_steps"], found["skipped_steps"]


@pytest.fixture(scope="module", params=first_in_ci(["2 bf16", "1 fp32", "2 fp32", "1 bf16"], 3))
def outcome(request: pytest.FixtureRequest, left_by: LeftBy) -> Outcome:
    """Of a number of ranks in a precision."""
    world_size, precision = request.param.split()
    folder = left_by("engine_main", precision, ranks=int(world_size))
    return Outcome(folder, int(world_size), precision)


@dataclass(frozen=True)
class Expected:
    weights: dict[str, Tensor]
    grad_norm: float
    loss: float
    weight: int


def reference(world_size: int, precision: str) -> list[Expected]:
    """One process, torch's AdamW on fp32 weights, a clip of its own.

    In fp32 each step is one pass over the whole batch; in bf16 it is a pass of a bf16 model over
    each micro-batch, whose gradients are added in fp32.
    """
    model = case.model(seed=1).train()
    named = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    if precision == "bf16":
        model.bfloat16()
    optimizer, steps = PlainAdamW(named, case.train_config(precision)), []
    for step in range(NUM_STEPS):
        batches = case.micro_batches(step, world_size)
        if precision == "fp32":
            batches = [_joined(batches)]
        count = sum(len(batch.inputs["targets"]) for batch in batches)
        loss = 0.0
        for weight in named.values():
            weight.grad = torch.zeros_like(weight)
        for batch in batches:
            layout = rows(batch.documents, batch.positions)
            if precision == "fp32":
                logits = model(batch.input_ids, layout, batch.inputs["masked_index"])
                total = F.cross_entropy(logits, batch.inputs["targets"], reduction="sum")
            else:  # its own loss, which rounds gradients in its own order
                total, _ = model(batch.input_ids, layout, **batch.inputs)
            model.zero_grad()
            (total * (1 / count)).backward()
            loss += total.item()
            for name, weight in model.named_parameters():
                named[name].grad += weight.grad.float()
        norm = optimizer.step(case.GRAD_CLIP, case.learning_rate(step))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(named[name])
        weights = {name: weight.clone() for name, weight in named.items()}
        steps.append(Expected(weights, norm, loss, count))
    norms = [expected.grad_norm for expected in steps]
    assert min(norms) < case.GRAD_CLIP < max(norms), "some steps are to be clipped, not all"
    return steps


def _joined(batches: list[MicroBatch]) -> MicroBatch:
    starts = [0]
    for batch in batches:
        starts.append(starts[-1] + batch.input_ids.numel())
    numbered = zip(batches, starts, strict=False)
    places = [batch.inputs["masked_index"] + first for batch, first in numbered]
    targets = torch.cat([batch.inputs["targets"] for batch in batches])
    ids, documents, positions = (
        torch.cat([getattr(batch, name) for batch in batches])
        for name in ("input_ids", "documents", "positions")
    )
    return MicroBatch(input_ids=ids, documents=documents, positions=positions, segments=None,
                      inputs={"masked_index": torch.cat(places), "targets": targets},
                      weights={"loss": sum(batch.weights["loss"] for batch in batches)}, counts={},
                      cu_seqlens=torch.from_numpy(document_bounds(documents.numpy())),
                      num_tokens=starts[-1], hash=0)  # fmt: skip


def test_every_step_updates_once_and_as_the_reference(outcome: Outcome) -> None:
    before = dict(case.model(seed=1).named_parameters())
    last = read_weights(outcome.folder / "straight/0")
    for step, expected in enumerate(reference(outcome.world_size, outcome.precision)):
        folder = outcome.folder / f"straight/{step + 1}"
        masters = read_weights(folder)
        assert not [name for name in masters if torch.equal(masters[name], last[name])]
        last = masters
        counters = {"updates": step + 1, "global_steps": step + 1, "skipped_steps": 0}
        assert SavedState(folder).counters == counters
        # Largest found in fp32 4e-6, 9e-7, 1.1e-7, in bf16's first step 8e-7, 3e-7, 4e-8. Later a
        # bf16 weight may be rounded the other way: 5e-3, 2e-3, 2e-4.
        of_weights, of_norm, of_loss = (
            (4e-5, 1e-5, 2e-6) if outcome.precision == "fp32" or step == 0 else (5e-2, 1e-2, 2e-3)
        )
        moved = distance(expected.weights, before)
        assert distance(masters, expected.weights) < of_weights * moved
        results = [outcome.results("straight", rank)[step] for rank in range(outcome.world_size)]
        for result in results:
            assert result["applied"]
            assert result["grad_norm"] == pytest.approx(expected.grad_norm, rel=of_norm)
        loss = sum(result["loss"] for result in results)
        assert loss == pytest.approx(expected.loss, rel=of_loss)
        assert sum(result["weight"] for result in results) == expected.weight


@pytest.mark.parametrize("done", case.RESUMED_AFTER)
def test_fresh_engine_continues_bit_for_bit(outcome: Outcome, done: int) -> None:
    assert_same_bits(outcome.folder / f"resumed/{done}", outcome.folder / f"straight/{NUM_STEPS}")
    assert outcome.counters(f"resumed/{done}") == (NUM_STEPS, 0)


def test_non_finite_step_is_skipped_whole_after_another_accumulation(outcome: Outcome) -> None:
    assert case.ACCUMULATION[case.POISONED_STEP - 1] != case.ACCUMULATION[case.POISONED_STEP]
    for rank in range(outcome.world_size):
        skipped, *others = outcome.results("poisoned", rank)
        assert not skipped["applied"]
        assert skipped["grad_norm"] == float("inf")
        assert others == outcome.results("straight", rank)[case.POISONED_STEP :]
    assert_same_bits(outcome.folder / "skipped", outcome.folder / f"straight/{case.POISONED_STEP}")
    assert_same_bits(outcome.folder / "poisoned", outcome.folder / f"straight/{NUM_STEPS}")
    assert outcome.counters("poisoned") == (NUM_STEPS + 1, 1)
