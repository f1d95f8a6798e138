"""Arrays that the processes of a node make once and read together, in shared memory.

    file         one memory file (memfd_create): a table, then slots of equal size
    row          state, time of last use, key
    slot         the arrays of one key, each behind its type and length

The file has no name in any folder, so nothing is left behind, however its processes end: the system
frees it with the last of them. The first process makes it and hands it to the others through a
socket of Linux's abstract namespace, whose name ends with that process, too.

Whoever reads a slot has a shared lock on it, whoever fills it an exclusive one: locks of open files
(F_OFD_SETLK, fcntl(2)), which the system frees when a process is killed. A forked child opens the
file again, so it does not hold its parent's locks. A slot whose maker died is filled by the next
process that needs it. If all slots are taken, the one is filled anew that was
unused for longest and that nobody reads.
"""

import errno
import fcntl
import hashlib
import mmap
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.runtime.files import lock_byte

Key = tuple[int, int, int, int, int]
Arrays = list[npt.NDArray[Any]]

_LAYOUT = 1
"""Raise it when slots have another content, so that two revisions never share them."""
_DTYPES = tuple(np.dtype(kind) for kind in ("u1", "u2", "u4", "i4", "i8"))
_ROW = 8  # numbers of a row of the table: state, use, key, one spare
_READY = 1
_ALIGN = 64
_PAGE = 4096
_TIMEOUT_S = 10.0
_RETRY_S = 0.01
_MUTEX = 0  # byte that is locked to change the table; slot k has byte k + 1


