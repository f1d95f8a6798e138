"""Documents of WikiExtractor's output: `<doc id=...>` ... `</doc>`, or JSON lines.

Format: https://github.com/attardi/wikiextractor, README.md and wikiextractor/extract.py. The title,
which WikiExtractor repeats as the first line, is part of the text.
"""

import html
import re

from data_prep.readers.encodings import decode
from data_prep.readers.items import BrokenFileError, FileOrigin, Rejected
from data_prep.readers.records import Fields, json_document
from data_prep.readers.text import GrowingDocument, Items, Lines

_OPENING = re.compile(r'<doc (id="[^"]*"[^\n]*)>\s*')
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_CLOSING = "</doc>"


def documents(lines: Lines, place: FileOrigin, metadata: tuple[str, ...]) -> Items:
    """Yield the documents, with the named ones of their attributes, such as url and title.

    A document with a line that is too long is rejected as a whole.

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
