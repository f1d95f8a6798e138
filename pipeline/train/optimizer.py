"""The optimizer of a run: AdamW, or LAMB over the partitions of ZeRO.

ZeRO gives each rank's optimizer flat tensors that begin and end anywhere in a parameter, so norms
of these tensors mean nothing. LAMB (You et al. 2019, arXiv 1904.00962) needs the norms of whole
matrices: a `TensorSlice` says which stretch of which parameter a partition holds, and the squares
of a matrix' pieces are added over the ranks.
"""

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config.train import TrainConfig

logger = logging.getLogger(__name__)

# fp32 within blocks, float64 between them: torch's float64 norm of an fp32 tensor takes 40 times
# as long on a CPU (40.4 against 0.97 ms for 8.5 M elements).
BLOCK = 1 << 12
"""Elements whose products are added in fp32; blocks are added in float64, which takes longer."""


def squared_norm(flat: Tensor) -> Tensor:
    """0-dimensional float64 square of the norm of a flat fp32 tensor. No host synchronisation.

    torch adds an fp32 tensor on a CPU in few partial sums, which stop growing by small squares: of
    3e7 elements the norm is 0.2% short.
    """
    whole = flat.numel() // BLOCK * BLOCK
    blocks = torch.linalg.vector_norm(flat[:whole].view(-1, BLOCK), dim=1).double()
    square: Tensor = blocks.square().sum() + flat[whole:].double().square().sum()
    return square


