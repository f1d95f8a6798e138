"""Stages line_hashes, line_parts and lines: lines that occurred before are dropped.

This finds the boilerplate of many pages (menus, licences, "read more") without rules. The first of
several equal lines stays, by document and line over all pieces; lines with fewer than
`dedup.line_min_chars` characters always stay, since "}" or a year depend on their context. A
document that is left without any line long enough to be compared has no text of its own and is
rejected. CCNet (Wenzek et al. 2020) drops repeated paragraphs by hash, too.

A line's 64-bit hash decides. Of 3 billion different lines 0.25 pairs are expected to share one.

Stage line_hashes writes per piece, of its L lines that are long enough
    NAME.hashes.npy     (u,) uint64, rising: each hash once
    NAME.first.npy      (u,) uint32, the first line with it, 0 to L - 1
Stage line_parts, for each of `parts` equal ranges of hash values
    PART.repeated.npy   (m,) int64, rising: lines of NAME.first.npy, numbered over all pieces, that
                        an earlier piece has too
Stage lines writes the files of a piece again, without these lines.

A part task holds its range of hashes, about 50 bytes for each of `PART_LINES`. Since a piece gives
a hash only once, a line that half of all documents have makes no part large.
"""

import hashlib
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep import stage
from data_prep.corpus import Progress
from data_prep.pieces import (
    PIECE_FILES,
    Hashes,
    Mask,
    Numbers,
    piece_paths,
    piece_writer,
    read_documents,
)
from data_prep.types import Rejected

PART_LINES = 16_000_000
NOTHING_NEW = "no long line that was not seen before"
_BLANK_LINES = re.compile("\n{3,}")
_LINE_BYTES = 90  # of an average line, for estimates


@dataclass(frozen=True)
class HashJob:
    """One ingested piece."""

    documents: Path
    min_chars: int


@dataclass(frozen=True)
class PartJob:
    """One of `parts` equal ranges of hash values."""

    hash_folder: Path
    names: tuple[str, ...]
    num_lines: tuple[int, ...]
    """Long lines of every piece."""
    part: int
    parts: int


@dataclass(frozen=True)
class RewriteJob:
    """The task that hashed a piece, and the results of all parts."""

    hashed: stage.StageTask[HashJob]
    part_paths: tuple[Path, ...]
    first_line: int
    num_lines: int
    min_chars: int
    """Shorter documents are rejected."""


def hash_tasks(progress: Progress, folder: Path) -> list[stage.StageTask[HashJob]]:
    """Make one task per piece."""
    # Shorter lines always stay: "}" or a year depend on their context.
    pieces, min_chars = progress.pieces, progress.corpus.config.dedup.line_min_chars
    made = []
    for name, done in zip(pieces.names, progress.written, strict=True):
        job = HashJob(pieces.documents_path(name), min_chars)
        made.append(stage.StageTask(name, folder, stage.make_key(done.digest, min_chars), job))
    return made


def run_hashes(task: stage.StageTask[HashJob]) -> stage.Result:
    """Hash the lines of one piece."""
    hashes = array("Q")
    for document in read_documents(task.payload.documents):
        for line in document["text"].split("\n"):
            if len(line) >= task.payload.min_chars:
                digest = hashlib.blake2b(line.encode(), digest_size=8).digest()
                hashes.append(int.from_bytes(digest, "little"))
    distinct, first = np.unique(np.frombuffer(hashes, dtype=np.uint64), return_index=True)
    paths = [task.path(".hashes.npy"), task.path(".first.npy")]
    stage.save_array(paths[0], distinct)
    stage.save_array(paths[1], first.astype(np.uint32))
    return {"lines": len(hashes), "distinct": len(distinct)}, paths


def part_tasks(
    hash_tasks: list[stage.StageTask[HashJob]], hashed: list[stage.Done], folder: Path
) -> list[stage.StageTask[PartJob]]:
    """Make one task per part; `hash_tasks` and `hashed` are tasks and records of line_hashes."""
    key = stage.make_key([done.digest for done in hashed])
    parts = 1 + sum(done.result["distinct"] for done in hashed) // PART_LINES
    names = tuple(task.name for task in hash_tasks)
    num_lines = tuple(done.result["lines"] for done in hashed)
    made = []
    for part in range(parts):
        job = PartJob(hash_tasks[0].folder, names, num_lines, part, parts)
        made.append(
            stage.StageTask(stage.task_name(part, 4), folder, stage.make_key(key, part, parts), job)
        )
    return made


def run_part(task: stage.StageTask[PartJob]) -> stage.Result:
    """Find lines of one range that an earlier piece has."""
    job = task.payload
    hashes, lines = [np.zeros(0, dtype=np.uint64)], [np.zeros(0, dtype=np.int64)]
    start = 0
    for name, num_lines in zip(job.names, job.num_lines, strict=True):
        table = np.load(job.hash_folder / f"{name}.hashes.npy", mmap_mode="r")
        here = _range(table, job.part, job.parts)
        hashes.append(np.array(table[here]))
        first = np.load(job.hash_folder / f"{name}.first.npy", mmap_mode="r")
        lines.append(start + first[here].astype(np.int64))
        start += num_lines
    repeated = _repeated(np.concatenate(hashes), np.concatenate(lines))
    path = task.path(".repeated.npy")
    stage.save_array(path, repeated)
    return {"repeated": len(repeated)}, [path]


