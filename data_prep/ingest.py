"""Stages ingest and normalise, in one pass over a piece: input files to normalised documents.

Writes per piece
    NAME.jsonl.zst        {"id", "source", "text"} a line
    NAME.hashes.npy       (d, 2) uint64, 128-bit hash of each text, for deduplication
    NAME.bytes.npy        (d,) int64, UTF-8 bytes of each text
    NAME.rejected.jsonl   {"id", "reason", "raw"} a line: what did not go on
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from backports import zstd

from data_prep import embedded
from data_prep.config import CleanConfig
from data_prep.counts import Counts
from data_prep.documents import Document, Rejected, read_file
from data_prep.inputs import Piece
from data_prep.normalise import normalise
from data_prep.stage import Task, make_key, replacing
from pipeline.errors import DataError

SUFFIXES = (".jsonl.zst", ".hashes.npy", ".bytes.npy", ".rejected.jsonl")


@dataclass(frozen=True)
class IngestJob:
    """What one task needs to know."""

    piece: Piece
    clean: CleanConfig


def tasks(pieces: list[Piece], clean: CleanConfig, folder: Path) -> list[Task[IngestJob]]:
    """One task a piece."""
    return [
        Task(f"{i:05d}", folder, make_key(asdict(piece), asdict(clean)), IngestJob(piece, clean))
        for i, piece in enumerate(pieces)
    ]


def run(task: Task[IngestJob]) -> tuple[dict[str, Any], list[Path]]:
    """Ingests one piece."""
    job = task.payload
    ingested, normalised = Counts(), Counts()
    hashes: list[bytes] = []
    sizes: list[int] = []
    paths = [task.path(suffix) for suffix in SUFFIXES]
    with ExitStack() as stack:
        text_file, hash_file, size_file, rejected_file = (
            stack.enter_context(stack.enter_context(replacing(path)).open("wb")) for path in paths
        )
        writer = stack.enter_context(zstd.open(text_file, "wb", level=3))
        for item in _items(job.piece, job.clean.max_document_mb * 1_000_000):
            if isinstance(item, Rejected):
                ingested.take(len(item.raw))
                ingested.reject(item.reason, len(item.raw))
                rejected_file.write(item.to_json().encode() + b"\n")
                continue
            size_before = len(item.text.encode())
            ingested.take(size_before)
            ingested.give(size_before)
            normalised.take(size_before)
            text = normalise(item.text)
            if len(text) < job.clean.min_chars:
                reason = f"shorter than {job.clean.min_chars} characters"
                normalised.reject(reason, size_before)
                rejected = Rejected(item.id, reason, item.text.encode())
                rejected_file.write(rejected.to_json().encode() + b"\n")
                continue
            encoded = text.encode()
            normalised.give(len(encoded))
            record = {"id": item.id, "source": job.piece.source.name, "text": text}
            writer.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            hashes.append(hashlib.blake2b(encoded, digest_size=16).digest())
            sizes.append(len(encoded))
        np.save(hash_file, np.frombuffer(b"".join(hashes), dtype="<u8").reshape(-1, 2))
        np.save(size_file, np.array(sizes, dtype=np.int64))
    return {"ingest": ingested.to_json(), "normalise": normalised.to_json()}, paths


def read_documents(path: Path) -> Iterator[dict[str, str]]:
    """Reads a `.jsonl.zst` back."""
    with zstd.open(path, "rt", encoding="utf-8", newline="\n") as lines:
        for line in lines:
            yield json.loads(line)


def _items(piece: Piece, max_bytes: int) -> Iterator[Document | Rejected]:
    for file in piece.files:
        try:
            if piece.source.kind == "files":
                yield from read_file(file, piece.source, max_bytes)
                continue
            for place, raw in embedded.documents(Path(file.path), file.name):
                place = f"{piece.source.name}/{place}"
                try:
                    yield Document(place, raw.decode())
                except UnicodeDecodeError:
                    yield Rejected(place, "invalid UTF-8 document", raw)
        except OSError as error:
            raise DataError(f"{file.path} cannot be read: {error}") from error
