"""Files that are complete or absent, or grow by whole records, whatever kills the process."""

import errno
import fcntl
import hashlib
import json
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pipeline.errors import PASSING, DataError

logger = logging.getLogger(__name__)
T = TypeVar("T")

PAUSES_S = (0.5, 2.0, 8.0, 30.0)
_TRIED = f"{len(PAUSES_S) + 1} tries in {sum(PAUSES_S):g} s"
_CHUNK_BYTES = 1 << 22
_ABANDONED_AFTER_S = 3600


def retry_storage(action: Callable[[], T], what: Callable[[], str]) -> T:
    """Do something with files, and again for `PAUSES_S` while storage fails in passing.

    The action must do all of it anew: what fsync has refused once is not on disk although the next
    fsync succeeds, and a handle that is stale stays so. `what` says what is done, for the log.
    An action that has itself tried in vain is not tried again.

    Raises:
        OSError: storage failed at every try, or with an error that does not pass: at once.
    """
    for pause_s in (*PAUSES_S, None):
        try:
            return action()
        except OSError as error:
            if error.errno not in PASSING or _TRIED in getattr(error, "__notes__", ()):
                raise
            if pause_s is None:
                error.add_note(_TRIED)
                raise
            logger.warning("%s: %s; tried again in %g s", what(), error, pause_s)
            time.sleep(pause_s)
    raise AssertionError("unreachable")


def temporary_beside(path: Path) -> Path:
    """Make a name for what will become `path`, of this process alone on all machines."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")


def remove_abandoned(folder: Path, hosts: Iterable[str] = ()) -> None:
    """Remove temporary files whose process was killed.

    Of this machine's processes that is known; files of other machines, except `hosts`, count as
    abandoned when nobody has written to them for an hour.
    """
    for path in folder.glob(".*.tmp"):
        host, _, process = path.name.removesuffix(".tmp").rpartition(".")
        here = host.endswith(f".{socket.gethostname()}") and process.isdigit()
        try:
            idle_s = time.time() - path.stat().st_mtime
            elsewhere = not any(host.endswith(f".{name}") for name in hosts)
            if (here and not is_alive(int(process))) or (
                not here and elsewhere and idle_s > _ABANDONED_AFTER_S
            ):
                path.unlink()
        except FileNotFoundError:
            continue  # its process was quicker


def is_alive(process: int) -> bool:
    """Return whether this machine runs a process of that number."""
    try:
        os.kill(process, 0)
    # The number may belong to a later process by now: then a file of the dead one stays for longer.
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def write_atomic(path: Path, data: bytes) -> None:
    """Write `path` so that readers see the old content or the new, never a part.

    Tried again while storage fails in passing.

    Raises:
        OSError: the disk is full or not writable; the old content is untouched.
    """
    retry_storage(lambda: _write_once(path, data), lambda: f"writing {path}")
    # Until the folder's list of names is on disk, a power cut brings back the old file.
    sync_folder(path.parent)


def _write_once(path: Path, data: bytes) -> None:
    temporary = temporary_beside(path)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            # Before the new name: some file systems write names first, and a power cut would leave
            # an empty file in place of the old content.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):  # what failed to be written may fail to be removed
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = error.filename or str(path)  # a write to an open file names none
        raise


def write_json_atomic(path: Path, value: Any) -> None:
    """Write a value as indented JSON, atomically."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    write_atomic(path, text.encode())


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of one JSON object a line, without the line that a killed writer left unfinished.

    Empty if there is no such file.
    """
    found: list[dict[str, Any]] = []
    # Replaced, not refused: a last line cut within a character must not hide those before it.
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


def flush_file(path: Path) -> None:
    """Flush a file to the disk; after an error it must be written again."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Flush a folder's list of names to the disk; tried again while storage fails in passing."""
    retry_storage(lambda: flush_file(path), lambda: f"flushing {path}")


def make_folder(path: Path) -> None:
    """Make a folder and those above it; tried again while storage fails in passing."""
    retry_storage(lambda: path.mkdir(parents=True, exist_ok=True), lambda: f"making {path}")


