"""Stages signatures, buckets, candidates and near: near duplicates over all pieces.

Signatures are computed once per piece. Documents that agree in all rows of a band are in one bucket
of that band (locality-sensitive hashing: Leskovec, Rajaraman, Ullman, "Mining of Massive
Datasets", 3.4): with Jaccard similarity s that happens in at least one band with probability
1 - (1 - s^rows)^bands. A bucket of m documents gives at most 2m pairs, each member with the first
one and with the one before it.

Similarity is not transitive: a chain of small changes joins documents that have nothing in common,
so clusters are not connected components. Documents are taken in order, and one is dropped if the
*estimated* similarity to a kept document reaches the threshold: to the earlier document of one of
its pairs, or to the document that is kept instead of that one. So every dropped document is similar
to a kept, earlier one, which `NAME.near.jsonl` names.

That rule is sequential, but comparing most pairs is not. Stage candidates has one task for each of
`groups` equal ranges of documents: it takes the pairs of all bands whose later document is in its
range, each once, and compares their sketches. Stage near is one task that goes through these pairs;
it reads sketches only where the earlier document of a pair was dropped.

Stage signatures writes per piece
    NAME.signatures.npy   (d, bands) uint64, column by column; 0 where there is no signature
    NAME.sketch.npy       (d, 257) uint8, for estimates of the similarity
Stage buckets writes per band, and part of its hash values
    BAND-PART.pairs.npy   (p,) uint64, rising: later document * 2^32 + earlier one, both numbered
                          over all pieces; of a large corpus for several bands, from BAND on
Stage candidates writes per group
    GROUP.pairs           uint64, little endian: later document * 2^32 + earlier one, rising
    GROUP.agreements      uint16, little endian: bins in which their sketches agree, and 2^15 where
                          their kinds of shingles differ
Stage near writes per piece
    NAME.keep.npy         (d,) bool, after exact and near deduplication
    NAME.near.jsonl       {"id", "kept", "jaccard"} a line, see `data_prep.pieces`

Memory: a signature task holds one batch of documents. A bucket task holds one part of one band,
about 70 bytes a document of the part: `PART_DOCUMENTS`, or more where a single bucket has more,
however large the corpus is. A candidate task holds at most about `_RUN_PAIRS` pairs at a time, 60
bytes each, and the sketches of its later documents. Stage near needs 7 bytes a document of the
corpus and a bounded rest.
"""

import functools
import itertools
import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from data_prep.config import DedupConfig
from data_prep.corpus import Progress
from data_prep.dedup.minhash import (
    NUM_BINS,
    SKETCH_BYTES,
    SignatureSettings,
    agreements,
    bins,
    signatures,
    similarity,
)
from data_prep.pieces import (
    Hashes,
    Numbers,
    Pieces,
    batches,
    list_bytes,
    listed_per_piece,
    read_documents,
    write_dropped,
)
from data_prep.stage import (
    Done,
    Estimate,
    Result,
    Size,
    StageCounts,
    StageTask,
    make_key,
    replacing,
    save_array,
    task_name,
)
from pipeline.errors import DataError

REASON = "near duplicate of an earlier document"
# A task peaks at 1.0 GB then; the decision takes 7 bytes a document and 1.9 us a pair (`python -m
# benchmarks.dedup`).
PART_DOCUMENTS = 8_000_000
GROUP_DOCUMENTS = 1_000_000
BUCKET_TASKS = 4_000
_CELLS = 64
_RUN_PAIRS = 8_000_000
_CHUNK_PAIRS = 1 << 16
_BLOCK_PAIRS = 1 << 15
_OPEN_FILES = 128
_CACHED_ROWS = 1 << 18
_LOW = np.uint64(2**32 - 1)
_OTHER_KINDS = 1 << 15
"""Is added to the agreements of documents whose kinds of shingles differ."""
_UNKNOWN = 255
_LIMIT_PAIRS = 3
"""Of a piece, for the datasheet."""
_PAIRS = 15  # candidate pairs a document, for estimates; half of them by chance


@dataclass(frozen=True)
class SignatureJob:
    """One piece."""

    documents: Path
    sizes: Path
    settings: SignatureSettings


