"""What the model is given: one micro-batch of packed, masked sequences."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


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
    num_tokens: int
    """Slots that are no padding."""
    unmasked_documents: int
    """Pieces with text of which no slot is to be predicted."""

    def to(self, device: torch.device) -> "MicroBatch":
        """Copies the tensors to a device without waiting for the copy."""
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)
