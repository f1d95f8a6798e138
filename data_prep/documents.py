"""Reads the documents of a piece out of files of all formats; nothing is dropped silently.

What could not be read is counted by file, up to the share at which a run stops. Rows are documents,
and records without text or that are not valid; bytes are those of lines that are not valid in their
file's encoding. What a setting leaves out is not lost.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from data_prep import embedded
from data_prep.config import CleanConfig, Encoding, SourceConfig
from data_prep.inputs import RECORDS, encoding_of, format_of, refuse_changed
from data_prep.plugins import load_function, raised, source_of
from data_prep.readers import records, text
from data_prep.readers.encodings import of_lines, storable
from data_prep.readers.text import BEGINNING_BYTES, MOST_BYTES, BrokenFileError, FileOrigin
from data_prep.types import Document, InputFile, InputPiece, Rejected
from pipeline.errors import PASSING, DataError

logger = logging.getLogger(__name__)
_KEPT, _SHOWN = 20, 5
"""Files and reasons that are kept, and those that a message names."""
UNKNOWN = "UTF-8, which they are not, nor another encoding that is known"


@dataclass
class Losses:
    """Counts of a file, of a piece or of a source."""

    rows: int = 0
    rows_lost: int = 0
    num_bytes: int = 0
    bytes_lost: int = 0
    stored: int = 0
    """Bytes of the files as they are stored."""
    stored_lost: int = 0
    """Those of files of which nothing could be read: nobody knows how many rows they have."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Reason, with what was there instead -> items."""

    def take(self, item: Document | Rejected) -> None:
        """Count an item of a reader."""
        if isinstance(item, Document):
            self.rows += 1
            self.num_bytes += len(item.text.encode())
        if isinstance(item, Document) or not item.is_lost:
            return
        self.rows += item.rows
        self.rows_lost += item.rows
        self.num_bytes += len(item.raw)
        self.bytes_lost += 0 if item.rows else len(item.raw)
        what = f"{item.reason}; {item.detail}" if item.detail else item.reason
        if what in self.reasons or len(self.reasons) < _KEPT:
            self.reasons[what] += max(1, item.rows)

    def add(self, other: "Losses") -> None:
        """Add the counts of another part."""
        for name in ("rows", "rows_lost", "num_bytes", "bytes_lost", "stored", "stored_lost"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.reasons.update(other.reasons)

    @property
    def share(self) -> float:
        """Share that is lost, of rows or of bytes, read or stored, whichever is largest."""
        return max(
            self.rows_lost / (self.rows or 1),
            self.bytes_lost / (self.num_bytes or 1),
            self.stored_lost / (self.stored or 1),
        )

    def text(self) -> str:
        """Describe the losses on one line."""
        reasons = "; ".join(f"{n:,}: {what}" for what, n in self.reasons.most_common(_SHOWN))
        return f"{100 * self.share:.1f}% lost ({reasons})"


@dataclass
class FieldUse:
    """Files whose records have a field, and others of the source that have not."""

    files: int = 0
    files_without: int = 0
    rows_without: int = 0
    example: str = ""
    """A file without."""

    def add(self, other: "FieldUse") -> None:
        """Add the counts of another part."""
        self.files += other.files
        self.files_without += other.files_without
        self.rows_without += other.rows_without
        self.example = self.example or other.example


@dataclass
class ReadReport:
    """What was read, of a piece or of a source."""

    total: Losses = field(default_factory=Losses)
    files: dict[str, Losses] = field(default_factory=dict)
    """By path, those that lost most."""
    fields: dict[str, FieldUse] = field(default_factory=dict)

    def add_file(self, path: str, losses: Losses, seen: dict[str, bool]) -> None:
        """Take a file, or a range of one; `seen` says which fields its records had."""
        fields = {
            name: FieldUse(1) if is_there else FieldUse(0, 1, losses.rows, path)
            for name, is_there in seen.items()
        }
        self.add(ReadReport(losses, {path: losses} if losses.share else {}, fields))

    def add(self, other: "ReadReport") -> None:
        """Add another part of the source."""
        self.total.add(other.total)
        for path, losses in other.files.items():
            self.files.setdefault(path, Losses()).add(losses)
            if len(self.files) > _KEPT:
                del self.files[min(self.files, key=lambda name: self.files[name].share)]
        for name, use in other.fields.items():
            self.fields.setdefault(name, FieldUse()).add(use)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        return {
            "total": _plain(self.total),
            "files": {path: _plain(losses) for path, losses in self.files.items()},
            "fields": {name: asdict(use) for name, use in self.fields.items()},
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "ReadReport":
        """Make it from what `to_json` returned."""
        files = {path: _losses(counts) for path, counts in values["files"].items()}
        fields = {name: FieldUse(**use) for name, use in values["fields"].items()}
        return cls(_losses(values["total"]), files, fields)


def _plain(losses: Losses) -> dict[str, Any]:
    # `asdict` would make a Counter of the pairs of a Counter.
    return {**vars(losses), "reasons": dict(losses.reasons)}


def _losses(values: dict[str, Any]) -> Losses:
    return Losses(**{**values, "reasons": Counter(values["reasons"])})


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
            losses.stored = file.range_bytes
            is_broken = not {text.CUT_SHORT, text.DAMAGED}.isdisjoint(losses.reasons)
            losses.stored_lost = losses.stored if is_broken and not is_read else 0
            remarks.reading.add_file(file.path, losses, use if is_read else {})
        except OSError as error:
            if error.errno in PASSING:
                raise  # the task is tried again
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
    num_items = 0
    try:
        for item in _items(file, source, place, fields, encoding, only_head):
            num_items += 1
            yield item
    except BrokenFileError as broken:
        logger.warning(
            "%s: %s: %s; the documents before that are used", file.path, broken.reason, broken
        )
        whole = f"{source.name}/{file.name}"
        rows = broken.rows
        if broken.at:  # as many in what is left as before it
            rows = max(rows, round(num_items * (file.num_bytes - broken.at) / broken.at))
        yield Rejected(whole, broken.reason, broken.unfinished, rows=rows)


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
        if kind == "txt" and source.txt_documents != "file":
            lines = text.told_apart(lines, place)
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
            json.dumps(named)  # what JSON cannot hold is told with the document
            yield Document(own_id, storable(document), named)
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"{key} = {source.reader!r} failed behind document {number} of {file.path}: "
            f"{raised(error, source_of(source.reader, key).file)}; correct the reader"
        ) from error


def check_losses(source: SourceConfig, parts: Iterable[dict[str, Any]], *, warns: bool) -> None:
    """Warn of losses and of files with other fields, and stop where too much was lost.

    Raises:
        DataError: more than the source's `max_lost_share` was lost; names the files and reasons.
    """
    reading = ReadReport()
    for part in parts:
        reading.add(ReadReport.from_json(part))
    for name, use in reading.fields.items() if warns else ():
        if use.files_without and (use.files or name != source.id_field):
            text = (
                "source %s: field %r is in none of the %d rows of %d files, such as %s; %d other "
                "files have it"
            )
            where = (use.rows_without, use.files_without, use.example, use.files)
            logger.warning(text, source.name, name, *where)
    worst = sorted(reading.files.items(), key=lambda file: -file[1].share)
    named = [f"{path}: {losses.text()}" for path, losses in worst[:_SHOWN]]
    if reading.total.share > source.max_lost_share:
        raise DataError(
            f"source {source.name!r}: {100 * reading.total.share:.1f}% of its rows or bytes could "
            f"not be read, more than max_lost_share = {source.max_lost_share:g} of the source:\n  "
            + "\n  ".join(named)
            + f"\n{_remedies(reading.total)}; or raise max_lost_share, if this may be lost"
        )
    for line in named if warns else ():
        logger.warning("source %s: %s", source.name, line)


def _remedies(total: Losses) -> str:
    reasons = " ".join(total.reasons)
    remedies = {
        "no text in": "set the source's text_field to a field that is there",
        "invalid ": "set the source's encoding (auto finds each file's own) and format",
        "array": "give objects as records (format json, if a whole file is an array of them)",
        "WARC": "give WET files, which have the extracted text",
    }
    fitting = [remedy for word, remedy in remedies.items() if word in reasons]
    return "; ".join(fitting) or "repair these files"
