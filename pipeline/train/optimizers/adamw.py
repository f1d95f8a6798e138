"""AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), torch's fused kernel."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from pipeline.checkpoints.state import MOMENTS
from pipeline.train.optimizers.base import PartitionedOptimizer


class AdamW(PartitionedOptimizer):
    """The same bits as torch.optim.AdamW(fused=True); `betas` and `eps` are keys of its groups."""

    def _update(self, groups: list[dict[str, Any]]) -> None:
        for group in groups:
            self._update_fused(group)

    def _update_fused(self, group: dict[str, Any]) -> None:
        """Update a group in one pass over weights, gradient and averages."""
        flats = [flat for flat in group["params"] if flat.grad is not None]
        states = [self.state_of(flat) for flat in flats]
        means, squares = ([state[kind] for state in states] for kind in MOMENTS)
        adamw(
            flats,
            [flat.grad for flat in flats],
            means,
            squares,
            max_exp_avg_sqs=[],
            state_steps=[state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _counter(self, flat: Tensor, group: dict[str, Any]) -> Tensor:
        # The fused kernel reads it on the device.
        return torch.zeros((), device=flat.device)
