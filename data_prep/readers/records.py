"""Documents of files of records: JSON lines and arrays, tables, and WikiExtractor's output.

A record is an object with the fields that the source names. JSON arrays are UTF-8 by RFC 8259; they
are read element by element, so that a file of any size needs the memory of its longest document.
"""

import csv
import html
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, AnyStr

from data_prep.readers.encodings import CODECS, LongLine, decode, storable
from data_prep.readers.text import (
    BEGINNING_BYTES,
    CUT_SHORT,
    DAMAGED,
    BrokenFileError,
    FileOrigin,
    GrowingDocument,
    Items,
    Lines,
    Stream,
    line_documents,
)
from data_prep.types import Document, Metadata, Rejected

_STEP = 1 << 16
_STRUCTURE = re.compile(rb'["\[\]{},]')
_IN_STRING = re.compile(rb'["\\]')
_JSON_SPACE = b" \t\r\n"
_SHOWN_FIELDS = 12
# WikiExtractor's: https://github.com/attardi/wikiextractor, README.md and wikiextractor/extract.py.
_OPENING = re.compile(r'<doc (id="[^"]*"[^\n]*)>\s*')
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_CLOSING = "</doc>"


@dataclass(frozen=True)
class Fields:
    """Names of the values of a record that are used; `a.b` is `b` of `a`, if no key is `a.b`."""

    text: tuple[str, ...] = ("text",)
    """Joined by line feeds, without those that a record has not; all of them must be text."""
    id: str = "id"
    metadata: tuple[str, ...] = ()
    seen: set[str] = field(default_factory=set)
    """Those that a record had."""

    @property
    def wanted(self) -> tuple[str, ...]:
        """Names of all fields."""
        return (*self.text, self.id, *self.metadata)

    def metadata_of(self, record: Mapping[str, Any]) -> Metadata:
        """Return the named values that the record has."""
        values = {name: value_at(record, name) for name in self.metadata}
        return {name: value for name, value in values.items() if value is not None}

    def text_of(self, record: Any, newline: AnyStr) -> AnyStr | None:
        """Return the text of a record, on lines; None if it has none. A string is all text."""
        if isinstance(record, type(newline)):
            self.seen.update(self.text)
            return record
        texts = {name: joined(value_at(record, name), newline) for name in self.text}
        there = {name: text for name, text in texts.items() if text is not None}
        self.seen.update(there)
        if any(value_at(record, name) not in (None, []) for name in texts.keys() - there.keys()):
            return None  # a number or an object, which would be lost without a word
        return newline.join(there.values()) if there else None

    def document(
        self, record: Any, raw: bytes, place: FileOrigin, offset: int
    ) -> Document | Rejected:
        """Return the document of a record, or why there is none."""
        if isinstance(record, list):  # would be one document of all their texts
            reason = "array where an object was expected"
            return Rejected(place.at(offset), reason, raw, rows=len(record) or 1)
        text = self.text_of(record, "\n")
        if text is None:
            return self.no_text("field", place.at(offset), raw, there=record)
        given = value_at(record, self.id)
        metadata = self.metadata_of(record)
        self.seen.update(metadata, () if given is None else (self.id,))
        return Document(place.own(given, offset), text, metadata)

    def no_text(
        self, what: str, document_id: str, raw: bytes, *, there: Any, rows: int = 1
    ) -> Rejected:
        """Reject rows without text; the detail says which fields or columns are there."""
        names = ", ".join(list(there)[:_SHOWN_FIELDS]) if isinstance(there, (dict, tuple)) else ""
        more = ", ..." if names and len(there) > _SHOWN_FIELDS else ""
        detail = f"{what}s there: {names}{more}" if names else f"no {what} is there"
        reason = f"no text in {what} {', '.join(map(repr, self.text))}"
        return Rejected(document_id, reason, raw, detail, rows=rows)


def value_at(record: Any, name: str) -> Any:
    """Return the value of a field, None if there is none; of a list, those of its elements."""
    if isinstance(record, list):
        values = [value_at(element, name) for element in record]
        return [value for value in values if value is not None] or None
    if not isinstance(record, Mapping):
        return None
    if name in record:
        return record[name]
    first, dot, rest = name.partition(".")
    return value_at(record.get(first), rest) if dot else None


def joined(value: Any, newline: AnyStr) -> AnyStr | None:
    """Return a text, or the texts of a list, of any depth, on lines; None for all else."""
    if isinstance(value, list):
        texts = [joined(element, newline) for element in value if element is not None]
        there = [text for text in texts if text is not None]
        return newline.join(there) if there and len(there) == len(texts) else None
    return value if isinstance(value, type(newline)) else None


