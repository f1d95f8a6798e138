"""Copies the shards of a dataset to a folder of the node and reads them from there.

    STAGE_DIR/FINGERPRINT/shards/NAME.tar       complete: its sha256 matched the index
    STAGE_DIR/FINGERPRINT/shards/NAME.tar.part  being copied by the process with its lock, or a rest

Every rank of a node calls `stage`, and other jobs on that node may do so, too. Each copies the
first missing shard that no process is copying until none is left, then waits for the others. The
system frees the lock of a process however it ends, and another one copies that shard again.

A tar is renamed to its name only after its hash was right, so name and size prove that it was good,
and a later start does not hash it again: `BlockReader` compares every block with the index when it
is first read, which finds later damage on the local disk.
"""

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from pipeline.data.format import DatasetIndex
from pipeline.data.reader import BlockReader, read_range
from pipeline.errors import ConfigError, DataError, PostnormError, StorageError

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 24
_PROGRESS_EVERY_S = 10.0
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def stage(
    index: DatasetIndex, stage_dir: str | Path, heartbeat: Callable[[], None] = lambda: None
) -> DatasetIndex:
    """Copy the missing shards of both splits, together with the other ranks of the node.

    `heartbeat` is called after each part of the work, which may take hours.

    Returns:
        The index with shards read from that folder.

    Raises:
        DataError: a shard of the dataset is missing or damaged.
        ConfigError: the folder cannot be used or has too little space.
        StorageError: a shard cannot be read or written at the moment.
    """
    staging = _Staging(index, Path(stage_dir), heartbeat)
    staging.run()
    return staging.staged


