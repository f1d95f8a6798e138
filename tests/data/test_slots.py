"""Filled slots: those of a plain Python version, at every offset of pieces and word bits."""

import numpy as np
import pytest

from pipeline.data.format import DatasetIndex, Vocabulary
from pipeline.data.packing import PackedSequences, lay_out, pack
from pipeline.data.reader import Block, BlockReader
from tests.support.reference_slots import reference_slots


def _assert_filled_as_reference(block: Block, seq_len: int, vocabulary: Vocabulary) -> None:
    packing = pack(block.doc_ends, seq_len)
    found = PackedSequences.empty(packing.num_sequences, seq_len)
    for array in found[:-1]:
        array.view(np.uint8)[:] = 0xA5  # what is not written must show
    for rows in np.array_split(np.random.default_rng(0).permutation(packing.num_sequences), 3):
        lay_out(found, (rows, rows), block, packing, vocabulary)
    expected = PackedSequences.empty(packing.num_sequences, seq_len)
    for sequence in range(packing.num_sequences):
        reference_slots(expected, sequence, block, packing, sequence, vocabulary)
    for name, ours, theirs in zip(
        PackedSequences._fields[:-1], found[:-1], expected[:-1], strict=True
    ):
        assert ours.dtype == theirs.dtype
        # As bytes: a bool that is neither 0 nor 1 is not equal to True.
        np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8), name)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("seq_len", [8, 64, 509, 4096])
def test_slots_are_those_of_the_reference(dtype: type, seq_len: int) -> None:
    rng = np.random.default_rng(seq_len)
    ends = np.cumsum(rng.integers(1, 300, 200))
    size = 65_536 if dtype == np.uint16 else 100_000
    block = Block(tokens=rng.integers(0, size, ends[-1]).astype(dtype), doc_ends=ends,
                  word_bits=rng.integers(0, 256, -(-ends[-1] // 8)).astype(np.uint8),
                  meta_json=b"")  # fmt: skip
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
