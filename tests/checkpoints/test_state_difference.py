"""Differences of states, as numpy computes them."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.checkpoints import state
from pipeline.checkpoints.state import KINDS, TensorShard, state_differences, write_part

COUNTERS = {"updates": 1, "global_steps": 1, "skipped_steps": 0}


def _write(folder: Path, values: dict[str, np.ndarray], split: int) -> None:
    """On two ranks, the second one from element `split` on."""
    numel = len(values["master"])
    for rank, (start, stop) in enumerate([(0, split), (split, numel)]):
        tensors = {kind: torch.from_numpy(values[kind][start:stop].copy()) for kind in KINDS}
        write_part(folder, rank, 2, [TensorShard("weight", (numel,), start, tensors)], COUNTERS)


def test_sizes_of_differences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    # Several chunks, the last one not full.
    monkeypatch.setattr(state, "_CHUNK", 1000)
    one = {kind: rng.standard_normal(9_001).astype(np.float32) for kind in KINDS}
    other = {kind: values.copy() for kind, values in one.items()}
    other["exp_avg"][[0, 8_500]] += np.float32(0.25)
    one["exp_avg_sq"][7] = other["exp_avg_sq"][7] = np.nan
    other["exp_avg_sq"][8] = np.inf
    _write(tmp_path / "one", one, 100)
    _write(tmp_path / "other", other, 8_999)
    seen: list[int] = []
    found = state_differences(tmp_path / "one", tmp_path / "other", seen.append)
    assert sum(seen) == 3 * 9_001
    assert (found.num_parameters, found.others) == (1, [])
    average, squares = found.tensors
    difference = other["exp_avg"].astype(np.float64) - one["exp_avg"]
    assert (average.kind, average.max_abs) == ("exp_avg", np.abs(difference).max())
    expected = np.linalg.norm(difference) / np.linalg.norm(one["exp_avg"].astype(np.float64))
    assert math.isclose(average.relative, expected, rel_tol=1e-9)
    assert (squares.kind, squares.max_abs) == ("exp_avg_sq", math.inf)
