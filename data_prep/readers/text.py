"""Files that consist of lines, plain or compressed, and the documents of .txt.

Lines are read as bytes and decoded one by one, so that a broken byte costs only its line. A range
of a file yields exactly the documents that begin in it, so that all ranges together yield the same
documents as the whole file.
"""

import bz2
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

from backports import zstd

from data_prep.config import Encoding
from data_prep.readers.encodings import (
    UTF_16,
    LongLine,
    as_utf8,
    decode,
    detect,
    invalid_line,
    storable,
)
from data_prep.types import Document, Metadata, Rejected
from pipeline.errors import DataError
from pipeline.runtime import remote

MOST_BYTES = 1_000_000_000
"""What is read of a document to split or reject it."""
BEGINNING_BYTES = 1000
"""What is kept of a document that is longer, and not read to be split or rejected."""
CUT_SHORT = "file cut short"
DAMAGED = "file damaged"

Lines = Iterator[tuple[int, bytes]]
Items = Iterator[Document | Rejected]

# A damaged stream loses at most one step of output before the damage.
_STEP = 1 << 14
_NEWLINE_SEARCH = 1 << 16
_HEAD_BYTES = 1 << 18
_LATER_BYTES = 1 << 16
_LATER_PARTS = 8


class BrokenFileError(Exception):
    """A file is not readable from here on; `documents.read_file` catches it."""

    def __init__(self, reason: str, message: str, unfinished: bytes = b"", rows: int = 1) -> None:
        super().__init__(message)
        self.reason = reason
        """`CUT_SHORT` or `DAMAGED`."""
        self.unfinished = unfinished
        """The beginning of the document that the break goes through."""
        self.rows = rows
        """Rows from there on, as far as that is known: all of them are lost."""
        self.at = 0
        """Bytes of the file, as it is stored, before the damaged member."""


@dataclass(frozen=True)
class FileOrigin:
    """The file that documents come from: gives them their ids, and has their limit."""

    source: str
    path: str
    name: str
    """The file's name in ids."""
    max_bytes: int
    """Of a document."""
    encoding: Encoding = "utf-8"
    longer: Literal["stop", "split", "reject"] = "stop"
    """What becomes of a document longer than `max_bytes`; only lines of text can be split."""

    def at(self, offset: int) -> str:
        """Make the id of a document at a byte of the decompressed file (parquet: in a row)."""
        return f"{self.source}/{self.name}@{offset}"

    def own(self, value: object, offset: int) -> str:
        """Make the id from the document's own value, or from its place if that is unusable."""
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
            return self.at(offset)
        return f"{self.source}/{storable(str(value))}"

    def invalid_line(self, offset: int, raw: bytes) -> Rejected:
        """Reject a line that cannot be decoded, or is too long."""
        if isinstance(raw, LongLine):
            return self.too_long(self.at(offset), raw, raw.num_bytes)
        return Rejected(self.at(offset), invalid_line(self.encoding), raw, rows=0)

    def too_long(self, document_id: str, beginning: bytes, num_bytes: int = 0) -> Rejected:
        """Reject a document that is longer than `max_bytes`.

        Raises:
            DataError: the run is to stop there.
        """
        if self.longer == "stop":
            raise DataError(
                f"{self.path}: document {document_id} is longer than clean.max_document_mb = "
                f"{self.max_bytes // 1_000_000} MB; set clean.on_long_document to split or reject, "
                "or raise clean.max_document_mb (about 25 times as much memory is needed for it)"
            )
        reason = f"longer than {self.max_bytes // 1_000_000} MB"
        detail = f"{num_bytes:,} bytes" if num_bytes else ""
        beginning = beginning[:BEGINNING_BYTES]
        return Rejected(document_id, reason, beginning, detail, is_lost=False)


class _Gzip:
    """zlib's decoder of one gzip member, with checksum, with the interface of lzma's and zstd's."""

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


