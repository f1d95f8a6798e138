"""Stages ingest, normalise and filter, in one pass over the input files of a piece.

Writes the files of `data_prep.pieces`. A task's result holds counts by stage, `notes`, counts of
what is worth knowing but not rejected (masked personal data, repeated ids within the piece, files
read as GB18030), `scripts`, the accepted documents by the script that they are written in, and
`metadata`, their values in the fields that the source names.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.clean.normalise import normalise
from data_prep.config import CleanConfig, FiltersConfig, PrepConfig
from data_prep.documents import ReadStats, read_piece
from data_prep.filters.rules import Chain, Dropped, key_parts
from data_prep.pieces import (
    PIECE_FILES,
    PieceWriter,
    id_hash,
    piece_name,
    piece_paths,
    piece_writer,
)
from data_prep.plugins import digest
from data_prep.stage import (
    INGEST_STAGES,
    REPEATED_IDS,
    Estimate,
    Result,
    Size,
    StageCounts,
    StageTask,
    make_key,
)
from data_prep.types import Document, InputPiece, Metadata, Rejected

logger = logging.getLogger(__name__)

# First bytes of UTF-8 sequences: letters of ASCII, Han (U+4000 to U+9FFF, all common ones), and all
# others but those of general punctuation and symbols (E2) and of CJK punctuation and kana (E3).
_HAN, _LATIN, _OTHER = 1, 2, 3
_SCRIPTS = bytearray(256)
_SCRIPTS[0xE4:0xEA] = [_HAN] * 6
_SCRIPTS[0x41:0x5B] = _SCRIPTS[0x61:0x7B] = [_LATIN] * 26
for _first, _end in ((0xC3, 0xE2), (0xEA, 0xEF), (0xF0, 0xF5)):
    _SCRIPTS[_first:_end] = [_OTHER] * (_end - _first)


# Different values that are counted; URLs have more.
_MOST_VALUES = 1000
_MOST_CHARS = 60


@dataclass(frozen=True)
class IngestJob:
    """Input and settings of one task."""

    piece: InputPiece
    clean: CleanConfig
    filters: tuple[FiltersConfig, ...]
    """Filters of the piece's source."""


def tasks(
    pieces: Sequence[InputPiece], config: PrepConfig, folder: Path
) -> list[StageTask[IngestJob]]:
    """Make one task per piece."""
    made = []
    parts: dict[tuple[FiltersConfig, ...], list[Any]] = {}
    for i, piece in enumerate(pieces):
        source = piece.source
        described = {"source": source.of_texts(), "files": [asdict(file) for file in piece.files]}
        if source.reader:
            described["reader"] = digest(source.reader, f"source {source.name!r}: reader")
        clean, chosen = config.clean_of(source), config.filters_of(source)
        if chosen not in parts:  # reads the files of words and of own rules once
            parts[chosen] = [part for rules in chosen for part in key_parts(rules)]
        key = make_key(described, clean.of_texts(), *parts[chosen])
        made.append(StageTask(piece_name(i), folder, key, IngestJob(piece, clean, chosen)))
    return made


def run(task: StageTask[IngestJob]) -> Result:
    """Ingest one piece."""
    job = task.payload
    remarks = ReadStats()
    with piece_writer(task) as writer:
        results = _Results(job, writer)
        for item in read_piece(job.piece, job.clean, remarks):
            if isinstance(item, Document):
                writer.id_hashes.append(id_hash(item.id))
                results.take(item)
            else:
                results.counts["ingest"].take(len(item.raw), max(1, item.rows))
                results.reject("ingest", item, len(item.raw))
    hashes_of_ids = np.array(writer.id_hashes, dtype=np.uint64)
    duplicate_ids = len(hashes_of_ids) - len(np.unique(hashes_of_ids))
    _warn(job.piece, duplicate_ids, remarks)
    notes = {
        **{f"masked: {kind}": count for kind, count in sorted(results.masked.items())},
        **{f"characters of HTML removed: {kind}": n for kind, n in sorted(results.cut.items())},
        REPEATED_IDS: duplicate_ids,
        **{f"files read as {name}": len(paths) for name, paths in remarks.encodings.items()},
        "long documents that were split": remarks.num_split,
    }
    stages = {name: counts.to_json() for name, counts in results.counts.items()}
    scripts = dict(sorted(results.scripts.items()))
    metadata = {name: asdict(counts) for name, counts in results.metadata.items()}
    read = remarks.reading.to_json()
    result = {**stages, "notes": notes, "scripts": scripts, "metadata": metadata, "read": read}
    return result, piece_paths(task)


def estimates(size: Size) -> dict[str, Estimate]:
    """Estimate the cost; filters take nearly as long as all the rest."""
    names = ("shape", "script", "quality", "repetition", "c4", "mask")
    every = [rules for source in size.config.sources for rules in size.config.filters_of(source)]
    filtered = any(getattr(rules, name).enabled for rules in every for name in names)
    cpu_s = size.text_bytes / 1e6 * (1 / 32 + (1 / 23 if filtered else 0))
    longest = max(size.config.clean_of(source).max_document_mb for source in size.config.sources)
    longest_mb = longest if size.largest_bytes > 1e9 else 0
    memory, files = 150e6 + 25e6 * longest_mb, (PIECE_FILES + 1) * size.pieces
    return {"ingest": Estimate(size.pieces, cpu_s, 0.45 * size.text_bytes, memory, files)}


