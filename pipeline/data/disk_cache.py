"""Blocks of a dataset in an object store, kept on a node's disk for all processes of the node.

    FOLDER/ab/SHA256         a block, by its hash
    FOLDER/ab/SHA256.part    being written, or left by a killed process
    FOLDER/state             four numbers, see `CacheCounts`; locks are held on its bytes

A block is renamed to its name when it is complete, and compared with its hash whenever it is read:
one that is damaged is removed, counted and fetched again. A process that fetches a block holds a
lock that the system frees however it ends; the others wait for it and then read what it left.

The blocks, unfinished ones included, never take more than a bound. What is removed for a new one is
not what was unused for longest: an epoch uses each block once, in a new order, so what was used
just now is needed last, and the oldest are those that the running epoch still has before it. With
room for half of a dataset the least recently used rule finds an eighth of the blocks, this one
nearly half. The newest eighth stays for other ranks, which use the same blocks at the same time.
"""

import fcntl
import logging
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.errors import DataError
from pipeline.runtime.files import lock_byte

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

_STATE_FILE = "state"
_STATE = struct.Struct("<4q")
_STATE_BYTE = 0  # is locked to change the numbers and to remove blocks; block k has a byte above
_WAIT_S = 120.0
"""For the process that fetches a block; a process that was stopped must not stop the others."""
_RETRY_S = 0.01
_PART = ".part"
_warned: set[Path] = set()


class CacheCounts(NamedTuple):
    """What happened to a cache, over all processes and since it was made."""

    kept_bytes: int
    """Bytes of its files; too high by what killed processes left, until room is made again."""
    fetched_blocks: int
    fetched_bytes: int
    damaged_blocks: int
    """Blocks that differed from their hash when they were read from this disk."""


