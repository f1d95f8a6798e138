"""Activation checkpointing, compiled layers and tuned ZeRO train as the plain engine does."""

import json
from pathlib import Path

import pytest

from tests.distributed.conftest import LeftBy
from tests.distributed.switches_main import COMPILED, SWITCHED, Case
from tests.support.grids import first_in_ci, selected
from tests.support.ranks import assert_same_bits, state_of


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, left_by: LeftBy) -> Path:
    """What the cases of the selected tests left, with their switch and without."""
    cases = selected(request, "case")
    names = {case.name for switched in cases for case in (switched, switched.without)}
    return left_by("switches_main", *names, timeout_s=600)


@pytest.fixture(scope="module", params=first_in_ci([1, 2]))
def compiled(request: pytest.FixtureRequest, left_by: LeftBy) -> Path:
    """Layers that each rank has compiled, which takes it seconds."""
    names = (COMPILED.name, COMPILED.without.name)
    return left_by("switches_main", *names, ranks=request.param, timeout_s=600)


def _results(folder: Path, case: Case) -> list[list[list[float]]]:
    """Loss and norm by rank and step."""
    paths = sorted((folder / case.name).glob("results-*.json"))
    assert paths, "no rank has ended"
    return [json.loads(path.read_text()) for path in paths]


@pytest.mark.parametrize("case", first_in_ci(SWITCHED, 7), ids=lambda case: case.name)
def test_nothing_changes_to_the_bit(folder: Path, case: Case) -> None:
    for of_rank, wanted in zip(_results(folder, case), _results(folder, case.without), strict=True):
        assert [loss for loss, _ in of_rank] == [loss for loss, _ in wanted]
        # The sum over groups of parameters, in float64; tuning divides them in another way.
        norms = [norm for _, norm in wanted]
        assert [norm for _, norm in of_rank] == pytest.approx(norms, rel=1e-15, abs=0)
    assert_same_bits(folder / case.name, folder / case.without.name)


def test_compiled_layers_train_as_eager_ones_and_are_compiled_once(compiled: Path) -> None:
    of_ranks = zip(_results(compiled, COMPILED), _results(compiled, COMPILED.without), strict=True)
    for of_rank, wanted in of_ranks:
        for pair, numbers in zip(of_rank, wanted, strict=True):
            assert pair == pytest.approx(numbers, rel=5e-6)
    state, reference = (state_of(compiled / case.name) for case in (COMPILED, COMPILED.without))
    assert state.keys() == reference.keys(), "names have changed"
    for path in compiled.glob("graphs-*.json"):
        # The first layer has no carried scores; alpha and rate differ from step to step.
        assert json.loads(path.read_text()) == [2, 2, 2]
    assert list(compiled.glob("graphs-0.json"))