class _Results:
    """Takes documents through normalisation and filters, and counts them."""

    def __init__(self, job: IngestJob, writer: PieceWriter) -> None:
        self.counts = {name: StageCounts() for name in INGEST_STAGES}
        self.masked = Counter[str]()
        self.cut = Counter[str]()
        self.scripts = Counter[str]()
        self.metadata: dict[str, FieldCounts] = {}
        self._source = job.piece.source.name
        self._clean, self._min_chars = job.clean, job.clean.min_chars
        self._filters = Chain(job.filters, self._source)
        self._writer = writer

    def reject(self, stage: str, item: Rejected, num_bytes: int) -> None:
        """Count and store a rejected document."""
        self.counts[stage].reject(item.reason, num_bytes, max(1, item.rows))
        self._writer.reject(item)

    def take(self, item: Document) -> None:
        """Normalise, filter and write one document."""
        raw = item.text.encode()
        for stage in ("ingest", "normalise"):
            self.counts[stage].take(len(raw))
        self.counts["ingest"].give(len(raw))
        text = normalise(item.text, self._clean, self.cut)
        if len(text) < self._min_chars:
            reason = f"shorter than {self._min_chars} characters"
            rejected = Rejected(item.id, reason, raw, metadata=item.metadata)
            self.reject("normalise", rejected, len(raw))
            return
        encoded = text.encode()
        num_bytes = len(encoded)
        self.counts["normalise"].give(num_bytes)
        self.counts["filter"].take(num_bytes)
        outcome = self._filters.apply(text, item)
        if isinstance(outcome, Dropped):
            rejected = Rejected(item.id, outcome.reason, raw, outcome.detail, item.metadata)
            self.reject("filter", rejected, num_bytes)
            return
        self.masked.update(outcome.masked)
        if outcome.text is not text:
            encoded = outcome.text.encode()
        self.counts["filter"].give(len(encoded))
        self.scripts[script_of(encoded)] += 1
        count(self.metadata, item.metadata)
        self._writer.take(item.id, self._source, outcome.text, item.metadata)


def script_of(encoded: bytes) -> str:
    """Name the script of a UTF-8 text for reports: that of at least 70% of its letters."""
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


def _warn(piece: InputPiece, duplicate_ids: int, remarks: ReadStats) -> None:
    where = f"source {piece.source.name}, {piece.files[0].path}"
    if len(piece.files) > 1:
        where += f" and {len(piece.files) - 1} more files"
    if duplicate_ids:
        logger.warning(
            "%s: %d documents have the same id as an earlier one; all are kept, but splits and "
            "samples treat them alike",
            where,
            duplicate_ids,
        )
    for name, paths in remarks.encodings.items():
        text = "%s: %d files are read as %s, such as %s"
        logger.warning(text, where, len(paths), name, ", ".join(paths[:3]))


@dataclass
class FieldCounts:
    """What is known of the values of one field; counts of tasks add up in any order."""

    documents: int = 0
    """Number of documents that have the field."""
    values: dict[str, int] | None = field(default_factory=dict)
    """Value -> documents; None if there are more than `_MOST_VALUES`."""
    first: str = ""
    last: str = ""
    """The smallest and the largest value as text, such as of dates."""

    def add(self, value: str) -> None:
        """Count a document with a value."""
        self.first = min(self.first, value) if self.documents else value
        self.last = max(self.last, value)
        self.documents += 1
        if self.values is not None:
            self.values[value] = self.values.get(value, 0) + 1
            if len(self.values) > _MOST_VALUES:
                self.values = None

    def merge(self, other: "FieldCounts") -> None:
        """Add the counts of another task."""
        ends = [end for each in (self, other) if each.documents for end in (each.first, each.last)]
        if ends:
            self.first, self.last = min(ends), max(ends)
        self.documents += other.documents
        both = None
        if self.values is not None and other.values is not None:
            both = dict(Counter(self.values) + Counter(other.values))
        self.values = None if both is None or len(both) > _MOST_VALUES else both


def count(counts: dict[str, FieldCounts], metadata: Metadata) -> None:
    """Count the values of one document, cut to what a table can show."""
    for name, value in metadata.items():
        counts.setdefault(name, FieldCounts()).add(str(value)[:_MOST_CHARS])


def merged(of_tasks: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, FieldCounts]:
    """Add up the counts of tasks, as `asdict` made plain values of them."""
    whole: dict[str, FieldCounts] = {}
    for counts in of_tasks:
        for name, values in counts.items():
            whole.setdefault(name, FieldCounts()).merge(FieldCounts(**values))
    return dict(sorted(whole.items()))


def shown(counts: FieldCounts, most: int = 3) -> str:
    """List the most frequent values, or where all differ the first and the last."""
    if counts.values is None or len(counts.values) == counts.documents > most:
        return f"{counts.first} to {counts.last}"
    common = Counter(counts.values).most_common(most)
    texts = [f"{value} ({100 * n / counts.documents:.1f}%)" for value, n in common]
    more = len(counts.values) - len(common)
    return ", ".join(texts) + (f" and {more:,} more" if more else "")