@dataclass(frozen=True)
class SignatureFolder:
    """The pieces with the masks of exact deduplication, and the folder of their signatures."""

    pieces: Pieces
    signatures: Path

    def agreements(self, pairs: Hashes) -> npt.NDArray[np.uint16]:
        """Compare the sketches of each of P pairs: (P,), see GROUP.agreements.

        A pair is later document * 2^32 + earlier one, in any order. Holds the rows of all later
        documents, and those of the earlier ones piece by piece.
        """
        counts = np.zeros(len(pairs), dtype=np.uint16)
        later, later_row = np.unique((pairs >> np.uint64(32)).astype(np.int64), return_inverse=True)
        parts = [self._read(piece, part) for piece, part in self.pieces.split(later)]
        later_rows = np.concatenate([np.zeros((0, SKETCH_BYTES), dtype=np.uint8), *parts])
        earlier = (pairs & _LOW).astype(np.int64)
        order = np.argsort(earlier, kind="stable")
        done = 0
        for piece, documents in self.pieces.split(earlier[order]):
            wanted, row = np.unique(documents, return_inverse=True)
            rows = self._read(piece, wanted)
            for start in range(0, len(documents), _BLOCK_PAIRS):
                stop = min(start + _BLOCK_PAIRS, len(documents))
                block = order[done + start : done + stop]
                counts[block] = _compared(rows[row[start:stop]], later_rows[later_row[block]])
            done += len(documents)
        return counts

    def sketch_path(self, piece: int) -> Path:
        """Return the file with the sketches of a piece."""
        return self.signatures / f"{self.pieces.names[piece]}.sketch.npy"

    def _read(self, piece: int, documents: Numbers) -> npt.NDArray[np.uint8]:
        # A map is closed at once: there may be more pieces than a process may have open files.
        table = np.load(self.sketch_path(piece), mmap_mode="r")
        return np.array(table[documents - self.pieces.starts[piece]])


class _SketchReader:
    """Reads one sketch at a time, with few system calls; keeps some files open until its end."""

    def __init__(self, place: SignatureFolder) -> None:
        self._place = place
        self._ends, self._starts = place.pieces.ends, place.pieces.starts
        self._files: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._row = functools.lru_cache(maxsize=_CACHED_ROWS)(self._read)

    def close(self) -> None:
        """Close all files."""
        for handle, _ in self._files.values():
            os.close(handle)

    def agreements(self, first: int, other: int) -> int:
        """Compare two documents as `SignatureFolder.agreements` does."""
        return int(_compared(self._row(first), self._row(other)))

    def _read(self, document: int) -> npt.NDArray[np.uint8]:
        piece = int(np.searchsorted(self._ends, document, side="right"))
        if piece not in self._files:
            if len(self._files) >= _OPEN_FILES:
                os.close(self._files.popitem(last=False)[1][0])
            handle = os.open(self._place.sketch_path(piece), os.O_RDONLY)
            values = (int(self._ends[piece]) - self._starts[piece]) * SKETCH_BYTES
            self._files[piece] = handle, os.fstat(handle).st_size - values
        self._files.move_to_end(piece)
        handle, first = self._files[piece]
        place = first + (document - self._starts[piece]) * SKETCH_BYTES
        return np.frombuffer(os.pread(handle, SKETCH_BYTES, place), dtype=np.uint8)


def _compared(one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint16]:
    differ = one[..., NUM_BINS] != other[..., NUM_BINS]
    return agreements(one, other) | np.where(differ, _OTHER_KINDS, 0).astype(np.uint16)


@dataclass(frozen=True)
class BucketJob:
    """Some bands, and one of `parts` equal ranges of their hash values."""

    place: SignatureFolder
    bands: range
    part: int
    parts: int


def settings_of(config: DedupConfig) -> SignatureSettings:
    """Return the part of the config that signatures depend on."""
    return SignatureSettings(
        config.ngram, config.ngram_cjk, config.bands, config.rows, config.min_chars
    )


def signature_tasks(progress: Progress, folder: Path) -> list[StageTask[SignatureJob]]:
    """Make one task per piece."""
    pieces, settings = progress.pieces, settings_of(progress.corpus.config.dedup)
    made = []
    for name, done in zip(pieces.names, progress.written, strict=True):
        documents = pieces.documents_path(name)
        job = SignatureJob(documents, pieces.texts / f"{name}.bytes.npy", settings)
        made.append(StageTask(name, folder, make_key(done.digest, asdict(settings)), job))
    return made


