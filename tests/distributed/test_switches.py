"""Activation checkpointing, compiled layers and tuned ZeRO train as the plain engine does."""

import json
import sys
from pathlib import Path

import pytest

from tests.distributed import switches_main
from tests.distributed.switches_main import Case
from tests.support.ranks import Starter, assert_same_bits, finish, state_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, start_command: Starter) -> Path:
    folder = tmp_path_factory.mktemp("switches")
    command = [sys.executable, "-m", "tests.distributed.switches_main", str(folder)]
    finish(start_command(command, 2, folder / "output"), folder / "output", timeout_s=600)
    return folder


def _results(folder: Path, case: Case) -> list[list[list[float]]]:
    """Loss and norm by rank and step."""
    paths = [folder / case.name / f"results-{rank}.json" for rank in range(2)]
    return [json.loads(path.read_text()) for path in paths]


@pytest.mark.parametrize(
    "case",
    [case for case in switches_main.SWITCHED if case.switch != "compiled"],
    ids=lambda case: case.name,
)
def test_nothing_changes_to_the_bit(folder: Path, case: Case) -> None:
    for of_rank, wanted in zip(_results(folder, case), _results(folder, case.without), strict=True):
        assert [loss for loss, _ in of_rank] == [loss for loss, _ in wanted]
        # The sum over groups of parameters, in float64; tuning divides them in another way.
        norms = [norm for _, norm in wanted]
        assert [norm for _, norm in of_rank] == pytest.approx(norms, rel=1e-15, abs=0)
    assert_same_bits(folder / case.name, folder / case.without.name)


def test_compiled_layers_train_as_eager_ones(folder: Path) -> None:
    [case] = [case for case in switches_main.SWITCHED if case.switch == "compiled"]
    found, expected = _results(folder, case), _results(folder, case.without)
    for of_rank, wanted in zip(found, expected, strict=True):
        for pair, numbers in zip(of_rank, wanted, strict=True):
            assert pair == pytest.approx(numbers, rel=5e-6)
    state, reference = (state_of(folder / each.name) for each in (case, case.without))
    assert state.keys() == reference.keys(), "names have changed"


def test_a_layer_is_compiled_once_for_all_layers_steps_and_sequences(folder: Path) -> None:
    for rank in range(2):
        graphs = json.loads((folder / f"graphs-{rank}.json").read_text())
        # The first layer has no carried scores; alpha and rate differ from step to step.
        assert graphs == [2, 2, 2]
