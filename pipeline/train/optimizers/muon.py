"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) over the partitions of ZeRO.

The average of the gradient is elementwise, so it lives in the partitions as Adam's does. A matrix
is put together on one rank alone, its owner, which makes the update of the whole matrix and gives
the others their pieces back: two exchanges a group. Its products are of as many matrices at a time
whatever a rank owns, so its bits do not depend on ranks, stages, or how a matrix is cut.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoints.state import MOMENTS
from pipeline.config.train import TrainConfig
from pipeline.model.cost import divided, newton_schulz_flops
from pipeline.runtime import dist
from pipeline.train.optimizers.adamw import AdamW
from pipeline.train.optimizers.slices import TensorSlice

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of Newton and Schulz' iteration, from Jordan's code: singular values end at about 0.7 to 1.2."""
_RMS = 0.2
"""Root mean square of an update, as AdamW's (Liu et al. 2025, arXiv 2502.16982, section 2.2)."""
_FIRST_MOMENTUM = 0.85
"""Where the momentum's warm-up begins (modded-nanogpt)."""
# One by one, the 72 matrices of a base model made a step of 100 ms one of 139 (H200): the host took
# longer to launch products than the GPU to compute them (14 ms).
_AT_ONCE = 8
"""Matrices of a product on a GPU. What is missing to a last batch is filled with zeros."""


class Muon(AdamW):
    """Muon for the matrices inside layers, AdamW for all else, with one learning rate.

    With m the average of the gradient g, for each matrix w of (rows, columns):

        m := mu m + (1 - mu) g;    u = mu m + (1 - mu) g
        w := w - lr weight_decay w - lr 0.2 sqrt(max(rows, columns)) orthogonal(u)

    An orthogonal matrix has root mean square 1 / sqrt(max(rows, columns)), and AdamW's updates have
    about 0.2, which is why both take the same rate. Matrices stored as one, as queries, keys and
    values are, are updated one by one. The iteration is in the precision of the run's passes, all
    else in fp32.
    """

    hidden_apart = True

    def __init__(self, groups: list[dict[str, Any]], config: TrainConfig) -> None:
        super().__init__(groups, config)
        self._momentum = config.muon_momentum
        self._warmup_steps = config.muon_momentum_warmup_steps
        self._num_iterations = config.muon_ns_steps
        self._dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        self._routes: dict[Tensor, _Route] = {}

    def _bound(self) -> None:
        for group in self.param_groups:
            if group.get("is_apart"):
                [flat] = group["params"]
                held = self._pieces.get(flat, [])
                self._routes[flat] = _Route(self._matrices, held, is_divided=self._is_divided)

    def moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Name the averages: one of the matrices, both of all else."""
        return MOMENTS[:1] if group.get("is_apart") else MOMENTS

    def _update(self, groups: list[dict[str, Any]]) -> None:
        for group in groups:
            if group.get("is_apart"):
                [flat] = group["params"]
                self._update_matrices(flat, group)
            else:
                self._update_fused(group)

    def _update_matrices(self, flat: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state_of(flat), flat.grad
        assert gradient is not None, "a rank without one would leave the others waiting"
        momentum = self._momentum_at(int(state["step"]))  # on the CPU: no synchronisation
        state["step"] += 1
        mean = state[MOMENTS[0]].lerp_(gradient, 1 - momentum)
        # Of Nesterov: a look ahead.
        ahead = gradient.lerp(mean, momentum)
        at_once = _AT_ONCE if flat.is_cuda else 1
        updates = self._routes[flat].through(
            ahead.to(self._dtype),
            lambda matrices: orthogonal_all(matrices, self._num_iterations, at_once),
        )
        flat.mul_(1 - group["lr"] * group["weight_decay"])
        for piece, update in zip(self._pieces.get(flat, []), updates, strict=True):
            scale = _RMS * math.sqrt(max(piece.shape))
            piece.of(flat).add_(update, alpha=-group["lr"] * scale)

    def _momentum_at(self, updates: int) -> float:
        if updates >= self._warmup_steps:
            return self._momentum
        first = min(_FIRST_MOMENTUM, self._momentum)
        return first + (self._momentum - first) * updates / self._warmup_steps

    def _counter(self, flat: Tensor, group: dict[str, Any]) -> Tensor:
        return torch.zeros(()) if group.get("is_apart") else super()._counter(flat, group)


def orthogonal_all(matrices: Sequence[Tensor], num_iterations: int, at_once: int) -> list[Tensor]:
    """Apply `orthogonal` to matrices of several shapes, `at_once` of a shape at a time."""
    by_shape: dict[torch.Size, list[int]] = {}
    for number, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(number)
    found: dict[int, Tensor] = {}
    for shape, numbers in by_shape.items():
        for first in range(0, len(numbers), at_once):
            batch = numbers[first : first + at_once]
            stacked = matrices[batch[0]].new_zeros(at_once, *shape)
            torch.stack([matrices[number] for number in batch], out=stacked[: len(batch)])
            made = orthogonal(stacked, num_iterations)
            found |= zip(batch, made, strict=False)
    return [found[number] for number in range(len(matrices))]


def orthogonal(matrices: Tensor, num_iterations: int) -> Tensor:
    """Bring the singular values of (matrices, rows, columns) near 1; shape and dtype stay.

    Newton and Schulz' iteration of degree 5, after a division by the norm in fp32 with no constant
    beside it: the size of a gradient does not matter. Zero stays zero.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if is_tall else matrices).float()
    # The largest element first: squares of small gradients would be 0.
    largest = x.abs().amax((1, 2), keepdim=True)
    x = x / largest.clamp(min=torch.finfo(torch.float32).tiny)
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x = (x / norm.clamp(min=1.0)).to(matrices.dtype)
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT.contiguous() if is_tall else x