def run_signatures(task: StageTask[SignatureJob]) -> Result:
    """Sign the documents of one piece."""
    settings = task.payload.settings
    num_documents = len(np.load(task.payload.sizes, mmap_mode="r"))
    paths = [task.path(".signatures.npy"), task.path(".sketch.npy")]
    start = signed = 0
    with (
        replacing(paths[0]) as table,
        table.open("wb") as bands,
        replacing(paths[1]) as rows,
        rows.open("wb") as sketches,
    ):
        first = _write_header(bands, np.uint64, (num_documents, settings.bands), by_column=True)
        _write_header(sketches, np.uint8, (num_documents, SKETCH_BYTES), by_column=False)
        for documents in batches(read_documents(task.payload.documents)):
            batch = signatures([document["text"] for document in documents], settings)
            for band in range(settings.bands):
                bands.seek(first + 8 * (band * num_documents + start))
                bands.write(batch.bands[:, band].tobytes())
            sketches.write(batch.sketch.tobytes())
            start += len(documents)
            signed += int(np.count_nonzero(batch.bands[:, 0]))
    assert start == num_documents
    return {"signed": signed}, paths


def bucket_tasks(progress: Progress, folder: Path) -> list[StageTask[BucketJob]]:
    """Make one task per band and part; of many, one does some bands, each by itself.

    Every candidate task reads all their files.
    """
    documents = progress.kept.result["dedup"]["documents_in"]
    if documents >= 2**32:
        raise DataError(
            f"{documents:,} documents are too many for dedup.near_duplicates, which numbers up to "
            f"{2**32:,}; prepare the corpus as several datasets"
        )
    place = SignatureFolder(progress.pieces, progress.folder("signatures"))
    signed = [done.digest for done in progress.records["signatures"]]
    upstream = make_key(signed, progress.kept.digest)
    parts = 1 + documents // PART_DOCUMENTS
    num_bands = progress.corpus.config.dedup.bands
    together = -(-num_bands * parts // BUCKET_TASKS)
    made = []
    for band, part in product(range(0, num_bands, together), range(parts)):
        bands = range(band, min(band + together, num_bands))
        key = make_key(upstream, band if together == 1 else list(bands), part, parts)
        job = BucketJob(place, bands, part, parts)
        made.append(StageTask(f"{band:03d}-{part:03d}", folder, key, job))
    return made


def run_buckets(task: StageTask[BucketJob]) -> Result:
    """Find the pairs of one part of some bands."""
    found = [bucket_pairs(*_column(task.payload, band)) for band in task.payload.bands]
    pairs = found[0] if len(found) == 1 else np.unique(np.concatenate(found))
    path = task.path(".pairs.npy")
    save_array(path, pairs)
    return {"pairs": len(pairs)}, [path]


def bucket_pairs(hashes: Hashes, documents: npt.NDArray[np.uint32]) -> Hashes:
    """Pair documents, rising, that have equal hashes in a band.

    Returns:
        (p,) rising: later document * 2^32 + the bucket's first one, or the one before.
    """
    order = np.argsort(hashes, kind="stable")  # equal hashes stay in the order of documents
    ordered = hashes[order]
    new = np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]
    numbers = documents[order].astype(np.uint64)
    del ordered, order
    later = np.flatnonzero(~new)
    firsts = np.flatnonzero(new)
    first = firsts[np.searchsorted(firsts, later) - 1]
    shifted = numbers[later] << np.uint64(32)
    apart = first != later - 1
    pairs = np.concatenate([shifted | numbers[first], (shifted | numbers[later - 1])[apart]])
    pairs.sort()
    return pairs