def json_document(
    line: str, raw: bytes, place: FileOrigin, offset: int, fields: Fields
) -> Document | Rejected:
    """Return the document of one JSON object, or why there is none."""
    try:
        try:
            record = json.loads(line)
        except ValueError:  # Python reads no numbers of more than 4,300 digits, which JSON may have
            record = json.loads(line, parse_int=str)
        # Only an escape can bring in a lone surrogate: the line itself is valid text.
        return fields.document(_storable(record) if "\\u" in line else record, raw, place, offset)
    except (ValueError, RecursionError):
        return Rejected(place.at(offset), "invalid JSON line", raw)


def _storable(value: Any) -> Any:
    if isinstance(value, dict):
        return {storable(name): _storable(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_storable(part) for part in value]
    return storable(value) if isinstance(value, str) else value


def json_documents(lines: Lines, place: FileOrigin, fields: Fields) -> Items:
    """Yield the documents of lines that are JSON objects."""
    return line_documents(
        lines, place, lambda line, raw, offset: json_document(line, raw, place, offset, fields)
    )


def array_documents(stream: Stream, place: FileOrigin, fields: Fields) -> Items:
    """Yield the documents of a JSON array of objects; ids are places of the objects in the file.

    Raises:
        DataError: an element is too long.
        BrokenFileError: the file is cut or damaged here.
    """
    for offset, raw in _elements(stream, place):
        line = decode(raw, place.encoding)
        if line is None:
            yield place.invalid_line(offset, raw)
        else:
            yield json_document(line, raw, place, offset, fields)


def _elements(stream: Stream, place: FileOrigin) -> Lines:
    """Yield (byte offset, bytes) of the elements of an array."""
    # What is read, its place in the file, and the place of the current element in it.
    text, at, start = b"", 0, 0
    position, depth, in_string, rows = 0, 0, False, 0
    long: LongLine | None = None  # of an element that is too long, without what was read of it
    while True:
        found = (_IN_STRING if in_string else _STRUCTURE).search(text, position)
        if found is None:
            data = stream.buffer.read(_STEP)
            if len(text) - start > place.max_bytes:
                place.too_long(place.at(at + start), text[start : start + BEGINNING_BYTES])
                if long is None:
                    long = LongLine(text[start : start + BEGINNING_BYTES])
                long.num_bytes += len(text) - start
                start = len(text)
            if not data:
                problem = stream.problem or BrokenFileError(CUT_SHORT, "the array has no end")
                problem.unfinished = text[start:]
                raise problem
            text, at = text[start:] + data, at + start
            position, start = len(text) - len(data), 0
            continue
        mark, position = found[0], found.end()
        if mark == b"\\":
            position += 1  # may lie behind what is read; the search goes on there
            while position > len(text) and (data := stream.buffer.read(_STEP)):
                text += data
        elif mark == b'"':
            in_string = not in_string
        elif mark in b"[{":
            if depth == 0 and mark == b"{":
                raise BrokenFileError(DAMAGED, "an object where an array was expected")
            start = start if depth else position
            depth += 1
        elif mark in b"]}" or depth == 1:
            depth -= mark != b","
            if depth == 0 or mark == b",":
                yield from _element(at + start, text[start : position - 1], long)
                long, rows = None, rows + 1
                start = position
            if depth == 0:
                break
    rest = text[position:] + stream.buffer.read(_STEP)
    if stream.problem:
        raise stream.problem
    if rest.strip(_JSON_SPACE):
        left = len(rest) + sum(map(len, iter(lambda: stream.buffer.read(_STEP), b"")))
        message, size = f"text behind the array, at byte {at + position}", at + position
        raise BrokenFileError(DAMAGED, message, rest, max(1, round(rows * left / size)))


def _element(offset: int, rest: bytes, long: LongLine | None) -> Lines:
    """Yield an element, if there is one before a comma; of a long one `rest` is its last part."""
    if long is not None:
        long.num_bytes += len(rest)
        yield offset + len(rest) - long.num_bytes, long
    elif element := rest.lstrip(_JSON_SPACE):
        yield offset + len(rest) - len(element), element.rstrip(_JSON_SPACE)


def table_documents(lines: Lines, place: FileOrigin, fields: Fields, *, tabs: bool) -> Items:
    """Yield the rows of a table whose first row has the names of its columns.

    A row with more or fewer cells than there are columns is rejected.

    Raises:
        BrokenFileError: the file is cut or damaged here, or a quote has no end.
    """
    seen = _RowLines(lines, place)
    csv.field_size_limit(place.max_bytes)  # where a quote has no end, all the rest is one cell
    # Quoted as in RFC 4180 where commas part cells, and never where tabs do, as in GLUE and CLUE.
    rows = (line[:-1].split("\t") for line in seen) if tabs else csv.reader(seen, strict=True)
    columns: list[str] | None = None
    try:
        for cells in rows:
            offset, raw = seen.take()
            if cells in ([], [""]):
                continue
            if decode(raw, place.encoding) is None:
                yield place.invalid_line(offset, raw)
            elif columns is None:
                columns = [cell.strip() for cell in cells]
                twice = [name for name in fields.wanted if columns.count(name) > 1]
                if twice or not any(name in columns for name in fields.text):
                    rows_lost = sum(1 for cells in rows if cells not in ([], [""]))
                    document_id = f"{place.source}/{place.name}"
                    refused = fields.no_text(
                        "column", document_id, raw, there=tuple(columns), rows=rows_lost
                    )
                    if twice:
                        refused = replace(refused, reason=f"two columns {twice[0]!r}")
                    yield refused
                    return
            elif len(cells) != len(columns):
                detail = f"{len(cells)} cells, {len(columns)} columns"
                yield Rejected(place.at(offset), "row of another length", raw, detail)
            else:
                yield fields.document(dict(zip(columns, cells, strict=True)), raw, place, offset)
    except csv.Error as error:
        rows_left = seen.rows_left()
        offset, raw = seen.take()
        message = f"{error}, in the row at byte {offset}"
        raise BrokenFileError(DAMAGED, message, raw[:_STEP], rows_left) from error
    except BrokenFileError as broken:
        broken.unfinished = b"\n".join(filter(None, (seen.take()[1], broken.unfinished)))
        raise


class _RowLines:
    """Lines as text, and what of them the current row took."""

    def __init__(self, lines: Lines, place: FileOrigin) -> None:
        self._lines, self._encoding = lines, place.encoding
        self._taken: list[tuple[int, bytes]] = []
        self._before = (0, 0)  # rows before the current one, and their lines

    def __iter__(self) -> Iterator[str]:
        for offset, raw in self._lines:
            self._taken.append((offset, raw))
            # Invalid bytes must not shift the cells behind them; the row is rejected later.
            text = decode(raw, self._encoding)
            yield (text or raw.decode(CODECS[self._encoding], "surrogateescape")) + "\n"

    def take(self) -> tuple[int, bytes]:
        """Return the place and the bytes of the lines since the last call."""
        taken, self._taken = self._taken, []
        self._before = (self._before[0] + 1, self._before[1] + len(taken))
        long = next((raw for _, raw in taken if isinstance(raw, LongLine)), None)
        return taken[0][0] if taken else 0, long or b"\n".join(raw for _, raw in taken)

    def rows_left(self) -> int:
        """Estimate the rows from the current one on, by the lines of those before it."""
        (rows, lines), left = self._before, len(self._taken)
        with suppress(BrokenFileError):
            left += sum(1 for _ in self._lines)
        return max(1, round(left * rows / lines)) if lines else left


def wiki_documents(lines: Lines, place: FileOrigin, metadata: tuple[str, ...]) -> Items:
    """Yield the documents of WikiExtractor's output, `<doc id=...>` ... `</doc>` or JSON lines.

    Of their attributes, such as url and title, they have the named ones. The title, which
    WikiExtractor repeats as the first line, is part of the text. A document with a line that is too
    long is rejected as a whole.

    Raises:
        DataError: a document is too long, and the run is to stop there.
        BrokenFileError: the file is cut or damaged here.
    """
    draft = GrowingDocument(place)
    fields = Fields(metadata=metadata)
    attributes: dict[str, str] = {}
    opening: tuple[str, int] | None = None  # the open document's own id and offset
    try:
        for offset, raw in lines:
            line = decode(raw, place.encoding)
            tag = _OPENING.fullmatch(line) if line is not None else None
            if tag:
                yield from _unclosed(opening, draft, place)
                attributes = {k: html.unescape(v) for k, v in _ATTRIBUTE.findall(tag[1])}
                opening = attributes["id"], offset
            elif opening and line is not None and line.strip() == _CLOSING:
                yield draft.take(place.own(*opening), fields.metadata_of(attributes))
                opening = None
            elif opening:
                yield from draft.add(offset, raw, line)
            elif line is None:
                yield place.invalid_line(offset, raw)
            elif line.lstrip().startswith("{"):
                yield json_document(line, raw, place, offset, fields)
            elif line.strip():
                yield Rejected(place.at(offset), "line outside <doc>", raw)
    except BrokenFileError as broken:
        draft.keep_in(broken)
        raise
    yield from _unclosed(opening, draft, place)


def _unclosed(opening: tuple[str, int] | None, draft: GrowingDocument, place: FileOrigin) -> Items:
    if opening:
        yield Rejected(place.own(*opening), "no </doc>", draft.text().encode())
        draft.clear()