_ANY_WINDOW: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 31}
_DECODERS: dict[str, tuple[Callable[[], Any], bytes]] = {
    # Decoder of each format, and the byte that may pad the gap between members.
    ".gz": (_Gzip, b"\0"),
    # `zstd --long=31`, the longest window there is, which takes 2 GB.
    ".zst": (partial(zstd.ZstdDecompressor, options=_ANY_WINDOW), b""),
    ".xz": (lzma.LZMADecompressor, b"\0"),
    ".bz2": (bz2.BZ2Decompressor, b""),
}


_Damage = tuple[int, BrokenFileError] | None
"""The bytes of output before the first damaged member of a file, and what is wrong with it."""


class _Decompressed(io.RawIOBase):
    """All members of a compressed file; ends at a break and then has a `problem`.

    The standard readers are not used because they ignore trailing bytes that are not a member
    (lzma, zstd), and because they lose the output before an exception.
    """

    def __init__(self, file: IO[bytes], suffix: str, damage: _Damage = None) -> None:
        """Read up to the damage, if that is known."""
        self.problem: BrokenFileError | None = None
        self.member_start = 0
        """Bytes of output before the current member."""
        self.member_at, self._num_read = 0, 0  # bytes of the file before it, and those read
        self._given = 0
        self._damage = damage
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
        limit = min(len(buffer), _STEP)
        if self._damage:
            start, problem = self._damage
            limit = min(limit, start - self._given)
            if not limit:
                self.problem = problem
                return 0
        try:
            data = self._read(limit)
        except EOFError:
            self.problem = BrokenFileError(CUT_SHORT, "the compressed data has no end")
        except (zlib.error, lzma.LZMAError, zstd.ZstdError) as error:
            self.problem = BrokenFileError(DAMAGED, str(error))
        except OSError as error:
            if error.errno is not None:
                raise  # an error of the operating system, not of bz2
            self.problem = BrokenFileError(DAMAGED, str(error))
        buffer[: len(data)] = data
        self._given += len(data)
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
                self._num_read += len(data)
                at_end = not data
            text: bytes = self._decoder.decompress(data, limit)
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
            self._num_read += len(data)
            rest = data.lstrip(self._padding)
        self._decoder, self._input = self._make(), rest
        self.member_start, self.member_at = self._given, self._num_read - len(rest)
        return True


def _find_damage(path: str, suffix: str) -> _Damage:
    """Decompress a file for its checksums alone."""
    buffer = memoryview(bytearray(_STEP))
    # A pass of its own, since a member's checksum stands at its end: by then its text would be in
    # the dataset. Of 280 GB it takes 1 core-hour in .xz, 20 minutes in .gz and 7 in .zst, at the
    # rate of 24 MB of news and encyclopedia text.
    with open_binary(path) as file:
        stream = _Decompressed(file, suffix)
        while stream.readinto(buffer):
            pass
    problem = stream.problem
    if problem:
        problem.at = stream.member_at
    return (stream.member_start, problem) if problem and problem.reason == DAMAGED else None


@dataclass(frozen=True)
class Stream:
    """An open file."""

    buffer: IO[bytes]
    _decompressed: _Decompressed | None

    @property
    def problem(self) -> BrokenFileError | None:
        """The reason why the file broke off, known when its last readable byte has been read."""
        return self._decompressed.problem if self._decompressed else None

    @property
    def is_plain(self) -> bool:
        """Whether any byte can be read without those before it."""
        return self._decompressed is None


def open_binary(path: str) -> IO[bytes]:
    """Open a file of the file system or of a store as it is."""
    return remote.open_file(path) if remote.is_address(path) else Path(path).open("rb")


@contextmanager
def opened(path: str, *, only_head: bool = False, encoding: Encoding = "utf-8") -> Iterator[Stream]:
    """Open a file, decompressing by its suffix; it breaks off before a damaged member.

    That is not known of a file of which only the head is read. UTF-16 is read as UTF-8.
    """
    suffix = Path(path).suffix.lower()
    with open_binary(path) as file:
        if suffix in _DECODERS:
            damage = None if only_head else _find_damage(path, suffix)
            decompressed = _Decompressed(file, suffix, damage)
            buffer: IO[bytes] = io.BufferedReader(decompressed, _STEP)
        else:
            buffer, decompressed = file, None
        yield Stream(as_utf8(buffer, encoding) if encoding in UTF_16 else buffer, decompressed)


