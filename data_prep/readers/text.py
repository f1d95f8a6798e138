"""Documents of files that consist of lines: .txt, .jsonl and the output of WikiExtractor.

Lines are read as bytes and decoded one by one, so that a broken byte costs only its line. A range
of a file yields exactly the documents that begin in it, so that all ranges together yield the same
documents as the whole file.
"""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Literal

from data_prep.readers.items import BrokenFileError, Document, Place, Rejected, storable
from data_prep.readers.streams import opened

Encoding = Literal["utf-8", "gb18030"]
Lines = Iterator[tuple[int, bytes]]
Items = Iterator[Document | Rejected]

_HEAD_BYTES = 1_000_000
# No byte of a GB18030 character is a line feed, so lines can be told apart before decoding.
_NAMES: dict[Encoding, str] = {"utf-8": "UTF-8", "gb18030": "GB18030"}
_OPENING = re.compile(r'<doc id="([^"]*)"[^\n]*>\s*')
_CLOSING = "</doc>"


def detect_encoding(path: str) -> Encoding:
    """Detect the encoding of a file's first MB: UTF-8, or else GB18030 if that decodes all of it.

    A character that is cut at the end of the head does not count as invalid. A file that is valid
    in neither is read as UTF-8 with bad lines.
    """
    with opened(path) as stream:
        head = stream.buffer.read(_HEAD_BYTES)
    encodings: tuple[Encoding, ...] = ("utf-8", "gb18030")
    for encoding in encodings:
        try:
            codecs.getincrementaldecoder(encoding)().decode(head)
        except UnicodeDecodeError:
            continue
        return encoding
    return "utf-8"


def decode(raw: bytes, encoding: Encoding) -> str | None:
    """Decode a line, without a byte-order mark; None if it has invalid bytes."""
    try:
        return raw.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError:
        return None


def invalid_line(encoding: Encoding) -> str:
    """Return the reason for rejecting a line that cannot be decoded."""
    return f"invalid {_NAMES[encoding]} line"


def whole_document(data: bytes, document_id: str) -> Items:
    """Yield a document given as UTF-8 bytes, without its invalid lines, which are rejected."""
    kept = []
    for raw in data.split(b"\n"):
        line = decode(raw, "utf-8")
        if line is None:
            yield Rejected(document_id, invalid_line("utf-8"), raw)
        else:
            kept.append(line)
    if kept:
        yield Document(document_id, "\n".join(kept))


def owned(lines: Lines, start: int, end: int | None) -> Lines:
    """Yield the lines that begin in [start, end)."""
    for offset, raw in lines:
        if end is not None and offset >= end:
            return
        if offset >= start:
            yield offset, raw


def line_documents(lines: Lines, place: Place, encoding: Encoding) -> Items:
    """Yield every line that is not blank as a document."""
    for offset, raw in lines:
        line = decode(raw, encoding)
        if line is None:
            yield Rejected(place.at(offset), invalid_line(encoding), raw)
        elif line.strip():
            yield Document(place.at(offset), line)


class Draft:
    """A document that grows line by line."""

    def __init__(self, place: Place, encoding: Encoding, max_bytes: int) -> None:
        self._place, self._encoding, self._max_bytes = place, encoding, max_bytes
        self.clear()

    def clear(self) -> None:
        """Begin a new document."""
        self._parts: list[str] = []
        self._first = 0
        self._size = 0

    def add(self, offset: int, raw: bytes, line: str | None) -> Items:
        """Add a line, or yield it back as rejected if it could not be decoded.

        Raises:
            DataError: the document is too long.
        """
        if line is None:
            yield Rejected(self._place.at(offset), invalid_line(self._encoding), raw)
            return
        if not self._parts:
            self._first = offset
        self._parts.append(line)
        self._size += len(raw) + 1
        if self._size > self._max_bytes:
            raise self._place.too_long(f"byte {self._first}", self._max_bytes)

    def text(self) -> str:
        """Join the lines so far."""
        return "\n".join(self._parts)

    def finish(self) -> Items:
        """Yield the document if it has a line."""
        if self._parts:
            yield Document(self._place.at(self._first), self.text())
        self.clear()

    def keep_in(self, broken: BrokenFileError) -> None:
        """Hand the unfinished document to the error about a broken file."""
        text = self.text().encode()
        broken.unfinished = (text + b"\n" if text else b"") + broken.unfinished


