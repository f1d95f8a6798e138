"""Where the matrices of a model lie in the flat tensors that an optimizer updates.

ZeRO gives each rank's optimizer flat tensors that begin and end anywhere in a parameter, so norms
and products of these tensors mean nothing. A `TensorSlice` says which stretch of which parameter,
or of which matrix in it, a partition holds.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

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
    """A stretch of one flattened parameter or matrix, and its place in a rank's partition."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole parameter or matrix."""
    start: int
    """First element in it, flattened."""
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


def hidden_matrices(model: nn.Module) -> dict[str, int]:
    """List the weights of linear maps inside layers, with the number of matrices stored in each.

    Modules declare them in `hidden_matrices`: queries, keys and values are one parameter and three
    matrices. Tables, heads and poolers are not among them.
    """
    return {
        f"{prefix}.{name}".removeprefix("."): number
        for prefix, module in model.named_modules()
        for name, number in getattr(module, "hidden_matrices", {}).items()
    }


def matrix_slices(
    model: nn.Module, shapes: dict[str, tuple[int, ...]], slices: list[TensorSlice]
) -> tuple[dict[str, tuple[int, ...]], list[TensorSlice]]:
    """Cut pieces of parameters into pieces of the matrices that are stored as one parameter.

    Returns:
        Shapes of all matrices and vectors of the model by name, in the same order on all ranks, and
        the pieces by these names.
    """
    stored = hidden_matrices(model)
    matrices: dict[str, tuple[int, ...]] = {}
    pieces = []
    for name, shape in shapes.items():
        number = stored.get(name, 1)
        of_one = (shape[0] // number, *shape[1:])
        matrices |= {f"{name}/{which}": of_one for which in range(number)}
        for piece in slices:
            if piece.name == name:
                pieces += _cut(piece, of_one)
    return matrices, pieces


def _cut(piece: TensorSlice, shape: tuple[int, ...]) -> list[TensorSlice]:
    """Cut a piece at the borders of matrices of a shape."""
    size, end = math.prod(shape), piece.start + piece.numel
    starts = [piece.start, *range((piece.start // size + 1) * size, end, size)]
    return [
        replace(
            piece,
            name=f"{piece.name}/{first // size}",
            shape=shape,
            start=first % size,
            numel=last - first,
            offset=piece.offset + first - piece.start,
        )
        for first, last in pairwise([*starts, end])
    ]
