"""Stage near: which near duplicates are dropped.

Similarity is not transitive: a chain of small changes joins documents that have nothing in common,
so clusters are no connected components. Documents are taken in order, and one is dropped if the
*estimated* similarity to a document that is kept reaches the threshold: to the earlier document
of one of its pairs, or to the one for which that was dropped. So every dropped document is similar
to a kept, earlier one, which `NAME.near.jsonl` names.

Writes per piece
    NAME.keep.npy     (d,) bool, after exact and near deduplication
    NAME.near.jsonl   {"id", "kept", "jaccard"} a line: what was dropped, for what

Needs 8 bytes of memory a document, 24 a distinct pair and 300 a dropped document of one group of
pieces; the sketches are read for a chunk of pairs at a time.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep import near
from data_prep.counts import Counts
from data_prep.minhash import estimate
from data_prep.stage import Done, Task, make_key, replacing

REASON = "near duplicate of an earlier document"
_CHUNK_PAIRS = 1 << 16
_GROUP_DROPPED = 1_000_000


@dataclass(frozen=True)
class ClusterJob:
    """Where everything lies."""

    ingest_folder: Path
    dedup_folder: Path
    signature_folder: Path
    pair_paths: tuple[Path, ...]
    names: tuple[str, ...]
    threshold: float


@dataclass(frozen=True)
class _Dropped:
    """Dropped documents, rising, the kept document of each, and the similarity to it."""

    documents: npt.NDArray[np.int64]
    kept: npt.NDArray[np.int64]
    jaccard: npt.NDArray[np.float64]


def task(
    job: ClusterJob, signed: list[Done], deduplicated: Done, paired: list[Done], folder: Path
) -> Task[ClusterJob]:
    """The one task of this stage."""
    key = make_key(
        [done.digest for done in signed], deduplicated.digest, [done.digest for done in paired],
        job.threshold,
    )  # fmt: skip
    return Task("all", folder, key, job)


def run(task: Task[ClusterJob]) -> tuple[dict[str, Any], list[Path]]:
    """Decides about all documents."""
    job = task.payload
    masks = [np.load(job.dedup_folder / f"{name}.keep.npy") for name in job.names]
    ends = np.cumsum([len(mask) for mask in masks])
    dropped = _decide(_distinct(job.pair_paths), _Sketches(job, ends), job.threshold, int(ends[-1]))
    counts = Counts()
    for name, mask, end in zip(job.names, masks, ends.tolist(), strict=True):
        sizes = np.load(job.ingest_folder / f"{name}.bytes.npy")
        counts.documents_in += int(mask.sum())
        counts.bytes_in += int(sizes[mask].sum())
        low, high = np.searchsorted(dropped.documents, [end - len(mask), end]).tolist()
        mask[dropped.documents[low:high] - (end - len(mask))] = False
        counts.documents_out += int(mask.sum())
        counts.bytes_out += int(sizes[mask].sum())
        near.save(task.folder / f"{name}.keep.npy", mask)
    if len(dropped.documents):
        lost = counts.bytes_in - counts.bytes_out
        counts.rejected[REASON] = [len(dropped.documents), lost]
    _write_samples(task, ends, dropped)
    paths = [
        task.folder / f"{name}{end}" for name in job.names for end in (".keep.npy", ".near.jsonl")
    ]
    return {"near": counts.to_json()}, paths


def _distinct(paths: tuple[Path, ...]) -> npt.NDArray[np.uint64]:
    """Pairs of all bands, each once, as later * 2^32 + earlier, rising."""
    found = np.zeros(0, dtype=np.uint64)
    for path in paths:
        pairs = np.load(path).astype(np.uint64)
        found = np.union1d(found, (pairs[:, 1] << np.uint64(32)) | pairs[:, 0])
    return found


class _Sketches:
    """Reads rows of all pieces' sketches."""

    def __init__(self, job: ClusterJob, ends: npt.NDArray[np.int64]) -> None:
        self._job = job
        self._ends = ends

    def read(self, documents: npt.NDArray[np.int64]) -> dict[int, npt.NDArray[np.uint8]]:
        """Sketches of rising document numbers."""
        found: dict[int, npt.NDArray[np.uint8]] = {}
        for piece, part in by_piece(documents, self._ends):
            path = self._job.signature_folder / f"{self._job.names[piece]}.sketch.npy"
            table = np.load(path, mmap_mode="r")
            rows = np.array(table[part - (self._ends[piece] - len(table))])
            found.update(zip(part.tolist(), rows, strict=True))
        return found


