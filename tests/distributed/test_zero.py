"""ZeRO stages against one plain process, and states that other ranks and stages go on with."""

import json
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.checkpoints.state import SavedState, read_weights
from pipeline.model.layout import rows
from tests.distributed import engine_main
from tests.distributed import zero_main as case
from tests.distributed.plain_adamw import PlainAdamW, distance
from tests.support.grids import first_in_ci
from tests.support.ranks import Starter, assert_same_bits, finish, state_of
from tests.support.warm import Process

# One rank's states on two, two ranks' on one and four, and from stage to stage.
LAUNCHES = {
    "one": (1, [":0", ":1", ":2", ":3"]),
    "two": (
        2, [":0", ":1", ":2", "1-0:0", "1-1:1", "1-2:2", "2-0:1", "2-1:2", "2-2:1", "2-2:0", ":3",
            "1-3:3", "2-1:3"],
    ),
    "one again": (1, ["2-0:0", "2-1:1", "2-2:2", "2-3:0", "2-3:1", "2-3:3"]),
    "four": (4, ["2-0:0", "2-1:1", "2-2:2", "2-0:3", "2-3:3"]),
}  # fmt: skip
# Of weights as a share of how far they moved, of gradient norms and of losses. Largest found
# against the plain process: fp32 1.3e-6, 1.0e-6, 1.3e-7, bf16 2.1e-2, 4e-3, 2.4e-3; against the
# run that was saved about the same.
TOLERANCE = {"fp32": (2e-5, 1e-5, 2e-6), "bf16": (1e-1, 2e-2, 1e-2)}
LOADS = [
    (job.split(":")[0], f"{ranks}-{job.split(':')[1]}")
    for ranks, jobs in LAUNCHES.values()
    for job in jobs
    if not job.startswith(":")
]


def _launch(start: Starter, folder: Path, name: str, *, bf16_loads: bool) -> list[Process]:
    ranks, jobs = LAUNCHES[name]
    command = [sys.executable, "-m", "tests.distributed.zero_main", str(folder)]
    command += [f"{precision}:{job}" for job in jobs for precision in case.PRECISIONS
                if (precision == "bf16" and job[0] != ":") == bf16_loads]  # fmt: skip
    return start(command, ranks, folder / "output")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, start_command: Starter) -> Path:
    """Both precisions from the start, and fp32 after loads."""
    folder = tmp_path_factory.mktemp("zero")
    for names in (["one"], ["two"], ["one again", "four"]):
        started = [_launch(start_command, folder, name, bf16_loads=False) for name in names]
        finish(list(chain(*started)), folder / "output")
    return folder


@pytest.fixture(scope="module")
def folder_of_bf16(folder: Path, start_command: Starter) -> Path:
    """With bf16 after loads, which a CPU computes slowly."""
    for names in (["two"], ["one again", "four"]):
        started = [_launch(start_command, folder, name, bf16_loads=True) for name in names]
        finish(list(chain(*started)), folder / "output")
    return folder


@pytest.fixture(scope="module")
def reference() -> list[tuple[dict[str, Tensor], float, float]]:
    """One process in fp32, torch's AdamW, a clip of its own: weights, loss, norm of each step."""
    model = engine_main.model(seed=1).train()
    named = dict(model.named_parameters())
    optimizer, steps = PlainAdamW(named, case.train_config("fp32", 1)), []
    for step in range(case.NUM_STEPS):
        batches = case.micro_batches(step)
        count = sum(len(batch.inputs["targets"]) for batch in batches)
        model.zero_grad()
        loss = torch.zeros(())
        for batch in batches:
            layout = rows(batch.documents, batch.positions)
            logits = model(batch.input_ids, layout, batch.inputs["masked_index"])
            loss = loss + F.cross_entropy(logits, batch.inputs["targets"], reduction="sum")
        (loss / count).backward()
        norm = optimizer.step(case.GRAD_CLIP, case.learning_rate(step))
        steps.append(({k: v.detach().clone() for k, v in named.items()}, loss.item(), norm))
    norms = [norm for _, _, norm in steps]
    assert min(norms) < case.GRAD_CLIP < max(norms), "some steps are to be clipped, not all"
    return steps


