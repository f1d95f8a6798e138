"""A dataset of which only the index is real: shards are holes of the right size."""

from pathlib import Path

import numpy as np

from pipeline.data import format as data_format
from pipeline.data.counts import BlockCounts
from pipeline.data.format import DatasetIndex, ShardInfo, Vocabulary

_BLOCK_BYTES = 2_200_064


def write_large_index(folder: Path, *, num_shards: int, blocks_per_shard: int) -> DatasetIndex:
    """Writes index and shards; the last shard is the eval split. Takes hardly any space.

    Blocks have about a million tokens in about 1,250 documents. Reading any of them fails, since
    a hole has not the bytes that the index expects.
    """
    total = num_shards * blocks_per_shard
    rng = np.random.default_rng(0)
    shard = np.repeat(np.arange(num_shards, dtype=np.int32), blocks_per_shard)
    offset = np.tile(np.arange(blocks_per_shard) * _BLOCK_BYTES, num_shards)
    blocks = data_format.Blocks(
        shard=shard, offset=offset, length=np.full(total, _BLOCK_BYTES),
        sha256=rng.integers(0, 256, (total, 32), dtype=np.uint8),
        member_offset=offset[:, None] + np.array([512, 2_050_048, 2_061_312, 2_187_776]),
        member_length=np.tile([2_000_128, 10_128, 125_128, 10_000], (total, 1)),
        member_sha256=rng.integers(0, 256, (total, 4, 32), dtype=np.uint8),
        num_tokens=rng.integers(990_000, 1_000_001, total),
        num_documents=rng.integers(1_000, 1_500, total),
    )  # fmt: skip
    shards = [
        ShardInfo(
            file=f"shards/{number:06d}.tar", split="eval" if number == num_shards - 1 else "train",
            num_bytes=blocks_per_shard * _BLOCK_BYTES + 10_240, sha256=f"{number:064x}",
            keys=tuple(f"train-{number:06d}-{block:04d}" for block in range(blocks_per_shard)),
        )
        for number in range(num_shards)
    ]  # fmt: skip
    (folder / "shards").mkdir(parents=True)
    for info in shards:
        with (folder / info.file).open("wb") as file:
            file.truncate(info.num_bytes)
    np.savez(folder / "index.npz", **vars(blocks))
    text = data_format.index_bytes(
        vocabulary=Vocabulary(32_000), tokenizer_file="tokenizer.model", tokenizer_sha256="0" * 64,
        unigram_entropy_nats=7.0, totals={}, shards=shards, blocks=blocks,
        sources=([data_format.Source("all", 1.0)], [0] * total),
    )  # fmt: skip
    (folder / "index.json").write_bytes(text)
    return data_format.read_index(folder)


def plausible_counts(index: DatasetIndex, seq_len: int) -> BlockCounts:
    """Numbers of sequences and pieces that packing might give."""
    slots = index.blocks.num_tokens + 2 * index.blocks.num_documents
    sequences = (slots * 1.01 / seq_len).astype(np.int64) + 1
    return BlockCounts(sequences, np.maximum(sequences, index.blocks.num_documents))