class _Route:
    """The way of a group's matrices to their owners, and of what the owners make of them back."""

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], pieces: list[TensorSlice], *, is_divided: bool
    ) -> None:
        """Find the owners. Collective.

        Args:
            shapes: of all matrices.
            pieces: those that this rank holds of the group's matrices.
            is_divided: or every rank holds all of them.
        """
        rank, self._is_divided = torch.distributed.get_rank(), is_divided
        self._pieces = pieces
        # (name, start, numel) by rank.
        held = dist.gather([(piece.name, piece.start, piece.numel) for piece in pieces])
        sizes = [{name: numel for name, _, numel in of_rank} for of_rank in held]
        names = [name for name in shapes if any(name in of_rank for of_rank in sizes)]
        work = [newton_schulz_flops(*shapes[name]) for name in names]
        # Each rank an equal part of the work; of equal ranks that which has most of the matrix.
        ranks = divided(work, len(held), lambda rank, item: sizes[rank].get(names[item], 0))
        owners = dict(zip(names, ranks, strict=True))
        self._own = {name: shapes[name] for name in names if owners[name] == rank}
        self._by_owner = sorted(range(len(pieces)), key=lambda n: owners[pieces[n].name])
        """This rank's pieces in the order of their owners."""
        self._of_owners = [0] * len(held)
        """Elements of this rank's pieces, by owner."""
        for piece in pieces:
            self._of_owners[owners[piece.name]] += piece.numel
        self._asked = [[each for each in of_rank if each[0] in self._own] for of_rank in held]
        """By rank, its pieces of this rank's matrices."""
        self._of_ranks = [sum(numel for *_, numel in asked) for asked in self._asked]

    def through(self, flat: Tensor, update: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
        """Apply a function to whole matrices, each on its owner. Collective.

        Args:
            flat: laid out like the partition that holds this rank's pieces.
            update: from matrices, each (rows, columns), to as many of the same shapes.

        Returns:
            The results' parts for the pieces, flat, in their order.
        """
        whole = self._assembled(flat)
        updated = update(list(whole.values()))
        made = {name: one.reshape(-1) for name, one in zip(whole, updated, strict=True)}
        answers = [
            made[name][start : start + numel]
            for asked in self._asked
            for name, start, numel in asked
        ]
        given = dist.exchange(_joined(answers, flat), self._of_ranks, self._of_owners)
        sizes = [self._pieces[number].numel for number in self._by_owner]
        found = dict(zip(self._by_owner, torch.split(given, sizes), strict=True))
        return [found[number] for number in range(len(self._pieces))]

    def _assembled(self, flat: Tensor) -> dict[str, Tensor]:
        """Put this rank's matrices together."""
        if not self._is_divided:
            whole = {piece.name: piece.of(flat) for piece in self._pieces}
            return {name: whole[name].view(shape) for name, shape in self._own.items()}
        parts = [self._pieces[number].of(flat) for number in self._by_owner]
        given = dist.exchange(_joined(parts, flat), self._of_owners, self._of_ranks)
        made = {name: flat.new_empty(math.prod(shape)) for name, shape in self._own.items()}
        at = 0
        for asked in self._asked:
            for name, start, numel in asked:
                made[name][start : start + numel] = given[at : at + numel]
                at += numel
        return {name: made[name].view(shape) for name, shape in self._own.items()}


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    """Join flat tensors; a rank may have none."""
    return torch.cat(parts) if parts else like.new_empty(0)
