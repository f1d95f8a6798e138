"""Stages candidates and near: which near duplicates are dropped.

Similarity is not transitive: a chain of small changes joins documents that have nothing in common,
so clusters are no connected components. Documents are taken in order, and one is dropped if the
*estimated* similarity to a document that is kept reaches the threshold: to the earlier document
of one of its pairs, or to the one for which that was dropped. So every dropped document is similar
to a kept, earlier one, which `NAME.near.jsonl` names.

That rule is sequential, and what it needs for most pairs is not. Stage candidates has one task for
each of `groups` equal ranges of documents: it takes the pairs of all bands whose later document is
in its range, each once, and compares their sketches. Stage near is one task that goes through these
pairs; it reads sketches only where the earlier document of a pair was dropped.

Stage candidates writes per group
    GROUP.pairs        uint64, little endian: later document * 2^32 + earlier one, rising
    GROUP.agreements   uint16, little endian: bytes in which their sketches agree
Stage near writes per piece
    NAME.keep.npy      (d,) bool, after exact and near deduplication
    NAME.near.jsonl    {"id", "kept", "jaccard"} a line, see `data_prep.dedup.dropped`

A candidate task holds at most about `_RUN_PAIRS` pairs at a time, 60 bytes each, and the sketches
of its later documents. Stage near needs 5 bytes a document of the corpus and a bounded rest.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.counts import Counts
from data_prep.dedup.dropped import Dropped, Pieces, listed_per_piece, write_lists
from data_prep.dedup.minhash import NUM_BINS, similarity
from data_prep.dedup.near import BucketJob, Place, save
from data_prep.dedup.sketches import Rows, Sketches, least_agreements
from data_prep.stage import Done, Task, make_key, replacing

REASON = "near duplicate of an earlier document"
GROUP_DOCUMENTS = 1_000_000
_CELLS = 64
_RUN_PAIRS = 8_000_000
_CHUNK_PAIRS = 1 << 16


@dataclass(frozen=True)
class CandidateJob:
    """Pairs whose later document is between two numbers."""

    place: Place
    bucket_paths: tuple[Path, ...]
    start: int
    end: int


@dataclass(frozen=True)
class NearJob:
    """Files of all groups, in order, without suffix."""

    place: Place
    groups: tuple[Path, ...]
    threshold: float


def candidate_tasks(
    buckets: list[Task[BucketJob]], upstream: tuple[list[Done], Done, list[Done]], folder: Path
) -> list[Task[CandidateJob]]:
    """One task a group; `upstream` are the records of signatures, dedup and buckets."""
    signed, deduplicated, paired = upstream
    key = make_key([done.digest for done in signed], [done.digest for done in paired])
    documents = deduplicated.result["dedup"]["documents_in"]
    groups = 1 + documents // GROUP_DOCUMENTS
    cuts = [documents * group // groups for group in range(groups + 1)]
    paths = tuple(bucket.path(".pairs.npy") for bucket in buckets)
    return [
        Task(
            f"{group:04d}", folder, make_key(key, cuts[group : group + 2]),
            CandidateJob(buckets[0].payload.place, paths, cuts[group], cuts[group + 1]),
        )
        for group in range(groups)
    ]  # fmt: skip


def run_candidates(task: Task[CandidateJob]) -> tuple[dict[str, Any], list[Path]]:
    """Gathers and compares the pairs of one group."""
    job = task.payload
    sketches = _sketches(job.place)
    paths = [task.path(".pairs"), task.path(".agreements")]
    total = 0
    with (
        replacing(paths[0]) as first, first.open("wb") as pair_file,
        replacing(paths[1]) as second, second.open("wb") as agreement_file,
    ):  # fmt: skip
        for pairs in _distinct_runs(job):
            agreements = sketches.agreements(pairs)
            pair_file.write(pairs.astype("<u8", copy=False).tobytes())
            agreement_file.write(agreements.astype("<u2", copy=False).tobytes())
            total += len(pairs)
    return {"pairs": total}, paths


def near_tasks(
    groups: list[Task[CandidateJob]], compared: list[Done], deduplicated: Done, threshold: float,
    folder: Path,
) -> list[Task[NearJob]]:  # fmt: skip
    """The one task of this stage; `groups` are the tasks before, `compared` their records."""
    key = make_key([done.digest for done in compared], deduplicated.digest, threshold)
    paths = tuple(task.folder / task.name for task in groups)
    return [Task("all", folder, key, NearJob(groups[0].payload.place, paths, threshold))]


def run_near(task: Task[NearJob]) -> tuple[dict[str, Any], list[Path]]:
    """Decides about all documents."""
    place = task.payload.place
    sketches = _sketches(place)
    pieces = sketches.pieces
    kept_for = np.arange(pieces.ends[-1], dtype=np.uint32)
    apart = np.zeros(pieces.ends[-1], dtype=np.uint8)
    least = least_agreements(task.payload.threshold)
    with sketches.rows() as rows:
        for path in task.payload.groups:
            for chunk in _chunks(path):
                _decide(chunk, (kept_for, apart), rows, least)
    counts = Counts()
    listed = []
    for name, start, end in zip(pieces.names, pieces.starts, pieces.ends.tolist(), strict=True):
        exact = np.load(place.dedup_folder / f"{name}.keep.npy")
        dropped = start + np.flatnonzero(kept_for[start:end] != np.arange(start, end))
        keep = exact.copy()
        keep[dropped - start] = False
        sizes = np.load(pieces.folder / f"{name}.bytes.npy")
        counts.mask(sizes[exact], keep[exact], REASON)
        save(task.folder / f"{name}.keep.npy", keep)
        listed.append(dropped[: listed_per_piece(pieces)])
    shown = _described(np.concatenate(listed), kept_for, sketches)
    lists = write_lists(pieces, shown, task.folder, ".near.jsonl")
    masks = [task.folder / f"{name}.keep.npy" for name in pieces.names]
    return {"near": counts.to_json()}, [*masks, *lists]


def _sketches(place: Place) -> Sketches:
    return Sketches(Pieces.of(place.documents_folder, place.names), place.signature_folder)


def _distinct_runs(job: CandidateJob) -> Iterator[npt.NDArray[np.uint64]]:
    """The group's pairs, each once, rising; at most about `_RUN_PAIRS` in a run."""
    cuts = np.linspace(job.start, job.end, _CELLS + 1).astype(np.uint64) << np.uint64(32)
    places = np.array([
        np.searchsorted(np.load(path, mmap_mode="r"), cuts) for path in job.bucket_paths
    ])  # fmt: skip
    pairs_before = places.sum(axis=0)
    cell = 0
    while cell < _CELLS:
        limit = pairs_before[cell] + _RUN_PAIRS
        after = max(cell + 1, int(np.searchsorted(pairs_before, limit, side="right")) - 1)
        parts = [np.zeros(0, dtype=np.uint64)]
        for path, (low, high) in zip(job.bucket_paths, places[:, [cell, after]], strict=True):
            parts.append(np.array(np.load(path, mmap_mode="r")[low:high]))
        yield np.unique(np.concatenate(parts))
        cell = after


