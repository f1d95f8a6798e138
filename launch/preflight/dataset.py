"""Whether a node reads the dataset as it was written."""

import random

from launch.preflight.record import Finding
from pipeline.data.format import DatasetIndex, read_index
from pipeline.data.reader import BlockReader
from pipeline.errors import DataError, PostnormError


def check_dataset(folder: str, num_shards: int, seed: str) -> tuple[str, list[Finding]]:
    """Reads the index, and a random block of each of some shards.

    Args:
        folder: of the dataset.
        num_shards: to look at.
        seed: of the choice; another one for each node and each start.

    Returns:
        The fingerprint, empty if the index cannot be read, and what is wrong.
    """
    try:
        index = read_index(folder)
    except (PostnormError, OSError) as error:
        return "", [Finding("dataset", str(error), "all")]
    found = []
    for block in _sample(index, num_shards, seed):
        try:
            read_block(index, block)
        except DataError as error:
            found.append(Finding("shards", str(error), "node", block))
        except (PostnormError, OSError) as error:
            found.append(Finding("storage", str(error), "all"))
    return index.fingerprint, found


def read_block(index: DatasetIndex, block: int) -> None:
    """Compares the size of a block's shard, its end, and the block's bytes with the index.

    Raises:
        DataError: they differ.
        StorageError: they cannot be read at the moment.
    """
    BlockReader(index, [int(index.blocks.shard[block])]).check(block)


def _sample(index: DatasetIndex, num_shards: int, seed: str) -> list[int]:
    """A random block of each of `num_shards` random shards."""
    chance = random.Random(seed)
    shards = chance.sample(range(len(index.shards)), min(num_shards, len(index.shards)))
    rows: list[list[int]] = [[] for _ in index.shards]
    for block, shard in enumerate(index.blocks.shard.tolist()):
        rows[shard].append(block)
    return [chance.choice(rows[shard]) for shard in shards if rows[shard]]
