"""Stages exact and dedup: of all documents with equal text the first is kept, over all pieces.

A document's 128-bit hash decides. Stage exact has one task for each of `parts` equal ranges of hash
values; it reads the hashes of all pieces and holds those of its range, about 60 bytes a document
of the part: `PART_DOCUMENTS`, or more where one text has more copies than that, however large the
corpus is. Stage dedup is one light task that combines the parts, piece by piece. "First" is by
piece and line, so the result depends neither on the number of parts nor on the order in which
pieces were ingested.

The parts also find ids that several documents have. Those documents stay; they are counted, and the
first ones are named.

Stage exact writes per part
    PART.duplicates.npy    (2, m) int64: dropped documents, rising, and the kept one of each; both
                           are numbered over all pieces
Stage dedup writes per piece
    NAME.keep.npy          (d,) bool
    NAME.duplicates.jsonl  {"id", "kept"} a line, see `data_prep.pieces`
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.dedup.minhash import bins
from data_prep.pieces import Numbers, Pieces, id_hash, list_bytes, listed_per_piece, write_dropped
from data_prep.stage import (
    Done,
    Estimate,
    Result,
    Size,
    StageCounts,
    StageTask,
    make_key,
    save_array,
    task_name,
)

logger = logging.getLogger(__name__)

PART_DOCUMENTS = 8_000_000
REASON = "exact duplicate"
_NAMED_IDS = 3

_Example = tuple[int, int, int, int]
"""A repeated id: (number among all documents read, piece, piece of the first one, hash)."""


@dataclass(frozen=True)
class ExactJob:
    """One of `parts` equal ranges of hash values, over all pieces."""

    pieces: Pieces
    part: int
    parts: int


@dataclass(frozen=True)
class DedupJob:
    """The pieces, and the results of all parts."""

    pieces: Pieces
    part_paths: tuple[Path, ...]
    repeated: int
    examples: tuple[_Example, ...]


def exact_tasks(
    written: list[Done], pieces: Pieces, num_read: int, folder: Path
) -> list[StageTask[ExactJob]]:
    """Make one task per part; `num_read` documents, which ingestion read, decide their number."""
    key = make_key([done.digest for done in written])
    parts = 1 + num_read // PART_DOCUMENTS
    return [
        StageTask(
            task_name(part, 3), folder, make_key(key, part, parts), ExactJob(pieces, part, parts)
        )
        for part in range(parts)
    ]


def run_exact(task: StageTask[ExactJob]) -> Result:
    """Compare the hashes of one range."""
    job = task.payload
    path = task.path(".duplicates.npy")
    save_array(path, _repeats(job, ".hashes.npy")[-1])
    repeated, examples = _equal_ids(job)
    return {"repeated_ids": repeated, "examples": examples}, [path]


def dedup_tasks(
    exact: list[StageTask[ExactJob]], compared: list[Done], written: list[Done], folder: Path
) -> list[StageTask[DedupJob]]:
    """Make the one task of stage dedup; `exact` and `compared` are tasks and records of exact."""
    examples = sorted(tuple(example) for done in compared for example in done.result["examples"])
    job = DedupJob(
        exact[0].payload.pieces,
        tuple(task.path(".duplicates.npy") for task in exact),
        sum(done.result["repeated_ids"] for done in compared),
        tuple(examples[:_NAMED_IDS]),
    )
    digests = [[done.digest for done in records] for records in (written, compared)]
    return [StageTask("all", folder, make_key(*digests, job.repeated, job.examples), job)]


def run_dedup(task: StageTask[DedupJob]) -> Result:
    """Write masks and lists of all pieces."""
    job, pieces = task.payload, task.payload.pieces
    tables = [np.load(path, mmap_mode="r") for path in job.part_paths]
    counts = StageCounts()
    masks, listed = [], []
    for name, start, end in zip(pieces.names, pieces.starts, pieces.ends.tolist(), strict=True):
        sizes = pieces.sizes(name)
        dropped = _between(tables, start, end)
        keep = np.ones(len(sizes), dtype=bool)
        keep[dropped[0] - start] = False
        counts.mask(sizes, keep, REASON)
        masks.append(task.folder / f"{name}.keep.npy")
        save_array(masks[-1], keep)
        listed.append(dropped[:, : listed_per_piece(pieces)])
    rows = np.concatenate(listed, axis=1)
    lists = write_dropped((task.folder, ".duplicates.jsonl"), pieces, rows[0], rows[1])
    examples = [text for example in job.examples if (text := _id_of(pieces, example))]
    if job.repeated:
        text = (
            "%s documents have the id of an earlier one, such as %s; all are kept, but splits and "
            "samples treat them alike"
        )
        logger.warning(text, f"{job.repeated:,}", ", ".join(examples) or "rejected ones")
    result = {"dedup": counts.to_json(), "repeated_ids": job.repeated, "examples": examples}
    return result, [*masks, *lists]


def estimates(size: Size) -> dict[str, Estimate]:
    """Estimate the cost of each stage."""
    documents, parts = size.documents, 1 + int(size.documents) // PART_DOCUMENTS
    memory = 150e6 + list_bytes(documents)
    return {
        "exact": Estimate(
            parts, documents * 1e-6, documents, 100e6 + 60 * documents / parts, 2 * parts
        ),
        "dedup": Estimate(1, documents * 2.5e-6, documents, memory, 2 * size.pieces + 1),
    }


def _between(tables: list[Numbers], start: int, end: int) -> Numbers:
    """Return the (2, m) duplicates of the documents from `start` to `end`, rising."""
    slices = []
    for table in tables:
        low, high = np.searchsorted(table[0], [start, end]).tolist()
        slices.append(np.array(table[:, low:high]))
    joined = np.concatenate(slices, axis=1)
    return joined[:, np.argsort(joined[0])]


def _repeats(job: ExactJob, suffix: str) -> tuple[Any, Numbers, list[int], Numbers]:
    """Find documents of the range whose hash an earlier one has.

    Returns:
        The hashes, the number of each one's document over all pieces, the numbers behind the
        pieces' last documents, and (2, m): the repeating documents, rising, and the first of each.
    """
    parts, numbers, ends = [], [], [0]
    for name in job.pieces.names:
        table = np.load(job.pieces.texts / f"{name}{suffix}")
        table = table if table.ndim == 2 else table[:, None]
        chosen = np.flatnonzero(bins(table[:, 0], job.parts) == job.part)
        parts.append(table[chosen])
        numbers.append(ends[-1] + chosen)
        ends.append(ends[-1] + len(table))
    hashes, documents = np.concatenate(parts), np.concatenate(numbers)
    del parts, numbers
    order = np.lexsort(hashes.T[::-1])  # stable: equal hashes stay in order
    ordered, numbered = hashes[order], documents[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    later, firsts = np.flatnonzero(~new), np.flatnonzero(new)
    first = firsts[np.searchsorted(firsts, later) - 1]
    pairs = np.stack([numbered[later], numbered[first]])
    return hashes, documents, ends[1:], pairs[:, np.argsort(pairs[0])]


def _equal_ids(job: ExactJob) -> tuple[int, list[_Example]]:
    """Count documents with the id of an earlier one, and give the first of them."""
    hashes, documents, ends, pairs = _repeats(job, ".id_hashes.npy")
    named = pairs[:, :_NAMED_IDS]
    pieces = np.searchsorted(ends, named, side="right")
    wanted = hashes[np.searchsorted(documents, named[0]), 0]
    examples = zip(named[0].tolist(), *pieces.tolist(), wanted.tolist(), strict=True)
    return pairs.shape[1], list(examples)


def _id_of(pieces: Pieces, example: _Example) -> str | None:
    """Look up the id with the example's hash; None if all its documents were rejected."""
    _, piece, first_piece, wanted = example
    for number in (piece, first_piece):
        for text in pieces.ids(pieces.names[number]):
            if id_hash(text) == wanted:
                return text
    return None
