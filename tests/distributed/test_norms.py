"""Gradient norms of large tensors, at every ZeRO stage and precision, against numpy's float64."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.distributed import norms_main as case
from tests.distributed.conftest import LeftBy


@pytest.fixture(scope="module")
def folder(left_by: LeftBy) -> Path:
    return left_by("norms_main")


@pytest.mark.parametrize(("precision", "stage"), case.CASES)
def test_norms_are_those_of_float64(folder: Path, precision: str, stage: int) -> None:
    gradients = {group: case.gradient(group).astype(np.float64) for group in case.SHAPES}
    norms = {group: float(np.linalg.norm(each)) for group, each in gradients.items()}
    expected = {"all": float(np.linalg.norm(list(norms.values())))}
    if stage < 3:  # which has no partitions to measure groups in
        expected |= norms
    for rank in range(2):
        found = json.loads((folder / f"{precision}-{stage}-{rank}.json").read_text())
        assert found == pytest.approx(expected, rel=1e-6)
