"""Held-out loss and accuracy, with the same text and masks in every run."""

from dataclasses import dataclass

import torch

from pipeline.data.loader import EvalLoader
from pipeline.runtime import dist
from pipeline.train.engine import Engine, Objective


@dataclass(frozen=True)
class EvalResult:
    """Means over all masked tokens of the evaluation set."""

    loss: float
    """Cross-entropy, nats."""
    accuracy: float
    """Share predicted right."""
    num_masked: int
    """Masked tokens looked at."""


def evaluate(engine: Engine, objective: Objective, loader: EvalLoader) -> EvalResult:
    """Evaluates the model as it is trained now, alpha included, without dropout. Collective."""
    sums = torch.zeros(3, dtype=torch.float64, device=engine.device)
    engine.model.eval()
    with torch.no_grad():
        for batch in loader.batches():
            part = objective(engine.model, batch.to(engine.device))
            sums += torch.stack((part.loss, part.correct, part.weight)).double()
    loss, correct, weight = dist.sum_over_ranks(sums).tolist()  # sync
    return EvalResult(loss / weight, correct / weight, int(weight))