@dataclass(frozen=True)
class TensorSlice:
    """A stretch of one flattened parameter, and its place in a rank's partition."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    start: int
    """First element in the flattened parameter."""
    numel: int
    partition: Tensor
    """(elements,) fp32: the tensor that the optimizer updates."""
    offset: int
    """First element in the partition."""

    def of(self, tensor: Tensor) -> Tensor:
        """View the stretch in a tensor that is laid out like the partition."""
        return tensor.narrow(0, self.offset, self.numel)


def share_of_rank(slices: Iterable[TensorSlice], rank: int, world_size: int) -> list[TensorSlice]:
    """Return a rank's share of slices that all ranks hold: an equal part of each partition."""
    share = []
    for each in slices:
        size = each.partition.numel()
        first = max(each.offset, size * rank // world_size)
        last = min(each.offset + each.numel, size * (rank + 1) // world_size)
        if first < last:
            start = each.start + first - each.offset
            share.append(replace(each, start=start, numel=last - first, offset=first))
    return share


class Lamb(torch.optim.Optimizer):
    """LAMB with weight decay inside the update.

    With m and v the averages of the gradient and of its square, for each matrix w:

        u = m / (sqrt(v) + eps) + weight_decay w;    w := w - lr |w| / |u| u

    The ratio |w| / |u| is 1 if one of the norms is 0, and in groups with `adapts` False; it is not
    clipped. Bias correction, as in the paper, first divides m and v by 1 - beta^t; Google's code
    (google-research/albert, lamb_optimizer.py) and RoFormerV2's recipe omit it.

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
        """Take groups with `params`, `weight_decay` and `adapts`."""
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
        """Set which matrices the groups' tensors are pieces of; call it before the first step.

        `names` have their own ratio, in the same order on all ranks; `slices` are this rank's
        pieces of them. `sum_over_ranks` adds a float64 tensor over the ranks that hold the other
        pieces.
        """
        self._index = {name: number for number, name in enumerate(names)}
        self._pieces = {}
        for piece in slices:
            self._pieces.setdefault(piece.partition, []).append(piece)
        self._sum_over_ranks = sum_over_ranks

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every tensor that has a gradient. Collective, without host synchronisation.

        Each call makes one sum over the ranks; DeepSpeed calls it once a step or once a group.
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
        # The same decision on all ranks, even if a rank's tensor holds only padding.
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
        """Update the averages with the gradient, and return u, shaped like `flat`."""
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

    # Squares over the ranks in float64, all in one sum a call. Against whole tensors in float64,
    # 1, 2 and 4 ranks, 20 steps: 5e-7 of the way; without the sum 2.6e-2
    # (`tests/distributed/test_lamb.py`). 7% more CPU time than AdamW. Queries, keys and values
    # have ratios of their own though they are stored as one matrix, as in Google's code and
    # bert4keras.
    def _trust_ratios(self, updates: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Compute |w| / |u| of every matrix, (names,) float32; 1 for matrices not in this call."""
        # All are on one; a rank may hold no piece of a matrix, and still joins the sum.
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


def make_optimizer(
    model: nn.Module, config: TrainConfig, lr_scale: Callable[[str], float] = lambda _: 1.0
) -> torch.optim.Optimizer:
    """Make the optimizer of all parameters, in the groups of `decay_groups`; log their sizes."""
    groups = decay_groups(model, config.weight_decay, lr_scale)
    for group in groups:
        size = sum(parameter.numel() for parameter in group["params"])
        logger.info(
            "%s: weight decay %s on %d tensors of %s parameters",
            config.optimizer,
            group["weight_decay"],
            len(group["params"]),
            f"{size:,}",
        )
    betas = (config.adam_beta1, config.adam_beta2)
    if config.optimizer == "adamw":
        # Fused: one pass over weights, gradient and averages instead of one per operation.
        return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)
    assert config.lamb_bias_correction is not None, "checked by the config"
    # Parameters that do not decay are not adapted, as in Google's code; bert4keras adapts all.
    groups = [{**group, "adapts": is_matrix(group["params"][0])} for group in groups]
    return Lamb(
        groups,
        lr=config.lr,
        betas=betas,
        eps=config.adam_eps,
        bias_correction=config.lamb_bias_correction,
    )


def matrix_slices(
    model: nn.Module, shapes: dict[str, tuple[int, ...]], slices: list[TensorSlice]
) -> tuple[list[str], list[TensorSlice]]:
    """Cut pieces of parameters into pieces of the matrices that are stored as one parameter.

    Modules list such parameters with their number of matrices in `stacked`.

    Returns:
        Names of all matrices of the model, and the pieces by these names.
    """
    stacked = {
        f"{prefix}.{name}".removeprefix("."): number
        for prefix, module in model.named_modules()
        for name, number in getattr(module, "stacked", {}).items()
    }
    names, pieces = [], []
    for name, shape in shapes.items():
        number = stacked.get(name, 1)
        size = math.prod(shape) // number
        names += [f"{name}/{which}" for which in range(number)]
        for piece in slices:
            if piece.name == name:
                pieces += _cut(piece, size)
    return names, pieces


def _cut(piece: TensorSlice, size: int) -> list[TensorSlice]:
    """Cut a piece at multiples of `size` elements of its parameter."""
    end = piece.start + piece.numel
    starts = [piece.start, *range((piece.start // size + 1) * size, end, size)]
    return [
        replace(
            piece,
            name=f"{piece.name}/{first // size}",
            start=first,
            numel=last - first,
            offset=piece.offset + first - piece.start,
        )
        for first, last in pairwise([*starts, end])
    ]


def is_matrix(parameter: nn.Parameter) -> bool:
    """Return whether a parameter decays and has a trust ratio, unlike biases, gains and shifts."""
    return parameter.ndim >= 2


def decay_groups(
    model: nn.Module, weight_decay: float, lr_scale: Callable[[str], float] = lambda _: 1.0
) -> list[dict[str, Any]]:
    """Group the parameters: matrices decay; biases and the gains and shifts of norms do not.

    Parameters of a rate of their own are groups of their own, with `lr_scale`.

    Source: google-research/bert `optimization.py`, exclude_from_weight_decay.
    """
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    # Every rank needs the same order of groups, by which ZeRO splits.
    for scale in sorted({lr_scale(name) for name, _ in model.named_parameters()}, reverse=True):
        for decays in (True, False):
            groups[scale, decays] = []
    for name, parameter in model.named_parameters():
        groups[lr_scale(name), is_matrix(parameter)].append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if decays else 0.0, "decays": decays}
        | ({"lr_scale": scale} if scale != 1.0 else {})
        for (scale, decays), parameters in groups.items()
        if parameters
    ]
