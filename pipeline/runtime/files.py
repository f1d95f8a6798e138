"""Files that are either complete or absent, whatever kills the process in between.

A file that grows by whole records, whatever fails in between.
"""

import hashlib
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.runtime.run_folder import RunFolder
from pipeline.runtime.run_folder import record_exit as record_exit

# For `launch`, until it takes them from RunFolder.
ATTEMPTS_FILE = RunFolder(Path()).attempts.name
DONE_FILE = RunFolder(Path()).done.name
EXIT_FOLDER = RunFolder(Path()).exits("").name
RESOLVED_FILE = RunFolder(Path()).resolved.name
STOP_FILE = RunFolder(Path()).stop.name
_CHUNK_BYTES = 1 << 22
_ABANDONED_AFTER_S = 3600


def temporary_beside(path: Path) -> Path:
    """A name for what will become `path`, of this process alone on all machines."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")


def remove_abandoned(folder: Path) -> None:
    """Removes temporary files whose process was killed.

    That is known of this machine's processes; others' files count as abandoned when they were not
    written to for an hour.
    """
    for path in folder.glob(".*.tmp"):
        host, _, process = path.name.removesuffix(".tmp").rpartition(".")
        here = host.endswith(f".{socket.gethostname()}") and process.isdigit()
        try:
            idle_s = time.time() - path.stat().st_mtime
            if (here and not is_alive(int(process))) or idle_s > _ABANDONED_AFTER_S:
                path.unlink()
        except FileNotFoundError:
            continue  # its process was quicker


def is_alive(process: int) -> bool:
    """Whether this machine runs a process of that number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def write_atomic(path: Path, data: bytes) -> None:
    """Writes `path` so that readers see the old content or the new, never a part.

    Raises:
        OSError: the disk is full or not writable; the old content is untouched.
    """
    temporary = temporary_beside(path)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def write_json_atomic(path: Path, value: Any) -> None:
    """Writes a value as indented JSON, atomically."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    write_atomic(path, text.encode())


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a file of one a line; what a killed writer left unfinished is passed over.

    Empty if there is no such file.
    """
    found = []
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def sync_path(path: Path) -> None:
    """Flushes a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def forget_cached(path: Path) -> None:
    """Lets the next read of a file come from the disk; what is not written yet stays in memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def is_locked(run_dir: Path) -> bool:
    """Whether a process trains a run."""
    return RunFolder(run_dir).is_locked()


def sha256_file(path: Path) -> str:
    """sha256 of a file's content, in hex, reading a few MiB at a time."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


class AppendedFile:
    """A file of one writer. It is opened for each record: what replaced it meanwhile is found."""

    def __init__(self, path: Path) -> None:
        """Looks at nothing yet."""
        self._path = path
        self._torn: tuple[tuple[int, int], int] | None = None
        """Which file has a part of a record that could not be removed, and where it begins."""

    def append(self, record: bytes, first: bytes = b"", end: bytes = b"") -> None:
        """Writes all of a record or nothing.

        Args:
            record: to write.
            first: stands before the record in a new file.
            end: of every complete record; a file that ends otherwise was left by a killed writer,
                and is cut behind its last one.

        Raises:
            OSError: the file or its folder cannot be written.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            size = self._mend(descriptor, end)
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

    def _mend(self, descriptor: int, end: bytes) -> int:
        """Cuts off what is no complete record; returns the size."""
        size = good = os.fstat(descriptor).st_size
        if self._torn is not None and self._torn[0] == _identity(descriptor):
            good = min(size, self._torn[1])
        elif end and size and os.pread(descriptor, len(end), size - len(end)) != end:
            good = self._path.read_bytes().rfind(end) + len(end)
        if good < size:
            os.ftruncate(descriptor, good)
        self._torn = None
        return good


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _write_all(descriptor: int, data: bytes) -> None:
    """A short write is followed by one that raises what is wrong."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
