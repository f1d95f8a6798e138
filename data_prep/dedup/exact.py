"""Stages exact and dedup: the first of all documents with equal text is kept, over all pieces.

A document's 128-bit hash decides. Stage exact has one task for each of `parts` equal ranges of hash
values; it reads the hashes of all pieces and holds those of its range, about 60 bytes a document
of the part: `PART_DOCUMENTS`, or as many more as there are copies of one text, however large the
corpus is. Stage dedup is one light task that puts the parts together, piece by piece. "First" is by
piece and line, so the result depends neither on the number of parts nor on which piece was
ingested first.

The parts also find ids that several documents have. Those documents stay; they are counted, and the
first ones are named.

Stage exact writes per part
    PART.duplicates.npy    (2, m) int64: dropped documents, rising, and the kept one of each; both
                           are counted over all pieces
Stage dedup writes per piece
    NAME.keep.npy          (d,) bool
    NAME.duplicates.jsonl  {"id", "kept"} a line, see `data_prep.dedup.dropped`
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.counts import Counts
from data_prep.dedup.dropped import Dropped, Pieces, listed_per_piece, write_lists
from data_prep.ingest import id_hash, read_lines
from data_prep.stage import Done, Task, make_key, replacing

logger = logging.getLogger(__name__)

PART_DOCUMENTS = 8_000_000
REASON = "exact duplicate"
REPEATED_IDS = "documents with the id of another"
_NAMED_IDS = 3


@dataclass(frozen=True)
class ExactJob:
    """One of `parts` equal ranges of hash values, over the pieces of a folder."""

    documents_folder: Path
    names: tuple[str, ...]
    part: int
    parts: int


@dataclass(frozen=True)
class DedupJob:
    """Names of the pieces, in order, their folder, and what the parts found, in files and words."""

    documents_folder: Path
    names: tuple[str, ...]
    part_paths: tuple[Path, ...]
    repeated: int
    examples: tuple[tuple[int, int, int, int], ...]
    """Of ids that are there again: see `run_exact`."""


def exact_tasks(
    upstream: list[Done],
    names: tuple[str, ...],
    documents_folder: Path,
    num_read: int,
    folder: Path,
) -> list[Task[ExactJob]]:
    """One task a part.

    Args:
        upstream: records of the stage that wrote the pieces.
        names: the pieces, in order.
        documents_folder: where they are.
        num_read: documents that ingestion read, for the number of parts.
        folder: of this stage.
    """
    key = make_key([done.digest for done in upstream])
    parts = 1 + num_read // PART_DOCUMENTS
    return [
        Task(
            f"{part:03d}", folder, make_key(key, part, parts),
            ExactJob(documents_folder, names, part, parts),
        )
        for part in range(parts)
    ]  # fmt: skip


def run_exact(task: Task[ExactJob]) -> tuple[dict[str, Any], list[Path]]:
    """Compares the hashes of one range.

    Returns:
        As a result `repeated_ids`, how many documents have an id that an earlier one has, and
        `examples` of them: (number among all documents read, piece, piece of the first one, hash).
    """
    job = task.payload
    path = task.path(".duplicates.npy")
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.save(file, _equal_texts(job))
    repeated, examples = _equal_ids(job)
    return {"repeated_ids": repeated, "examples": examples}, [path]


def dedup_tasks(
    exact: list[Task[ExactJob]], found: list[Done], upstream: list[Done], folder: Path
) -> list[Task[DedupJob]]:
    """The one task of this stage; `exact` and `found` are the tasks before and their records."""
    examples = sorted(tuple(example) for done in found for example in done.result["examples"])
    job = DedupJob(
        exact[0].payload.documents_folder,
        exact[0].payload.names,
        tuple(task.path(".duplicates.npy") for task in exact),
        sum(done.result["repeated_ids"] for done in found),
        tuple(examples[:_NAMED_IDS]),
    )
    key = make_key(
        [done.digest for done in upstream], [done.digest for done in found], job.repeated,
        job.examples,
    )  # fmt: skip
    return [Task("all", folder, key, job)]


def run_dedup(task: Task[DedupJob]) -> tuple[dict[str, Any], list[Path]]:
    """Writes masks and lists of all pieces.

    Returns:
        As a result the counts, `repeated_ids`, how many documents have an id that an earlier one
        has, and `examples`, up to three of these ids.
    """
    job = task.payload
    pieces = Pieces.of(job.documents_folder, job.names)
    tables = [np.load(path, mmap_mode="r") for path in job.part_paths]
    counts = Counts()
    listed = []
    for name, start, end in zip(job.names, pieces.starts, pieces.ends.tolist(), strict=True):
        sizes = np.load(job.documents_folder / f"{name}.bytes.npy")
        dropped = _between(tables, start, end)
        keep = np.ones(len(sizes), dtype=bool)
        keep[dropped[0] - start] = False
        counts.mask(sizes, keep, REASON)
        with replacing(task.folder / f"{name}.keep.npy") as temporary, temporary.open("wb") as file:
            np.save(file, keep)
        listed.append(dropped[:, : listed_per_piece(pieces)])
    rows = np.concatenate(listed, axis=1)
    lists = write_lists(pieces, Dropped(rows[0], rows[1]), task.folder, ".duplicates.jsonl")
    paths = [*(task.folder / f"{name}.keep.npy" for name in job.names), *lists]
    examples = [text for example in job.examples if (text := _id_of(job, example))]
    if job.repeated:
        logger.warning(
            "%s documents have the id of an earlier one, such as %s; all are kept, but splits and "
            "samples treat them alike", f"{job.repeated:,}", ", ".join(examples) or "rejected ones",
        )  # fmt: skip
    return {
        "dedup": counts.to_json(), "repeated_ids": job.repeated, "examples": examples
    }, paths  # fmt: skip


def _between(tables: list[npt.NDArray[np.int64]], start: int, end: int) -> npt.NDArray[np.int64]:
    """(2, m) duplicates of the documents from `start` to `end`, rising."""
    slices = []
    for table in tables:
        low, high = np.searchsorted(table[0], [start, end]).tolist()
        slices.append(np.array(table[:, low:high]))
    joined = np.concatenate(slices, axis=1)
    return joined[:, np.argsort(joined[0])]


def in_part(hashes: npt.NDArray[np.uint64], part: int, parts: int) -> npt.NDArray[np.bool_]:
    """Which hashes are in the part: of `parts` equal ranges of their upper half."""
    scaled = (hashes >> np.uint64(32)) * np.uint64(parts)
    chosen: npt.NDArray[np.bool_] = (scaled >> np.uint64(32)) == part
    return chosen


def _equal_texts(job: ExactJob) -> npt.NDArray[np.int64]:
    """(2, m), by dropped document."""
    first, second = [np.zeros(0, dtype=np.uint64)], [np.zeros(0, dtype=np.uint64)]
    numbers = [np.zeros(0, dtype=np.int64)]
    start = 0
    for name in job.names:
        hashes = np.load(job.documents_folder / f"{name}.hashes.npy")
        chosen = np.flatnonzero(in_part(hashes[:, 0], job.part, job.parts))
        first.append(hashes[chosen, 0])
        second.append(hashes[chosen, 1])
        numbers.append(start + chosen)
        start += len(hashes)
    low, high, documents = (np.concatenate(part) for part in (first, second, numbers))
    del first, second, numbers
    order = np.lexsort((high, low))  # stable: equal hashes stay in order
    low, high = low[order], high[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (low[1:] != low[:-1]) | (high[1:] != high[:-1])
    return _later_and_first(documents[order], new)


def _later_and_first(
    documents: npt.NDArray[np.integer[Any]], new: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """(2, m): documents that are not `new`, rising, and the last new one before each."""
    later = np.flatnonzero(~new)
    firsts = np.flatnonzero(new)
    first = firsts[np.searchsorted(firsts, later) - 1]
    pairs = np.stack([documents[later], documents[first]])
    return pairs[:, np.argsort(pairs[0])]


def _equal_ids(job: ExactJob) -> tuple[int, list[tuple[int, int, int, int]]]:
    """How many documents have an id that is there before, and the first of them."""
    found, numbers = [np.zeros(0, dtype=np.uint64)], [np.zeros(0, dtype=np.int64)]
    ends = []
    start = 0
    for name in job.names:
        hashes = np.load(job.documents_folder / f"{name}.id_hashes.npy")
        chosen = np.flatnonzero(in_part(hashes, job.part, job.parts))
        found.append(hashes[chosen])
        numbers.append(start + chosen)
        start += len(hashes)
        ends.append(start)
    hashes, documents = np.concatenate(found), np.concatenate(numbers)
    del found, numbers
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = ordered[1:] != ordered[:-1]
    pairs = _later_and_first(documents[order], new)
    named = pairs[:, :_NAMED_IDS]
    pieces = np.searchsorted(ends, named, side="right")
    values = hashes[np.searchsorted(documents, named[0])]
    examples = zip(named[0].tolist(), *pieces.tolist(), values.tolist(), strict=True)
    return pairs.shape[1], list(examples)


def _id_of(job: DedupJob, example: tuple[int, int, int, int]) -> str | None:
    """The id with the example's hash, if one of its documents goes on."""
    _, piece, first_piece, wanted = example
    for number in (piece, first_piece):
        for text in read_lines(job.documents_folder / f"{job.names[number]}.ids.jsonl.zst"):
            if id_hash(text) == wanted:
                return str(text)
    return None
