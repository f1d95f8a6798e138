"""Stage dedup: keeps the first of all documents with equal text, over all pieces.

Needs 24 bytes of memory a document. "First" is by piece and line, so the result does not depend on
which piece was ingested first. Writes (d,) bool `NAME.keep.npy` for every piece.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.counts import Counts
from data_prep.stage import Done, Task, make_key, replacing


@dataclass(frozen=True)
class DedupJob:
    """Names of the ingested pieces, in order, and their folder."""

    ingest_folder: Path
    names: tuple[str, ...]


def task(
    ingested: list[Done], ingest_folder: Path, names: tuple[str, ...], folder: Path
) -> Task[DedupJob]:
    """The one task of this stage."""
    key = make_key([done.digest for done in ingested])
    return Task("all", folder, key, DedupJob(ingest_folder, names))


def run(task: Task[DedupJob]) -> tuple[dict[str, Any], list[Path]]:
    """Compares all hashes."""
    job = task.payload
    hashes = [np.load(job.ingest_folder / f"{name}.hashes.npy") for name in job.names]
    sizes = [np.load(job.ingest_folder / f"{name}.bytes.npy") for name in job.names]
    keep = _first_of_equals(np.concatenate(hashes))
    counts = Counts()
    paths = []
    start = 0
    for name, size in zip(job.names, sizes, strict=True):
        part = keep[start : start + len(size)]
        start += len(size)
        counts.documents_in += len(size)
        counts.bytes_in += int(size.sum())
        counts.documents_out += int(part.sum())
        counts.bytes_out += int(size[part].sum())
        path = task.folder / f"{name}.keep.npy"
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.save(file, part)
        paths.append(path)
    dropped = counts.documents_in - counts.documents_out
    if dropped:
        counts.rejected["exact duplicate"] = [dropped, counts.bytes_in - counts.bytes_out]
    return {"dedup": counts.to_json()}, paths


def _first_of_equals(hashes: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, Any]:
    """(d,) bool, true at the first row of each value of (d, 2) hashes."""
    keep = np.zeros(len(hashes), dtype=bool)
    if len(hashes):
        order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # stable: equal rows stay in order
        ordered = hashes[order]
        new = np.ones(len(hashes), dtype=bool)
        new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
        keep[order[new]] = True
    return keep