def _chunks(path: Path) -> Iterator[Iterator[tuple[int, int, int]]]:
    """(later, earlier, agreements) of one group, rising."""
    with (
        Path(f"{path}.pairs").open("rb") as pairs,
        Path(f"{path}.agreements").open("rb") as agreements,
    ):  # fmt: skip
        while block := pairs.read(8 * _CHUNK_PAIRS):
            numbers = np.frombuffer(block, dtype="<u4").reshape(-1, 2)
            counts = np.frombuffer(agreements.read(len(block) // 4), dtype="<u2")
            yield zip(numbers[:, 1].tolist(), numbers[:, 0].tolist(), counts.tolist(), strict=True)


def _decide(
    chunk: Iterator[tuple[int, int, int]],
    state: tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]],
    rows: Rows,
    least: int,
) -> None:
    """Goes through pairs by later, then by earlier document.

    Args:
        chunk: (later, earlier, agreements).
        state: of every document, the one for which it is dropped, or itself, and in how many bytes
            the sketches of the two differ; is changed.
        rows: sketches.
        least: agreements for which a document is dropped.
    """
    # Elements of a buffer take a third of the time of an array's.
    kept_for, apart = state[0].data, state[1].data
    current, tried = -1, set[int]()
    for later, earlier, agreements in chunk:
        if kept_for[later] != later:
            continue
        if later != current:
            current, tried = later, set()
        kept = kept_for[earlier]
        if kept in tried:
            continue
        tried.add(kept)
        if kept != earlier:
            # Where `kept` and `later` agree, `earlier` agrees with both or differs from `kept`.
            if agreements + apart[earlier] < least:
                continue
            agreements = rows.agreements(kept, later)
        if agreements >= least:
            kept_for[later] = kept
            apart[later] = NUM_BINS - agreements


def _described(
    documents: npt.NDArray[np.int64], kept_for: npt.NDArray[np.uint32], sketches: Sketches
) -> Dropped:
    """Dropped documents with their similarities."""
    kept = kept_for[documents]
    pairs = (documents.astype(np.uint64) << np.uint64(32)) | kept
    jaccard = similarity(sketches.agreements(pairs))
    return Dropped(documents, kept.astype(np.int64), jaccard)
