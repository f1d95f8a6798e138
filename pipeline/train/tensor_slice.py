"""Which stretch of a parameter a rank holds, and where: what ZeRO's partitions consist of."""

from dataclasses import dataclass

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
