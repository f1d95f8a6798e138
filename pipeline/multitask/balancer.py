"""The rules of `balance.py` in a training step, and what they remember between steps.

Shared parameters are those of the encoder, embeddings included: norms and products are of their
gradients (of gradnorm: of the last layer's). A rule of losses, and gradient normalisation, scale
the gradient of a head as that of the encoder. Rules that combine gradients leave each head its own
gradient, divided by the number of tasks of the step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.multitask import balance as rules
from pipeline.multitask.config import OF_LOSSES, OF_PRODUCTS, BalanceConfig
from pipeline.multitask.draws import Draws
from pipeline.runtime import dist
from pipeline.train.engine import Measures

Memory = dict[str, dict[str, float]]
"""Remembered numbers of each task, by quantity; saved with every checkpoint."""


# Computed by `loss_of_prior` of a task's kind. Some kinds have no formula for it: their first draw
# only measures, since a guess would make the update depend on the loss' scale.
@dataclass(frozen=True)
class LossBaseline:
    """What is known of a task's loss before training, its factor included; None: nothing."""

    initial: float | None
    """Loss of a model that knows nothing, such as log K for K classes."""
    prior: float | None
    """Loss of a model that knows the frequencies of the answers alone."""


class Balancer:
    """Makes the weighing of each step."""

    def __init__(
        self,
        config: BalanceConfig,
        known: Mapping[str, LossBaseline],
        draws: Draws,
        *,
        seed: int,
        num_layers: int,
        world_size: int,
        output: Callable[[], Tensor] | None = None,
    ) -> None:
        """Take the tasks by name, in the order in which `draws` numbers them.

        `output` returns and clears the sum of squares of the gradient of the encoder's output.
        """
        self.config, self.known, self.draws, self.seed = config, known, draws, seed
        self.names = list(known)
        self.last_layer = f"encoder.layers.{num_layers - 1}."
        self.world_size, self.output = world_size, output
        self.gram: npt.NDArray[np.float64] = np.zeros((len(self.names), len(self.names)))
        """Sums of the cosines between tasks since the last picture."""
        self.seen = np.zeros_like(self.gram)
        """How often each pair was in a step since then."""

    def at(self, memory: Memory, step: int) -> "StepWeighing":
        """Begin a step."""
        counts = np.bincount(self.draws.of_step(step), minlength=len(self.names))
        return StepWeighing(self, memory, step, dict(zip(self.names, counts.tolist(), strict=True)))

    def take_cosines(self) -> npt.NDArray[np.float64]:
        """(tasks, tasks) mean cosines since the last call; NaN where a pair never met."""
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = self.gram / self.seen
        self.gram, self.seen = np.zeros_like(self.gram), np.zeros_like(self.seen)
        return np.asarray(mean)


