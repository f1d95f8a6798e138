"""A file that grows by whole records, whatever fails in between."""

import os
from contextlib import suppress
from pathlib import Path


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
