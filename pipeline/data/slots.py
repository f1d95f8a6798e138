"""Packed sequences from the tokens of a block: the slots of a micro-batch, filled in one pass.

B sequences of S slots.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.data.format import Vocabulary
from pipeline.data.jit import kernel
from pipeline.data.packing import Ints, Packing
from pipeline.data.reader import Block

_ONE, _THREE, _SEVEN = np.uint64(1), np.uint64(3), np.uint64(7)


class Slots(NamedTuple):
    """The sequences of a micro-batch before they are masked."""

    tokens: npt.NDArray[np.int64]
    """(B, S) int64."""
    documents: npt.NDArray[np.int32]
    """(B, S) int32, number of the piece in the sequence from 1, 0 at padding."""
    positions: npt.NDArray[np.int64]
    """(B, S) int64, position within the piece, 0 at its [CLS] and at padding."""
    word_starts: npt.NDArray[np.bool_]
    """(B, S) bool. [CLS], a piece's first token, [SEP] and padding bound words."""
    maskable: npt.NDArray[np.bool_]
    """(B, S) bool, false at special tokens and padding."""

    def rows(self, first: int, stop: int) -> "Slots":
        """Those of some sequences, in the same memory."""
        return Slots._make(array[first:stop] for array in self)

    @classmethod
    def empty(cls, num_sequences: int, seq_len: int) -> "Slots":
        """Room for sequences; every one is to be filled by `lay_out`."""
        shape = (num_sequences, seq_len)
        return cls(
            tokens=np.empty(shape, np.int64),
            documents=np.empty(shape, np.int32),
            positions=np.empty(shape, np.int64),
            word_starts=np.empty(shape, np.bool_),
            maskable=np.empty(shape, np.bool_),
        )


def lay_out(
    slots: Slots,
    rows: Ints,
    block: Block,
    packing: Packing,
    sequences: Ints,
    vocabulary: Vocabulary,
) -> None:
    """Fills some rows with the pieces of sequences of a block, side by side.

    Args:
        slots: is written to.
        rows: (r,) int64 below B.
        block: whose sequences they are.
        packing: of the block.
        sequences: (r,) int64 number of each row's within the block.
        vocabulary: ids of the special tokens.
    """
    _lay_out(
        slots,
        (rows, sequences),
        (block.tokens, block.word_bits),
        (packing.piece_start, packing.piece_stop, packing.sequence_ends),
        vocabulary.special,
    )


@kernel
def _lay_out(
    slots: Slots,
    which: tuple[Ints, Ints],
    block: tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.uint8]],
    packing: tuple[Ints, Ints, Ints],
    special: tuple[int, int, int, int, int],
) -> None:
    rows, sequences = which
    starts, stops, ends = packing
    for i in range(len(rows)):
        first = ends[sequences[i] - 1] if sequences[i] else 0
        _lay_out_row(slots, rows[i], block, (starts, stops, first, ends[sequences[i]]), special)


@kernel
def _lay_out_row(
    slots: Slots,
    row: int,
    block: tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.uint8]],
    pieces: tuple[Ints, Ints, int, int],
    special: tuple[int, int, int, int, int],
) -> None:
    tokens, documents, positions = slots.tokens[row], slots.documents[row], slots.positions[row]
    word_starts, maskable = slots.word_starts[row], slots.maskable[row]
    block_tokens, word_bits = block
    starts, stops, first, last = pieces
    pad, unk, cls, sep, mask = special
    slot = 0
    for piece in range(first, last):
        start, stop = starts[piece], stops[piece]
        end = slot + stop - start + 2
        documents[slot:end] = piece - first + 1
        # Loops over whole slices: the compiler makes vector code of them.
        of_piece = positions[slot:end]
        for i in range(len(of_piece)):
            of_piece[i] = i
        text = block_tokens[start:stop]
        to_tokens, to_maskable = tokens[slot + 1 : end - 1], maskable[slot + 1 : end - 1]
        for i in range(len(text)):
            token = np.int64(text[i])
            to_tokens[i] = token
            to_maskable[i] = (
                (token != pad) & (token != unk) & (token != cls) & (token != sep) & (token != mask)
            )
        to_words = word_starts[slot + 1 : end - 1]
        for i in range(len(to_words)):
            bit = np.uint64(start + i)
            to_words[i] = (word_bits[bit >> _THREE] >> (_SEVEN - (bit & _SEVEN))) & _ONE
        tokens[slot], tokens[end - 1] = cls, sep
        maskable[slot] = maskable[end - 1] = False
        word_starts[slot] = word_starts[slot + 1] = word_starts[end - 1] = True
        slot = end
    tokens[slot:] = pad
    documents[slot:] = 0
    positions[slot:] = 0
    word_starts[slot:] = True
    maskable[slot:] = False
