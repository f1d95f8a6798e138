"""StableAdamW: AdamW whose update is clipped for each matrix, in place of the whole gradient.

The average of squares lags behind: a gradient that jumps, most often that of the embeddings, makes
Adam's step several times as long, and the loss with it. A clipped gradient would slow all matrices
in such a step, and it would not see a jump of a matrix whose gradient is small.

Source: Wortsman et al. 2023, arXiv 2304.13013, algorithm 2; as in optimi and ModernBERT.
"""

import math
from typing import Any

import torch
from torch import Tensor

from pipeline.train.optimizers.base import PartitionedOptimizer, update_averages


class StableAdamW(PartitionedOptimizer):
    """AdamW with a rate for each matrix and vector, lower where its gradient jumped.

    With m and v the bias-corrected averages of the gradient g and of its square, for each w:

        r = lr / max(1, sqrt(mean(g^2 / max(v, eps^2))))
        w := w - r (m / (sqrt(v) + eps) + weight_decay w)

    v is the average after g was taken into it. Matrices stored as one have rates of their own.
    """

    def _bound(self) -> None:
        sizes = [math.prod(shape) for shape in self._matrices.values()]
        self._sizes = torch.tensor(sizes, device=self.param_groups[0]["params"][0].device)

    def _update(self, groups: list[dict[str, Any]]) -> None:
        found = [
            (flat, *self._direction(flat, group), group)
            for group in groups
            for flat in group["params"]
            if flat.grad is not None
        ]
        # All ranks make this sum, even if a rank's tensor holds only padding.
        squares = self._squared_norms([(flat, (jump,)) for flat, jump, _, _ in found], 1)[0]
        shares = (squares / self._sizes).sqrt().clamp(min=1.0).reciprocal().float()
        for flat, _, update, group in found:
            for piece in self._pieces.get(flat, []):
                piece.of(flat).addcmul_(
                    piece.of(update), shares[self._index[piece.name]], value=-group["lr"]
                )

    def _direction(self, flat: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Update the averages; return g / max(sqrt(v), eps) and the update, shaped like `flat`."""
        state = self.state_of(flat)
        beta1, beta2 = group["betas"]
        assert flat.grad is not None
        mean, square = update_averages(state, flat.grad, group["betas"])
        updates = state["step"].item()  # on the CPU: no synchronisation
        root = square.sqrt().div_((1 - beta2**updates) ** 0.5)
        jump = flat.grad / root.clamp(min=group["eps"])
        root.add_(group["eps"]).mul_(1 - beta1**updates)
        return jump, torch.div(mean, root, out=root).add_(flat, alpha=group["weight_decay"])
