"""LAMB over flat partitions against LAMB over whole tensors, in float64 and one process."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.checkpoints.state import read_weights
from tests.distributed import lamb_main
from tests.distributed.lamb_main import Case
from tests.support.grids import first_in_ci, selected
from tests.support.ranks import Starter, assert_same_bits, finish

# All on two ranks; parts of four have other borders.
CASES = [*((2, case) for case in lamb_main.CASES), (4, lamb_main.CASES[0])]
AT_NIGHT = [*((4, case) for case in lamb_main.CASES[1:]), *((1, case) for case in lamb_main.CASES)]


@pytest.fixture(scope="module")
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start_command: Starter
) -> dict[int, Path]:
    """What the selected cases left, by the number of ranks."""
    cases = selected(request, "world_size", "case")
    folders = {size: tmp_path_factory.mktemp(f"lamb-{size}") for size, _ in cases}
    # All at once: most of their time is the start.
    groups = {}
    for size, folder in folders.items():
        names = [case.name for of, case in cases if of == size]
        command = [sys.executable, "-m", "tests.distributed.lamb_main", str(folder), *names]
        groups[size] = start_command(command, size, folder / "output")
    for size, group in groups.items():
        finish(group, folders[size] / "output")
    return folders


def reference(
    *, bias_correction: bool, adapted: bool = True, apart: bool = True
) -> dict[str, Tensor]:
    """The weights after all steps, float64; the formulas of the paper's algorithm 2."""
    config = lamb_main.CASES[0].config()
    beta1, beta2, eps = config.adam_beta1, config.adam_beta2, config.adam_eps

    def trained(name: str, part: int, parts: int) -> Tensor:
        w = lamb_main.weights()[name].double().chunk(parts)[part]
        m, v = torch.zeros_like(w), torch.zeros_like(w)
        for step in range(lamb_main.NUM_STEPS):
            batches = range(lamb_main.NUM_MICRO_BATCHES)
            grads = [lamb_main.gradient(step, batch)[name].double() for batch in batches]
            g = torch.stack(grads).mean(0).chunk(parts)[part]
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g**2
            t = step + 1
            m_hat = m / (1 - beta1**t) if bias_correction else m
            v_hat = v / (1 - beta2**t) if bias_correction else v
            u = m_hat / (v_hat.sqrt() + eps)
            ratio = 1.0
            if w.ndim > 1:
                u = u + lamb_main.WEIGHT_DECAY * w
                norms = w.square().sum().sqrt().item(), u.square().sum().sqrt().item()
                if adapted and min(norms) > 0:
                    ratio = norms[0] / norms[1]
            w = w - lamb_main.learning_rate(step) * ratio * u
        return w

    return {
        name: torch.cat([trained(name, part, parts) for part in range(parts)])
        for name in lamb_main.SHAPES
        for parts in [lamb_main.STACKED.get(name, 1) if apart else 1]
    }


def _distances(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Of each weight, as a share of the way that it went."""
    start = lamb_main.weights()
    ways = {name: value - start[name] for name, value in expected.items()}
    return {n: ((found[n] - expected[n]).norm() / way.norm()).item() for n, way in ways.items()}


@pytest.mark.parametrize(("world_size", "case"), first_in_ci([*CASES, *AT_NIGHT], len(CASES)))
def test_weights_are_those_of_whole_tensors_in_one_process(
    folders: dict[int, Path], world_size: int, case: Case
) -> None:
    folder = folders[world_size] / case.name
    if case.bias_correction:  # a fresh engine goes on from the middle
        assert_same_bits(folder / "resumed", folder / "straight")
    masters = read_weights(folder / "straight")
    distances = _distances(masters, reference(bias_correction=case.bias_correction))
    # Largest found: 5e-7, the same in all cases.
    assert max(distances.values()) < 5e-6, distances
    # The reference tells other optimizers apart.
    for other in (
        reference(bias_correction=not case.bias_correction),
        reference(bias_correction=case.bias_correction, adapted=False),
        reference(bias_correction=case.bias_correction, apart=False),
    ):
        assert max(_distances(masters, other).values()) > 0.05