@dataclass(frozen=True)
class DiskCache:
    """Keeps blocks below a folder of a file system that can lock files."""

    folder: Path
    max_bytes: int

    def get(
        self, sha256: bytes, fetch: Callable[[], Bytes], check: Callable[[Bytes], None]
    ) -> Bytes:
        """Return a block that passes its check, from here or from `fetch`.

        A block that does not pass after it was fetched is fetched once more: the network may have
        damaged it.

        Raises:
            DataError: it fails again; and what `fetch` raises.
        """
        path = self._path(sha256)
        if (data := self._good(path, check)) is not None:
            return data
        with self._locked(_byte_of(path.name), _WAIT_S) as alone:
            # Another process may have fetched it meanwhile.
            if alone and (data := self._good(path, check)) is not None:
                return data
            data = fetch()
            try:
                check(data)
            except DataError as error:
                logger.warning("%s; fetched once more", error)
                data = fetch()
                check(data)
            if alone:
                self._keep(path, data)
            return data

    def part(self, sha256: bytes, start: int, length: int) -> Bytes | None:
        """Return bytes of a block without checking them; None if it is not kept."""
        try:
            with self._path(sha256).open("rb", buffering=0) as file:
                return np.frombuffer(os.pread(file.fileno(), length, start), np.uint8)
        except OSError:
            return None

    def counts(self) -> CacheCounts:
        """Return the numbers as they are now."""
        with suppress(OSError), (self.folder / _STATE_FILE).open("rb") as file:
            return _read(file.fileno())
        return CacheCounts(0, 0, 0, 0)

    def _path(self, sha256: bytes) -> Path:
        name = sha256.hex()
        return self.folder / name[:2] / name

    def _good(self, path: Path, check: Callable[[Bytes], None]) -> Bytes | None:
        """Read a kept block, and remove it if it is damaged."""
        try:
            data = np.frombuffer(path.read_bytes(), np.uint8)
            check(data)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (DataError, OSError) as error:
            with suppress(OSError):
                path.unlink()
            counts = self._count(damaged_blocks=1)
            logger.warning(
                "%s, kept from an earlier reading, is damaged and fetched again (%d so far here)%s",
                path,
                counts.damaged_blocks,
                f": {error}" if isinstance(error, OSError) else "",
            )
            return None
        now = time.time_ns()
        with suppress(OSError):  # another process may have removed it
            os.utime(path, ns=(now, now))
        return data

    def _keep(self, path: Path, data: Bytes) -> None:
        """Write a block, if there is room; the run goes on without."""
        part = path.with_name(path.name + _PART)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked(_STATE_BYTE, _WAIT_S) as alone:
                if not alone or not self._has_room(len(data)):
                    return
                # Its size is counted from now on, also by others that count files.
                with part.open("wb") as file:
                    file.truncate(len(data))
            with part.open("r+b") as file:
                file.write(data.data)
            part.replace(path)
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            self._warn(f"blocks are not kept: {error}; free space there, or lower data.stage_gb")
        else:
            self._count(fetched_blocks=1, fetched_bytes=len(data))

    def _has_room(self, need: int) -> bool:
        """Count a new block; remove others for it if the bound asks for that."""
        with (self.folder / _STATE_FILE).open("r+b") as file:
            counts = _read(file.fileno())
            kept = counts.kept_bytes
            if kept + need > self.max_bytes:
                kept = self._remove_for(need)
            fits = kept + need <= self.max_bytes
            _write(file.fileno(), counts._replace(kept_bytes=kept + need if fits else kept))
        if not fits:
            self._warn(f"data.stage_gb={self.max_bytes / 1e9:g} has no room for a block")
        return fits

    # With room for half of the blocks 56% are fetched again; 87% (calculated) if the least
    # recently used goes.
    def _remove_for(self, need: int) -> int:
        """Remove blocks until a new one fits, and a few more; return the bytes that are left."""
        found = sorted(self._files(), reverse=True)  # the newest first
        left = sum(size for _, size, _ in found)
        goal = self.max_bytes - max(need, self.max_bytes // 16)
        sizes = np.cumsum([size for _, size, _ in found])
        newest = int(np.searchsorted(sizes, self.max_bytes // 8, side="right"))
        for _, size, path in [*found[newest:], *reversed(found[:newest])]:
            if left <= goal:
                break
            if path.suffix != _PART:
                path.unlink(missing_ok=True)
                left -= size
        return left

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """Yield time of last use, size and path of each file; remove what killed writers left."""
        for folder in self.folder.iterdir():
            if not folder.is_dir():
                continue
            for path in folder.iterdir():
                if path.suffix == _PART:
                    with self._locked(_byte_of(path.stem), 0.0) as is_left:
                        if is_left:
                            path.unlink(missing_ok=True)
                            continue
                with suppress(FileNotFoundError):
                    found = path.stat()
                    yield found.st_mtime_ns, found.st_size, path

    @contextmanager
    def _locked(self, byte: int, wait_s: float) -> Iterator[bool]:
        """Lock a byte of the state; False if that cannot be had."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)  # somebody may clean the disk
            state = self.folder / _STATE_FILE
            # Opened each time: threads of a process exclude each other like processes.
            file = os.open(state, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self._warn(f"blocks are not kept: {error}")
            yield False
            return
        try:
            until = time.monotonic() + wait_s
            while not (locked := lock_byte(file, byte, fcntl.F_WRLCK)):
                if time.monotonic() >= until:
                    break
                time.sleep(_RETRY_S)
            yield locked
        finally:
            os.close(file)

    def _count(self, **more: int) -> CacheCounts:
        with self._locked(_STATE_BYTE, _WAIT_S) as alone:
            counts = self.counts()
            if alone:
                added = {name: getattr(counts, name) + number for name, number in more.items()}
                counts = counts._replace(**added)
                with suppress(OSError), (self.folder / _STATE_FILE).open("r+b") as file:
                    _write(file.fileno(), counts)
        return counts

    def _warn(self, text: str) -> None:
        if self.folder not in _warned:
            _warned.add(self.folder)
            logger.warning("%s: %s", self.folder, text)


def _byte_of(name: str) -> int:
    """Return the byte of the state that is locked for a block, by its hash in hex."""
    return 1 + int(name[:15], 16)


def _read(file: int) -> CacheCounts:
    data = os.pread(file, _STATE.size, 0)
    return (
        CacheCounts(*_STATE.unpack(data)) if len(data) == _STATE.size else CacheCounts(0, 0, 0, 0)
    )


def _write(file: int, counts: CacheCounts) -> None:
    os.pwrite(file, _STATE.pack(*counts), 0)
