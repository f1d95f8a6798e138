"""Reads the documents of a piece out of files of all formats; nothing is dropped silently."""

import logging
from collections.abc import Iterator
from pathlib import Path

from data_prep import embedded
from data_prep.config import SourceConfig
from data_prep.inputs import InputFile, Piece, format_of, refuse_changed
from data_prep.own import load_function, raised, source_of
from data_prep.readers import text
from data_prep.readers.items import BrokenFileError, Document, Place, Rejected, storable
from pipeline.errors import DataError

logger = logging.getLogger(__name__)


def read_piece(
    piece: Piece, max_bytes: int, gb18030_files: list[str]
) -> Iterator[Document | Rejected]:
    """Yield the documents of a piece as they are in its files, and the unreadable parts.

    Paths of files that turn out to be GB18030 are added to `gb18030_files`.
    """
    for file in piece.files:
        try:
            yield from _read(piece.source, file, max_bytes, gb18030_files)
            refuse_changed(file)
        except OSError as error:
            raise DataError(f"{file.path} cannot be read: {error}") from error


def _read(
    source: SourceConfig, file: InputFile, max_bytes: int, gb18030_files: list[str]
) -> Iterator[Document | Rejected]:
    if source.kind == "files":
        encoding = encoding_of(file, source)
        # Only the first range of a file counts it.
        if encoding == "gb18030" and source.encoding == "auto" and not file.start:
            gb18030_files.append(file.path)
        yield from read_file(file, source, max_bytes, encoding)
        return
    for place, raw in embedded.documents(Path(file.path), file.name):
        place = f"{source.name}/{place}"
        try:
            yield Document(place, raw.decode())
        except UnicodeDecodeError:
            yield Rejected(place, "invalid UTF-8 document", raw)


def encoding_of(file: InputFile, source: SourceConfig) -> text.Encoding:
    """Return the encoding of a file's lines; looks into the file if the source says `auto`."""
    if source.encoding != "auto":
        return source.encoding
    # Parquet and WET are UTF-8 by their definition.
    is_lines = format_of(file.path, source) in ("txt", "jsonl", "wikiextractor")
    return text.detect_encoding(file.path) if is_lines else "utf-8"


def read_file(
    file: InputFile, source: SourceConfig, max_bytes: int, encoding: text.Encoding = "utf-8"
) -> Iterator[Document | Rejected]:
    """Yield, in order, the documents that begin in one file or range of a file.

    A file that is cut short gives all documents before the break, one with a damaged member (of
    gzip, xz or zstd) those before that member; then one `Rejected` follows with the beginning of
    the document that the break goes through.
    """
    place = Place(source.name, file.path, file.name)
    try:
        yield from _items(file, source, max_bytes, encoding, place)
    except BrokenFileError as broken:
        logger.warning(
            "%s: %s: %s; the documents before that are used", file.path, broken.reason, broken
        )
        yield Rejected(f"{source.name}/{file.name}", broken.reason, broken.unfinished)


def _items(
    file: InputFile, source: SourceConfig, max_bytes: int, encoding: text.Encoding, place: Place
) -> Iterator[Document | Rejected]:
    if source.reader:
        yield from _own(file, source, max_bytes, place)
        return
    kind = format_of(file.path, source)
    if kind == "parquet":
        # Imported here, because it is large and few files need it.
        from data_prep.readers import parquet

        yield from parquet.documents(place, source.text_field, source.id_field, max_bytes)
        return
    with text.opened(file.path) as stream:
        if kind == "wet":
            from data_prep.readers import wet

            yield from wet.documents(stream, place, max_bytes)
            return
        lines = text.lines(stream, place, file.start, max_bytes)
        in_range = text.owned(lines, file.start, file.end)
        if kind == "wikiextractor":
            yield from text.wiki_documents(lines, place, encoding, max_bytes)
        elif kind == "jsonl":
            yield from text.json_documents(
                in_range, place, encoding, source.text_field, source.id_field
            )
        elif source.txt_documents == "line":
            yield from text.line_documents(in_range, place, encoding)
        elif source.txt_documents == "file":
            yield from text.file_document(lines, place, encoding, max_bytes)
        else:
            span = (file.start, file.end)
            yield from text.paragraphs(lines, place, encoding, max_bytes, span)


def _own(
    file: InputFile, source: SourceConfig, max_bytes: int, place: Place
) -> Iterator[Document | Rejected]:
    """Yield the documents of a user's reader; those without an id are numbered."""
    key = f"source {source.name!r}: reader"
    function = load_function(source.reader, key)
    number = 0
    try:
        for number, item in enumerate(function(file.path)):
            given, document = item if isinstance(item, tuple) and len(item) == 2 else (None, item)
            if not isinstance(document, str):
                raise TypeError(f"yielded {item!r:.80}; expected text, or a pair of id and text")
            if len(document) > max_bytes:
                raise place.too_long(f"document {number}", max_bytes)
            yield Document(place.own(given, number), storable(document))
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"{key} = {source.reader!r} failed behind document {number} of {file.path}: "
            f"{raised(error, source_of(source.reader, key).file)}; correct the reader"
        ) from error
