"""What the model is given: one micro-batch of packed, masked sequences as tensors."""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.data.dataset import Batch

_SHARED = ("input_ids", "documents", "positions", "masked_index", "targets")
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
    """B sequences of S slots; M of the slots are to be predicted."""

    input_ids: Tensor
    """(B, S) int64, corrupted token ids."""
    documents: Tensor
    """(B, S) int32, number of the document piece in the sequence from 1, 0 at padding."""
    positions: Tensor
    """(B, S) int64, position within the piece, 0 at its [CLS]."""
    masked_index: Tensor
    """(M,) int64, flat indices b * S + s of the slots to predict."""
    targets: Tensor
    """(M,) int64, their original token ids."""
    cu_seqlens: Tensor
    """(D + 1,) int32, of `document_bounds`."""
    num_tokens: int
    """Slots that are no padding."""
    unmasked_documents: int
    """Pieces with text of which no slot is to be predicted."""
    hash: int
    """See `Batch.hash`."""

    @classmethod
    def of(cls, batch: Batch, *, pin: bool = False) -> "MicroBatch":
        """Tensors that share the arrays' memory, or copies that a GPU can fetch by itself."""
        tensors = {
            name: torch.from_numpy(array).pin_memory() if pin else torch.from_numpy(array)
            for name, array in (
                *((name, getattr(batch, name)) for name in _SHARED),
                ("cu_seqlens", document_bounds(batch.documents)),
            )
        }
        return cls(
            **tensors,
            num_tokens=batch.num_tokens,
            unmasked_documents=batch.unmasked_documents,
            hash=batch.hash,
        )

    def to(self, device: torch.device) -> "MicroBatch":
        """Copies the tensors to a device without waiting for the copy."""
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)