def _write_header(
    file: IO[bytes], dtype: type[np.generic], shape: tuple[int, int], *, by_column: bool
) -> int:
    """Begin a .npy file; return the place where its values begin."""
    descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
    header = {"descr": descr, "fortran_order": by_column, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.tell()


def _column(job: BucketJob, band: int) -> tuple[Hashes, npt.NDArray[np.uint32]]:
    """Load the hashes of a band's part and their documents: kept so far, and signed."""
    hashes = [np.zeros(0, dtype=np.uint64)]
    documents = [np.zeros(0, dtype=np.uint32)]
    start = 0
    pieces = job.place.pieces
    for name in pieces.names:
        table = np.load(job.place.signatures / f"{name}.signatures.npy", mmap_mode="r")
        column = np.array(table[:, band])
        del table  # closes the map: there may be more pieces than a process may have open files
        chosen = pieces.keep(name) & (column != 0)
        chosen &= bins(column, job.parts) == job.part
        hashes.append(column[chosen])
        documents.append((start + np.flatnonzero(chosen)).astype(np.uint32))
        start += len(column)
    return np.concatenate(hashes), np.concatenate(documents)


@dataclass(frozen=True)
class CandidateJob:
    """Pairs whose later document is between two numbers."""

    place: SignatureFolder
    bucket_paths: tuple[Path, ...]
    start: int
    end: int


@dataclass(frozen=True)
class NearJob:
    """Input of one near-duplicate task."""

    place: SignatureFolder
    groups: tuple[Path, ...]
    thresholds: tuple[float, ...]
    """Of each piece's source."""


def candidate_tasks(
    buckets: list[StageTask[BucketJob]], upstream: tuple[list[Done], Done, list[Done]], folder: Path
) -> list[StageTask[CandidateJob]]:
    """Make one task per group; `upstream`: records of signatures, dedup and buckets."""
    signed, deduplicated, paired = upstream
    key = make_key([done.digest for done in signed], [done.digest for done in paired])
    documents = deduplicated.result["dedup"]["documents_in"]
    groups = 1 + documents // GROUP_DOCUMENTS
    cuts = [documents * group // groups for group in range(groups + 1)]
    paths = tuple(bucket.path(".pairs.npy") for bucket in buckets)
    made = []
    for group in range(groups):
        start, end = cuts[group : group + 2]
        job = CandidateJob(buckets[0].payload.place, paths, start, end)
        made.append(StageTask(task_name(group, 4), folder, make_key(key, [start, end]), job))
    return made


def run_candidates(task: StageTask[CandidateJob]) -> Result:
    """Gather and compare the pairs of one group."""
    job = task.payload
    paths = [task.path(".pairs"), task.path(".agreements")]
    total = 0
    with (
        replacing(paths[0]) as first,
        first.open("wb") as pair_file,
        replacing(paths[1]) as second,
        second.open("wb") as agreement_file,
    ):
        for pairs in _distinct_runs(job):
            agreements = job.place.agreements(pairs)
            pair_file.write(pairs.astype("<u8", copy=False).tobytes())
            agreement_file.write(agreements.astype("<u2", copy=False).tobytes())
            total += len(pairs)
    return {"pairs": total}, paths


def near_tasks(
    groups: list[StageTask[CandidateJob]],
    compared: list[Done],
    deduplicated: Done,
    thresholds: tuple[float, ...],
    folder: Path,
) -> list[StageTask[NearJob]]:
    """Make the one task of stage near; `groups` and `compared`: tasks and records of candidates."""
    key = make_key([done.digest for done in compared], deduplicated.digest, thresholds)
    paths = tuple(task.folder / task.name for task in groups)
    return [StageTask("all", folder, key, NearJob(groups[0].payload.place, paths, thresholds))]


def run_near(task: StageTask[NearJob]) -> Result:
    """Decide about all documents."""
    place, pieces = task.payload.place, task.payload.place.pieces
    kept_for = _decisions(task.payload)
    counts = StageCounts()
    listed, masks = [], []
    for name, start, end in zip(pieces.names, pieces.starts, pieces.ends.tolist(), strict=True):
        exact = pieces.keep(name)
        dropped = start + np.flatnonzero(kept_for[start:end] != np.arange(start, end))
        keep = exact.copy()
        keep[dropped - start] = False
        sizes = pieces.sizes(name)
        counts.mask(sizes[exact], keep[exact], REASON)
        masks.append(task.folder / f"{name}.keep.npy")
        save_array(masks[-1], keep)
        listed.append(dropped[: listed_per_piece(pieces)])
    documents = np.concatenate(listed)
    kept = kept_for[documents].astype(np.int64)
    counts_of = place.agreements(
        (documents.astype(np.uint64) << np.uint64(32)) | kept.astype(np.uint64)
    )
    jaccard = similarity(counts_of & (_OTHER_KINDS - 1))
    path = (task.folder, ".near.jsonl")
    lists = write_dropped(path, pieces, documents, kept, jaccard)
    return {"near": counts.to_json(), "at_limit": _at_limit(pieces, documents, kept, jaccard)}, [
        *masks,
        *lists,
    ]


def _at_limit(
    pieces: Pieces, documents: Numbers, kept: Numbers, jaccard: npt.NDArray[np.float64]
) -> list[tuple[int, int, float]]:
    """List the least similar pairs of each piece: dropped document, kept one, similarity."""
    found = []
    for low, high in itertools.pairwise([0, *np.searchsorted(documents, pieces.ends).tolist()]):
        least = low + np.argsort(jaccard[low:high], kind="stable")[:_LIMIT_PAIRS]
        found += [(int(documents[i]), int(kept[i]), round(float(jaccard[i]), 3)) for i in least]
    return found


def estimates(size: Size) -> dict[str, Estimate]:
    """Estimate the cost of each stage."""
    documents, bands = size.documents, size.config.dedup.bands
    parts, groups = (1 + int(documents) // most for most in (PART_DOCUMENTS, GROUP_DOCUMENTS))
    pairs = documents * _PAIRS
    signature_bytes = documents * (8 * bands + SKETCH_BYTES)
    together = -(-bands * parts // BUCKET_TASKS)
    buckets = -(-bands // together) * parts
    bucket_memory = 100e6 + (70 + 8 * _PAIRS * together / bands) * documents / parts
    group_memory = 150e6 + documents / groups * (256 + 60 * min(8, _PAIRS))
    memory = 200e6 + 7 * documents + list_bytes(documents)
    return {
        "signatures": Estimate(
            size.pieces, size.text_bytes / 1e6 / 60, signature_bytes, 300e6, 3 * size.pieces
        ),
        "buckets": Estimate(
            buckets, documents * bands * 0.3e-6, 8 * pairs, bucket_memory, 2 * buckets
        ),
        "candidates": Estimate(groups, pairs * 2.2e-6, 10 * pairs, group_memory, 3 * groups),
        "near": Estimate(1, pairs * 1.9e-6, documents, memory, 2 * size.pieces + 1),
    }


def _decisions(job: NearJob) -> npt.NDArray[np.uint32]:
    """Return for every document the one that is kept instead, or itself."""
    documents = job.place.pieces.ends[-1]
    kept_for = np.arange(documents, dtype=np.uint32)
    apart = np.zeros(documents, dtype=np.uint8)
    # Agreements from which on the estimated similarity reaches the threshold of the source.
    reached = similarity(np.arange(NUM_BINS + 1)) >= np.array(job.thresholds)[:, None]
    pieces = job.place.pieces
    sizes = np.diff(pieces.ends, prepend=0)
    least = np.repeat(reached.argmax(axis=1).astype(np.uint16), sizes)
    with closing(_SketchReader(job.place)) as rows:
        for path in job.groups:
            for chunk in _chunks(path):
                _decide(chunk, (kept_for, apart), rows, least)
    return kept_for


def _distinct_runs(job: CandidateJob) -> Iterator[Hashes]:
    """Yield the group's pairs, each once, rising, in runs of at most about `_RUN_PAIRS`."""
    cuts = np.linspace(job.start, job.end, _CELLS + 1).astype(np.uint64) << np.uint64(32)
    tables = (np.load(path, mmap_mode="r") for path in job.bucket_paths)
    places = np.array([np.searchsorted(table, cuts) for table in tables])
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
    """Yield (later, earlier, agreements) of one group in chunks, rising."""
    with (
        Path(f"{path}.pairs").open("rb") as pairs,
        Path(f"{path}.agreements").open("rb") as agreements,
    ):
        while block := pairs.read(8 * _CHUNK_PAIRS):
            numbers = np.frombuffer(block, dtype="<u4").reshape(-1, 2)
            counts = np.frombuffer(agreements.read(len(block) // 4), dtype="<u2")
            yield zip(numbers[:, 1].tolist(), numbers[:, 0].tolist(), counts.tolist(), strict=True)


def _decide(
    chunk: Iterator[tuple[int, int, int]],
    state: tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]],
    rows: _SketchReader,
    least: npt.NDArray[np.uint16],
) -> None:
    """Decide about the later documents of pairs, in order of the later, then the earlier one.

    Args:
        chunk: (later, earlier, agreements).
        state: for every document, the document that is kept instead, or itself, and the number of
            bins in which the sketches of the two differ, or `_UNKNOWN`; is changed.
        rows: sketches.
        least: for every document, the agreements from which on it is dropped.
    """
    # Reading an element of a buffer takes a third of the time of reading one of an array.
    kept_for, apart, least_of = state[0].data, state[1].data, least.data
    current, tried = -1, set[int]()
    for later, earlier, agreed in chunk:
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
            is_known = agreed < _OTHER_KINDS and apart[earlier] != _UNKNOWN
            if is_known and agreed + apart[earlier] < least_of[later]:
                continue
            agreed = rows.agreements(kept, later)
        if agreed & (_OTHER_KINDS - 1) >= least_of[later]:
            kept_for[later] = kept
            apart[later] = _UNKNOWN if agreed >= _OTHER_KINDS else NUM_BINS - agreed
