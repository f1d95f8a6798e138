"""Documents of WikiExtractor's output: `<doc id=...>` ... `</doc>`, or JSON lines (`--json`).

Format: https://github.com/attardi/wikiextractor, README.md and wikiextractor/extract.py. The title,
which WikiExtractor repeats as the first line, is part of the text.
"""

import re

from data_prep.readers.items import BrokenFileError, Document, Place, Rejected
from data_prep.readers.text import (
    Draft,
    Encoding,
    Items,
    Lines,
    decode,
    invalid_line,
    json_document,
)

_OPENING = re.compile(r'<doc id="([^"]*)"[^\n]*>\s*')
_CLOSING = "</doc>"


def documents(lines: Lines, place: Place, encoding: Encoding, max_bytes: int) -> Items:
    """Yields the documents of one file.

    Raises:
        DataError: one is longer than `max_bytes`.
        BrokenFileError: the file is cut or damaged here.
    """
    draft = Draft(place, encoding, max_bytes)
    opening: tuple[str, int] | None = None  # the open document's own id and offset
    try:
        for offset, raw in lines:
            line = decode(raw, encoding)
            found = _OPENING.fullmatch(line) if line is not None else None
            if found:
                yield from _unclosed(opening, draft, place)
                opening = found[1], offset
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