# No character of the encodings but UTF-16 has the byte of a line feed, so lines can be told apart
# before decoding.
def lines(stream: Stream, place: FileOrigin, start: int) -> Lines:
    """Yield (byte offset, line without its end), of a line that is not read a `LongLine`.

    If `start` is not 0, the first line is the one that holds byte `start - 1`. Parts of a line that
    is split are lines of their own.

    Raises:
        DataError: a line is longer, and the run is to stop there.
        BrokenFileError: the file is cut or damaged here.
    """
    # Readers of a range need to see the text before it.
    offset = _line_start(stream.buffer, place, start - 1) if start else 0
    rest = b""
    while line := rest + stream.buffer.readline(place.max_bytes + 1 - len(rest)):
        size, rest = len(line), b""
        if size > place.max_bytes and place.longer == "split":
            size = _end_of_part(line, place.max_bytes)
            line, rest = line[:size], line[size:]
        elif size > place.max_bytes:
            place.too_long(place.at(offset), line)
            line, size = _skip_line(stream.buffer, line)
        if stream.problem and not (rest or line.endswith(b"\n")):
            stream.problem.unfinished = line
            break
        yield offset, line if isinstance(line, LongLine) else line.rstrip(b"\r\n")
        offset += size
    if stream.problem:
        raise stream.problem


def _end_of_part(line: bytes, most_bytes: int) -> int:
    """Find where to split: behind a space, or else at the beginning of a character of UTF-8."""
    end = line.rfind(b" ", 0, most_bytes) + 1 or most_bytes
    while end > 1 and line[end] & 0xC0 == 0x80:
        end -= 1
    return end


def _skip_line(file: IO[bytes], line: bytes) -> tuple[LongLine, int]:
    """Read on to the end of a line, keeping only its beginning; returns its bytes, too."""
    long, size = LongLine(line[:BEGINNING_BYTES]), len(line)
    while not line.endswith(b"\n") and (line := file.readline(_NEWLINE_SEARCH)):
        size += len(line)
    long.num_bytes = size
    return long, size


def _line_start(file: IO[bytes], place: FileOrigin, position: int) -> int:
    """Seek to the start of the line that holds the byte at `position`."""
    end = position
    while end > 0:
        begin = max(0, end - _NEWLINE_SEARCH)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            return file.seek(begin + newline + 1)
        if position - begin > place.max_bytes:
            place.too_long(place.at(begin), b"")
            if place.longer == "reject":  # by the range in which it begins
                return file.seek(begin)
        end = begin
    return file.seek(0)


