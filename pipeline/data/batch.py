"""A micro-batch of packed sequences as tensors, with the inputs that the objective made."""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.data.dataset import Batch

_MULTIPLE = 64


def document_bounds(documents: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Where pieces and paddings of sequences begin, if these lie end to end, and the end.

    Args:
        documents: (B, S), as in `MicroBatch`.

    Returns:
        (D + 1,) int32 from 0 to B * S. Its end is repeated, as of empty documents, up to a multiple
        of 64: micro-batches then have few different shapes.
    """
    begins = np.ones(documents.shape, np.bool_)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = np.flatnonzero(begins)
    bounds = np.full(-(-(len(starts) + 1) // _MULTIPLE) * _MULTIPLE, documents.size, np.int32)
    bounds[: len(starts)] = starts
    return bounds


@dataclass(frozen=True)
class MicroBatch:
    """B sequences of S slots as tensors, and what the objective needs beside them."""

    input_ids: Tensor
    """(B, S) int64, token ids as the model sees them."""
    documents: Tensor
    """(B, S) int32, number of the document piece in the sequence from 1, 0 at padding."""
    positions: Tensor
    """(B, S) int64, position within the piece, 0 at its [CLS]."""
    segments: Tensor | None
    """(B, S) int64, segment ids; None: all are 0."""
    cu_seqlens: Tensor
    """(D + 1,) int32, of `document_bounds`."""
    inputs: dict[str, Tensor]
    """As `Batch.inputs`."""
    weights: dict[str, float]
    """As `Batch.weights`; on the host."""
    counts: dict[str, int]
    """As `Batch.counts`; on the host."""
    num_tokens: int
    """Slots that are not padding."""
    hash: int
    """See `Batch.hash`."""

    @classmethod
    def of(cls, batch: Batch, *, pin: bool = False) -> "MicroBatch":
        """Tensors that share the arrays' memory, or copies that a GPU can fetch by itself."""

        def tensor(array: npt.NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).pin_memory() if pin else torch.from_numpy(array)

        return cls(
            input_ids=tensor(batch.input_ids),
            documents=tensor(batch.documents),
            positions=tensor(batch.positions),
            segments=None if batch.segments is None else tensor(batch.segments),
            cu_seqlens=tensor(document_bounds(batch.documents)),
            inputs={name: tensor(array) for name, array in batch.inputs.items()},
            weights=batch.weights,
            counts=batch.counts,
            num_tokens=batch.num_tokens,
            hash=batch.hash,
        )

    def to(self, device: torch.device) -> "MicroBatch":
        """Copies the tensors to a device without waiting for the copy."""
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        inputs = {name: each.to(device, non_blocking=True) for name, each in self.inputs.items()}
        return replace(self, inputs=inputs, **moved)
