"""Held-out loss and accuracy, whole and by source, with the same text and masks in every run."""

from dataclasses import dataclass

import torch

from pipeline.data.loader import EvalLoader
from pipeline.runtime import dist, watchdog
from pipeline.train.engine import Engine, Objective


@dataclass(frozen=True)
class Score:
    """Means over masked tokens."""

    loss: float
    """Cross-entropy, nats."""
    accuracy: float
    """Share predicted right."""
    num_masked: int
    """Masked tokens looked at."""


@dataclass(frozen=True)
class EvalResult:
    """What an evaluation found."""

    total: Score
    by_source: dict[str, Score]
    """Of the sources that have held-out text."""

    def values(self) -> dict[str, float]:
        """As named numbers; those of sources only where there are several."""
        scores = {"": self.total}
        if len(self.by_source) > 1:
            scores |= {f"_{name}": score for name, score in self.by_source.items()}
        return {
            f"{field}{suffix}": float(value)
            for suffix, score in scores.items()
            for field, value in vars(score).items()
        }


def evaluate(engine: Engine, objective: Objective, loader: EvalLoader) -> EvalResult:
    """Evaluates the model as it is trained now, alpha included, without dropout. Collective."""
    sums = torch.zeros(len(loader.sources), 3, dtype=torch.float64, device=engine.device)
    engine.model.eval()
    with torch.no_grad():
        for source, batch in loader.batches():
            watchdog.beat("evaluating")
            part = objective(engine.model, batch.to(engine.device))
            sums[source] += torch.stack((part.loss, part.correct, part.weight)).double()
    rows = dist.sum_over_ranks(sums).tolist()  # sync
    return EvalResult(
        _score(*map(sum, zip(*rows, strict=True))),
        {name: _score(*row) for name, row in zip(loader.sources, rows, strict=True) if row[2]},
    )


def _score(loss: float, correct: float, weight: float) -> Score:
    return Score(loss / weight, correct / weight, int(weight))