def rewrite_tasks(progress: Progress, folder: Path) -> list[stage.StageTask[RewriteJob]]:
    """Make one task per piece; `folder` replaces that of ingestion."""
    tasks, records = progress.tasks, progress.records
    config, pieces = progress.corpus.config, progress.corpus.pieces
    key = stage.make_key([done.digest for done in records["line_parts"]])
    part_paths = tuple(task.path(".repeated.npy") for task in tasks["line_parts"])
    made = []
    start = 0
    hashed = (tasks["line_hashes"], records["line_hashes"], progress.written, pieces)
    for task, own, done, piece in zip(*hashed, strict=True):
        num_lines = own.result["lines"]
        min_chars = config.clean_of(piece.source).min_chars
        job = RewriteJob(task, part_paths, start, num_lines, min_chars)
        made.append(
            stage.StageTask(
                task.name, folder, stage.make_key(key, done.digest, own.key, start, min_chars), job
            )
        )
        start += num_lines
    return made


def run_rewrite(task: stage.StageTask[RewriteJob]) -> stage.Result:
    """Write one piece without the lines that occurred before."""
    job, ingested = task.payload, task.payload.hashed.payload
    counts = stage.StageCounts()
    keep = iter(_kept(job).tolist())
    with piece_writer(task) as writer:
        id_hashes = np.load(ingested.documents.with_suffix("").with_suffix(".id_hashes.npy"))
        writer.id_hashes.frombytes(id_hashes.tobytes())
        for document in read_documents(ingested.documents):
            text, num_dropped, num_kept = _without(document["text"], keep, ingested.min_chars)
            size, left = (len(part.encode()) for part in (document["text"], text))
            metadata = document.get("metadata", {})
            counts.take(size)
            if num_dropped:
                counts.reject(stage.SEEN_LINE, size - left, num_dropped)
            reason = None
            if num_dropped and not num_kept:
                reason = NOTHING_NEW
            elif len(text) < job.min_chars:
                reason = f"shorter than {job.min_chars} characters"
            if reason:
                counts.reject(reason, left)
                raw = document["text"].encode()
                writer.reject(Rejected(document["id"], reason, raw, metadata=metadata))
                continue
            counts.give(left)
            writer.take(document["id"], document["source"], text, metadata)
    return {"lines": counts.to_json()}, piece_paths(task)


def estimates(size: stage.Size) -> dict[str, stage.Estimate]:
    """Estimate the cost of each stage."""
    lines, mb, pieces = size.text_bytes / _LINE_BYTES, size.text_bytes / 1e6, size.pieces
    parts = 1 + int(lines) // PART_LINES
    return {
        "line_hashes": stage.Estimate(
            pieces, mb / 60, 12 * lines, 100e6 + 40 * lines / pieces, 3 * pieces
        ),
        "line_parts": stage.Estimate(
            parts, lines * 0.3e-6, lines, 100e6 + 50 * lines / parts, 2 * parts
        ),
        "lines": stage.Estimate(
            pieces, mb / 35, 0.45 * size.text_bytes, 150e6, (PIECE_FILES + 1) * pieces
        ),
    }


def _range(table: Hashes, part: int, parts: int) -> slice:
    """Return the slice of a rising table with the part's hashes."""
    first, after = (-(-number * 2**32 // parts) << 32 for number in (part, part + 1))
    low = int(np.searchsorted(table, np.uint64(first)))
    high = len(table) if part + 1 == parts else int(np.searchsorted(table, np.uint64(after)))
    return slice(low, high)


def _repeated(hashes: Hashes, lines: Numbers) -> Numbers:
    """Return the lines whose hash an earlier entry has, rising."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    again = np.flatnonzero(ordered[1:] == ordered[:-1]) + 1
    repeated = lines[order[again]]
    repeated.sort()
    return repeated


def _kept(job: RewriteJob) -> Mask:
    """Return (L,) bool: the long lines of the piece that stay."""
    keep = np.zeros(job.num_lines, dtype=bool)
    keep[np.load(job.hashed.path(".first.npy"))] = True
    for path in job.part_paths:
        table = np.load(path, mmap_mode="r")
        low, high = np.searchsorted(table, [job.first_line, job.first_line + job.num_lines])
        keep[table[low:high] - job.first_line] = False
    return keep


def _without(text: str, keep: Iterator[bool], min_chars: int) -> tuple[str, int, int]:
    """Return the text without dropped lines, and the numbers of dropped and kept long lines."""
    lines, long_kept, dropped = [], 0, 0
    for line in text.split("\n"):
        if len(line) >= min_chars:
            if not next(keep):
                dropped += 1
                continue
            long_kept += 1
        lines.append(line)
    if not dropped:
        return text, 0, long_kept
    return _BLANK_LINES.sub("\n\n", "\n".join(lines)).strip("\n"), dropped, long_kept
