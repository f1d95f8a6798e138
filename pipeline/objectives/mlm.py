"""Masked language modelling: losses as sums, divided once, over the whole global batch."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline.data.batch import MicroBatch
from pipeline.model.layout import rows


@dataclass(frozen=True)
class LossSums:
    """0-dimensional fp32 tensors over M masked positions; add freely, divide at the end.

    Loss and correct are fp64 where the model is.
    """

    loss: Tensor
    """Sum of the cross-entropies, nats."""
    correct: Tensor
    """Number of positions where the most likely token is right."""
    weight: Tensor
    """M."""


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
        # In the model's forward pass, where ZeRO stage 3 has the weights together.
        loss, correct = model(
            batch.input_ids, layout, batch.masked_index, self.alpha, targets=batch.targets
        )
        count = torch.full((), len(batch.targets), dtype=torch.float32, device=loss.device)
        return LossSums(loss, correct, count)