# By lock, not by rank: ranks, other jobs and the successor of a killed process need no agreement.
# 915 MB a CPU-second with hashing (copyfile 2,409, sha256 alone 1,811, in memory).
@dataclass(frozen=True)
class _Staging:
    index: DatasetIndex
    stage_dir: Path
    heartbeat: Callable[[], None]

    @property
    def staged(self) -> DatasetIndex:
        return replace(self.index, shard_root=self.stage_dir / self.index.fingerprint[:16])

    def run(self) -> None:
        every = range(len(self.index.shards))
        missing = self._incomplete(every)
        root = self.staged.shard_root
        if not missing:
            logger.info("shards are read from %s, where they were staged before", root)
            return
        BlockReader(self.index, missing)  # checks sizes now rather than after an hour
        try:
            for folder in {self.staged.shard_path(shard).parent for shard in missing}:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from error
        self._require_space()
        total = sum(shard.num_bytes for shard in self.index.shards)
        there = self._bytes_there()
        logger.info(
            "staging %.3f GB of shards to %s, %.3f GB are there", total / 1e9, root, there / 1e9
        )
        started, copied = time.monotonic(), 0
        with self._progress(total):
            # From the front each time, so that a shard that cannot be copied stops every process
            # and not only the first that tried it.
            while missing := self._incomplete(missing):
                self.heartbeat()
                # If all are locked, wait for the first: its process may have failed.
                copied += any(self._copy(shard) for shard in missing) or self._copy(
                    missing[0], wait=True
                )
        logger.info(
            "staged in %.1f s: %d of %d shards were copied by this process",
            time.monotonic() - started,
            copied,
            len(every),
        )

    def _incomplete(self, shards: range | list[int]) -> list[int]:
        sizes = ((shard, _size(self.staged.shard_path(shard))) for shard in shards)
        return [shard for shard, size in sizes if size != self.index.shards[shard].num_bytes]

    def _copy(self, shard: int, *, wait: bool = False) -> bool:
        """Copy a shard unless another process does or did; return whether it was copied."""
        path = self.staged.shard_path(shard)
        part = _part(path)
        with self._locked(part, wait=wait) as file:
            if file is None:
                return False
            if not self._incomplete([shard]):
                part.unlink(missing_ok=True)  # opening it created it after the other's rename
                return False
            try:
                self._fill(file, shard)
                part.replace(path)
            except BaseException as error:
                part.unlink(missing_ok=True)
                file.close()  # frees its space before the message counts it
                if isinstance(error, OSError):
                    raise self._not_written(part, error) from error
                raise
        return True

    def _fill(self, file: IO[bytes], shard: int) -> None:
        """Copy a shard into an open file and compare its hash; OSError is an error of writing."""
        info = self.index.shards[shard]
        file.truncate(0)
        hasher = hashlib.sha256()
        for offset in range(0, info.num_bytes, _CHUNK_BYTES):
            chunk = self._read(shard, offset, min(_CHUNK_BYTES, info.num_bytes - offset))
            hasher.update(chunk)
            while chunk:
                chunk = chunk[file.write(chunk) :]
            self.heartbeat()
        if hasher.hexdigest() != info.sha256:
            raise DataError(
                f"shard {self.index.shard_path(shard)} is damaged: its sha256 is "
                f"{hasher.hexdigest()}, the index expects {info.sha256}; `python -m data_prep "
                f"verify {self.index.folder}` finds the member; restore this shard from its "
                "source, or delete it and run `python -m data_prep run` again"
            )

    def _read(self, shard: int, offset: int, length: int) -> memoryview:
        path = self.index.shard_path(shard)
        try:
            # A file that ends early has another hash, too.
            return read_range(path, offset, length, lambda: f"shard {path}").data
        except OSError as error:
            raise DataError(
                f"shard {path} cannot be read: {error}; restore it from its source"
            ) from error

    @contextmanager
    def _locked(self, part: Path, *, wait: bool) -> Iterator[IO[bytes] | None]:
        """Open and lock a part without truncating it; None if another process has or had it."""
        try:
            file = part.open("ab", buffering=0)
        except OSError as error:
            raise self._not_written(part, error) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield None
                return
            except OSError as error:
                raise self._unusable(error) from error
            # Its last holder has renamed it, or has failed and removed it.
            yield file if _is_at(file, part) else None

    def _bytes_there(self) -> int:
        """Add up complete shards and parts; a part is looked at first, as it may be renamed."""
        total = 0
        for shard, info in enumerate(self.index.shards):
            path = self.staged.shard_path(shard)
            part = _size(_part(path)) or 0
            total += info.num_bytes if _size(path) == info.num_bytes else part
        return total

    def _require_space(self) -> None:
        # In this order, so that bytes written by others in between do not count as missing.
        free = self._free_bytes()
        if free < self._missing_bytes():
            raise self._no_space(free)

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self.staged.shard_root).free

    def _missing_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.index.shards) - self._bytes_there()

    def _no_space(self, free: int) -> ConfigError:
        return ConfigError(
            f"no space to stage shards in data.stage_dir, {self.stage_dir}: "
            f"{self._missing_bytes() / 1e9:.4f} GB are still needed, {free / 1e9:.4f} GB are free. "
            "Free space there (folders of other datasets?), choose another data.stage_dir, or "
            f"leave it out to read the shards from {self.index.folder}"
        )

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"data.stage_dir, {self.stage_dir}, cannot be used: {error}; choose a node-local "
            "folder that this user can write to and that can be locked, or leave it out"
        )

    def _not_written(self, part: Path, error: OSError) -> PostnormError:
        if error.errno in _NO_SPACE:
            return self._no_space(self._free_bytes())
        if error.errno in _REFUSED:
            return self._unusable(error)
        return StorageError(
            f"{part} cannot be written: {error}; check the disk of this node, or choose another "
            "data.stage_dir"
        )

    @contextmanager
    def _progress(self, total: int) -> Iterator[None]:
        """Log the progress of the whole node, also while this process waits for another."""
        ended = threading.Event()
        before, started = self._bytes_there(), time.monotonic()

        def log() -> None:
            while not ended.wait(_PROGRESS_EVERY_S):
                there = self._bytes_there()
                rate = (there - before) / (time.monotonic() - started)
                logger.info(
                    "staged %.3f of %.3f GB, %.0f MB/s", there / 1e9, total / 1e9, rate / 1e6
                )

        thread = threading.Thread(target=log, name="staging", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Return whether a path still names this open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _size(path: Path) -> int | None:
    """Return the size of a file; None if it is missing or cannot be looked at."""
    try:
        return path.stat().st_size
    except OSError:
        return None
