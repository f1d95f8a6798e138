"""Packing: every token exactly once, nothing too long, almost no padding."""

import numpy as np
import pytest

from pipeline.data.format import DatasetIndex
from pipeline.data.packing import pack
from pipeline.data.reader import BlockReader
from tests.support import reference_packing


def _lengths(kind: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    return {
        "mixed": np.exp(rng.normal(5.0, 1.2, 3000)).astype(int) + 1,
        "short": rng.integers(1, 30, 5000), "one token each": np.ones(500, dtype=int),
        "one long": np.array([100_000]), "just a sequence": np.array([126, 126]),
        "one too long": np.array([127]),
    }[kind]  # fmt: skip


@pytest.mark.parametrize(
    "kind", ["mixed", "short", "one token each", "one long", "just a sequence", "one too long"]
)
@pytest.mark.parametrize("seq_len", [8, 128, 512])
def test_every_token_is_packed_once_and_in_its_document(kind: str, seq_len: int) -> None:
    lengths = _lengths(kind)
    ends = np.cumsum(lengths)
    packing = pack(ends, seq_len)
    seen = np.zeros(ends[-1], dtype=int)
    doc_of_token = np.repeat(np.arange(len(lengths)), lengths)
    for sequence in range(packing.num_sequences):
        slots = 0
        for piece in packing.pieces(sequence):
            start, stop = packing.piece_start[piece], packing.piece_stop[piece]
            assert stop > start
            seen[start:stop] += 1
            assert (doc_of_token[start:stop] == packing.piece_doc[piece]).all()
            slots += stop - start + 2
        assert 0 < slots <= seq_len
    assert (seen == 1).all()


@pytest.mark.parametrize("kind", ["mixed", "short"])
@pytest.mark.parametrize("seq_len", [128, 512])
def test_sequences_are_filled(kind: str, seq_len: int) -> None:
    lengths = _lengths(kind)
    packing = pack(np.cumsum(lengths), seq_len)
    used = lengths.sum() + 2 * len(packing.piece_doc)
    assert used / (packing.num_sequences * seq_len) > 0.98


def test_sequences_of_real_text_are_filled_and_none_is_empty(dataset: DatasetIndex) -> None:
    reader = BlockReader(dataset)
    used = slots = 0
    for row in dataset.split_blocks("train"):
        packing = pack(reader.doc_ends(int(row)), 128)
        used += int(dataset.blocks.num_tokens[row]) + 2 * len(packing.piece_doc)
        slots += packing.num_sequences * 128
    # Blocks here have 8,000 tokens; each leaves a last sequence half empty on average.
    assert used / slots > 0.97
    packing = pack(np.empty(0, np.int64), 128)
    assert packing.num_sequences == len(packing.piece_start) == 0


def _random_lengths(rng: np.random.Generator) -> np.ndarray:
    """Some shape of documents of 1 to 1,000,000 tokens."""
    shape = rng.integers(5)
    count = int(rng.integers(1, 1500))
    if shape == 0:
        return rng.integers(1, 400, count)
    if shape == 1:
        return np.exp(rng.normal(rng.uniform(1, 7), 1.5, count // 3 + 1)).astype(int) % 10**6 + 1
    if shape == 2:  # few different lengths: many sequences with just the same room
        return rng.choice(rng.integers(1, 600, 3), count)
    if shape == 3:
        return rng.integers(1, 1_000_001, 3)
    return np.full(count, rng.integers(1, 70))


def _assert_packed_as_reference(lengths: np.ndarray, seq_len: int) -> None:
    ends = np.cumsum(lengths)
    found, expected = pack(ends, seq_len), reference_packing.pack(ends, seq_len)
    for name in ("piece_start", "piece_stop", "piece_doc", "sequence_ends"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype == np.int64
        np.testing.assert_array_equal(ours, theirs, f"{name}, {seq_len=}, {lengths=}")


@pytest.mark.parametrize("seed", range(4))
def test_packing_is_that_of_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(25):
        lengths = _random_lengths(rng)
        seq_len = int(np.exp(rng.uniform(np.log(8), np.log(65537))))
        _assert_packed_as_reference(lengths, seq_len)


@pytest.mark.parametrize("seq_len", [8, 9, 31, 32, 33, 63, 64, 65, 512, 65535, 65536])
def test_every_length_up_to_the_sequence_s_fits_it(seq_len: int) -> None:
    lengths = np.arange(1, min(seq_len, 1500) + 2)
    lengths = np.concatenate((lengths, np.maximum(seq_len - lengths, 1)))
    _assert_packed_as_reference(lengths, seq_len)
