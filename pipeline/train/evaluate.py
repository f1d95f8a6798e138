"""Held-out loss and accuracy, whole and by source, with the same text and masks in every run."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline.data.loader import EvalLoader, MicroBatch
from pipeline.errors import DataError
from pipeline.objectives.base import Objective
from pipeline.runtime import dist, watchdog


@dataclass(frozen=True)
class EvalScore:
    """Means over targets, such as masked tokens."""

    means: dict[str, float]
    """The objective's sums, each over its weight; `loss` is what is minimised."""
    counts: dict[str, int]
    """Targets looked at, as `num_masked`."""

    @property
    def loss(self) -> float:
        """What is minimised, nats."""
        return self.means["loss"]

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class EvalResult:
    """The scores of an evaluation."""

    total: EvalScore
    by_source: dict[str, EvalScore]
    """Scores of the sources that have held-out text."""

    def values(self) -> dict[str, float]:
        """Return named numbers; numbers of sources only if there are several."""
        scores = {"": self.total}
        if len(self.by_source) > 1:
            scores |= {f"_{name}": score for name, score in self.by_source.items()}
        return {
            f"{field}{suffix}": float(value)
            for suffix, score in scores.items()
            for field, value in (score.means | score.counts).items()
        }


def evaluate(
    model: nn.Module, device: torch.device, objective: Objective, loader: EvalLoader
) -> EvalResult:
    """Evaluate a model at the alpha that it has, without dropout. Collective."""
    sums = local_sums(model, device, objective, loader.batches(), len(loader.sources))
    return reduce_sums(sums, objective, loader.sources)


def local_sums(
    model: nn.Module,
    device: torch.device,
    objective: Objective,
    batches: Iterable[tuple[int, MicroBatch]],
    num_sources: int,
) -> dict[str, Tensor]:
    """Sum this rank's part of an evaluation. Not collective unless the model is divided.

    Returns:
        By name of the objective's sums, (num_sources, 2) fp64 on the device: totals and weights.
    """
    sums: dict[str, Tensor] = {}
    model.eval()
    with torch.no_grad():
        for source, batch in batches:
            watchdog.heartbeat("evaluating")
            for name, part in objective(model, batch.to(device)).items():
                if name not in sums:
                    sums[name] = torch.zeros(num_sources, 2, dtype=torch.float64, device=device)
                sums[name][source] += torch.stack((part.total, part.weight)).double()
    return sums


def reduce_sums(
    sums: dict[str, Tensor], objective: Objective, sources: Sequence[str]
) -> EvalResult:
    """Add up the `local_sums` of all ranks. Collective.

    Raises:
        DataError: nothing was to be predicted.
    """
    names = list(sums)
    summed = dist.sum_over_ranks(torch.stack(list(sums.values()), dim=1)).tolist()  # sync
    by_source = {
        source: {name: (total, weight) for name, (total, weight) in zip(names, rows, strict=True)}
        for source, rows in zip(sources, summed, strict=True)
    }
    first = next(iter(objective.losses))
    found = {source: each for source, each in by_source.items() if each[first][1]}
    if not found:
        raise DataError(
            "the held-out text is so short that none of its tokens is masked; prepare the data "
            "with a larger shards.eval_fraction, or evaluate more sequences"
        )
    whole = {
        name: (
            sum(each[name][0] for each in found.values()),
            sum(each[name][1] for each in found.values()),
        )
        for name in names
    }
    return EvalResult(
        _score(whole, objective),
        {source: _score(each, objective) for source, each in found.items()},
    )


def _score(sums: dict[str, tuple[float, float]], objective: Objective) -> EvalScore:
    means = {name: total / weight if weight else math.nan for name, (total, weight) in sums.items()}
    loss = objective.tracked_loss(
        {name: means[name] for name, (_, weight) in sums.items() if weight}
    )
    weight = sums[next(iter(objective.losses))][1]
    return EvalScore({**means, "loss": loss}, {f"num_{objective.targets}": int(weight)})
