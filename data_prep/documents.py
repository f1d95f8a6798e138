"""Reads the documents of a piece out of files of all formats; nothing is dropped silently."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from data_prep import embedded
from data_prep.config import CleanConfig, Encoding, SourceConfig
from data_prep.inputs import RECORDS, encoding_of, format_of, refuse_changed
from data_prep.losses import Losses, ReadReport
from data_prep.plugins import load_function, raised, source_of
from data_prep.readers import records, text
from data_prep.readers.encodings import of_lines, storable
from data_prep.readers.text import BEGINNING_BYTES, MOST_BYTES, BrokenFileError, FileOrigin
from data_prep.types import Document, InputFile, InputPiece, Rejected
from pipeline.errors import DataError

logger = logging.getLogger(__name__)
UNKNOWN = "UTF-8, which they are not, nor another encoding that is known"


@dataclass
class ReadStats:
    """What is worth knowing of a piece, but not rejected."""

    encodings: dict[str, list[str]] = field(default_factory=dict)
    """Encoding that was found, other than UTF-8, or `UNKNOWN` -> paths of the files."""
    num_split: int = 0
    """Documents that were too long."""
    reading: ReadReport = field(default_factory=ReadReport)


def read_piece(
    piece: InputPiece, clean: CleanConfig, remarks: ReadStats, *, only_head: bool = False
) -> Iterator[Document | Rejected]:
    """Yield the documents of a piece as they are in its files, and the unreadable parts.

    With `only_head` the caller reads the first ones: compressed files are not read twice, and
    damage is not noticed.

    Raises:
        DataError: a file cannot be read, or a document is too long and `clean` says to stop.
    """
    max_bytes = clean.max_document_mb * 1_000_000
    for file in piece.files:
        losses, seen = Losses(), set[str]()
        try:
            for item in _read(piece.source, file, clean, remarks, seen, only_head):
                losses.take(item)
                if isinstance(item, Rejected) or len(item.text) * 4 <= max_bytes:
                    yield item
                    continue
                encoded = item.text.encode()
                if len(encoded) <= max_bytes:
                    yield item
                elif clean.on_long_document == "reject":
                    detail = f"{len(encoded):,} bytes"
                    reason = f"longer than {clean.max_document_mb} MB"
                    yield Rejected(item.id, reason, encoded, detail, item.metadata, is_lost=False)
                else:
                    remarks.num_split += 1
                    yield from _parts(item, encoded, max_bytes)
            refuse_changed(file)
            use = {name: name in seen for name in _compared_fields(piece.source, file)}
            is_read = losses.rows > losses.rows_lost
            remarks.reading.add_file(file.path, losses, use if is_read else {})
        except OSError as error:
            raise DataError(f"{file.path} cannot be read: {error}") from error


def _parts(document: Document, encoded: bytes, max_bytes: int) -> Iterator[Document]:
    """Cut a document at the ends of lines, at spaces where there is none, or else anywhere."""
    start, number = 0, 1
    while start < len(encoded):
        end = start + max_bytes
        if end < len(encoded):
            window = encoded[start:end]
            end = start + (window.rfind(b"\n") + 1 or window.rfind(b" ") + 1 or max_bytes)
            while encoded[end] & 0xC0 == 0x80:  # within a character
                end -= 1
        part_id = document.id if number == 1 else f"{document.id}#{number}"
        yield Document(part_id, encoded[start:end].decode(), document.metadata)
        start, number = end, number + 1


def _compared_fields(source: SourceConfig, file: InputFile) -> tuple[str, ...]:
    """Name the fields that some files of a source may have and others not."""
    if source.kind != "files" or source.reader or format_of(file.path, source) not in RECORDS:
        return ()
    texts = source.text_fields if len(source.text_fields) > 1 else ()
    return (*texts, source.id_field, *source.metadata)


def _read(
    source: SourceConfig,
    file: InputFile,
    clean: CleanConfig,
    remarks: ReadStats,
    seen: set[str],
    only_head: bool,
) -> text.Items:
    if source.kind == "files":
        encoding = encoding_of(file, source)
        # Only the first range of a file counts it.
        if encoding != "utf-8" and source.encoding == "auto" and not file.start:
            remarks.encodings.setdefault(encoding or UNKNOWN, []).append(file.path)
        # A document that may be long is read up to a limit, and split or rejected by the caller.
        longer = clean.on_long_document
        if longer == "split" and format_of(file.path, source) not in ("txt", "md"):
            longer = "reject"  # nobody can split what has to be parsed as a whole
        max_bytes = MOST_BYTES if longer != "stop" else clean.max_document_mb * 1_000_000
        yield from read_file(
            file,
            source,
            max_bytes,
            encoding or "utf-8",
            longer=longer,
            seen=seen,
            only_head=only_head,
        )
        return
    for place, raw in embedded.documents(Path(file.path), file.name):
        place = f"{source.name}/{place}"
        try:
            yield Document(place, raw.decode())
        except UnicodeDecodeError:
            yield Rejected(place, "invalid UTF-8 document", raw)


def read_file(
    file: InputFile,
    source: SourceConfig,
    max_bytes: int,
    encoding: Encoding = "utf-8",
    *,
    longer: Literal["stop", "split", "reject"] = "stop",
    seen: set[str] | None = None,
    only_head: bool = False,
) -> text.Items:
    """Yield, in order, the documents that begin in one file or range of a file.

    `longer` says what becomes of a document of more than `max_bytes`. Names of fields that records
    have are added to `seen`. A file that is cut short gives all documents before the break, one
    with a damaged member (of gzip, xz or zstd) those before that member; then one `Rejected`
    follows with the beginning of the document that the break goes through.
    """
    lines = of_lines(encoding)
    place = FileOrigin(source.name, file.path, file.name, max_bytes, lines, longer)
    fields = records.Fields(
        source.text_fields, source.id_field, source.metadata, set() if seen is None else seen
    )
    try:
        yield from _items(file, source, place, fields, encoding, only_head)
    except BrokenFileError as broken:
        logger.warning(
            "%s: %s: %s; the documents before that are used", file.path, broken.reason, broken
        )
        yield Rejected(f"{source.name}/{file.name}", broken.reason, broken.unfinished)


def _items(
    file: InputFile,
    source: SourceConfig,
    place: FileOrigin,
    fields: records.Fields,
    encoding: Encoding,
    only_head: bool,
) -> text.Items:
    if source.reader:
        yield from _own(file, source, place)
        return
    kind = format_of(file.path, source)
    if kind == "parquet":
        # Imported here, because it is large and few files need it.
        from data_prep.readers import parquet

        yield from parquet.documents(place, fields)
        return
    with text.opened(file.path, only_head=only_head, encoding=encoding) as stream:
        if kind == "wet":
            from data_prep.readers import wet

            yield from wet.documents(stream, place, source.metadata)
            return
        if kind == "json":
            yield from records.array_documents(stream, place, fields)
            return
        lines = text.lines(stream, place, file.start)
        in_range = text.owned(lines, file.start, file.end)
        if kind == "wikiextractor":
            yield from records.wiki_documents(lines, place, source.metadata)
        elif kind == "jsonl":
            yield from records.json_documents(in_range, place, fields)
        elif kind in ("csv", "tsv"):
            yield from records.table_documents(lines, place, fields, tabs=kind == "tsv")
        elif source.txt_documents == "line" and kind == "txt":
            yield from text.line_documents(
                in_range, place, lambda line, _, offset: Document(place.at(offset), line)
            )
        else:
            whole = source.txt_documents == "file" or kind == "md"
            yield from text.paragraphs(lines, place, (file.start, file.end), whole=whole)


def _own(file: InputFile, source: SourceConfig, place: FileOrigin) -> text.Items:
    """Yield the documents of a user's reader; those without an id are numbered."""
    key = f"source {source.name!r}: reader"
    function = load_function(source.reader, key)
    number = 0
    try:
        for number, item in enumerate(function(file.path)):
            parts = item if isinstance(item, tuple) else (None, item)
            given, document, metadata = (*parts, {}) if len(parts) == 2 else parts
            if not isinstance(document, str):
                raise TypeError(
                    f"yielded {item!r:.80}; expected text, or id and text, or id, text and metadata"
                )
            own_id = place.own(given, number)
            if len(document) > place.max_bytes:
                yield place.too_long(own_id, document[:BEGINNING_BYTES].encode(), len(document))
                continue
            named = records.Fields(metadata=source.metadata).metadata_of(metadata)
            yield Document(own_id, storable(document), named)
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"{key} = {source.reader!r} failed behind document {number} of {file.path}: "
            f"{raised(error, source_of(source.reader, key).file)}; correct the reader"
        ) from error
