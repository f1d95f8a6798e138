"""Stages ingest, normalise and filter, in one pass over a piece: input files to documents.

Writes per piece
    NAME.jsonl.zst        {"id", "source", "text"} a line
    NAME.hashes.npy       (d, 2) uint64, 128-bit hash of each text, for deduplication
    NAME.bytes.npy        (d,) int64, UTF-8 bytes of each text
    NAME.ids.jsonl.zst    the documents' ids, a JSON string a line
    NAME.id_hashes.npy    (n,) uint64, hash of the id of every document read, also of rejected ones
    NAME.rejected.jsonl.zst  {"id", "reason", "detail", "raw"} a line: what did not go on; what is
                          no UTF-8 is under "raw_base64"

The task's result also has `notes`, counts of what is no rejection (masked personal data, ids that
an earlier document of the piece has, files found to be GB18030), and `scripts`, documents that go
on by the script that they are written in.
"""

import hashlib
import io
import json
import logging
from array import array
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from backports import zstd

from data_prep import embedded
from data_prep.clean.normalise import normalise
from data_prep.config import CleanConfig, SourceConfig
from data_prep.counts import Counts
from data_prep.documents import Document, Rejected, encoding_of, read_file
from data_prep.filters.config import FiltersConfig
from data_prep.filters.rules import Dropped, Filters, key_parts
from data_prep.inputs import InputFile, Piece, refuse_changed
from data_prep.stage import Task, make_key, replacing
from pipeline.errors import DataError

logger = logging.getLogger(__name__)

STAGES = ("ingest", "normalise", "filter")
SUFFIXES = (
    ".jsonl.zst", ".hashes.npy", ".bytes.npy", ".rejected.jsonl.zst", ".ids.jsonl.zst",
    ".id_hashes.npy",
)  # fmt: skip
# First bytes of UTF-8 sequences: letters of ASCII, Han (U+4000 to U+9FFF, all common ones), and all
# others but those of general punctuation and symbols (E2) and of CJK punctuation and kana (E3).
_HAN, _LATIN, _OTHER = 1, 2, 3
_SCRIPTS = bytearray(256)
_SCRIPTS[0xE4:0xEA] = [_HAN] * 6
_SCRIPTS[0x41:0x5B] = _SCRIPTS[0x61:0x7B] = [_LATIN] * 26
for _first, _end in ((0xC3, 0xE2), (0xEA, 0xEF), (0xF0, 0xF5)):
    _SCRIPTS[_first:_end] = [_OTHER] * (_end - _first)


@dataclass(frozen=True)
class IngestJob:
    """What one task needs to know."""

    piece: Piece
    clean: CleanConfig
    filters: FiltersConfig


def tasks(
    pieces: Sequence[Piece], clean: CleanConfig, filters: FiltersConfig, folder: Path
) -> list[Task[IngestJob]]:
    """One task a piece.

    Raises:
        ConfigError: the list of bad words is unusable.
    """
    settings = [asdict(clean), *key_parts(filters)]
    made = []
    for i, piece in enumerate(pieces):
        described = asdict(piece)
        del described["source"]["weight"]  # says how often text is used, not what it is
        key = make_key(described, *settings)
        made.append(Task(f"{i:05d}", folder, key, IngestJob(piece, clean, filters)))
    return made


def run(task: Task[IngestJob]) -> tuple[dict[str, Any], list[Path]]:
    """Ingests one piece."""
    job = task.payload
    max_bytes = job.clean.max_document_mb * 1_000_000
    gb18030_files: list[str] = []
    with piece_writer(task) as writer:
        results = _Results(job, writer)
        for item in items(job.piece, max_bytes, gb18030_files):
            if isinstance(item, Document):
                writer.id_hashes.append(id_hash(item.id))
                results.take(item)
            else:
                results.counts["ingest"].take(len(item.raw))
                results.reject("ingest", item, len(item.raw))
    hashes_of_ids = np.array(writer.id_hashes, dtype=np.uint64)
    duplicate_ids = len(hashes_of_ids) - len(np.unique(hashes_of_ids))
    _warn(job.piece, duplicate_ids, gb18030_files)
    notes = {
        **{f"masked: {kind}": count for kind, count in sorted(results.masked.items())},
        "documents with the id of another": duplicate_ids,
        "files read as GB18030": len(gb18030_files),
    }
    stages = {name: counts.to_json() for name, counts in results.counts.items()}
    return {**stages, "notes": notes, "scripts": dict(sorted(results.scripts.items()))}, paths_of(
        task
    )


def paths_of(task: Task[Any]) -> list[Path]:
    """The files of a piece."""
    return [task.path(suffix) for suffix in SUFFIXES]


@dataclass
class PieceWriter:
    """Takes what goes into the files of a piece."""

    documents: IO[bytes]
    ids: IO[bytes]
    rejected: IO[bytes]
    hashes: list[bytes] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    id_hashes: "array[int]" = field(default_factory=lambda: array("Q"))
    """To be filled by who reads documents."""

    def take(self, document_id: str, source: str, text: str) -> None:
        """Writes a document that goes on."""
        encoded = text.encode()
        record = {"id": document_id, "source": source, "text": text}
        self.documents.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self.ids.write(json.dumps(document_id).encode() + b"\n")
        self.hashes.append(hashlib.blake2b(encoded, digest_size=16).digest())
        self.sizes.append(len(encoded))

    def reject(self, item: Rejected) -> None:
        """Keeps aside what does not go on."""
        self.rejected.write(item.to_json().encode() + b"\n")


def _compressed(file: IO[bytes]) -> io.BufferedWriter:
    # A MB at a time: the compressor's tables and those of normalisation push each other out of the
    # processor's cache if they take turns from document to document.
    compressor = cast("io.RawIOBase", zstd.open(file, "wb", level=3))
    return io.BufferedWriter(compressor, 1 << 20)


