"""Packing: every token exactly once, nothing too long, almost no padding."""

import numpy as np
import pytest

from pipeline.data.packing import pack
from pipeline.data.reader import BlockReader
from pipeline.data.shards import DatasetIndex


def _lengths(kind: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    return {
        "mixed": np.exp(rng.normal(5.0, 1.2, 3000)).astype(int) + 1,
        "short": rng.integers(1, 30, 5000),
        "one token each": np.ones(500, dtype=int),
        "one long": np.array([100_000]),
        "just a sequence": np.array([126, 126]),
        "one too long": np.array([127]),
    }[kind]


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


def test_sequences_are_filled_on_real_text(dataset: DatasetIndex) -> None:
    reader = BlockReader(dataset)
    used = slots = 0
    for row in dataset.split_blocks("train"):
        packing = pack(reader.doc_ends(int(row)), 128)
        used += int(dataset.blocks.num_tokens[row]) + 2 * len(packing.piece_doc)
        slots += packing.num_sequences * 128
    # Blocks here have 8,000 tokens; each leaves a last sequence half empty on average.
    assert used / slots > 0.97


def test_packing_depends_on_lengths_only() -> None:
    ends = np.cumsum(_lengths("mixed"))
    first, second = pack(ends, 128), pack(ends.copy(), 128)
    for name in ("piece_start", "piece_stop", "piece_doc", "sequence_ends"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
