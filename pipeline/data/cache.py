"""Bytes that the processes of a node make once and read together, in a folder.

    FOLDER/ab/KEY            what is kept, by its key in hex
    FOLDER/ab/KEY.part       being written, or left by a killed process
    FOLDER/state             four numbers, see `CacheCounts`; locks are held on its bytes

On a disk these are blocks of a dataset by their hash, copied from an object store or from shared
storage: compared with the hash whenever they are read, and fetched again if damaged. In memory (a
folder of /dev/shm) these are arrays that every rank of the node needs, see `SharedArrays`.

A file is renamed to its name when it is complete. A process that makes one holds a lock that the
system frees however the process ends; the others wait for it and then read what it left.

Files, unfinished ones included, never take more than a bound. In memory what was unused for longest
goes first. On a disk it is the other way round: an epoch uses each block once, in a new order, so
what was used just now is needed last, and the oldest are those that the running epoch still has
before it. With room for half of a dataset the least recently used rule finds an eighth of the
blocks, this one nearly half.
"""

import fcntl
import hashlib
import logging
import mmap
import os
import shutil
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.errors import DataError
from pipeline.runtime.files import is_at, lock_byte

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Arrays = Sequence[npt.NDArray[Any]]
Key = tuple[int, ...]

_STATE_FILE = "state"
_STATE = struct.Struct("<4q")
_STATE_BYTE = 0  # is locked to change the numbers and to remove blocks; block k has a byte above
# For the process that fetches a block; a process that was stopped must not stop the others.
_WAIT_S = 120.0
_RETRY_S = 0.01
_PART = ".part"
_MEMORY = Path("/dev/shm")
_USERS_FILE = "users"
# Raise it when arrays have another layout, so that two revisions never share them.
_LAYOUT = 2
_DTYPES = tuple(np.dtype(kind) for kind in ("u1", "u2", "u4", "i4", "i8"))
_ALIGN = 64
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
class BlockCache:
    """Keeps bytes below a folder of a file system that can lock files; threads may share it."""

    folder: Path
    max_bytes: int
    in_memory: bool = False
    """The folder is memory: files are mapped and not read, and the oldest go first."""

    def get(
        self, key: bytes, make: Callable[[], Bytes], check: Callable[[Bytes], None] = lambda _: None
    ) -> Bytes:
        """Return bytes that pass their check, from here or from `make`.

        Raises:
            DataError: bytes just made do not pass, twice; and what `make` raises.
        """
        path = self._path(key)
        if (data := self._good(path, check)) is not None:
            return data
        with ExitStack() as stack:
            alone = False
            try:
                alone = stack.enter_context(self._locked(_byte_of(path.name), _WAIT_S))
            except OSError as error:
                self._warn(f"blocks are not kept: {error}")
            # Another process may have made it meanwhile.
            if alone and (data := self._good(path, check)) is not None:
                return data
            data = _made(make, check)
            if alone:
                try:
                    if not self._keep(path, data):
                        self._warn(f"{self.max_bytes / 1e9:g} GB have no room{self._remedy}")
                except OSError as error:
                    self._warn(f"blocks are not kept: {error}{self._remedy}")
            return data

    @property
    def _remedy(self) -> str:
        if self.in_memory:
            return "; give the job or container more shared memory (docker: --shm-size, --ipc=host)"
        return "; free space there, or change data.stage_gb"

    def fill(
        self, key: bytes, make: Callable[[], Bytes], check: Callable[[Bytes], None], wait_s: float
    ) -> tuple[bool, bool]:
        """Keep bytes before they are needed.

        Returns:
            Whether they are kept now, and whether this process has written them.

        Raises:
            OSError: the folder cannot be used or written to; and as `get`.
        """
        path = self._path(key)
        if path.is_file():
            return True, False
        with self._locked(_byte_of(path.name), wait_s) as alone:
            if not alone or path.is_file():
                return alone, False
            return (self._keep(path, _made(make, check)),) * 2

    def part(self, key: bytes, start: int, length: int) -> Bytes | None:
        """Return some of the bytes of a key without checking them; None if it is not kept."""
        try:
            with self._path(key).open("rb", buffering=0) as file:
                return np.frombuffer(os.pread(file.fileno(), length, start), np.uint8)
        except OSError:
            return None

    def counts(self) -> CacheCounts:
        """Return the numbers as they are now."""
        with suppress(OSError), (self.folder / _STATE_FILE).open("rb") as file:
            return _read(file.fileno())
        return CacheCounts(0, 0, 0, 0)

    def recounted(self) -> int:
        """Count the bytes of the files anew, without what killed writers left, and return them.

        Raises:
            OSError: the folder cannot be used.
        """
        with self._locked(_STATE_BYTE, _WAIT_S):
            kept = sum(size for _, size, _ in self._files())
            with (self.folder / _STATE_FILE).open("r+b") as file:
                _write(file.fileno(), _read(file.fileno())._replace(kept_bytes=kept))
        return kept

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / name[:2] / name

    def _good(self, path: Path, check: Callable[[Bytes], None]) -> Bytes | None:
        """Read a kept block, and remove it if it is damaged."""
        try:
            data = _mapped(path) if self.in_memory else np.frombuffer(path.read_bytes(), np.uint8)
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
        # Set here, because many file systems do not note each reading (relatime, noatime).
        now = time.time_ns()
        with suppress(OSError):  # another process may have removed it
            os.utime(path, ns=(now, now))
        return data

    def _keep(self, path: Path, data: Bytes) -> bool:
        """Write a file; False: there is no room (OSError: it cannot be written)."""
        part = path.with_name(path.name + _PART)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked(_STATE_BYTE, _WAIT_S) as alone:
                if not alone or not self._has_room(len(data)):
                    return False
                # Its size is counted from now on, also by others that count files.
                with part.open("wb") as file:
                    file.truncate(len(data))
            with part.open("r+b") as file:
                file.write(data.data)
            # Not flushed: what a power cut tears fails its hash and is fetched again, and a flush
            # would wait for the disk at each block.
            part.replace(path)
        except OSError:
            with suppress(OSError):
                part.unlink()
            raise
        self._count(fetched_blocks=1, fetched_bytes=len(data))
        return True

    def _has_room(self, need: int) -> bool:
        """Count a new file; remove others for it if the bound asks for that."""
        with (self.folder / _STATE_FILE).open("r+b") as file:
            counts = _read(file.fileno())
            kept = counts.kept_bytes
            if kept + need > self.max_bytes:
                kept = self._remove_for(need)
            fits = kept + need <= self.max_bytes
            _write(file.fileno(), counts._replace(kept_bytes=kept + need if fits else kept))
        return fits

    # With room for half of the blocks 56% are fetched again; 87% (calculated) if the least
    # recently used goes.
    def _remove_for(self, need: int) -> int:
        """Remove blocks until a new one fits, and a few more; return the bytes that are left."""
        found = sorted(self._files(), reverse=True)  # the newest first
        left = sum(size for _, size, _ in found)
        # A sixteenth at once, because finding the oldest lists every file.
        goal = self.max_bytes - max(need, self.max_bytes // 16)
        sizes = np.cumsum([size for _, size, _ in found])
        # The newest eighth goes last: other ranks use the same blocks at the same time.
        newest = int(np.searchsorted(sizes, self.max_bytes // 8, side="right"))
        if self.in_memory:
            newest = len(found)
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
                    # Whoever writes it holds the lock of its block: a free lock means that its
                    # writer is dead.
                    with self._locked(_byte_of(path.stem), 0.0) as is_left:
                        if is_left:
                            path.unlink(missing_ok=True)
                            continue
                with suppress(FileNotFoundError):
                    found = path.stat()
                    yield found.st_mtime_ns, found.st_size, path

    @contextmanager
    def _locked(self, byte: int, wait_s: float) -> Iterator[bool]:
        """Lock a byte of the state; False: another process has it, and the wait was too long."""
        self.folder.mkdir(parents=True, exist_ok=True)  # somebody may clean the disk
        state = self.folder / _STATE_FILE
        # Opened each time: threads of a process exclude each other like processes.
        file = os.open(state, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            until = time.monotonic() + wait_s
            # Asked again and again, as a wait for a lock cannot be given up after a time.
            while not (locked := lock_byte(file, byte, fcntl.F_WRLCK)):
                if time.monotonic() >= until:
                    break
                time.sleep(_RETRY_S)
            yield locked
        finally:
            os.close(file)

    def _count(self, **more: int) -> CacheCounts:
        counts = self.counts()
        with suppress(OSError), self._locked(_STATE_BYTE, _WAIT_S) as alone:
            counts = self.counts()
            added = {name: getattr(counts, name) + number for name, number in more.items()}
            counts = counts._replace(**added)
            if alone:
                with (self.folder / _STATE_FILE).open("r+b") as file:
                    _write(file.fileno(), counts)
        return counts

    def _warn(self, text: str) -> None:
        if self.folder not in _warned:
            _warned.add(self.folder)
            logger.warning("%s: %s", self.folder, text)


def _made(make: Callable[[], Bytes], check: Callable[[Bytes], None]) -> Bytes:
    """Make bytes; those that do not pass are made once more: the network may have damaged them."""
    data = make()
    try:
        check(data)
    except DataError as error:
        logger.warning("%s; fetched once more", error)
        data = make()
        check(data)
    return data


def _mapped(path: Path) -> Bytes:
    """Map a file, which may be removed while the array is in use."""
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)


def _byte_of(name: str) -> int:
    """Return the byte of the state that is locked for a block, by its hash in hex."""
    # 60 bits, an offset that every file system takes. A lock needs no byte behind it, and two
    # blocks of one byte only wait for each other.
    return 1 + int(name[:15], 16)


def _read(file: int) -> CacheCounts:
    data = os.pread(file, _STATE.size, 0)
    return (
        CacheCounts(*_STATE.unpack(data)) if len(data) == _STATE.size else CacheCounts(0, 0, 0, 0)
    )


def _write(file: int, counts: CacheCounts) -> None:
    os.pwrite(file, _STATE.pack(*counts), 0)


# Files and not a memory file without a name, which a process has to hand out (315 lines). What
# killed ranks leave goes at the next start.
class SharedArrays:
    """Arrays that the processes of a user on this node make once and read together, in memory.

    They are files below /dev/shm, whose folder the last process removes. What killed processes left
    goes when the next one of this user opens its own.
    """

    def __init__(self, content: str, max_bytes: int, num_views: int) -> None:
        """Join the processes that have the same content, or be the first.

        `content` says all that the arrays follow from beside their keys. The last `num_views`
        arrays of this process are kept, which saves looking for them again.

        Raises:
            OSError: there is no /dev/shm, or another user has taken the folder's name.
        """
        identity = repr((_LAYOUT, content, max_bytes))
        prefix = f"postnorm-{os.getuid()}-"
        self.folder = _MEMORY / f"{prefix}{hashlib.sha256(identity.encode()).hexdigest()[:32]}"
        for left in _MEMORY.glob(f"{prefix}*"):
            _remove_unused(left)
        self._cache = BlockCache(self.folder, max_bytes, in_memory=True)
        self._num_views = num_views
        self._views: dict[Key, Arrays] = {}
        # With the process's number: a forked child may run the finaliser, too.
        weakref.finalize(self, _leave, self.folder, _users_lock(self.folder), os.getpid())

    def get(self, key: Key, make: Callable[[], Arrays]) -> Arrays:
        """Return the one-dimensional arrays of a key, which `make` makes if no process has.

        They cannot be changed, and stay what they are as long as they are used.
        """
        if (arrays := self._views.get(key)) is None:
            name = hashlib.sha256(repr(key).encode()).digest()
            arrays = self._views[key] = _unpacked(self._cache.get(name, lambda: _packed(make())))
            for oldest in list(self._views)[: -self._num_views]:
                self._views.pop(oldest, None)  # another thread may have been faster
        return arrays


def _packed(arrays: Arrays) -> Bytes:
    """Join arrays behind a head of their types and lengths, each at a multiple of 64 bytes."""
    head = [len(arrays), *(n for a in arrays for n in (_DTYPES.index(a.dtype), len(a)))]
    parts = [np.array(head, np.int64), *arrays]
    data = np.zeros(sum(-(-part.nbytes // _ALIGN) * _ALIGN for part in parts), np.uint8)
    at = 0
    for part in parts:
        data[at : at + part.nbytes] = part.view(np.uint8)
        at += -(-part.nbytes // _ALIGN) * _ALIGN
    return data


def _unpacked(data: Bytes) -> Arrays:
    data.flags.writeable = False
    [count] = data[:8].view(np.int64).tolist()
    head = data[8 : 8 + 16 * count].view(np.int64)
    arrays, at = [], -(-(8 + 16 * count) // _ALIGN) * _ALIGN
    for kind, length in zip(head[::2].tolist(), head[1::2].tolist(), strict=True):
        num_bytes = length * _DTYPES[kind].itemsize
        arrays.append(data[at : at + num_bytes].view(_DTYPES[kind]))
        at += -(-num_bytes // _ALIGN) * _ALIGN
    return arrays


def _users_lock(folder: Path) -> int:
    """Open the file that each process which uses a folder has locked, and lock it, too."""
    while True:
        # Everybody may write to /dev/shm: `lstat` notices another user's link to a folder of ours.
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.lstat().st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")
        with suppress(FileNotFoundError):  # another process removes it at this moment
            file = os.open(folder / _USERS_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(file, fcntl.LOCK_SH)
            # Between opening and locking the last user may have removed it: then the lock guards
            # nothing.
            if is_at(file, folder / _USERS_FILE):
                return file
            os.close(file)


def _remove_unused(folder: Path) -> None:
    """Remove a folder of arrays that no living process uses."""
    with suppress(OSError), (folder / _USERS_FILE).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)


def _leave(folder: Path, file: int, process: int) -> None:
    if os.getpid() == process:  # not a fork of it
        os.close(file)
        _remove_unused(folder)
