"""Filled slots: those of a plain Python version, at every offset of pieces and word bits."""

import numpy as np
import pytest

from pipeline.data.assemble import Slots, lay_out
from pipeline.data.packing import Packing, pack
from pipeline.data.reader import Block, BlockReader
from pipeline.data.shards import DatasetIndex, Vocabulary


def _reference(block: Block, packing: Packing, seq_len: int, vocabulary: Vocabulary) -> Slots:
    """All sequences of a block, document by document in Python."""
    shape = (packing.num_sequences, seq_len)
    tokens = np.full(shape, vocabulary.pad, dtype=np.int64)
    documents = np.zeros(shape, dtype=np.int32)
    positions = np.zeros(shape, dtype=np.int64)
    word_starts = np.zeros(shape, dtype=bool)
    for row in range(packing.num_sequences):
        slot = 0
        for number, piece in enumerate(packing.pieces(row), start=1):
            start, stop = int(packing.piece_start[piece]), int(packing.piece_stop[piece])
            end = slot + stop - start + 2
            tokens[row, slot] = vocabulary.cls
            tokens[row, slot + 1 : end - 1] = block.tokens[start:stop]
            tokens[row, end - 1] = vocabulary.sep
            documents[row, slot:end] = number
            positions[row, slot:end] = np.arange(end - slot)
            word_starts[row, slot + 1 : end - 1] = block.word_starts(start, stop)
            word_starts[row, [slot, slot + 1, end - 1]] = True
            slot = end
        word_starts[row, slot:] = True
    maskable = np.logical_and.reduce([tokens != token for token in vocabulary.special])
    return Slots(tokens, documents, positions, word_starts, maskable)


def _assert_filled_as_reference(block: Block, seq_len: int, vocabulary: Vocabulary) -> None:
    packing = pack(block.doc_ends, seq_len)
    found = Slots.empty(packing.num_sequences, seq_len)
    for array in found:
        array.view(np.uint8)[:] = 0xA5  # what is not written must show
    for sequence in range(packing.num_sequences):
        lay_out(found, sequence, block, packing, sequence, vocabulary)
    expected = _reference(block, packing, seq_len, vocabulary)
    for name, ours, theirs in zip(Slots._fields, found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        # As bytes: a bool that is neither 0 nor 1 is not equal to True.
        np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8), name)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("seq_len", [8, 64, 509, 4096])
def test_slots_are_those_of_the_reference(dtype: type, seq_len: int) -> None:
    rng = np.random.default_rng(seq_len)
    ends = np.cumsum(rng.integers(1, 300, 200))
    size = 65_536 if dtype == np.uint16 else 100_000
    block = Block(
        tokens=rng.integers(0, size, ends[-1]).astype(dtype),
        doc_ends=ends,
        word_bits=rng.integers(0, 256, -(-ends[-1] // 8)).astype(np.uint8),
        meta_json=b"",
    )
    block.tokens[rng.integers(0, ends[-1], 500)] = size - 1
    # Special ids in no order, one at each end of the range.
    vocabulary = Vocabulary(size, pad=7, unk=3, cls=size - 1, sep=0, mask=500, not_in_text=())
    for array in (block.tokens, block.word_bits):
        array.flags.writeable = False
    _assert_filled_as_reference(block, seq_len, vocabulary)


def test_slots_of_real_blocks(dataset: DatasetIndex) -> None:
    reader = BlockReader(dataset)
    for row in (0, len(dataset.blocks) - 1):
        _assert_filled_as_reference(reader.block(row), 128, dataset.vocabulary)
