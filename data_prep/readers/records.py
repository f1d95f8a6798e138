"""Documents of files of records: JSON lines, JSON arrays, and tables of commas or tabs.

A record is an object with the fields that the source names. JSON arrays are UTF-8 by RFC 8259; they
are read element by element, so that a file of any size needs the memory of its longest document.
"""

import csv
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from data_prep.readers.encodings import decode
from data_prep.readers.items import (
    CUT_SHORT,
    DAMAGED,
    BrokenFileError,
    Document,
    FileOrigin,
    Metadata,
    Rejected,
    storable,
)
from data_prep.readers.text import Items, Lines, Stream, line_documents

_STEP = 1 << 16
_STRUCTURE = re.compile(rb'["\[\]{},]')
_IN_STRING = re.compile(rb'["\\]')
_JSON_SPACE = b" \t\r\n"


@dataclass(frozen=True)
class Fields:
    """Names of the values of a record that are used; `a.b` is `b` of `a`, if no key is `a.b`."""

    text: str = "text"
    id: str = "id"
    metadata: tuple[str, ...] = ()

    def metadata_of(self, record: Mapping[str, Any]) -> Metadata:
        """Return the named values that the record has."""
        found = {name: value_at(record, name) for name in self.metadata}
        return {name: value for name, value in found.items() if value is not None}

    def document(
        self, record: Any, raw: bytes, place: FileOrigin, offset: int
    ) -> Document | Rejected:
        """Return the document of a record, or why there is none."""
        text = value_at(record, self.text)
        if not isinstance(text, str):
            return Rejected(place.at(offset), f"no text in field {self.text!r}", raw)
        own_id = place.own(value_at(record, self.id), offset)
        return Document(own_id, text, self.metadata_of(record))


def value_at(record: Any, name: str) -> Any:
    """Return the value of a field, None if there is none."""
    if not isinstance(record, Mapping):
        return None
    if name in record:
        return record[name]
    first, dot, rest = name.partition(".")
    return value_at(record.get(first), rest) if dot else None


def json_document(
    line: str, raw: bytes, place: FileOrigin, offset: int, fields: Fields
) -> Document | Rejected:
    """Return the document of one JSON object, or why there is none."""
    try:
        # Only an escape can bring in a lone surrogate: the line itself is valid text.
        record = json.loads(line, object_hook=_storable if "\\u" in line else None)
    except (ValueError, RecursionError):
        return Rejected(place.at(offset), "invalid JSON line", raw)
    return fields.document(record, raw, place, offset)


def _storable(record: dict[str, Any]) -> dict[str, Any]:
    return {k: storable(v) if isinstance(v, str) else v for k, v in record.items()}


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
    position, depth, in_string = 0, 0, False
    while True:
        found = (_IN_STRING if in_string else _STRUCTURE).search(text, position)
        if found is None:
            data = stream.buffer.read(_STEP)
            if len(text) - start > place.max_bytes:
                raise place.too_long(f"byte {at + start}")
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
                element = text[start : position - 1]
                lead = len(element) - len(element.lstrip(_JSON_SPACE))
                if element.strip(_JSON_SPACE):
                    yield at + start + lead, element.strip(_JSON_SPACE)
                start = position
            if depth == 0:
                break
    rest = text[position:] + stream.buffer.read(_STEP)
    if stream.problem:
        raise stream.problem
    if rest.strip(_JSON_SPACE):
        raise BrokenFileError(DAMAGED, f"text behind the array, at byte {at + position}", rest)


def table_documents(lines: Lines, place: FileOrigin, fields: Fields, *, tabs: bool) -> Items:
    """Yield the rows of a table whose first row has the names of its columns.

    Cells are quoted as in RFC 4180 where commas part them, and never where tabs do, as GLUE and
    CLUE have it. A row with more or fewer cells than there are columns is rejected.

    Raises:
        BrokenFileError: the file is cut or damaged here, or a quote has no end.
    """
    seen = _RowLines(lines, place)
    csv.field_size_limit(place.max_bytes)  # where a quote has no end, all the rest is one cell
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
                columns = [cell.removeprefix("\ufeff").strip() for cell in cells]
                if fields.text not in columns:
                    reason = f"no column {fields.text!r}"
                    yield Rejected(f"{place.source}/{place.name}", reason, raw)
                    return
            elif len(cells) != len(columns):
                detail = f"{len(cells)} cells, {len(columns)} columns"
                yield Rejected(place.at(offset), "row of another length", raw, detail)
            else:
                yield fields.document(dict(zip(columns, cells, strict=True)), raw, place, offset)
    except csv.Error as error:
        offset, raw = seen.take()
        message = f"{error}, in the row at byte {offset}"
        raise BrokenFileError(DAMAGED, message, raw[:_STEP]) from error
    except BrokenFileError as broken:
        broken.unfinished = b"\n".join(filter(None, (seen.take()[1], broken.unfinished)))
        raise


class _RowLines:
    """Lines as text, and what of them the current row took."""

    def __init__(self, lines: Lines, place: FileOrigin) -> None:
        self._lines, self._encoding = lines, place.encoding
        self._taken: list[tuple[int, bytes]] = []

    def __iter__(self) -> Iterator[str]:
        for offset, raw in self._lines:
            self._taken.append((offset, raw))
            # Invalid bytes must not shift the cells behind them; the row is rejected later.
            yield raw.decode(self._encoding, "surrogateescape") + "\n"

    def take(self) -> tuple[int, bytes]:
        """Return the place and the bytes of the lines since the last call."""
        taken, self._taken = self._taken, []
        return taken[0][0] if taken else 0, b"\n".join(raw for _, raw in taken)
