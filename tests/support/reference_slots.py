"""Filling slots as it was first written, document by document in Python."""

import numpy as np

from pipeline.data.format import Vocabulary
from pipeline.data.packing import PackedSequences, Packing
from pipeline.data.reader import Block


def reference_slots(slots: PackedSequences, row: int, block: Block, packing: Packing, sequence: int,
                    vocabulary: Vocabulary) -> None:  # fmt: skip
    """Does what `lay_out` does."""
    tokens, documents, positions, word_starts, maskable = (array[row] for array in slots[:-1])
    tokens[:], documents[:], positions[:], word_starts[:] = vocabulary.pad, 0, 0, False
    slot = 0
    for number, piece in enumerate(packing.pieces(sequence), start=1):
        start, stop = int(packing.piece_start[piece]), int(packing.piece_stop[piece])
        end = slot + stop - start + 2
        tokens[slot] = vocabulary.cls
        tokens[slot + 1 : end - 1] = block.tokens[start:stop]
        tokens[end - 1] = vocabulary.sep
        documents[slot:end] = number
        positions[slot:end] = np.arange(end - slot)
        word_starts[slot + 1 : end - 1] = block.word_starts(start, stop)
        # [CLS], a piece's first token and [SEP] bound words: none reaches across a piece.
        word_starts[[slot, slot + 1, end - 1]] = True
        slot = end
    word_starts[slot:] = True
    maskable[:] = np.logical_and.reduce([tokens != token for token in vocabulary.special])