def _results(folder: Path) -> dict[int, tuple[float, float]]:
    """Loss over all ranks and gradient norm, by step."""
    of_ranks = [json.loads(path.read_text()) for path in folder.glob("results-*.json")]
    assert len({json.dumps([step[1] for step in one.values()]) for one in of_ranks}) == 1
    first = of_ranks[0]
    return {int(s): (sum(one[s][0] for one in of_ranks), norm) for s, (_, norm) in first.items()}


def _assert_forward_passes_use_masters_rounded(folder: Path) -> None:
    ranks, stage = folder.name.rpartition(":")[2].split("-")
    found = list(folder.glob("used-*.pt"))
    assert len(found) == (0 if stage == "3" else int(ranks))
    for path in found:
        masters = read_weights(folder / str(case.NUM_STEPS))
        for name, value in torch.load(path).items():
            name = name.removeprefix("module.")
            assert (
                value.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[folder.parent.name]
            )
            assert torch.equal(masters.pop(name).to(value.dtype), value), (path, name)
        assert not masters, path


@pytest.mark.parametrize("precision", case.PRECISIONS)
@pytest.mark.parametrize("place", ["1-0", "1-1", "1-2", "1-3", "2-0", "2-1", "2-2", "2-3"])
def test_stage_trains_as_one_plain_process_does(
    folder: Path, reference: list[tuple[dict[str, Tensor], float, float]], place: str,
    precision: str,
) -> None:  # fmt: skip
    before = dict(engine_main.model(seed=1).named_parameters())
    of_weights, of_norm, of_loss = TOLERANCE[precision]
    found = _results(folder / precision / place)
    for step, (weights, loss, norm) in enumerate(reference):
        assert found[step] == (pytest.approx(loss, rel=of_loss), pytest.approx(norm, rel=of_norm))
        if step + 1 in (case.SAVED_AFTER, case.NUM_STEPS):
            masters = read_weights(folder / precision / place / str(step + 1))
            moved = distance(weights, before)
            assert distance(masters, weights) < of_weights * moved
    last = folder / precision / place / str(case.NUM_STEPS)
    assert SavedState(last).counters == {
        "updates": case.NUM_STEPS, "global_steps": case.NUM_STEPS + 1, "skipped_steps": 1
    }  # fmt: skip
    _assert_forward_passes_use_masters_rounded(folder / precision / place)


@pytest.mark.parametrize("precision", first_in_ci(case.PRECISIONS))
@pytest.mark.parametrize(("saved", "place"), LOADS)
def test_state_is_loaded_and_trains_on(
    request: pytest.FixtureRequest, folder: Path, saved: str, place: str, precision: str
) -> None:
    if precision == "bf16":
        request.getfixturevalue("folder_of_bf16")
    there, here = folder / precision / saved, folder / precision / f"{saved}:{place}"
    loaded, end = there / str(case.SAVED_AFTER), str(case.NUM_STEPS)
    assert_same_bits(here / "loaded", loaded)
    before = state_of(loaded)
    assert SavedState(here / "loaded").counters == SavedState(loaded).counters

    of_weights, of_norm, of_loss = TOLERANCE[precision]
    expected, found = _results(there), _results(here)
    for step in range(case.SAVED_AFTER, case.NUM_STEPS):
        loss, norm = expected[step]
        assert found[step] == (pytest.approx(loss, rel=of_loss), pytest.approx(norm, rel=of_norm))
    masters = {k: v for k, v in state_of(there / end).items() if k.startswith("master")}
    after = {k: v for k, v in state_of(here / end).items() if k.startswith("master")}
    moved = distance(masters, {k: before[k] for k in masters})
    assert distance(after, masters) < of_weights * moved
    _assert_forward_passes_use_masters_rounded(here)
