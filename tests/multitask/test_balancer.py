"""The gradient of a step against one that autograd gives in float64, for every rule."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeline.config.train import TrainConfig
from pipeline.data.loader import MicroBatch
from pipeline.errors import ConfigError
from pipeline.multitask import balance
from pipeline.multitask.balancer import Balancer, LossBaseline, StepWeighing
from pipeline.multitask.config import BalanceConfig, Method
from pipeline.multitask.draws import Draws
from pipeline.objectives.base import Sum, Sums
from pipeline.runtime import env
from pipeline.train import zero0_engine
from pipeline.train.engine import Engine, init_process_group
from pipeline.train.optimizers.muon import orthogonal
from pipeline.use.pretrain import own_process

WIDTH, HIDDEN = 6, 5
Batches = dict[str, list[MicroBatch]]
Gradients = dict[str, dict[str, np.ndarray]]


class Toy(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        torch.manual_seed(1)
        layer = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList([layer])})
        self.tasks = nn.ModuleDict({name: nn.Linear(HIDDEN, 1) for name in names})

    def forward(self, x: Tensor, task: str) -> Tensor:
        hidden = torch.tanh(self.encoder["layers"][0](x))  # type: ignore[index]
        return self.tasks[task](hidden)[:, 0]  # type: ignore[no-any-return]


@dataclass
class Squares:
    """The mean squared error of each task, times its factor, plus its constant."""

    losses: dict[str, float]
    constants: Mapping[str, float]
    targets = "rows"

    def __call__(self, model: nn.Module, batch: MicroBatch) -> Sums:
        [(name, weight)] = batch.weights.items()
        errors = model(batch.inputs["x"], task=name) - batch.inputs["y"]
        total = errors.square().sum() + self.constants.get(name, 0.0) * weight
        zero = torch.zeros(())
        found = {each: Sum(zero, zero) for each in self.losses}
        return {**found, name: Sum(total, torch.tensor(weight))}


def batch(name: str, x: Tensor, y: Tensor) -> MicroBatch:
    nothing = torch.zeros(1, 1, dtype=torch.int64)
    return MicroBatch(nothing, nothing.int(), nothing, None, nothing[0].int(), {"x": x, "y": y},
                      {name: float(len(x))}, {}, len(x), 0)  # fmt: skip


def rows(names: list[str], parts: int = 2) -> Batches:
    torch.manual_seed(2)
    found: Batches = {}
    for name in names:
        x, y = torch.randn(8, WIDTH), torch.randn(8)
        size = 8 // parts
        pieces = zip(x.split(size), y.split(size), strict=True)
        found[name] = [batch(name, *each) for each in pieces]
    return found


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with env.restored(), own_process():
        init_process_group(env.process_info_or_alone())
        yield


class _All(Draws):
    """Every task in every step."""

    def __init__(self, names: list[str]) -> None:
        super().__init__([1.0], 1, 1)
        self._names = names

    def of_step(self, step: int) -> np.ndarray:
        return np.arange(len(self._names))


def taken(method: str, given: Batches, factors: Mapping[str, float] | None = None,
          constants: Mapping[str, float] | None = None, steps: int = 1,
          **options: Any) -> tuple[dict[str, np.ndarray], dict[str, dict[str, float]]]:  # fmt: skip
    """Take steps; return the gradient of the last one by parameter, and what is remembered."""
    names = list(given)
    objective = Squares({name: (factors or {}).get(name, 1.0) for name in names}, constants or {})
    model = Toy(names)
    config = TrainConfig(zero_stage=0, precision="fp32", grad_clip=0.0, warmup_steps=0)
    engine = Engine(model, config, env.process_info_or_alone(), torch.device("cpu"))
    seen: list[dict[str, np.ndarray]] = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found = {}
        for slice_ in engine._slices():
            assert slice_.partition.grad is not None
            found[slice_.name] = slice_.of(slice_.partition.grad).clone().double().numpy()
        seen.append(found)

    engine.optimizer.register_step_pre_hook(look)

    known = {name: LossBaseline((factors or {}).get(name, 1.0) * 2.0, None) for name in names}
    balancer = Balancer(BalanceConfig(method=method, **options), known, _All(names), seed=3,
                        num_layers=1, world_size=1)  # fmt: skip
    memory: dict[str, dict[str, float]] = {}
    every = [each for of_task in given.values() for each in of_task]
    for step in range(steps):
        engine.train_step(every, objective, 0.0, weighing=balancer.at(memory, step))  # type: ignore[arg-type]
    return seen[-1], memory


def test_muon_takes_the_direction_of_normalised_gradients() -> None:
    given, names = rows(["a", "b"]), ["a", "b"]
    config = TrainConfig(optimizer="muon", zero_stage=0, precision="fp32", grad_clip=0.0,
                         warmup_steps=0, weight_decay=0.0)  # fmt: skip
    model = Toy(names)
    model.hidden_matrices = {"encoder.layers.0.weight": 1}  # type: ignore[assignment]
    before = model.encoder["layers"][0].weight.detach().clone()  # type: ignore[index, union-attr]
    engine = Engine(model, config, env.process_info_or_alone(), torch.device("cpu"))
    known = {name: LossBaseline(2.0, None) for name in names}
    balancer = Balancer(BalanceConfig(method="gradient_norm"), known, _All(names), seed=3,
                        num_layers=1, world_size=1)  # fmt: skip
    every = [each for of_task in given.values() for each in of_task]
    objective = Squares(dict.fromkeys(names, 1.0), {})
    engine.train_step(every, objective, 0.1, weighing=balancer.at({}, 0))  # type: ignore[arg-type]
    _, gradients = reference(given)
    key = "encoder.layers.0.weight"
    unit = [gradients[name][key] / np.linalg.norm(gradients[name][key]) for name in names]
    expected = orthogonal(torch.tensor(sum(unit)).view(1, *before.shape), 5)[0]
    update = before - model.encoder["layers"][0].weight.detach()  # type: ignore[index, union-attr]
    scale = 0.1 * 0.2 * max(before.shape) ** 0.5
    torch.testing.assert_close(update / scale, expected.float(), rtol=0, atol=1e-4)


def reference(given: Batches) -> tuple[dict[str, float], Gradients]:
    """Losses and gradients of each task in float64."""
    model = Toy(list(given)).double()
    losses, gradients = {}, {}
    for name, parts in given.items():
        model.zero_grad()
        x = torch.cat([part.inputs["x"] for part in parts]).double()
        y = torch.cat([part.inputs["y"] for part in parts]).double()
        loss = (model(x, name) - y).square().mean()
        loss.backward()
        losses[name] = loss.item()
        gradients[name] = {
            key: np.zeros(each.numel()) if each.grad is None else each.grad.flatten().numpy().copy()
            for key, each in model.named_parameters()
        }
    return losses, gradients


def weighted(
    gradients: Gradients, shared: list[float], heads: list[float]
) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for each, in_encoder, in_head in zip(gradients.values(), shared, heads, strict=True):
        for key, gradient in each.items():
            factor = in_encoder if key.startswith("encoder.") else in_head
            found[key] = found.get(key, 0.0) + factor * gradient
    return found


def encoder_gram(gradients: Gradients) -> np.ndarray:
    vectors = np.stack([np.concatenate([g for key, g in each.items() if key.startswith("encoder.")])
                        for each in gradients.values()])  # fmt: skip
    return np.asarray(vectors @ vectors.T)


def expected(method: str, given: Batches) -> dict[str, np.ndarray]:
    losses, gradients = reference(given)
    num, values = len(losses), np.array([*losses.values()])
    gram = encoder_gram(gradients)
    even = [1 / num] * num
    if method == "pcgrad":
        return weighted(gradients, (balance.pcgrad(gram, 3, 0) / num).tolist(), even)
    if method == "cagrad":
        return weighted(gradients, balance.cagrad(gram, 0.5).tolist(), even)
    if method in ("mgda", "main_and_helpers"):
        main = np.array([method == "mgda" or name == "a" for name in given])
        return weighted(gradients, balance.smallest(gram, main).tolist(), even)
    of = {
        "equal": np.ones(num),
        "initial": np.full(num, 1 / 2.0),
        "prior": np.full(num, 0.0),
        "real_time": 1 / values,
        "generalised_mean": np.sqrt(values).mean() / np.sqrt(values),  # of gamma 0.5
        "uncertainty": np.full(num, 0.5 * np.exp(0.5)),
        "dwa": np.ones(num),
        "random": balance.random_weights(num, 3, 0),
        "gradnorm": np.ones(num),
        "gradient_norm": 1 / np.sqrt(np.diag(gram)),
    }[method]
    return weighted(gradients, (of / num).tolist(), (of / num).tolist())


METHODS = ("equal", "initial", "prior", "real_time", "generalised_mean", "uncertainty", "dwa",
           "random", "gradnorm", "gradient_norm", "pcgrad", "cagrad", "mgda")  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_ranks_average_as_often_as_planned(monkeypatch: pytest.MonkeyPatch, method: Method) -> None:
    times = []
    monkeypatch.setattr(zero0_engine, "_average", lambda *_: times.append(1))
    given = rows(["a", "b", "c"])
    taken(method, given)
    assert len(times) == (len(given) if BalanceConfig(method=method).averages_each else 1)


def _relative(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> float:
    assert found.keys() == wanted.keys()
    size = max(float(np.abs(each).max()) for each in wanted.values()) or 1.0
    return max(float(np.abs(found[key] - wanted[key]).max()) for key in wanted) / size


@pytest.mark.parametrize(
    ("method", "options"),
    [*((method, {}) for method in METHODS), ("main_and_helpers", {"main": ("a",)})],
)
def test_gradient_of_a_step_is_the_rule_s(method: str, options: dict[str, Any]) -> None:
    given = rows(["a", "b", "c"])
    found, _ = taken(method, given, **options)
    assert _relative(found, expected(method, given)) < 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_other_micro_batches_give_the_same_gradient(method: str) -> None:
    one, _ = taken(method, rows(["a", "b"], parts=1))
    four, _ = taken(method, rows(["a", "b"], parts=4))
    assert _relative(four, one) < 1e-6


def test_a_table_of_what_scale_and_shift_change() -> None:
    """As kexue.fm/archives/8870: which rules do not see a factor, or a constant, of a loss."""
    given = rows(["a", "b", "c"])
    scale_free = {"initial", "real_time", "dwa", "gradient_norm"}
    shift_free = {"equal", "random", "gradient_norm", "pcgrad", "cagrad", "mgda", "initial",
                  "uncertainty", "dwa", "gradnorm"}  # fmt: skip
    for method in set(METHODS) - {"prior"}:
        plain, _ = taken(method, given)
        if method != "dwa":  # its weights, not its gradients, are free of a factor
            scaled, _ = taken(method, given, factors={"b": 1000.0})
            same = _relative(scaled, plain) < 1e-6
            assert same == (method in scale_free), method
        shifted, _ = taken(method, given, constants={"b": 5.0})
        same = _relative(shifted, plain) < 1e-6
        assert same == (method in shift_free), method


@pytest.mark.parametrize(("method", "options"), [
    *((method, {}) for method in METHODS),
    *(("generalised_mean", {"gamma": gamma}) for gamma in (0.0, -1.0, 2.0)),
])  # fmt: skip
def test_task_without_a_valid_row_gives_no_nan(method: str, options: dict[str, Any]) -> None:
    given = rows(["a", "b"])
    empty = [batch("b", p.inputs["x"][:0], p.inputs["y"][:0]) for p in given["b"][:1]]
    found, memory = taken(method, {**given, "b": empty}, steps=3, **options)
    assert all(np.isfinite(each).all() for each in found.values())
    assert not options or any(each.any() for each in found.values())
    assert all(np.isfinite([*each.values()]).all() for each in memory.values())


@pytest.mark.parametrize("gamma", [None, 1.0, 0.5, 0.0, -2.0, 3.0])
def test_rules_of_losses_have_the_slope_of_their_means(gamma: float | None) -> None:
    """`real_time`, without gamma, has the slope of the logarithm of the geometric mean."""
    losses, counts = np.array([0.2, 1.0, 3.0]), {"a": 5, "b": 3, "c": 2}
    parts = np.array([*counts.values()]) / 10

    def mean(of: np.ndarray) -> float:
        if gamma is None:
            return float(parts @ np.log(of))
        return float((parts @ of**gamma) ** (1 / gamma) if gamma else np.exp(parts @ np.log(of)))

    config = BalanceConfig(method="real_time")
    if gamma is not None:
        config = BalanceConfig(method="generalised_mean", gamma=gamma)
    balancer = Balancer(config, dict.fromkeys(counts, LossBaseline(None, None)), Draws([1.0], 1, 1),
                        seed=3, num_layers=1, world_size=1)  # fmt: skip
    step = StepWeighing(balancer, {}, 0, counts)
    of_each = [
        float(step.each(name, torch.tensor(loss), torch.tensor(1.0)))
        for name, loss in zip(counts, losses, strict=True)
    ]
    slope = [(mean(losses + each) - mean(losses - each)) / 2e-6 for each in 1e-6 * np.eye(3)]
    applied = np.array(of_each) * float(step.common())
    assert applied == pytest.approx(slope, rel=1e-6)
    # What is shown is what was applied.
    step.done(list(counts), losses.tolist())
    assert [step.values[f"weight_{name}"] for name in counts] == pytest.approx(applied)


def test_late_norms_and_rates_of_losses_are_those_measured() -> None:
    given = rows(["a", "b"])
    losses, gradients = reference(given)
    norms = np.sqrt(np.diag(encoder_gram(gradients)))
    # The rate is 0, so that every step has the same norms: late weights are exact ones.
    exact, _ = taken("gradient_norm", given)
    late, memory = taken("gradient_norm", given, steps=3, norms="late", every=2)
    assert [memory["norm"][name] for name in "ab"] == pytest.approx(norms, rel=1e-6)
    assert _relative(late, exact) < 1e-6
    _, memory = taken("dwa", given, steps=5, interval=2)
    assert memory["mean"] == pytest.approx(losses, rel=1e-6)
    assert memory["older_mean"] == pytest.approx(losses, rel=1e-6)
    weights = balance.dwa(np.array([0.5, 1.0]), 2.0)
    assert weights.sum() == pytest.approx(2)
    assert weights[0] < weights[1]


@pytest.mark.parametrize(("values", "message"), [
    ({"method": "mgda", "gamma": 0.1}, r"balance\.gamma=0\.1 .* generalised_mean; leave"),
    ({"method": "dwa", "lr": 3.0}, r"balance\.lr=3\.0 .* uncertainty or gradnorm"),
    ({"method": "gradient_norm", "every": 5}, r"balance\.every=5 .* but with late"),
], ids=str)  # fmt: skip
def test_settings_of_another_rule_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BalanceConfig(**values)
    BalanceConfig(method="gradient_norm", norms="late", every=5, decay=0.5)


def test_weights_below_one_divide_as_larger_ones_do() -> None:
    """Weights of classes add up to less than 1 in many small batches."""
    engine = Engine(Toy(["a"]), TrainConfig(zero_stage=0, precision="fp32"),
                    env.process_info_or_alone(), torch.device("cpu"))  # fmt: skip
    [given] = rows(["a"], parts=1)["a"]
    for weight, expected in ((8.0, 1 / 8), (0.25, 4.0), (0.0, 1.0)):
        scales, _ = engine._scales([replace(given, weights={"a": weight})], Squares({"a": 1.0}, {}))
        assert float(scales["a"]) == expected