def by_piece(
    documents: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """Groups rising document numbers by the piece that they are in; `ends` are the pieces'."""
    pieces = np.searchsorted(ends, documents, side="right")
    cuts = np.flatnonzero(np.diff(pieces)) + 1
    return [(int(np.searchsorted(ends, part[0], side="right")), part)
            for part in np.split(documents, cuts) if len(part)]  # fmt: skip


def _decide(
    pairs: npt.NDArray[np.uint64], sketches: _Sketches, threshold: float, num_documents: int
) -> _Dropped:
    """Goes through the pairs by later, then by earlier document."""
    kept_for = np.arange(num_documents, dtype=np.int64)
    dropped: list[tuple[int, int, float]] = []
    for start in range(0, len(pairs), _CHUNK_PAIRS):
        chunk = pairs[start : start + _CHUNK_PAIRS]
        earlier = (chunk & np.uint64(2**32 - 1)).astype(np.int64)
        later = (chunk >> np.uint64(32)).astype(np.int64)
        # Documents of this chunk can be dropped only for one of these.
        rows = sketches.read(np.unique(np.concatenate([earlier, later, kept_for[earlier]])))
        tried: tuple[int, set[int]] = (-1, set())
        for a, b in zip(earlier.tolist(), later.tolist(), strict=True):
            if tried[0] != b:
                tried = (b, set())
            kept = int(kept_for[a])
            if kept_for[b] != b or kept in tried[1]:
                continue
            tried[1].add(kept)
            jaccard = estimate(rows[kept], rows[b])
            if jaccard >= threshold:
                kept_for[b] = kept
                dropped.append((b, kept, jaccard))
    table = np.array(dropped, dtype=np.float64).reshape(-1, 3)  # exact below 2^53
    return _Dropped(table[:, 0].astype(np.int64), table[:, 1].astype(np.int64), table[:, 2])


def _write_samples(task: Task[ClusterJob], ends: npt.NDArray[np.int64], dropped: _Dropped) -> None:
    """Writes the `.near.jsonl` files, for as many pieces at a time as memory allows."""
    cuts = np.searchsorted(dropped.documents, ends).tolist()
    first = 0
    while first < len(ends):
        low = cuts[first - 1] if first else 0
        after = first + 1
        while after < len(ends) and cuts[after] - low <= _GROUP_DROPPED:
            after += 1
        group = slice(low, cuts[after - 1])
        wanted = np.union1d(dropped.documents[group], dropped.kept[group])
        ids = _ids(task.payload, ends, wanted)
        for piece in range(first, after):
            rows = slice(cuts[piece - 1] if piece else 0, cuts[piece])
            path = task.folder / f"{task.payload.names[piece]}.near.jsonl"
            with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
                for document, kept, jaccard in zip(
                    dropped.documents[rows].tolist(), dropped.kept[rows].tolist(),
                    dropped.jaccard[rows].tolist(), strict=True,
                ):  # fmt: skip
                    record = {"id": ids[document], "kept": ids[kept], "jaccard": round(jaccard, 3)}
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
        first = after


def _ids(
    job: ClusterJob, ends: npt.NDArray[np.int64], documents: npt.NDArray[np.int64]
) -> dict[int, str]:
    found = {}
    for piece, part in by_piece(documents, ends):
        with (job.signature_folder / f"{job.names[piece]}.ids.jsonl").open("rb") as file:
            lines = file.readlines()
        start = int(ends[piece]) - len(lines)
        found.update({number: json.loads(lines[number - start]) for number in part.tolist()})
    return found
