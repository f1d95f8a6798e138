"""torch's AdamW in one process, with a clip of its own: what the engine is compared with."""

import torch
from torch import Tensor

from pipeline.config.train import TrainConfig


class PlainAdamW:
    """Updates weights by their gradients; matrices decay, vectors do not."""

    def __init__(self, weights: dict[str, Tensor], config: TrainConfig) -> None:
        self._weights = list(weights.values())
        matrices = [weight for weight in self._weights if weight.ndim >= 2]
        others = [weight for weight in self._weights if weight.ndim < 2]
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay},
             {"params": others, "weight_decay": 0.0}],
            betas=(0.9, config.adam_beta2), eps=config.adam_eps,
        )  # fmt: skip

    def step(self, clip: float, lr: float) -> float:
        """Return the norm of the gradients before the clip."""
        norm = torch.cat([weight.grad.flatten() for weight in self._weights]).norm().item()
        for weight in self._weights:
            weight.grad *= min(1.0, clip / norm)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        return norm


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Euclidean, over all weights."""
    assert found.keys() == expected.keys()
    squares = [(found[name] - value).double().square().sum() for name, value in expected.items()]
    return torch.stack(squares).sum().sqrt().item()
