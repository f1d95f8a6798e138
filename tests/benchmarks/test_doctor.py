"""What the benchmark of the plateau's doctor makes of runs."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import divergence
from benchmarks.doctor import Curve, Point, findings, summary
from pipeline.checkpoints.manifest import problems
from pipeline.checkpoints.state import KINDS, SavedState
from pipeline.runtime.checkpoints import FOLDER, name_of
from tests.support.checkpoints import SHAPES, make_checkpoint

ENTROPY = 6.0
KNOWN = {"entropy": ENTROPY, "guess": 8.3}


def _curve(losses: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Curve:
    """Return a run of 600 steps with a log line every 5, an evaluation every 50."""
    accuracies = 0.05 + (ENTROPY - losses).clip(0) / 10
    lines = [
        [step, loss, accuracy, 1.0, 3e-4, 0.5, 1.0, 256.0 * 5]
        for step, loss, accuracy in zip(range(5, 605, 5), losses, accuracies, strict=True)
    ]
    return Curve(lines, [[line[0], line[1]] for line in lines if line[0] % 50 == 0])


def test_truth_of_a_run_that_did_not_learn_is_that_of_a_longer_one() -> None:
    flat = _curve(np.full(120, ENTROPY))
    learned = _curve(np.full(120, ENTROPY - 0.1))
    names = [f"12-unit-{lr}-{batch}" for lr in ("0.0003", "0.003") for batch in (4, 16)]
    curves = dict(zip(names, (flat, flat, learned, flat), strict=True))
    longer = dict(zip(names[:2], (learned, flat), strict=True))
    found = {each.point.name: each.truth for each in findings(curves, longer, "nowhere", **KNOWN)}
    # The last one's longer run has not ended: nothing is said of it.
    assert found == dict(zip(names[:3], ("late", "stuck", "learned"), strict=True))


def test_doctor_and_its_advice_are_judged() -> None:
    noise = np.random.default_rng(7).normal(0, 0.01, 120)
    stuck = _curve(ENTROPY + noise)
    learned = _curve(np.linspace(ENTROPY + 1, ENTROPY - 2, 120) + noise)
    deep = Point(24, "unit", 3e-4, 16)
    curves = {
        deep.name: stuck,
        Point(24, "deepnorm", 3e-4, 16).name: learned,  # the start alone
        Point(24, "alpha", 3e-3, 16).name: learned,  # start and rate
        Point(24, "unit", 3e-4, 4).name: stuck,  # a smaller batch is no advice
        Point(12, "unit", 3e-3, 16).name: learned,  # rate and depth
    }
    longer = {name: curve for name, curve in curves.items() if curve is stuck}
    found = {each.point: each for each in findings(curves, longer, "nowhere", **KNOWN)}
    assert len(found) == len(curves)
    assert (found[deep].truth, found[deep].freed) == ("stuck", ["start"])
    assert found[deep].advice == "start"
    assert found[deep].told_step == pytest.approx(150, abs=20)
    small = found[Point(24, "unit", 3e-4, 4)]
    assert small.freed == []  # the learned one of its start has another batch
    counts = summary([*found.values()])
    assert counts["matrix"] == {
        "stuck": {"told": 2, "not_told": 0},
        "late": {"told": 0, "not_told": 0},
        "learned": {"told": 0, "not_told": 3},
    }
    assert counts["first_advice_frees"] == counts["of_those_that_one_change_frees"] == 1


def test_where_a_run_diverges_is_read_off_its_log_lines_alone() -> None:
    falls = [8.0, 7.0, 6.0, 5.0]
    assert divergence.diverges_from([*falls, *[5.9] * 20]) is None
    assert divergence.diverges_from([*falls, *[6.1] * 20, 5.0]) is None
    assert divergence.diverges_from([*falls, 9.0, 5.0, 6.1, 9.0]) == 6
    assert divergence.diverges_from([7.9, 75.6, 20.0, 9.2]) == 1


def test_a_strike_changes_what_it_says_in_a_good_checkpoint(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, divergence.STRUCK)
    assert folder == tmp_path / FOLDER / name_of(divergence.STRUCK)
    before = SavedState(folder)
    old = {(kind, name): before.read(kind, name) for kind in KINDS for name in SHAPES}
    divergence.strike(tmp_path, "exp_avg", "matrix", lambda values: values * 1e4)
    assert not list(problems(folder))
    after = SavedState(folder)
    assert after.counters == before.counters
    for (kind, name), values in old.items():
        wanted = values * 1e4 if (kind, name) == ("exp_avg", "matrix") else values
        assert torch.equal(after.read(kind, name), wanted)
