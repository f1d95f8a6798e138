"""Copies the blocks of a dataset in a folder to a disk of the node, from which they are read.

Every rank of a node calls `stage`, and other jobs on that node may do so, too. Each copies the
first missing block that no process is copying until none is left, then waits for the others. Blocks
are compared with the index when they are copied and whenever they are read: `cache`.
"""

import errno
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.data.cache import BlockCache
from pipeline.data.format import DatasetIndex
from pipeline.data.reader import BlockReader
from pipeline.errors import ConfigError, PostnormError, StorageError

logger = logging.getLogger(__name__)

_PROGRESS_EVERY_S = 10.0
# What killed ranks left counts, too: a bound of the dataset's size would remove copies for it.
_NO_BOUND = 2**62
_WAIT_S = 1.0
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
# EEXIST: `mkdir` with exist_ok raises it where a file has the folder's name.
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST})


def stage(
    index: DatasetIndex, stage_dir: str | Path, heartbeat: Callable[[], None] = lambda: None
) -> DatasetIndex:
    """Copy the missing blocks of both splits, together with the other ranks of the node.

    `heartbeat` is called after each part of the work, which may take hours.

    Returns:
        The index with blocks read from that folder.

    Raises:
        DataError: a shard of the dataset is missing or damaged.
        ConfigError: the folder cannot be used or has too little space.
        StorageError: a shard cannot be read or written at the moment.
    """
    folder = Path(stage_dir) / index.fingerprint[:16]
    total = int(index.blocks.length.sum())
    staged = replace(index, cache=BlockCache(folder, _NO_BOUND))
    _Staging(BlockReader(staged), folder, total, heartbeat).run()
    return staged


# By lock, not by rank: ranks, other jobs and the successor of a killed process need no agreement.
@dataclass(frozen=True)
class _Staging:
    reader: BlockReader
    folder: Path
    total: int
    """Bytes of all blocks."""
    heartbeat: Callable[[], None]

    def run(self) -> None:
        rows = range(len(self.reader.index.blocks))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            assert self.reader.index.cache is not None
            self.reader.index.cache.recounted()
            # In this order, so that bytes written by others in between do not count as missing.
            free = self._free_bytes()
            if free < self.total - self._bytes_there():
                raise self._no_space(free)
            logger.info(
                "staging %.3f GB of blocks to %s, %.3f GB are there",
                self.total / 1e9, self.folder, self._bytes_there() / 1e9,
            )  # fmt: skip
            started = time.monotonic()
            with self._progress():
                copied = sum(self._copied(rows))
        except OSError as error:
            raise self._not_written(error) from error
        logger.info(
            "staged in %.1f s: %d of %d blocks were copied by this process",
            time.monotonic() - started,
            copied,
            len(rows),
        )

    def _copied(self, rows: range) -> Iterator[bool]:
        """Copy blocks; yield for each whether this process did."""
        left: list[int] = []  # other processes have these at work
        for row in rows:
            is_kept, is_mine = self.reader.keep(row)
            yield is_mine
            if not is_kept:
                left.append(row)
            if is_mine:
                self.heartbeat()
                # A block that cannot be copied stops every process, not only the first at it.
                left = [row for row in left if not self.reader.keep(row)[0]]
        while left:
            is_kept, is_mine = self.reader.keep(left[0], _WAIT_S)
            yield is_mine
            self.heartbeat()
            left = left[1:] if is_kept else left

    def _bytes_there(self) -> int:
        assert self.reader.index.cache is not None
        return self.reader.index.cache.counts().kept_bytes

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free

    def _no_space(self, free: int) -> ConfigError:
        missing = self.total - self._bytes_there()
        return ConfigError(
            f"no space to stage blocks in data.stage_dir, {self.folder.parent}: "
            f"{missing / 1e9:.4f} GB are still needed, {free / 1e9:.4f} GB are free. "
            "Free space there (folders of other datasets?), choose another data.stage_dir, or "
            f"leave it out to read the shards from {self.reader.index.folder}"
        )

    def _not_written(self, error: OSError) -> PostnormError:
        if error.errno in _NO_SPACE:
            return self._no_space(self._free_bytes())
        if error.errno in _REFUSED:
            return ConfigError(
                f"data.stage_dir, {self.folder.parent}, cannot be used: {error}; choose a "
                "node-local folder that this user can write to and that can be locked, or leave it "
                "out"
            )
        return StorageError(
            f"{self.folder} cannot be written: {error}; check the disk of this node, or choose "
            "another data.stage_dir"
        )

    @contextmanager
    def _progress(self) -> Iterator[None]:
        """Log the progress of the whole node, also while this process waits for another."""
        ended = threading.Event()
        before, started = self._bytes_there(), time.monotonic()

        def log() -> None:
            while not ended.wait(_PROGRESS_EVERY_S):
                there = self._bytes_there()
                rate = (there - before) / (time.monotonic() - started)
                logger.info(
                    "staged %.3f of %.3f GB, %.0f MB/s", there / 1e9, self.total / 1e9, rate / 1e6
                )

        thread = threading.Thread(target=log, name="staging", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
