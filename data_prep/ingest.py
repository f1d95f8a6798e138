"""Stages ingest, normalise and filter, in one pass over a piece: input files to documents.

Writes per piece
    NAME.jsonl.zst        {"id", "source", "text"} a line
    NAME.hashes.npy       (d, 2) uint64, 128-bit hash of each text, for deduplication
    NAME.bytes.npy        (d,) int64, UTF-8 bytes of each text
    NAME.rejected.jsonl   {"id", "reason", "raw"} a line: what did not go on

The task's result also has `duplicate_ids`, documents of the piece whose id an earlier one has (they
go on), `gb18030_files`, files that were found not to be UTF-8, and `masked`, placeholders for
personal data by kind.
"""

import hashlib
import json
import logging
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from backports import zstd

from data_prep import embedded
from data_prep.config import CleanConfig
from data_prep.counts import Counts
from data_prep.documents import Document, Rejected, encoding_of, read_file
from data_prep.filter_config import FiltersConfig
from data_prep.filters import Dropped, Filters, key_parts
from data_prep.inputs import Piece
from data_prep.normalise import normalise
from data_prep.stage import Task, make_key, replacing
from pipeline.errors import DataError

logger = logging.getLogger(__name__)

STAGES = ("ingest", "normalise", "filter")
SUFFIXES = (".jsonl.zst", ".hashes.npy", ".bytes.npy", ".rejected.jsonl")


@dataclass(frozen=True)
class IngestJob:
    """What one task needs to know."""

    piece: Piece
    clean: CleanConfig
    filters: FiltersConfig


def tasks(
    pieces: list[Piece], clean: CleanConfig, filters: FiltersConfig, folder: Path
) -> list[Task[IngestJob]]:
    """One task a piece.

    Raises:
        ConfigError: the list of bad words is unusable.
    """
    settings = [asdict(clean), *key_parts(filters)]
    return [
        Task(
            f"{i:05d}", folder, make_key(asdict(piece), *settings), IngestJob(piece, clean, filters)
        )
        for i, piece in enumerate(pieces)
    ]


def run(task: Task[IngestJob]) -> tuple[dict[str, Any], list[Path]]:
    """Ingests one piece."""
    job = task.payload
    max_bytes = job.clean.max_document_mb * 1_000_000
    gb18030_files: list[str] = []
    id_hashes = array("Q")
    paths = [task.path(suffix) for suffix in SUFFIXES]
    with ExitStack() as stack:
        files = [
            stack.enter_context(stack.enter_context(replacing(path)).open("wb")) for path in paths
        ]
        documents = cast("IO[bytes]", stack.enter_context(zstd.open(files[0], "wb", level=3)))
        results = _Results(job, documents, files[3])
        for item in _items(job.piece, max_bytes, gb18030_files):
            if isinstance(item, Document):
                id_hashes.append(_hash64(item.id))
                results.take(item)
            else:
                results.counts["ingest"].take(len(item.raw))
                results.reject("ingest", item, item.reason, len(item.raw))
        np.save(files[1], np.frombuffer(b"".join(results.hashes), dtype="<u8").reshape(-1, 2))
        np.save(files[2], np.array(results.sizes, dtype=np.int64))
    duplicate_ids = len(id_hashes) - len(np.unique(np.array(id_hashes, dtype=np.uint64)))
    _warn(job.piece, duplicate_ids, gb18030_files)
    notes = {
        **{f"masked: {kind}": count for kind, count in sorted(results.masked.items())},
        "documents with the id of another": duplicate_ids,
        "files read as GB18030": len(gb18030_files),
    }
    stages = {name: counts.to_json() for name, counts in results.counts.items()}
    return {**stages, "notes": notes}, paths


class _Results:
    """Documents on their way through normalisation and filters, and what is left of them."""

    def __init__(self, job: IngestJob, documents: IO[bytes], rejected: IO[bytes]) -> None:
        self.counts = {name: Counts() for name in STAGES}
        self.masked = Counter[str]()
        self.hashes: list[bytes] = []
        self.sizes: list[int] = []
        self._source = job.piece.source.name
        self._min_chars = job.clean.min_chars
        self._filters = Filters(job.filters)
        self._documents, self._rejected = documents, rejected

    def reject(self, stage: str, item: Rejected, reason: str, num_bytes: int) -> None:
        """Keeps aside what does not go on; `reason` is counted, `item` has it with its numbers."""
        self.counts[stage].reject(reason, num_bytes)
        self._rejected.write(item.to_json().encode() + b"\n")

    def take(self, item: Document) -> None:
        """Normalises, filters and writes one document."""
        raw = item.text.encode()
        for stage in ("ingest", "normalise"):
            self.counts[stage].take(len(raw))
        self.counts["ingest"].give(len(raw))
        text = normalise(item.text)
        if len(text) < self._min_chars:
            reason = f"shorter than {self._min_chars} characters"
            self.reject("normalise", Rejected(item.id, reason, raw), reason, len(raw))
            return
        num_bytes = len(text.encode())
        self.counts["normalise"].give(num_bytes)
        self.counts["filter"].take(num_bytes)
        outcome = self._filters.apply(text)
        if isinstance(outcome, Dropped):
            rejected = Rejected(item.id, str(outcome), raw)
            self.reject("filter", rejected, outcome.reason, num_bytes)
            return
        self.masked.update(outcome.masked)
        encoded = outcome.text.encode()
        self.counts["filter"].give(len(encoded))
        record = {"id": item.id, "source": self._source, "text": outcome.text}
        self._documents.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self.hashes.append(hashlib.blake2b(encoded, digest_size=16).digest())
        self.sizes.append(len(encoded))


def read_documents(path: Path) -> Iterator[dict[str, str]]:
    """Reads a `.jsonl.zst` back."""
    with zstd.open(path, "rt", encoding="utf-8", newline="\n") as lines:
        for line in lines:
            yield json.loads(line)


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


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


def _items(piece: Piece, max_bytes: int, gb18030_files: list[str]) -> Iterator[Document | Rejected]:
    for file in piece.files:
        try:
            if piece.source.kind == "files":
                encoding = encoding_of(file, piece.source)
                # Of several ranges of a file the first one counts it.
                if encoding == "gb18030" and piece.source.encoding == "auto" and not file.start:
                    gb18030_files.append(file.path)
                yield from read_file(file, piece.source, max_bytes, encoding)
                continue
            for place, raw in embedded.documents(Path(file.path), file.name):
                place = f"{piece.source.name}/{place}"
                try:
                    yield Document(place, raw.decode())
                except UnicodeDecodeError:
                    yield Rejected(place, "invalid UTF-8 document", raw)
        except OSError as error:
            raise DataError(f"{file.path} cannot be read: {error}") from error
