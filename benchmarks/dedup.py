"""Peak memory and CPU time of deduplication's tasks over a synthetic corpus, as one JSON line.

    python -m benchmarks.dedup [--million 8] [--folder /tmp/x]

The corpus has no text, only the files between the stages: `--million` documents in pieces of 80,000
with ids of 60 characters. A tenth of the documents are equal to an earlier one. A third are near
duplicates of an original, with similarities from 0.4 to 1, and meet it and the copy before;
besides, each document meets ten others by chance. A document has ten lines, of which two thirds are
there more than once. Each task runs in a process of its own, which is asked for its peak resident
memory (pages of mapped files count) and its CPU time.
"""

import argparse
import json
import pickle
import platform
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from backports import zstd

from data_prep.config import DedupConfig
from data_prep.dedup import exact, lines, near
from data_prep.dedup.minhash import NUM_BINS, SHORT, SKETCH_BYTES
from data_prep.pieces import Pieces
from data_prep.stage import Done, StageTask

_PIECE = 80_000
_BANDS = 16  # of pair files; what a pair costs does not depend on how many there are
_RUN = """
import json, pickle, sys, time
from data_prep.dedup import exact
from data_prep.dedup import lines
from data_prep.dedup import near
function, task = pickle.load(sys.stdin.buffer)
function(task)
peak = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(json.dumps({"peak_mb": int(peak[0]) // 1000, "cpu_s": round(time.process_time(), 1)}))
"""