def detect_encoding(path: str) -> Encoding | None:
    """Detect a file's encoding by its beginning and parts of its rest; None if none fits.

    A compressed file is known by its beginning alone.
    """
    with opened(path, only_head=True) as stream:
        head = stream.buffer.read(_HEAD_BYTES)
        later = []
        if len(head) == _HEAD_BYTES and stream.is_plain:
            size = stream.buffer.seek(0, io.SEEK_END)
            for part in range(_LATER_PARTS):
                stream.buffer.seek(max(len(head), size * (part + 1) // (_LATER_PARTS + 1)))
                # Before its first line feed may stand half a character.
                later.append(stream.buffer.read(_LATER_BYTES).partition(b"\n")[2])
    return detect(head, later)


def whole_document(data: bytes, document_id: str, metadata: Metadata) -> Items:
    """Yield a document given as UTF-8 bytes, without its invalid lines, which are rejected."""
    kept = []
    for raw in data.split(b"\n"):
        line = decode(raw, "utf-8")
        if line is None:
            yield Rejected(document_id, invalid_line("utf-8"), raw, rows=0)
        else:
            kept.append(line)
    if kept:
        yield Document(document_id, "\n".join(kept), metadata)


def owned(lines: Lines, start: int, end: int | None) -> Lines:
    """Yield the lines that begin in [start, end)."""
    for offset, raw in lines:
        if end is not None and offset >= end:
            return
        if offset >= start:
            yield offset, raw


def told_apart(lines: Lines, place: FileOrigin) -> Lines:
    """Yield the lines of a text (DataError: it has one alone, with carriage returns in it)."""
    number, is_one = 0, False
    for number, (offset, raw) in enumerate(lines, 1):
        is_one = number == 1 and not offset and raw.count(b"\r") > 1
        yield offset, raw
    if is_one:
        raise DataError(
            f"{place.path} has no line feed: carriage returns end its lines, and all of its "
            "documents would be one; convert them (`tr '\\r' '\\n'`)"
        )


def line_documents(
    lines: Lines, place: FileOrigin, make: Callable[[str, bytes, int], Document | Rejected]
) -> Items:
    """Yield what is made of each line that is not blank, by its text, bytes and offset."""
    for offset, raw in lines:
        line = decode(raw, place.encoding)
        if line is None:
            yield place.invalid_line(offset, raw)
        elif line.strip():
            yield make(line, raw, offset)


class GrowingDocument:
    """A document that grows line by line."""

    def __init__(self, place: FileOrigin) -> None:
        self._place = place
        self.clear()

    def clear(self) -> None:
        """Begin a new document."""
        self._parts: list[str] = []
        self._first = 0
        self._size = 0
        self._too_long: Rejected | None = None

    def add(self, offset: int, raw: bytes, line: str | None) -> Items:
        """Add a line, or yield it back as rejected if it could not be decoded.

        Yields what there is of a document that is too long and is to be split.
        """
        if line is None:
            rejected = self._place.invalid_line(offset, raw)
            if isinstance(raw, LongLine):
                self._too_long = rejected
            else:
                yield rejected
            return
        size = self._size + len(raw) + 1
        if self._parts and size > self._place.max_bytes and self._place.longer == "split":
            yield from self.finish()
            size = len(raw) + 1
        if not self._parts:
            self._first = offset
        self._size = size
        if not self._too_long:
            self._parts.append(line)
            if size > self._place.max_bytes and self._place.longer != "split":
                self._too_long = self._place.too_long(
                    self._place.at(self._first), self.text()[:BEGINNING_BYTES].encode()
                )
                del self._parts[1:]

    def text(self) -> str:
        """Join the lines so far; of a document that is too long there is only the first."""
        return "\n".join(self._parts)

    def take(self, document_id: str, metadata: Metadata) -> Document | Rejected:
        """Return the document, and begin a new one."""
        made = self._too_long or Document(document_id, self.text(), metadata)
        self.clear()
        return made

    def finish(self) -> Items:
        """Yield the document if it is not blank."""
        if self._too_long or self.text().strip():
            yield self.take(self._place.at(self._first), {})
        self.clear()

    def keep_in(self, broken: BrokenFileError) -> None:
        """Hand the unfinished document to the error about a broken file."""
        text = self.text().encode()
        broken.unfinished = (text + b"\n" if text else b"") + broken.unfinished


def paragraphs(
    lines: Lines, place: FileOrigin, span: tuple[int, int | None], *, whole: bool = False
) -> Items:
    """Yield documents whose first line begins in `span`, and that end at blank lines.

    With `whole` they end with the file. A line with broken bytes is left out of its document.
    """
    start, end = span
    draft = GrowingDocument(place)
    begin: int | None = None
    try:
        for offset, raw in lines:
            if begin is None and end is not None and offset >= end:
                return
            line = decode(raw, place.encoding)
            # A line with broken bytes is not blank: places where documents begin do not depend on
            # it.
            if line is not None and not line.strip() and not whole:
                yield from draft.finish()
                begin = None
                continue
            begin = offset if begin is None else begin
            if begin >= start:
                yield from draft.add(offset, raw, line)
    except BrokenFileError as broken:
        draft.keep_in(broken)
        raise
    yield from draft.finish()
