"""Reads documents out of files of all formats: nothing is dropped unseen."""

import logging
from collections.abc import Iterator

from data_prep.config import SourceConfig
from data_prep.inputs import InputFile, format_of
from data_prep.readers import streams, text, wikiextractor
from data_prep.readers.items import BrokenFileError, Document, Place, Rejected

__all__ = ["Document", "Rejected", "encoding_of", "read_file"]

logger = logging.getLogger(__name__)


def encoding_of(file: InputFile, source: SourceConfig) -> text.Encoding:
    """How a file's lines are decoded; looks into the file if the source says `auto`."""
    if source.encoding != "auto":
        return source.encoding
    # Parquet and WET are UTF-8 by their definition.
    is_lines = format_of(file.path, source) in ("txt", "jsonl", "wikiextractor")
    return text.detect_encoding(file.path) if is_lines else "utf-8"


def read_file(
    file: InputFile, source: SourceConfig, max_bytes: int, encoding: text.Encoding = "utf-8"
) -> Iterator[Document | Rejected]:
    """Yields, in order, the documents that begin in one file or range of a file.

    Of a file that is cut short or damaged, all documents before the break come, then one
    `Rejected` with the beginning of the document that the break goes through.

    Args:
        file: what to read.
        source: its settings.
        max_bytes: longest document.
        encoding: see `encoding_of`.

    Raises:
        DataError: one document is longer than `max_bytes`.
    """
    place = Place(source.name, file.path, file.name)
    try:
        yield from _items(file, source, max_bytes, encoding, place)
    except BrokenFileError as broken:
        logger.warning(
            "%s: %s: %s; what stands before that is used", file.path, broken.reason, broken
        )
        yield Rejected(f"{source.name}/{file.name}", broken.reason, broken.unfinished)


def _items(
    file: InputFile, source: SourceConfig, max_bytes: int, encoding: text.Encoding, place: Place
) -> Iterator[Document | Rejected]:
    kind = format_of(file.path, source)
    if kind == "parquet":
        # Imported here, because it is large and few files need it.
        from data_prep.readers import parquet

        yield from parquet.documents(place, source.text_field, source.id_field, max_bytes)
        return
    with streams.opened(file.path) as stream:
        if kind == "wet":
            from data_prep.readers import wet

            yield from wet.documents(stream, place, max_bytes)
            return
        lines = streams.lines(stream, place, file.start, max_bytes)
        in_range = text.owned(lines, file.start, file.end)
        if kind == "wikiextractor":
            yield from wikiextractor.documents(lines, place, encoding, max_bytes)
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