def _save(path: Path, array: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    np.save(path, array)


def _ids(path: Path, start: int, documents: int) -> None:
    with zstd.open(path, "wb") as file:
        for number in range(start, start + documents):
            file.write(json.dumps(f"web/part-{number:09d}{'x' * 42}").encode() + b"\n")


class _Corpus:
    """Files that stages read."""

    def __init__(self, work: Path, documents: int) -> None:
        self.work, self.documents = work, documents
        self.names = tuple(f"{i:05d}" for i in range(documents // _PIECE))
        self.rng = np.random.default_rng(0)

    def documents_and_lines(self) -> None:
        """Hashes of documents, ids and lines."""
        rng, work = self.rng, self.work
        hashes = rng.integers(0, 2**64, (self.documents, 2), dtype=np.uint64)
        again = np.flatnonzero(rng.random(self.documents) < 0.1)[1:]
        hashes[again] = hashes[(rng.random(len(again)) * again).astype(np.int64)]
        for i, name in enumerate(self.names):
            rows = slice(i * _PIECE, (i + 1) * _PIECE)
            _save(work / f"ingest/{name}.hashes.npy", hashes[rows])
            _save(work / f"ingest/{name}.bytes.npy", np.full(_PIECE, 3000))
            numbers = rng.integers(0, 2**64, _PIECE, dtype=np.uint64)
            _save(work / f"ingest/{name}.id_hashes.npy", numbers)
            _ids(work / f"ingest/{name}.ids.jsonl.zst", i * _PIECE, _PIECE)
            seen = rng.integers(0, 5 * self.documents, 10 * _PIECE).astype(np.uint64)
            distinct, first = np.unique(near_hash(seen), return_index=True)
            _save(work / f"line_hashes/{name}.hashes.npy", distinct)
            _save(work / f"line_hashes/{name}.first.npy", first.astype(np.uint32))

    def sketches_and_pairs(self) -> None:
        """Sketches, one band of signatures, and pairs."""
        rng, work, total = self.rng, self.work, self.documents
        sketches = rng.integers(0, 256, (total, SKETCH_BYTES), dtype=np.uint8)
        sketches[:, NUM_BINS] = SHORT
        copies = np.flatnonzero(rng.random(total) < 1 / 3)[1:]
        is_copy = np.zeros(total, dtype=bool)
        is_copy[copies] = True
        originals = np.flatnonzero(~is_copy)
        below = np.searchsorted(originals, copies)
        of = originals[(rng.random(len(copies)) * below).astype(np.int64)]
        for part in np.array_split(np.arange(len(copies)), 64):
            level = rng.uniform(0.4, 1, len(part)).astype(np.float32)[:, None]
            same = rng.random((len(part), SKETCH_BYTES), dtype=np.float32) < level
            rows = sketches[copies[part]]
            sketches[copies[part]] = np.where(same, sketches[of[part]], rows)
        order = np.argsort(of, kind="stable")
        previous = of.copy()
        same_of = np.flatnonzero(of[order][1:] == of[order][:-1]) + 1
        previous[order[same_of]] = copies[order[same_of - 1]]
        column = near_hash(rng.integers(0, 2 * total, total).astype(np.uint64))
        column[copies[::4]] = column[of[::4]]
        for i, name in enumerate(self.names):
            rows = slice(i * _PIECE, (i + 1) * _PIECE)
            _save(work / f"signatures/{name}.sketch.npy", sketches[rows])
            _save(work / f"signatures/{name}.signatures.npy", np.asfortranarray(column[rows, None]))
        for band in range(_BANDS):
            with_first, with_previous = rng.random((2, len(copies))) < 0.3
            later = rng.integers(1, total, int(10 / _BANDS * total))
            earlier = (rng.random(len(later)) * later).astype(np.int64)
            pairs = np.concatenate([
                copies[with_first] << 32 | of[with_first],
                copies[with_previous] << 32 | previous[with_previous],
                later << 32 | earlier,
            ])  # fmt: skip
            _save(work / f"buckets/{band:03d}-000.pairs.npy", np.sort(pairs.astype(np.uint64)))


def near_hash(numbers: Any) -> Any:
    """Numbers as hashes are."""
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)


def _measure(function: Any, task: StageTask[Any]) -> dict[str, float]:
    task.folder.mkdir(exist_ok=True)
    # Not rusage: what a child inherits from its parent at the fork counts there.
    done = subprocess.run([sys.executable, "-c", _RUN], input=pickle.dumps((function, task)),
                          stdout=subprocess.PIPE, check=True)  # fmt: skip
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _done(result: dict[str, Any]) -> Done:
    return Done("", result, {})


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--million", type=int, default=8, help="documents")
    parser.add_argument("--folder", type=Path, help="for temporary files, 0.6 GB a million")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        made = _Corpus(Path(name), arguments.million * 1_000_000 // _PIECE * _PIECE)
        work, names = made.work, made.names
        made.documents_and_lines()
        pieces = Pieces(work / "ingest", work / "dedup", names)
        exact.PART_DOCUMENTS = made.documents + 1
        [to_find] = exact.exact_tasks([], pieces, made.documents, work / "exact")
        found["exact"] = _measure(exact.run_exact, to_find)
        empty = _done({"repeated_ids": 0, "examples": []})
        [merge] = exact.dedup_tasks([to_find], [empty], [], work / "dedup")
        found["dedup"] = _measure(exact.run_dedup, merge)
        distinct = [
            len(np.load(work / f"line_hashes/{n}.hashes.npy", mmap_mode="r")) for n in names
        ]
        hashed = [_done({"lines": 10 * _PIECE, "distinct": n}) for n in distinct]
        hash_tasks = [
            StageTask(n, work / "line_hashes", "", lines.HashJob(work, 20)) for n in names
        ]
        parts = lines.part_tasks(hash_tasks, hashed, work / "line_parts")
        found["line_parts"] = {"parts": len(parts), **_measure(lines.run_part, parts[0])}
        made.sketches_and_pairs()
        place = near.SignatureFolder(pieces, work / "signatures")
        bucket = StageTask("bucket", work / "buckets", "", near.BucketJob(place, 0, 0, 1))
        found["buckets"] = _measure(near.run_buckets, bucket)
        paths = [
            replace(bucket, name=f"{band:03d}-000") for band in range(_BANDS)
        ]  # fmt: skip
        deduplicated = _done({"dedup": {"documents_in": made.documents}})
        groups = near.candidate_tasks(paths, ([], deduplicated, []), work / "candidates")
        each = [_measure(near.run_candidates, group) for group in groups]
        found["candidates"] = {"groups": len(groups), **{
            "peak_mb": max(m["peak_mb"] for m in each),
            "cpu_s_in_all": round(sum(m["cpu_s"] for m in each), 1),
        }}  # fmt: skip
        [last] = near.near_tasks(
            groups, [empty], deduplicated, (DedupConfig().threshold,) * len(names), work / "near"
        )
        pairs = sum(path.stat().st_size // 8 for path in work.glob("candidates/*.pairs"))
        found["near"] = {"pairs": pairs, **_measure(near.run_near, last)}
        dropped = sum((~np.load(p)).sum() for p in work.glob("near/*.keep.npy"))
        found["near"]["dropped_share"] = round(float(dropped) / made.documents, 3)
    sys.stdout.write(
        json.dumps({
            "versions": {"python": platform.python_version(), "numpy": np.__version__},
            "documents": made.documents, **found,
        }) + "\n"
    )  # fmt: skip


if __name__ == "__main__":
    main()
