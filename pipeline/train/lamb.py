"""LAMB (You et al. 2019, arXiv 1904.00962) whose trust ratios are those of whole matrices.

ZeRO gives each rank's optimizer flat tensors that begin and end anywhere in a parameter: a ratio of
their norms means nothing. Here the squares of each matrix' pieces are added over the ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipeline.train.tensor_slice import TensorSlice


class Lamb(torch.optim.Optimizer):
    """LAMB with weight decay inside the update.

    With m and v the averages of the gradient and of its square, for each matrix w:

        u = m / (sqrt(v) + eps) + weight_decay w;    w := w - lr |w| / |u| u

    The ratio is 1 where one of the norms is 0, and in groups with `adapts` False; there is no limit
    to it. Bias correction, which the paper has, divides m and v by 1 - beta^t before; Google's code
    (google-research/albert, lamb_optimizer.py) and RoFormerV2's recipe do without.

    State of each tensor: `step` (updates, on the CPU), `exp_avg` (m) and `exp_avg_sq` (v), as in
    torch's AdamW.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        bias_correction: bool,
    ) -> None:
        """Takes groups with `params`, `weight_decay` and `adapts`."""
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self._bias_correction = bias_correction
        self._index: dict[str, int] = {}
        self._pieces: dict[Tensor, list[TensorSlice]] = {}

    def bind(
        self,
        names: list[str],
        slices: list[TensorSlice],
        sum_over_ranks: Callable[[Tensor], Tensor],
    ) -> None:
        """Says what the tensors of the groups are pieces of; before the first step.

        Args:
            names: of all that has a ratio of its own, in the same order on all ranks.
            slices: this rank's, by these names.
            sum_over_ranks: adds a float64 tensor over the ranks that hold the other pieces.
        """
        self._index = {name: number for number, name in enumerate(names)}
        self._pieces = {}
        for piece in slices:
            self._pieces.setdefault(piece.partition, []).append(piece)
        self._sum_over_ranks = sum_over_ranks

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates every tensor that has a gradient. Collective, without host synchronisation.

        One sum over the ranks a call; DeepSpeed calls this once a step, or once for each group.
        """
        assert closure is None, "no closure is used with DeepSpeed"
        assert self._index, "bind comes before the first step"
        updates = [
            (flat, self._direction(flat, group), group)
            for group in self.param_groups
            for flat in group["params"]
            if flat.grad is not None
        ]
        ratios = None
        # The same on all ranks, also where a rank's tensor holds nothing but padding.
        if any(group["adapts"] for group in self.param_groups):
            ratios = self._trust_ratios([each[:2] for each in updates if each[2]["adapts"]])
        for flat, update, group in updates:
            if not group["adapts"]:
                flat.add_(update, alpha=-group["lr"])
                continue
            assert ratios is not None
            for piece in self._pieces.get(flat, []):
                piece.of(flat).addcmul_(
                    piece.of(update), ratios[self._index[piece.name]], value=-group["lr"]
                )

    def _direction(self, flat: Tensor, group: dict[str, Any]) -> Tensor:
        """Takes the gradient into the averages; returns u, shaped as `flat`."""
        state = self.state[flat]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(flat)
            state["exp_avg_sq"] = torch.zeros_like(flat)
        beta1, beta2 = group["betas"]
        state["step"] += 1
        mean = state["exp_avg"].lerp_(flat.grad, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(flat.grad, flat.grad, value=1 - beta2)
        root = square.sqrt()
        if self._bias_correction:
            updates = state["step"].item()  # on the CPU: no synchronisation
            root.div_((1 - beta2**updates) ** 0.5)
            root.add_(group["eps"]).mul_(1 - beta1**updates)
        else:
            root.add_(group["eps"])
        return torch.div(mean, root, out=root).add_(flat, alpha=group["weight_decay"])

    def _trust_ratios(self, updates: list[tuple[Tensor, Tensor]]) -> Tensor:
        """|w| / |u| of every matrix, (names,) float32; 1 for those that are not in this call."""
        [device] = {flat.device for group in self.param_groups for flat in group["params"]}
        squares = torch.zeros(2, len(self._index), dtype=torch.float64, device=device)
        for flat, update in updates:
            for piece in self._pieces.get(flat, []):
                for row, tensor in zip(squares, (flat, update), strict=True):
                    norm = torch.linalg.vector_norm(piece.of(tensor), dtype=torch.float64)
                    row[self._index[piece.name]] += norm.square()
        weights, directions = self._sum_over_ranks(squares).sqrt()
        ratios = torch.where((weights > 0) & (directions > 0), weights / directions, 1.0)
        return ratios.float()