class NodeCache:
    """A bounded cache; threads of a process take turns with it."""

    def __init__(self, content: str, slot_bytes: int, num_slots: int) -> None:
        """Join the processes of this user that have the same content, or be the first.

        `content` says all that the arrays follow from beside their keys.

        Raises:
            OSError: the system has no memory files or no such sockets.
        """
        self._slot_bytes = -(-slot_bytes // _PAGE) * _PAGE
        self._num_slots = num_slots
        self._first = -(-num_slots * _ROW * 8 // _PAGE) * _PAGE
        size = self._first + num_slots * self._slot_bytes
        identity = repr((_LAYOUT, os.getuid(), content, self._slot_bytes, num_slots))
        self.address = f"postnorm-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"
        """The socket where it is handed out, as /proc/net/unix names it after an @."""
        self._file, self._door = _join(self.address, size)
        self._memory = mmap.mmap(self._file, size)
        table = np.frombuffer(self._memory, np.int64, num_slots * _ROW)
        self._table = table.reshape(num_slots, _ROW)
        self._turn = threading.RLock()
        self._held: set[int] = set()
        """Slots that this process reads or fills: its own locks do not keep it from them."""
        self._last: dict[Key, int] = {}
        """Where a key was found, which saves a search."""
        self._views: dict[int, tuple[Key, Arrays]] = {}
        """Arrays of the key that this process read last in each slot."""
        weakref.finalize(self, _leave, self._file, self._door)
        _caches.add(self)

    def after_fork(self) -> None:
        """Make a forked child's copy of the cache its own: its locks, and no door."""
        own = _opened_again(self._file)
        os.dup2(own, self._file, inheritable=False)
        os.close(own)
        self._turn = threading.RLock()  # a thread of the parent may have had it
        self._held.clear()
        if self._door is not None:
            self._door.forget()

    @contextmanager
    def get(self, key: Key, make: Callable[[], Sequence[npt.NDArray[Any]]]) -> Iterator[Arrays]:
        """Give the one-dimensional arrays of a key, which `make` makes if no process has.

        They must not be used after the block, nor changed. Blocks of other keys may be within it.
        """
        with self._turn:
            slot, is_new = self._take(key)
            if slot is None:  # every slot is being read
                yield list(make())
                return
            self._held.add(slot)
            try:
                if not is_new:
                    yield self._read(slot, key)
                    return
                made = list(make())
                if self._write(slot, made):
                    self._table[slot, 0] = _READY
                    self._lock(slot + 1, fcntl.F_RDLCK)
                else:
                    # Whoever waits for it makes the arrays by itself.
                    self._lock(slot + 1, fcntl.F_UNLCK)
                yield made
            finally:
                self._held.remove(slot)
                self._lock(slot + 1, fcntl.F_UNLCK)

    def _take(self, key: Key) -> tuple[int | None, bool]:
        """Lock a slot: to read it, or to fill it (then the second value is True)."""
        while True:
            slot = self._find(key)
            if slot is not None:
                # Waits for a process that fills it. Only with the lock is the row sure to stay.
                self._lock(slot + 1, fcntl.F_RDLCK, wait=True)
                if self._table[slot, 0] == _READY and self._has(slot, key):
                    self._table[slot, 1] = self._table[:, 1].max() + 1
                    return slot, False
                self._lock(slot + 1, fcntl.F_UNLCK)
            self._lock(_MUTEX, fcntl.F_WRLCK, wait=True)
            try:
                slot = self._find(key)
                if slot is None:
                    slot = self._evicted()
                    if slot is None:
                        return None, False
                elif self._table[slot, 0] == _READY or not self._lock(slot + 1, fcntl.F_WRLCK):
                    continue  # another process was faster
                self._table[slot, 0] = 0
                self._table[slot, 1] = self._table[:, 1].max() + 1
                self._table[slot, 2:7] = key
                return slot, True
            finally:
                self._lock(_MUTEX, fcntl.F_UNLCK)

    def _find(self, key: Key) -> int | None:
        last = self._last.get(key)
        if last is not None and self._has(last, key):
            return last
        rows = np.flatnonzero((self._table[:, 2:7] == key).all(axis=1) & (self._table[:, 1] > 0))
        if not len(rows):
            return None
        self._last[key] = slot = int(rows[0])
        if len(self._last) > self._num_slots:
            del self._last[next(iter(self._last))]
        return slot

    def _has(self, slot: int, key: Key) -> bool:
        return bool(self._table[slot, 2:7].tolist() == [*key])

    def _evicted(self) -> int | None:
        """Lock the slot that was unused for longest, to fill it; None: all are in use."""
        for slot in np.argsort(self._table[:, 1], kind="stable").tolist():
            if slot not in self._held and self._lock(slot + 1, fcntl.F_WRLCK):
                return int(slot)
        return None

    def _lock(self, byte: int, kind: int, *, wait: bool = False) -> bool:
        """Lock or free a byte; False if another process has it."""
        return lock_byte(self._file, byte, kind, wait=wait)

    def _write(self, slot: int, arrays: Arrays) -> bool:
        """Copy arrays into a slot; False if they do not fit."""
        head = np.array(
            [len(arrays), *(n for a in arrays for n in (_DTYPES.index(a.dtype), len(a)))]
        )
        offsets = _offsets(head)
        if offsets[-1] > self._slot_bytes:
            return False
        at = self._first + slot * self._slot_bytes
        np.frombuffer(self._memory, np.int64, len(head), at)[:] = head
        for array, offset in zip(arrays, offsets, strict=False):
            np.frombuffer(self._memory, array.dtype, len(array), at + offset)[:] = array
        return True

    def _read(self, slot: int, key: Key) -> Arrays:
        found, arrays = self._views.get(slot, (None, []))
        if found == key:
            return arrays  # the slot may have been filled anew, with the same
        at = self._first + slot * self._slot_bytes
        [count] = np.frombuffer(self._memory, np.int64, 1, at).tolist()
        head = np.frombuffer(self._memory, np.int64, 1 + 2 * count, at)
        kinds, lengths = head[1::2].tolist(), head[2::2].tolist()
        arrays = [
            np.frombuffer(self._memory, _DTYPES[kind], length, at + offset)
            for kind, length, offset in zip(kinds, lengths, _offsets(head), strict=False)
        ]
        self._views[slot] = key, arrays
        return arrays


def _offsets(head: npt.NDArray[np.int64]) -> list[int]:
    """Return where each array of a slot begins, and where the last one ends."""
    offsets, at = [], -(-8 * len(head) // _ALIGN) * _ALIGN
    for kind, length in zip(head[1::2].tolist(), head[2::2].tolist(), strict=True):
        offsets.append(at)
        at += -(-length * _DTYPES[kind].itemsize // _ALIGN) * _ALIGN
    return [*offsets, at]


class _Door:
    """Where the process that made the file gives it to every process of this user that asks."""

    def __init__(self, listener: socket.socket, file: int) -> None:
        self._listener, self._file = listener, file
        self._is_mine = True
        listener.listen(socket.SOMAXCONN)
        threading.Thread(target=self._hand_out, name="node-cache", daemon=True).start()

    def close(self) -> None:
        """Give the file to nobody any more."""
        if self._is_mine:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes both

    def forget(self) -> None:
        """Leave it to the parent of this forked process, which has no thread that waits at it."""
        if self._is_mine:
            self._is_mine = False
            self._listener.close()
            with suppress(OSError):
                os.close(self._file)

    def _hand_out(self) -> None:
        with self._listener:
            while True:
                try:
                    connection, _ = self._listener.accept()
                except OSError:
                    os.close(self._file)
                    return
                with connection, suppress(OSError):
                    if _user_of(connection) == os.getuid():
                        socket.send_fds(connection, [b"f"], [self._file])


_caches: weakref.WeakSet[NodeCache] = weakref.WeakSet()


def _after_fork() -> None:
    for cache in list(_caches):
        cache.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _join(name: str, size: int) -> tuple[int, _Door | None]:
    """Return an open file of its own for this process, and its door if it made the file."""
    address = f"\0{name}"
    until = time.monotonic() + _TIMEOUT_S
    while True:
        with suppress(ConnectionRefusedError):
            return _received(address, size), None
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(address)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                raise
            time.sleep(_RETRY_S)  # another process was first, or is ending
            continue
        file = os.memfd_create(name)
        os.ftruncate(file, size)
        # Locks belong to an open file, and the others get this one.
        return _opened_again(file), _Door(listener, file)


def _leave(file: int, door: _Door | None) -> None:
    os.close(file)
    if door is not None:
        door.close()


def _received(address: str, size: int) -> int:
    """Get the file from the process that made it (ConnectionRefusedError: there is none)."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(address)
        if _user_of(connection) != os.getuid():
            raise PermissionError(f"{address[1:]} belongs to another user")
        _, files, _, _ = socket.recv_fds(connection, 1, 1)
        if not files:
            raise ConnectionRefusedError  # it is ending
        try:
            if os.fstat(files[0]).st_size != size:
                raise OSError(errno.EINVAL, f"{address[1:]} has another size than expected")
            return _opened_again(files[0])
        finally:
            os.close(files[0])


def _user_of(connection: socket.socket) -> int:
    """Return the user id of the process at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, user, _ = struct.unpack("3i", credentials)
    return int(user)


def _opened_again(file: int) -> int:
    return os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