@dataclass
class StepWeighing:
    """The `pipeline.train.engine.LossBalancer` of one step."""

    balancer: Balancer
    memory: Memory
    step: int
    counts: dict[str, int]
    _weights: dict[str, Tensor | float] = field(default_factory=dict)
    _norms: dict[str, Tensor] = field(default_factory=dict)
    _squares: dict[str, Tensor] = field(default_factory=dict)
    _powers: list[Tensor] = field(default_factory=list)
    _cosines: dict[str, float] = field(default_factory=dict)
    _shown: dict[str, float] = field(default_factory=dict)

    @property
    def measures(self) -> Measures:
        """What the rule has to know."""
        config = self.balancer.config
        if config.method in OF_LOSSES:
            return "losses"
        if config.method in OF_PRODUCTS:
            return "products"
        if config.method == "gradnorm":
            return "norms"
        if config.method != "gradient_norm" or config.norms == "output":
            return "nothing"
        drawn = [name for name, count in self.counts.items() if count]
        known = self.memory.get("norm", {})
        late = config.norms == "late" and self.step % config.every and known.keys() >= set(drawn)
        return "nothing" if late else "norms"

    def is_shared(self, parameter: str) -> bool:
        """Return whether it is the encoder's, or the last layer's."""
        prefix = self.balancer.last_layer
        return parameter.startswith(
            prefix if self.balancer.config.method == "gradnorm" else "encoder."
        )

    def before(self, names: Sequence[str]) -> list[float]:
        """Weigh what can be weighed without the step's losses."""
        if self.balancer.output is not None:
            self.balancer.output()  # passes outside of steps, as of a skipped one, are not ours
        is_known = self.measures == "nothing"
        weights = self._known_weights(names) if is_known else [1.0] * len(names)
        self._weights = dict(zip(names, weights, strict=True))
        return weights

    def _known_weights(self, names: Sequence[str]) -> list[float]:
        config, num = self.balancer.config, len(names)
        if config.method == "gradient_norm":
            norms = self.memory.get("norm", {})
            # The sum of gradients of length 1, divided by the number of tasks, is at most 1 long,
            # whatever the losses' scales are.
            return [1 / (num * norms[name]) if norms.get(name) else self._first(name, num)
                    for name in names]  # fmt: skip
        every = self.balancer.names
        if config.method == "uncertainty":
            learned = rules.uncertainty(self._remembered("log_variance", names, -0.5))
            of = dict(zip(names, learned.tolist(), strict=True))
        elif config.method == "dwa":
            of = dict(zip(every, rules.dwa(self._rates(), config.temperature), strict=True))
        elif config.method == "random":
            drawn = rules.random_weights(len(every), self.balancer.seed, self.step)
            of = dict(zip(every, drawn.tolist(), strict=True))
        elif config.method in ("initial", "prior"):
            of = {name: self._by_first_loss(name) for name in names}
        else:
            of = dict.fromkeys(names, 1.0)
        return [self._share(name) * float(of[name]) for name in names]

    def _share(self, name: str) -> float:
        """Return the share of a task in a mean over the draws of the step."""
        return self.counts[name] / sum(self.counts.values())

    def _first(self, name: str, num: int) -> float:
        """Weigh a task whose norm is not known yet, by what its loss begins with."""
        known = self.balancer.known[name].initial
        # Without a known loss the first draw measures, and counts for little beside other tasks.
        return 1 / (num * known) if known else 1e-3 / num

    def _by_first_loss(self, name: str) -> float:
        """Return 1 / L_i; 0 in the first draw of a task without a known loss, which measures it."""
        known = self.balancer.known[name]
        value = known.prior if self.balancer.config.method == "prior" else known.initial
        # A known loss of 0 counts as unknown: its inverse would be infinite.
        value = value or self.memory.get("first_loss", {}).get(name)
        return 1 / value if value else 0.0

    def _remembered(self, what: str, names: Sequence[str], default: float) -> rules.Floats:
        known = self.memory.get(what, {})
        return np.array([known.get(name, default) for name in names])

    def _rates(self) -> rules.Floats:
        """Return the last mean loss of each task over the one before; 1 where one is missing."""
        last, older = self.memory.get("mean", {}), self.memory.get("older_mean", {})
        return np.array([
            last[name] / older[name] if last.get(name) and older.get(name) else 1.0
            for name in self.balancer.names
        ])  # fmt: skip

    def passed(self, name: str) -> None:
        """Add up what the backward pass left at the encoder's output."""
        if self.balancer.output is not None:
            squares = self.balancer.output()
            self._squares[name] = self._squares.get(name, torch.zeros_like(squares)) + squares

    def each(self, name: str, loss: Tensor, norm: Tensor) -> Tensor:
        """Weigh one task's gradient."""
        config = self.balancer.config
        loss, norm = loss.double(), norm.double()
        if config.method not in OF_LOSSES:  # of which no norm is measured
            self._norms[name] = norm
        if config.method in OF_LOSSES:
            share, gamma = self._share(name), config.gamma
            if config.method == "real_time":
                weight = share / loss
            else:
                power = share * (loss.log() if gamma == 0 else loss**gamma)
                self._powers.append(torch.where(loss > 0, power, torch.zeros_like(loss)))
                weight = share * loss ** (gamma - 1)
            # A task without a valid row has the loss 0 and no gradient.
            weight = torch.where(loss > 0, weight, torch.zeros_like(loss))
        elif config.method == "gradnorm":
            drawn = [name for name, count in self.counts.items() if count]
            weights = len(drawn) * rules.softmax(self._remembered("logit", drawn, 0.0))
            weight = torch.full_like(norm, float(weights[drawn.index(name)] / len(drawn)))
        else:
            num = sum(1 for count in self.counts.values() if count)
            known = self.memory.get("norm", {}).get(name) if config.norms == "late" else None
            length = torch.full_like(norm, known) if known else norm
            # A NaN or an infinite norm goes through, and the step is skipped.
            weight = torch.where(norm == 0, torch.zeros_like(norm), 1 / (num * length))
        self._weights[name] = weight
        return weight

    def common(self) -> Tensor | float:
        """Return the factor of all gradients that the generalised mean has."""
        gamma = self.balancer.config.gamma
        if not self._powers:
            return 1.0
        total = torch.stack(self._powers).sum()
        factor = ((1 - gamma) * total).exp() if gamma == 0 else total ** (1 / gamma - 1)
        self._weights = {name: weight * factor for name, weight in self._weights.items()}
        return factor

    def combine(self, names: Sequence[str], products: npt.NDArray[np.float64]) -> list[float]:
        """Return the coefficients of the rules that compare gradients."""
        config, seed = self.balancer.config, self.balancer.seed
        if not np.isfinite(products).all():
            return [float("nan")] * len(names)  # the step is skipped
        if config.method == "pcgrad":
            # Divided as the sum of gradients of length 1 is.
            found = rules.pcgrad(products, seed, self.step) / len(names)
        elif config.method == "cagrad":
            found = rules.cagrad(products)
        else:
            # Of a step that draws no main task, all are.
            main = [name in config.main for name in names]
            found = rules.smallest(products, np.array(main if any(main) else [True] * len(main)))
        self._note_products(names, products)
        coefficients: list[float] = found.tolist()
        self._weights = dict(zip(names, coefficients, strict=True))
        return coefficients

    def _note_products(self, names: Sequence[str], products: npt.NDArray[np.float64]) -> None:
        cosines = rules.cosines(products)
        places = [self.balancer.names.index(name) for name in names]
        at = np.ix_(places, places)
        # NaN is a task without a gradient: it adds nothing, and is not counted in the next line.
        self.balancer.gram[at] += np.nan_to_num(cosines)
        self.balancer.seen[at] += np.isfinite(cosines)
        self._norms = {
            name: torch.tensor(float(value) ** 0.5)
            for name, value in zip(names, np.diag(products), strict=True)
        }
        above = cosines[np.triu_indices(len(names), 1)]
        if np.isfinite(above).any():
            self._cosines = {
                "task_cosine_min": float(np.nanmin(above)),
                "task_cosine_mean": float(np.nanmean(above)),
            }

    def done(self, names: Sequence[str], losses: Sequence[float]) -> None:
        """Learn from the step's losses and norms. Collective."""
        config, memory = self.balancer.config, self.memory
        valid = {n: x for n, x in zip(names, losses, strict=True) if np.isfinite(x) and x > 0}
        first = memory.setdefault("first_loss", {})
        for name, loss in valid.items():
            first.setdefault(name, loss)
        if config.method == "uncertainty":
            self._slide("log_variance", valid, -0.5, lambda _, *of: rules.uncertainty_slope(*of))
        elif config.method == "gradnorm":
            self._slide("logit", valid, 0.0, self._gradnorm_slope)
        elif config.method == "dwa":
            self._follow_means(valid)
        if config.method == "gradient_norm" and config.norms != "exact":
            self._follow_norms(names)
        self._shown = {
            f"weight_{name}": float(weight) for name, weight in self._weights.items()
        } | {f"grad_norm_{name}": float(norm) for name, norm in self._norms.items()}

    def _slide(
        self,
        what: str,
        losses: Mapping[str, float],
        start: float,
        slope: Callable[[list[str], rules.Floats, rules.Floats], rules.Floats],
    ) -> None:
        """Go a step of gradient descent with the numbers of these tasks."""
        if not losses:
            return
        names = list(losses)
        before = self._remembered(what, names, start)
        falls = slope(names, before, np.array([*losses.values()]))
        after = before - self.balancer.config.lr * falls
        self.memory.setdefault(what, {}).update(zip(names, after.tolist(), strict=True))

    def _gradnorm_slope(
        self, names: list[str], values: rules.Floats, losses: rules.Floats
    ) -> rules.Floats:
        norms = np.array([float(self._norms[name]) for name in names])
        ratios = losses / self._remembered("first_loss", names, 1.0)
        return rules.gradnorm_slope(values, norms, ratios)[1]

    def _follow_means(self, losses: Mapping[str, float]) -> None:
        """Add to the means of losses; after `interval` steps they take the place of the last."""
        sums = self.memory.setdefault("sum", {})
        draws = self.memory.setdefault("draws", {})
        for name, loss in losses.items():
            sums[name] = sums.get(name, 0.0) + loss
            draws[name] = draws.get(name, 0.0) + 1
        if (self.step + 1) % self.balancer.config.interval == 0:
            last = self.memory.setdefault("mean", {})
            older = self.memory.setdefault("older_mean", {})
            for name, total in sums.items():
                if name in last:
                    older[name] = last[name]
                last[name] = total / draws[name]
            sums.clear()
            draws.clear()

    def _follow_norms(self, names: Sequence[str]) -> None:
        """Add to the moving averages of norms."""
        config, known = self.balancer.config, self.memory.setdefault("norm", {})
        if config.norms == "output":
            squares = dist.sum_over_ranks(torch.stack([self._squares[name] for name in names]))
            for name, square in zip(names, squares.tolist(), strict=True):
                weight = float(self._weights[name])
                if weight:
                    # Each rank's loss was multiplied by the world size, which the mean over ranks
                    # undoes later.
                    norm = square**0.5 / (self.balancer.world_size * weight)
                    self._norms[name] = torch.tensor(norm)
        for name, norm in self._norms.items():
            value = float(norm)
            if value:
                known[name] = config.decay * known.get(name, value) + (1 - config.decay) * value

    @property
    def values(self) -> dict[str, float]:
        """Weights and norms of the step."""
        return self._shown | self._cosines
