"""Masked language modelling: losses as sums, divided once, over the whole global batch."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.data.batch import MicroBatch
from pipeline.model.layout import rows


@dataclass(frozen=True)
class LossSums:
    """0-dimensional fp32 tensors over M masked positions; add freely, divide at the end."""

    loss: Tensor
    """Sum of the cross-entropies, nats."""
    correct: Tensor
    """Number of positions where the most likely token is right."""
    weight: Tensor
    """M."""


def masked_lm_loss(logits: Tensor, targets: Tensor) -> LossSums:
    """Cross-entropy of masked positions.

    Args:
        logits: (M, V) any float dtype; M may be 0.
        targets: (M,) int64 original token ids.
    """
    wide = logits.float()
    return LossSums(
        loss=F.cross_entropy(wide, targets, reduction="sum"),
        correct=(wide.argmax(-1) == targets).sum().float() if len(targets) else wide.sum() * 0,
        weight=torch.full((), len(targets), dtype=torch.float32, device=logits.device),
    )


class MaskedLanguageModeling:
    """The pre-training objective, with the residual's alpha of the current step."""

    def __init__(self, device: torch.device) -> None:
        """Starts with alpha = 1."""
        # A tensor on the device: a Python number would be compiled into the graph.
        self.alpha = torch.ones((), device=device)
        """0-dimensional fp32: the scale of the residual branches."""

    def set_alpha(self, alpha: float) -> None:
        """Sets the scale of the residual branches for the passes that follow."""
        self.alpha.fill_(alpha)

    def __call__(self, model: nn.Module, batch: MicroBatch) -> LossSums:
        """Runs the model on a micro-batch that lies on its device."""
        layout = rows(batch.documents, batch.positions, batch.cu_seqlens)
        logits = model(batch.input_ids, layout, batch.masked_index, self.alpha)
        return masked_lm_loss(logits, batch.targets)
