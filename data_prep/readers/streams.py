"""Bytes of plain and compressed files, up to the last readable one, and their lines."""

import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, cast

from backports import zstd

from data_prep.readers.items import CUT_SHORT, DAMAGED, BrokenFileError, Place

# A damaged stream loses at most one step of output before the damage.
_STEP = 1 << 14
_NEWLINE_SEARCH = 1 << 16


class _Decoder(Protocol):
    """The interface of the decoders of lzma and zstd."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Gzip:
    """zlib's decoder of one gzip member, with checksum, seen as a `_Decoder`."""

    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(wbits=31)

    @property
    def needs_input(self) -> bool:
        return not self._decoder.unconsumed_tail

    @property
    def eof(self) -> bool:
        return self._decoder.eof

    @property
    def unused_data(self) -> bytes:
        return self._decoder.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._decoder.decompress(self._decoder.unconsumed_tail + data, max_length)


_DECODERS: dict[str, tuple[Callable[[], _Decoder], bytes]] = {
    # With the byte that may be repeated between members as padding.
    ".gz": (_Gzip, b"\0"),
    ".zst": (cast("Callable[[], _Decoder]", zstd.ZstdDecompressor), b""),
    ".xz": (cast("Callable[[], _Decoder]", lzma.LZMADecompressor), b"\0"),
}


class _Decompressed(io.RawIOBase):
    """All members of a compressed file; ends at a break and then has a `problem`.

    The standard readers are not used because they ignore trailing bytes that are not a member
    (lzma, zstd), and because they lose the output before an exception.
    """

    def __init__(self, file: IO[bytes], suffix: str) -> None:
        self.problem: BrokenFileError | None = None
        self._file = file
        self._make, self._padding = _DECODERS[suffix]
        self._decoder = self._make()
        self._input = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self.problem:
            return 0
        data = b""
        try:
            data = self._read(min(len(buffer), _STEP))
        except EOFError:
            self.problem = BrokenFileError(CUT_SHORT, "the compressed data has no end")
        except (zlib.error, lzma.LZMAError, zstd.ZstdError) as error:
            self.problem = BrokenFileError(DAMAGED, str(error))
        buffer[: len(data)] = data
        return len(data)

    def _read(self, limit: int) -> bytes:
        """Return up to `limit` bytes; none at the end of the last member."""
        while True:
            if self._decoder.eof and not self._next_member():
                return b""
            at_end = False
            data, self._input = self._input, b""
            if not data and self._decoder.needs_input:
                data = self._file.read(_STEP)
                at_end = not data
            text = self._decoder.decompress(data, limit)
            if text:
                return text
            if at_end and not self._decoder.eof:
                raise EOFError

    def _next_member(self) -> bool:
        rest = self._decoder.unused_data.lstrip(self._padding)
        while not rest:
            data = self._file.read(_STEP)
            if not data:
                return False
            rest = data.lstrip(self._padding)
        self._decoder, self._input = self._make(), rest
        return True


@dataclass(frozen=True)
class Stream:
    """An open file."""

    buffer: IO[bytes]
    _decompressed: _Decompressed | None

    @property
    def problem(self) -> BrokenFileError | None:
        """The reason why the file broke off, known when its last readable byte has been read."""
        return self._decompressed.problem if self._decompressed else None


@contextmanager
def opened(path: str) -> Iterator[Stream]:
    """Open a file, decompressing by its suffix."""
    suffix = Path(path).suffix.lower()
    with Path(path).open("rb") as file:
        if suffix in _DECODERS:
            decompressed = _Decompressed(file, suffix)
            yield Stream(io.BufferedReader(decompressed, _STEP), decompressed)
        else:
            yield Stream(file, None)


def lines(stream: Stream, place: Place, start: int, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield (byte offset, line without its end).

    Args:
        stream: the file.
        place: its name, for errors.
        start: if not 0, the first line is the one that holds byte `start - 1`: readers of a range
            need to see the text before it.
        max_bytes: longest line.

    Raises:
        DataError: a line is longer.
        BrokenFileError: the file is cut or damaged here.
    """
    offset = _line_start(stream.buffer, place, start - 1, max_bytes) if start else 0
    while line := stream.buffer.readline(max_bytes + 1):
        if len(line) > max_bytes:
            raise place.too_long(f"byte {offset}", max_bytes)
        if stream.problem and not line.endswith(b"\n"):
            stream.problem.unfinished = line
            break
        yield offset, line.rstrip(b"\r\n")
        offset += len(line)
    if stream.problem:
        raise stream.problem


def _line_start(file: IO[bytes], place: Place, position: int, max_bytes: int) -> int:
    """Seek to the start of the line that holds the byte at `position`."""
    end = position
    while end > 0:
        begin = max(0, end - _NEWLINE_SEARCH)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            return file.seek(begin + newline + 1)
        if position - begin > max_bytes:
            raise place.too_long(f"around byte {position}", max_bytes)
        end = begin
    return file.seek(0)
