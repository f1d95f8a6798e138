"""Stages signatures and buckets: candidates for near duplicates, over all pieces.

A signature is computed once a piece. Documents that agree in all rows of a band are in one bucket
of that band (locality-sensitive hashing: Leskovec, Rajaraman, Ullman, "Mining of Massive
Datasets", 3.4): with Jaccard similarity s that happens in at least one band with probability
1 - (1 - s^rows)^bands. A bucket of m documents gives at most 2m pairs, each member with the first
one and with the one before it. `data_prep.dedup.near_cluster` decides about the pairs.

Writes per piece
    NAME.signatures.npy   (d, bands) uint64, column by column; 0 where there is no signature
    NAME.sketch.npy       (d, 256) uint8, for estimates of the similarity
and per band, and part of its hash values
    BAND-PART.pairs.npy   (p,) uint64, rising: later document * 2^32 + earlier one, both counted
                          over all pieces

A signature task holds one batch of documents. A bucket task holds one part of one band, about 70
bytes a document of the part: `PART_DOCUMENTS`, or as many more as a single bucket has, however
large the corpus is.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from data_prep.config import DedupConfig
from data_prep.dedup.exact import in_part
from data_prep.dedup.minhash import NUM_BINS, SignatureSettings, signatures
from data_prep.ingest import read_documents
from data_prep.stage import Done, Task, make_key, replacing
from pipeline.errors import DataError

PART_DOCUMENTS = 8_000_000
_BATCH_CHARS = 1 << 18
_BATCH_DOCUMENTS = 1 << 12


@dataclass(frozen=True)
class SignatureJob:
    """One piece."""

    documents: Path
    sizes: Path
    settings: SignatureSettings


@dataclass(frozen=True)
class Place:
    """Where everything lies, and the names of the pieces, in order."""

    documents_folder: Path
    dedup_folder: Path
    signature_folder: Path
    names: tuple[str, ...]


@dataclass(frozen=True)
class BucketJob:
    """One band, and one of `parts` equal ranges of its hash values."""

    place: Place
    band: int
    part: int
    parts: int


def settings_of(config: DedupConfig) -> SignatureSettings:
    """The part of the config that signatures depend on."""
    return SignatureSettings(
        config.ngram, config.ngram_cjk, config.bands, config.rows, config.min_chars
    )


def signature_tasks(
    written: list[Done], place: Place, config: DedupConfig
) -> list[Task[SignatureJob]]:
    """One task a piece; `written` are the records of the stage that wrote the pieces."""
    settings = settings_of(config)
    return [
        Task(
            name, place.signature_folder, make_key(done.digest, asdict(settings)),
            SignatureJob(
                place.documents_folder / f"{name}.jsonl.zst",
                place.documents_folder / f"{name}.bytes.npy", settings,
            ),
        )
        for name, done in zip(place.names, written, strict=True)
    ]  # fmt: skip


def run_signatures(task: Task[SignatureJob]) -> tuple[dict[str, Any], list[Path]]:
    """Signs one piece."""
    settings = task.payload.settings
    num_documents = len(np.load(task.payload.sizes, mmap_mode="r"))
    paths = [task.path(".signatures.npy"), task.path(".sketch.npy")]
    start = signed = 0
    with (
        replacing(paths[0]) as table, table.open("wb") as bands,
        replacing(paths[1]) as rows, rows.open("wb") as sketches,
    ):  # fmt: skip
        first = _write_header(bands, np.uint64, (num_documents, settings.bands), by_column=True)
        _write_header(sketches, np.uint8, (num_documents, NUM_BINS), by_column=False)
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


def bucket_tasks(
    signed: list[Done], deduplicated: Done, place: Place, bands: int, folder: Path
) -> list[Task[BucketJob]]:
    """One task a band and part.

    Raises:
        DataError: there are more documents than a pair can count.
    """
    documents = deduplicated.result["dedup"]["documents_in"]
    if documents >= 2**32:
        raise DataError(
            f"{documents:,} documents are too many for dedup.near_duplicates, which counts up to "
            f"{2**32:,}; prepare the corpus as several datasets"
        )
    upstream = make_key([done.digest for done in signed], deduplicated.digest)
    parts = 1 + documents // PART_DOCUMENTS
    return [
        Task(
            f"{band:03d}-{part:03d}", folder, make_key(upstream, band, part, parts),
            BucketJob(place, band, part, parts),
        )
        for band in range(bands)
        for part in range(parts)
    ]  # fmt: skip


def run_buckets(task: Task[BucketJob]) -> tuple[dict[str, Any], list[Path]]:
    """Finds the pairs of one part of a band."""
    hashes, documents = _column(task.payload)
    pairs = bucket_pairs(hashes, documents)
    path = task.path(".pairs.npy")
    save(path, pairs)
    return {"pairs": len(pairs)}, [path]


def bucket_pairs(
    hashes: npt.NDArray[np.uint64], documents: npt.NDArray[np.uint32]
) -> npt.NDArray[np.uint64]:
    """Pairs of documents with equal hashes.

    Args:
        hashes: (d,) of one band.
        documents: (d,) their numbers, rising.

    Returns:
        (p,) rising: later document * 2^32 + the bucket's first one, or the one before.
    """
    order = np.argsort(hashes, kind="stable")  # equal hashes stay in the order of documents
    ordered = hashes[order]
    new = np.ones(len(ordered), dtype=bool)
    new[1:] = ordered[1:] != ordered[:-1]
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


def save(path: Path, array: npt.NDArray[Any]) -> None:
    """Writes an array, complete or not at all."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.save(file, array)


def _write_header(
    file: IO[bytes], dtype: type[np.generic], shape: tuple[int, int], *, by_column: bool
) -> int:
    """Begins a .npy file and returns where its values begin."""
    descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
    header = {"descr": descr, "fortran_order": by_column, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.tell()


def _column(job: BucketJob) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
    """Hashes of a band's part and their documents: kept by exact deduplication, and signed."""
    hashes = [np.zeros(0, dtype=np.uint64)]
    documents = [np.zeros(0, dtype=np.uint32)]
    start = 0
    for name in job.place.names:
        table = np.load(job.place.signature_folder / f"{name}.signatures.npy", mmap_mode="r")
        column = np.array(table[:, job.band])
        del table  # closes the map: there may be more pieces than a process may have open files
        chosen = np.load(job.place.dedup_folder / f"{name}.keep.npy") & (column != 0)
        chosen &= in_part(column, job.part, job.parts)
        hashes.append(column[chosen])
        documents.append((start + np.flatnonzero(chosen)).astype(np.uint32))
        start += len(column)
    return np.concatenate(hashes), np.concatenate(documents)


def batches(documents: Iterable[dict[str, str]]) -> Iterator[list[dict[str, str]]]:
    """Groups documents into lists of about as much text as fits caches."""
    batch: list[dict[str, str]] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document["text"])
        if size >= _BATCH_CHARS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
