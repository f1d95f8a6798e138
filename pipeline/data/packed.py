"""A batch without its padding: documents end to end, as kernels for variable lengths take them."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.data.dataset import Batch
from pipeline.data.jit import kernel


class PackedBatch(NamedTuple):
    """T tokens of D document pieces; M of the tokens are to be predicted."""

    tokens: npt.NDArray[np.int64]
    """(T,) corrupted token ids."""
    cu_seqlens: npt.NDArray[np.int32]
    """(D + 1,) 0, then the end of each piece."""
    positions: npt.NDArray[np.int64]
    """(T,) position within the piece."""
    max_seqlen: int
    """Tokens of the longest piece."""
    masked_index: npt.NDArray[np.int64]
    """(M,) rising indices of the tokens to predict."""
    targets: npt.NDArray[np.int64]
    """(M,) their original token ids."""


def packed(batch: Batch) -> PackedBatch:
    """The same tokens in the same order, row after row, with nothing in between."""
    tokens = np.empty(batch.num_tokens, np.int64)
    positions = np.empty(batch.num_tokens, np.int64)
    cu_seqlens = np.empty(int(batch.documents.max(axis=1).sum()) + 1, np.int32)
    masked_index = np.empty(len(batch.masked_index), np.int64)
    longest = _fill(
        (batch.input_ids.reshape(-1), batch.documents.reshape(-1), batch.positions.reshape(-1)),
        batch.masked_index,
        (tokens, positions, cu_seqlens, masked_index),
    )
    return PackedBatch(tokens, cu_seqlens, positions, longest, masked_index, batch.targets)


Ints = npt.NDArray[np.int64]


@kernel
def _fill(
    slots: tuple[Ints, npt.NDArray[np.int32], Ints],
    masked_index: Ints,
    into: tuple[Ints, Ints, npt.NDArray[np.int32], Ints],
) -> int:
    """Fills the arrays and returns the length of the longest piece."""
    input_ids, documents, slot_positions = slots
    tokens, positions, cu_seqlens, new_index = into
    token, piece, mask, longest = 0, 0, 0, 0
    for slot in range(len(input_ids)):
        if documents[slot] == 0:
            continue
        if slot_positions[slot] == 0:
            cu_seqlens[piece] = token
            piece += 1
        longest = max(longest, slot_positions[slot] + 1)
        tokens[token] = input_ids[slot]
        positions[token] = slot_positions[slot]
        if mask < len(masked_index) and masked_index[mask] == slot:
            new_index[mask] = token
            mask += 1
        token += 1
    cu_seqlens[piece] = token
    return longest
