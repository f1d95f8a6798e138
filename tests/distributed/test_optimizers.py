"""Optimizers over flat partitions against plain loops over whole tensors, in one process."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeline.checkpoints.state import read_weights
from tests.distributed import optimizers_main as given
from tests.distributed.optimizers_main import Case
from tests.support.grids import first_in_ci, selected
from tests.support.ranks import Starter, assert_same_bits, finish, state_of

_IN_CI = 6
# On two ranks; parts of four have other borders.
CASES = [*((4, case) for case in given.CASES[:2]), *((2, case) for case in given.CASES[2:_IN_CI])]
AT_NIGHT = [(size, case) for size in (2, 4, 1) for case in given.CASES if (size, case) not in CASES]


@pytest.fixture(scope="module")
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start_command: Starter
) -> dict[int, Path]:
    """What the selected cases left, by the number of ranks."""
    cases = selected(request, "world_size", "case")
    folders = {size: tmp_path_factory.mktemp(f"optimizers-{size}") for size, _ in cases}
    # All at once: most of their time is the start.
    groups = {}
    for size, folder in folders.items():
        names = [case.name for of, case in cases if of == size]
        groups[size] = start_command(_command(folder, *names), size, folder / "output")
    for size, group in groups.items():
        finish(group, folders[size] / "output")
    return folders


def _command(folder: Path, *jobs: str) -> list[str]:
    return [sys.executable, "-m", "tests.distributed.optimizers_main", str(folder), *jobs]


Rule = Callable[[Tensor, list[Tensor], list[float], bool], Tensor]
"""The weights after all steps: from the first ones, gradients, rates, and whether it is hidden."""
BETA1, BETA2, EPS = 0.9, 0.98, 1e-6


def lamb(*, bias_correction: bool, adapted: bool = True) -> Rule:
    """The formulas of the paper's algorithm 2."""

    def trained(w: Tensor, gradients: list[Tensor], rates: list[float], _: bool) -> Tensor:
        m, v = torch.zeros_like(w), torch.zeros_like(w)
        for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
            m = BETA1 * m + (1 - BETA1) * g
            v = BETA2 * v + (1 - BETA2) * g**2
            m_hat = m / (1 - BETA1**t) if bias_correction else m
            v_hat = v / (1 - BETA2**t) if bias_correction else v
            u = m_hat / (v_hat.sqrt() + EPS)
            ratio = 1.0
            if w.ndim > 1:
                u = u + given.WEIGHT_DECAY * w
                norms = w.square().sum().sqrt().item(), u.square().sum().sqrt().item()
                # Of decay alone the ratio would be its inverse.
                if adapted and min(norms) > 0 and m.any():
                    ratio = norms[0] / norms[1]
            w = w - rate * ratio * u
        return w

    return trained


def stable_adamw(*, clips: bool = True) -> Rule:
    """The formulas of algorithm 2 of arXiv 2304.13013; without clipping, AdamW's."""

    def trained(w: Tensor, gradients: list[Tensor], rates: list[float], _: bool) -> Tensor:
        m, v = torch.zeros_like(w), torch.zeros_like(w)
        decay = given.WEIGHT_DECAY if w.ndim > 1 else 0.0
        for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
            m = BETA1 * m + (1 - BETA1) * g
            v = BETA2 * v + (1 - BETA2) * g**2
            m_hat, v_hat = m / (1 - BETA1**t), v / (1 - BETA2**t)
            rms = (g**2 / v_hat.clamp(min=EPS**2)).mean().sqrt().item()
            rate = rate / max(1.0, rms) if clips else rate
            w = (1 - rate * decay) * w - rate * m_hat / (v_hat.sqrt() + EPS)
        return w

    return trained


def muon(*, warmup: int = 0, scaled: bool = True, momentum: float = 0.95) -> Rule:
    """Jordan's code with the factor of arXiv 2502.16982; AdamW for what is not inside layers."""

    def trained(w: Tensor, gradients: list[Tensor], rates: list[float], hidden: bool) -> Tensor:
        if not hidden:
            return stable_adamw(clips=False)(w, gradients, rates, hidden)
        average = torch.zeros_like(w)
        for t, (g, rate) in enumerate(zip(gradients, rates, strict=True)):
            mu = 0.85 + (momentum - 0.85) * min(1.0, t / warmup) if warmup else momentum
            average = mu * average + (1 - mu) * g
            x = mu * average + (1 - mu) * g
            x = x / x.norm() if x.any() else x
            for _ in range(5):
                gram = x @ x.mT
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            factor = 0.2 * max(w.shape) ** 0.5 if scaled else 1.0
            w = w - rate * given.WEIGHT_DECAY * w - rate * factor * x
        return w

    return trained


