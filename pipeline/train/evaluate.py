"""Held-out loss and accuracy, whole and by source, with the same text and masks in every run."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline.data.batch import MicroBatch
from pipeline.data.loader import EvalLoader
from pipeline.errors import DataError
from pipeline.runtime import dist, watchdog
from pipeline.train.engine import Objective


@dataclass(frozen=True)
class Score:
    """Means over masked tokens."""

    loss: float
    """Cross-entropy, nats."""
    accuracy: float
    """Share predicted right."""
    num_masked: int
    """Masked tokens looked at."""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class EvalResult:
    """What an evaluation found."""

    total: Score
    by_source: dict[str, Score]
    """Of the sources that have held-out text."""

    def values(self) -> dict[str, float]:
        """Return named numbers; numbers of sources only if there are several."""
        scores = {"": self.total}
        if len(self.by_source) > 1:
            scores |= {f"_{name}": score for name, score in self.by_source.items()}
        return {
            f"{field}{suffix}": float(value)
            for suffix, score in scores.items()
            for field, value in vars(score).items()
        }


def evaluate(
    model: nn.Module, device: torch.device, objective: Objective, loader: EvalLoader
) -> EvalResult:
    """Evaluate a model at the objective's alpha, without dropout. Collective.

    Args:
        model: as `Engine.model`, or any other that `objective` can call.
        device: it lies on.
        objective: gives the sums of losses.
        loader: of this rank's share.
    """
    sums = own_sums(model, device, objective, loader.batches(), len(loader.sources))
    return combine(sums, loader.sources)


def own_sums(
    model: nn.Module,
    device: torch.device,
    objective: Objective,
    batches: Iterable[tuple[int, MicroBatch]],
    num_sources: int,
) -> Tensor:
    """Sum this rank's part of an evaluation. Not collective unless the model is divided.

    Returns:
        (num_sources, 3) fp64 on the device: loss, correct and weight, as in `LossSums`.
    """
    sums = torch.zeros(num_sources, 3, dtype=torch.float64, device=device)
    model.eval()
    with torch.no_grad():
        for source, batch in batches:
            watchdog.beat("evaluating")
            part = objective(model, batch.to(device))
            sums[source] += torch.stack((part.loss, part.correct, part.weight)).double()
    return sums


def combine(sums: Tensor, sources: Sequence[str]) -> EvalResult:
    """Add up all ranks' `own_sums`, which are overwritten, and return the result. Collective.

    Raises:
        DataError: nothing was to be predicted.
    """
    rows = dist.sum_over_ranks(sums).tolist()  # sync
    if not any(row[2] for row in rows):
        raise DataError(
            "the held-out text is so short that none of its tokens is masked; prepare the data "
            "with a larger shards.eval_fraction, or evaluate more sequences"
        )
    return EvalResult(
        _score(*map(sum, zip(*rows, strict=True))),
        {name: _score(*row) for name, row in zip(sources, rows, strict=True) if row[2]},
    )


def _score(loss: float, correct: float, weight: float) -> Score:
    return Score(loss / weight, correct / weight, int(weight))