@contextmanager
def piece_writer(task: Task[Any]) -> Iterator[PieceWriter]:
    """Writes the files of a piece if the block succeeds, none if it fails."""
    with ExitStack() as stack:
        files = [
            stack.enter_context(stack.enter_context(replacing(path)).open("wb"))
            for path in paths_of(task)
        ]
        documents, rejected, ids = (stack.enter_context(_compressed(files[i])) for i in (0, 3, 4))
        writer = PieceWriter(documents, ids, rejected)
        yield writer
        np.save(files[1], np.frombuffer(b"".join(writer.hashes), dtype="<u8").reshape(-1, 2))
        np.save(files[2], np.array(writer.sizes, dtype=np.int64))
        np.save(files[5], np.array(writer.id_hashes, dtype=np.uint64))


class _Results:
    """Documents on their way through normalisation and filters, and what is left of them."""

    def __init__(self, job: IngestJob, writer: PieceWriter) -> None:
        self.counts = {name: Counts() for name in STAGES}
        self.masked = Counter[str]()
        self.scripts = Counter[str]()
        self._source = job.piece.source.name
        self._clean, self._min_chars = job.clean, job.clean.min_chars
        self._filters = Filters(job.filters)
        self._writer = writer

    def reject(self, stage: str, item: Rejected, num_bytes: int) -> None:
        """Counts and keeps aside what does not go on."""
        self.counts[stage].reject(item.reason, num_bytes)
        self._writer.reject(item)

    def take(self, item: Document) -> None:
        """Normalises, filters and writes one document."""
        raw = item.text.encode()
        for stage in ("ingest", "normalise"):
            self.counts[stage].take(len(raw))
        self.counts["ingest"].give(len(raw))
        text = normalise(item.text, self._clean)
        if len(text) < self._min_chars:
            reason = f"shorter than {self._min_chars} characters"
            self.reject("normalise", Rejected(item.id, reason, raw), len(raw))
            return
        encoded = text.encode()
        num_bytes = len(encoded)
        self.counts["normalise"].give(num_bytes)
        self.counts["filter"].take(num_bytes)
        outcome = self._filters.apply(text)
        if isinstance(outcome, Dropped):
            rejected = Rejected(item.id, outcome.reason, raw, outcome.detail)
            self.reject("filter", rejected, num_bytes)
            return
        self.masked.update(outcome.masked)
        if outcome.text is not text:
            encoded = outcome.text.encode()
        self.counts["filter"].give(len(encoded))
        self.scripts[script_of(encoded)] += 1
        self._writer.take(item.id, self._source, outcome.text)


def read_documents(path: Path, rows: Container[int] | None = None) -> Iterator[dict[str, str]]:
    """Reads a `.jsonl.zst` back: all documents, or those in some rows."""
    return read_lines(path, rows)


def read_lines(path: Path, rows: Container[int] | None = None) -> Iterator[Any]:
    """Reads the values of any of the `.jsonl.zst` files: of all lines, or of some."""
    if not path.stat().st_size:
        return  # nothing was written: not even an empty frame
    with zstd.open(path, "rb") as lines:
        for row, line in enumerate(lines):
            if rows is None or row in rows:
                yield json.loads(line)


def id_hash(document_id: str) -> int:
    """The number under which `.id_hashes.npy` has a document's id."""
    return int.from_bytes(hashlib.blake2b(document_id.encode(), digest_size=8).digest(), "little")


def script_of(encoded: bytes) -> str:
    """What a UTF-8 text is written in, for reports: the script of at least 70% of its letters."""
    scripts = np.frombuffer(encoded.translate(_SCRIPTS), dtype=np.uint8)
    han, latin, other = (int(np.count_nonzero(scripts == s)) for s in (_HAN, _LATIN, _OTHER))
    letters = han + latin + other
    if not letters:
        return "no letters"
    if han >= 0.7 * letters:
        return "Chinese"
    if latin >= 0.7 * letters:
        return "Latin"
    return "Chinese and Latin" if han + latin >= 0.7 * letters else "other"


def _warn(piece: Piece, duplicate_ids: int, gb18030_files: list[str]) -> None:
    where = f"source {piece.source.name}, {piece.files[0].path}"
    if len(piece.files) > 1:
        where += f" and {len(piece.files) - 1} more files"
    if duplicate_ids:
        logger.warning(
            "%s: %d documents have the same id as an earlier one; all are kept, but splits and "
            "samples treat them alike", where, duplicate_ids,
        )  # fmt: skip
    if gb18030_files:
        logger.warning(
            "%s: %d files are no UTF-8 and were read as GB18030, such as %s",
            where, len(gb18030_files), ", ".join(gb18030_files[:3]),
        )  # fmt: skip


def items(piece: Piece, max_bytes: int, gb18030_files: list[str]) -> Iterator[Document | Rejected]:
    """Yields the documents of a piece as they are in its files, and what could not be read.

    Args:
        piece: files, or ranges of them.
        max_bytes: longest document.
        gb18030_files: paths of files that turn out to be GB18030 are added to it.

    Raises:
        DataError: a file cannot be read, changed since it was listed, or has a longer document.
    """
    for file in piece.files:
        try:
            yield from _items_of_file(piece.source, file, max_bytes, gb18030_files)
            refuse_changed(file)
        except OSError as error:
            raise DataError(f"{file.path} cannot be read: {error}") from error


def _items_of_file(
    source: SourceConfig, file: InputFile, max_bytes: int, gb18030_files: list[str]
) -> Iterator[Document | Rejected]:
    if source.kind == "files":
        encoding = encoding_of(file, source)
        # Of several ranges of a file the first one counts it.
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
