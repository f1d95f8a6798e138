"""Which stretch of a parameter a rank holds, and where: what ZeRO's partitions consist of."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class TensorSlice:
    """A stretch of one flattened parameter, and where a rank holds it."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    """First element in the flattened parameter."""
    numel: int
    partition: Tensor
    """(elements,) fp32: the tensor that the optimizer updates."""
    offset: int
    """First element in the partition."""

    def of(self, tensor: Tensor) -> Tensor:
        """The stretch's part of a tensor that is laid out as the partition; a view."""
        return tensor.narrow(0, self.offset, self.numel)


def share_of_rank(slices: Iterable[TensorSlice], rank: int, world_size: int) -> list[TensorSlice]:
    """What a rank answers for where all ranks hold the same: an equal part of each partition."""
    found = []
    for each in slices:
        size = each.partition.numel()
        first = max(each.offset, size * rank // world_size)
        last = min(each.offset + each.numel, size * (rank + 1) // world_size)
        if first < last:
            start = each.start + first - each.offset
            found.append(replace(each, start=start, numel=last - first, offset=first))
    return found