def rename(source: Path, target: Path) -> None:
    """Give a file or folder another name; tried again while storage fails in passing."""
    tries = 0

    def move() -> None:
        nonlocal tries
        tries += 1
        try:
            os.replace(source, target)
        except FileNotFoundError:
            # A server may have done what it did not answer to.
            if tries == 1 or not target.exists():
                raise

    retry_storage(move, lambda: f"renaming {source} to {target}")


def forget_cached(path: Path) -> None:
    """Make the next read of a file come from the disk; what is not written yet stays in memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def sha256_file(path: Path) -> str:
    """Compute the sha256 of a file's content, in hex, reading a few MiB at a time."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def lock_byte(file: int, byte: int, kind: int, *, wait: bool = False) -> bool:
    """Lock or free a byte of an open file (F_OFD_SETLK, fcntl(2)); False if another one has it.

    The lock belongs to the open file: the system frees it when a process is killed. `kind` is
    F_RDLCK, F_WRLCK or F_UNLCK of `fcntl`.
    """
    # Not a lock of POSIX, which belongs to the process: threads would not exclude each other, and
    # closing any descriptor of the file would free it.
    # struct flock of 64-bit Linux: type, whence, start, length, pid.
    request = struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0)
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, request)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def is_at(file: int, path: Path) -> bool:
    """Return whether a path still names this open file."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def signed(body: dict[str, Any], name: str) -> dict[str, Any]:
    """Add under `name` a sha256 of everything else."""
    text = json.dumps({key: value for key, value in body.items() if key != name}, sort_keys=True)
    # JSON with a flipped digit is JSON, too.
    return {**body, name: hashlib.sha256(text.encode()).hexdigest()}


class AppendedFile:
    """A file of one writer, opened for each record: it may have been replaced meanwhile.

    The end of a record, where there is one, is the end of a line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._torn: tuple[tuple[int, int], int] | None = None
        """Which file has a part of a record that could not be removed, and where it begins."""

    def append(self, record: bytes, first: bytes = b"", end: bytes = b"") -> None:
        """Write all of a record or nothing.

        `first` stands before the record in a new file. A file without `end` at its end was left by
        a killed writer, and is cut behind its last complete record; one that lacks `end` alone gets
        it.

        Raises:
            OSError: the file or its folder cannot be written.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            size = self._repair(descriptor, end)
            try:
                _write_all(descriptor, record if size else first + record)
            except OSError:
                self._torn = (_identity(descriptor), size)
                with suppress(OSError):
                    os.ftruncate(descriptor, size)
                    self._torn = None
                raise
        finally:
            os.close(descriptor)

    def _repair(self, descriptor: int, end: bytes) -> int:
        """Cut off what is not a complete record; return the size."""
        size = good = os.fstat(descriptor).st_size
        if self._torn is not None and self._torn[0] == _identity(descriptor):
            good = min(size, self._torn[1])
        elif end and size and os.pread(descriptor, len(end), size - len(end)) != end:
            text = self._path.read_bytes()
            good = text.rfind(end) + len(end) if end in text else 0
            if _is_object(text[good:]):
                _write_all(descriptor, end)
                good = size = size + len(end)
        if good < size:
            os.ftruncate(descriptor, good)
        self._torn = None
        return good


def append_json(path: Path, record: dict[str, Any]) -> None:
    """Add a line to a file of JSON lines; tried again while storage fails in passing.

    Raises:
        OSError: the file or its folder cannot be written; it is unchanged.
    """
    file, line = AppendedFile(path), f"{json.dumps(record)}\n".encode()
    retry_storage(lambda: file.append(line, end=b"\n"), lambda: f"writing {path}")


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _is_object(text: bytes) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _write_all(descriptor: int, data: bytes) -> None:
    """Write everything; after a short write the next one raises what is wrong."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


_POINTER = b"version https://git-lfs.github.com/spec/"


def refuse_pointer(path: Path) -> None:
    """Refuse what git leaves in place of a large file that was not fetched.

    Raises:
        DataError: the file is a pointer of git-lfs.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(_POINTER))
    except OSError:
        return  # whoever reads the file says why it cannot be read
    if start == _POINTER:
        raise DataError(
            f"{path} is a git-lfs pointer of {path.stat().st_size} bytes, not the file itself; "
            "fetch it: `git lfs pull` in its folder"
        )