def file_document(lines: Lines, place: Place, encoding: Encoding, max_bytes: int) -> Items:
    """Yield all lines as one document."""
    draft = Draft(place, encoding, max_bytes)
    try:
        for offset, raw in lines:
            yield from draft.add(offset, raw, decode(raw, encoding))
    except BrokenFileError as broken:
        draft.keep_in(broken)
        raise
    if draft.text().strip():
        yield from draft.finish()


def paragraphs(
    lines: Lines, place: Place, encoding: Encoding, max_bytes: int, span: tuple[int, int | None]
) -> Items:
    """Yield documents that end at blank lines and whose first line begins in `span`.

    A line with broken bytes is left out of its document, but is not a blank line: the places where
    documents begin do not depend on it.
    """
    start, end = span
    draft = Draft(place, encoding, max_bytes)
    begin: int | None = None
    try:
        for offset, raw in lines:
            if begin is None and end is not None and offset >= end:
                return
            line = decode(raw, encoding)
            if line is not None and not line.strip():
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


def json_documents(
    lines: Lines, place: Place, encoding: Encoding, text_field: str, id_field: str
) -> Items:
    """Yield the documents of lines that are JSON objects."""
    for offset, raw in lines:
        line = decode(raw, encoding)
        if line is None:
            yield Rejected(place.at(offset), invalid_line(encoding), raw)
        elif line.strip():
            yield json_document(line, raw, place, offset, text_field, id_field)


def json_document(
    line: str, raw: bytes, place: Place, offset: int, text_field: str, id_field: str
) -> Document | Rejected:
    """Return the document of one JSON object."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return Rejected(place.at(offset), "invalid JSON line", raw)
    text = record.get(text_field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        return Rejected(place.at(offset), f"no text in field {text_field!r}", raw)
    # Only an escape can bring in a lone surrogate: the line itself is valid text.
    text = storable(text) if "\\u" in line else text
    return Document(place.own(record.get(id_field), offset), text)


def wiki_documents(lines: Lines, place: Place, encoding: Encoding, max_bytes: int) -> Items:
    """Yield the documents of WikiExtractor's output: `<doc id=...>` ... `</doc>`, or JSON lines.

    Format: https://github.com/attardi/wikiextractor, README.md and wikiextractor/extract.py. The
    title, which WikiExtractor repeats as the first line, is part of the text.

    Raises:
        DataError: one is longer than `max_bytes`.
        BrokenFileError: the file is cut or damaged here.
    """
    draft = Draft(place, encoding, max_bytes)
    opening: tuple[str, int] | None = None  # the open document's own id and offset
    try:
        for offset, raw in lines:
            line = decode(raw, encoding)
            tag = _OPENING.fullmatch(line) if line is not None else None
            if tag:
                yield from _unclosed(opening, draft, place)
                opening = tag[1], offset
            elif opening and line is not None and line.strip() == _CLOSING:
                yield Document(place.own(*opening), draft.text())
                draft.clear()
                opening = None
            elif opening:
                yield from draft.add(offset, raw, line)
            elif line is None:
                yield Rejected(place.at(offset), invalid_line(encoding), raw)
            elif line.lstrip().startswith("{"):
                yield json_document(line, raw, place, offset, "text", "id")
            elif line.strip():
                yield Rejected(place.at(offset), "line outside <doc>", raw)
    except BrokenFileError as broken:
        draft.keep_in(broken)
        raise
    yield from _unclosed(opening, draft, place)


def _unclosed(opening: tuple[str, int] | None, draft: Draft, place: Place) -> Items:
    if opening:
        yield Rejected(place.own(*opening), "no </doc>", draft.text().encode())
        draft.clear()
