"""Documents of WET files: the 'conversion' records of Common Crawl, text extracted from web pages.

Format: ISO 28500 (WARC), read with warcio. HTML is not parsed: 'response' and other records are
rejected by type, and only their address is stored.
"""

from typing import Any

# Plain Python, so that our decompression, which notices a cut, stands below; fastwarc is faster
# and brings its own.
from warcio.archiveiterator import WARCIterator  # type: ignore[import-untyped,import-not-found]
from warcio.exceptions import ArchiveLoadFailed  # type: ignore[import-untyped,import-not-found]

from data_prep.readers import text
from data_prep.readers.encodings import storable
from data_prep.types import Rejected

_STEP = 1 << 16
_HEADERS = {
    "url": "WARC-Target-URI",
    "date": "WARC-Date",
    "language": "WARC-Identified-Content-Language",
}


def documents(stream: text.Stream, place: text.FileOrigin, metadata: tuple[str, ...]) -> text.Items:
    """Yield one document per 'conversion' record; its id is the record's.

    Metadata are url, date and language, or headers by their names.

    Raises:
        DataError: a record's text is too long.
        BrokenFileError: the file is cut or damaged here.
    """
    records = WARCIterator(stream.buffer, no_record_parse=True)
    try:
        for record in records:
            yield from _record(record, records, place, metadata)
            if stream.problem:
                break
            if records.err_count:
                raise text.BrokenFileError(
                    text.DAMAGED, "a record is longer than its Content-Length"
                )
    except ArchiveLoadFailed as error:
        raise stream.problem or text.BrokenFileError(text.DAMAGED, str(error)) from error
    if stream.problem:
        raise stream.problem


def _record(
    record: Any, records: Any, place: text.FileOrigin, metadata: tuple[str, ...]
) -> text.Items:
    headers = record.rec_headers
    own_id = (headers.get_header("WARC-Record-ID") or "").strip("<>")
    document_id = place.own(own_id, records.offset)
    length = headers.get_header("Content-Length") or ""
    if not (length.isascii() and length.isdigit()):
        reason = text.DAMAGED if records.reader.read(1) else text.CUT_SHORT
        raise text.BrokenFileError(reason, f"record {document_id} has no Content-Length")
    if record.rec_type != "conversion":
        _read(record, int(length), keep=False)
        if record.rec_type != "warcinfo":  # describes the file
            reason = f"WARC {record.rec_type} record, which holds no extracted text"
            address = headers.get_header("WARC-Target-URI") or ""
            yield Rejected(document_id, reason, address.encode(errors="replace"))
        return
    if int(length) > place.max_bytes:
        yield place.too_long(document_id, b"", int(length))
        _read(record, int(length), keep=False)
        return
    values = {name: headers.get_header(_HEADERS.get(name, name)) for name in metadata}
    given = {name: storable(value) for name, value in values.items() if value}
    yield from text.whole_document(_read(record, int(length), keep=True), document_id, given)


def _read(record: Any, length: int, *, keep: bool) -> bytes:
    """Read the content of a record; return it if it is to be kept."""
    parts = []
    while length and (data := record.raw_stream.read(min(length, _STEP))):
        parts.append(data if keep else b"")
        length -= len(data)
    if length:
        raise text.BrokenFileError(text.CUT_SHORT, "the last record ends early", b"".join(parts))
    return b"".join(parts)