def muon_of_torch(*, momentum: float = 0.95, scale: str = "match_rms_adamw") -> Rule:
    """torch's, whose products are in bf16."""

    def trained(w: Tensor, gradients: list[Tensor], rates: list[float], hidden: bool) -> Tensor:
        if not hidden:
            return stable_adamw(clips=False)(w, gradients, rates, hidden)
        parameter = torch.nn.Parameter(w.float())
        optimizer = torch.optim.Muon([parameter], momentum=momentum, adjust_lr_fn=scale,
                                     weight_decay=given.WEIGHT_DECAY)  # fmt: skip
        for g, rate in zip(gradients, rates, strict=True):
            parameter.grad = g.float()
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        return parameter.detach().double()

    return trained


def reference(rule: Rule, num_steps: int, *, apart: bool = True) -> dict[str, Tensor]:
    """The weights after all steps, float64."""
    steps = range(num_steps)
    means, first = [given.mean_gradient(step) for step in steps], given.weights()
    found = {}
    for name in given.SHAPES:
        parts = given.HIDDEN.get(name, 1) if apart else 1
        rates = [given.lr_scale(name) * given.learning_rate(step) for step in steps]
        cut = zip(
            first[name].double().chunk(parts), *(m[name].chunk(parts) for m in means), strict=True
        )
        made = [rule(w, list(gradients), rates, name in given.HIDDEN) for w, *gradients in cut]
        found[name] = torch.cat(made)
    return found


def _distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest of a weight, as a share of the way that it went."""
    start = given.weights()
    ways = {name: value - start[name] for name, value in expected.items()}
    return max(((found[n] - expected[n]).norm() / way.norm()).item() for n, way in ways.items())


def _rules(case: Case) -> tuple[Rule, list[Rule]]:
    """The rule of a case, and others, which the reference must tell apart."""
    if case.optimizer == "stable_adamw":
        return stable_adamw(), [stable_adamw(clips=False)]
    if case.optimizer == "lamb":
        corrects = bool(case.lamb_bias_correction)
        others = [lamb(bias_correction=not corrects), lamb(bias_correction=corrects, adapted=False)]
        return lamb(bias_correction=corrects), others
    if case.precision == "bf16":
        return muon_of_torch(), [muon_of_torch(momentum=0.9), muon_of_torch(scale="original")]
    warmup = case.muon_momentum_warmup_steps
    return muon(warmup=warmup), [muon(warmup=warmup, scaled=False), muon(momentum=0.9)]


@pytest.mark.parametrize(("world_size", "case"), first_in_ci([*CASES, *AT_NIGHT], len(CASES)))
def test_weights_are_those_of_whole_tensors_in_one_process(
    folders: dict[int, Path], world_size: int, case: Case
) -> None:
    folder = folders[world_size] / case.name
    assert_same_bits(folder / "resumed", folder / "straight")
    masters = read_weights(folder / "straight")
    rule, others = _rules(case)
    # Largest found: 3e-6, after 100 steps; of muon 1e-5, because its iteration multiplies the
    # rounding of small singular values by up to 3.4445^5, and where its products are in bf16 9e-3.
    limit = 1e-5
    if case.optimizer == "muon":
        limit = 2e-2 if case.precision == "bf16" else 3e-5
    assert _distance(masters, reference(rule, case.num_steps)) < limit
    # The reference tells other optimizers apart.
    whole = reference(rule, case.num_steps, apart=False)
    for other in (whole, *(reference(each, case.num_steps) for each in others)):
        assert _distance(masters, other) > 0.02


def test_muon_goes_on_on_other_ranks_and_stages_to_the_same_bits(
    start_command: Starter, tmp_path: Path
) -> None:
    steps = [("", 4, 4, "muon-bf16-stage-2"), ("4", 8, 2, "muon-bf16-stage-1"),
             ("8", 12, 1, "muon-bf16-stage-0")]  # fmt: skip
    for loaded, stop, size, case in steps:
        jobs = [f"{case}:{loaded}:{stop}"]
        jobs += [f"{case}::straight/{stop}"] * (size == 1)
        finish(
            start_command(_command(tmp_path, *jobs), size, tmp_path / "output"), tmp_path / "output"
        )
    found, expected = state_of(tmp_path / "12"), state_of(tmp_path / "straight/12")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Not what is AdamW's: torch's fused kernel rounds the last elements of a part otherwise.
        is_muons = name.split()[1] in given.HIDDEN
        within = {"rtol": 0.0, "atol": 0.0} if is_muons else {"rtol": 1e-6, "atol": 1e-8}
        torch.testing.assert_close(found[name], value, **within, msg=name)
