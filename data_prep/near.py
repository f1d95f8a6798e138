"""Stages signatures and buckets: candidates for near duplicates, over all pieces.

A signature is computed once a piece. Documents that agree in all rows of a band are in one bucket
of that band (locality-sensitive hashing: Leskovec, Rajaraman, Ullman, "Mining of Massive
Datasets", 3.4): with Jaccard similarity s that happens in at least one band with probability
1 - (1 - s^rows)^bands. A bucket of m documents gives at most 2m pairs, each member with the first
one and with the one before it. Stage near (`data_prep.near_cluster`) decides about the pairs.

Writes per piece
    NAME.signatures.npy   (d, bands) uint64, column by column; 0 where there is no signature
    NAME.sketch.npy       (d, bands * rows) uint8, for estimates of the similarity
    NAME.ids.jsonl        the documents' ids
and per band, and part of its hash values
    BAND-PART.pairs.npy   (p, 2) uint32: earlier and later document, counted over all pieces

A bucket task holds one part of one band: about 40 bytes a document of the part, `PART_DOCUMENTS`
or about as many at a time, however large the corpus is.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.config import DedupConfig
from data_prep.ingest import read_documents
from data_prep.minhash import Signatures, SignatureSettings, signatures
from data_prep.stage import Done, Task, make_key, replacing
from pipeline.errors import DataError

PART_DOCUMENTS = 8_000_000
_BATCH_CHARS = 1 << 18


@dataclass(frozen=True)
class SignatureJob:
    """One ingested piece."""

    documents: Path
    settings: SignatureSettings


@dataclass(frozen=True)
class BucketJob:
    """One band, and one of `parts` equal ranges of its hash values."""

    signature_folder: Path
    dedup_folder: Path
    names: tuple[str, ...]
    band: int
    part: int
    parts: int


def settings_of(config: DedupConfig) -> SignatureSettings:
    """The part of the config that signatures depend on."""
    return SignatureSettings(
        config.ngram, config.ngram_cjk, config.bands, config.rows, config.min_chars
    )


def signature_tasks(
    ingested: list[Done],
    names: tuple[str, ...],
    ingest_folder: Path,
    config: DedupConfig,
    folder: Path,
) -> list[Task[SignatureJob]]:
    """One task a piece."""
    settings = settings_of(config)
    return [
        Task(
            name, folder, make_key(done.digest, asdict(settings)),
            SignatureJob(ingest_folder / f"{name}.jsonl.zst", settings),
        )
        for name, done in zip(names, ingested, strict=True)
    ]  # fmt: skip


def run_signatures(task: Task[SignatureJob]) -> tuple[dict[str, Any], list[Path]]:
    """Signs one piece."""
    job = task.payload
    paths = [task.path(suffix) for suffix in (".signatures.npy", ".sketch.npy", ".ids.jsonl")]
    bands = [np.zeros((0, job.settings.bands), dtype=np.uint64)]
    sketches = [np.zeros((0, job.settings.bands * job.settings.rows), dtype=np.uint8)]
    with replacing(paths[2]) as temporary, temporary.open("w", encoding="utf-8") as ids:
        for batch in batches(read_documents(job.documents)):
            ids.writelines(json.dumps(document["id"]) + "\n" for document in batch)
            signed = signatures([document["text"] for document in batch], job.settings)
            bands.append(signed.bands)
            sketches.append(signed.sketch)
    all_signed = Signatures(np.asfortranarray(np.concatenate(bands)), np.concatenate(sketches))
    save(paths[0], all_signed.bands)
    save(paths[1], all_signed.sketch)
    return {"signed": int(np.count_nonzero(all_signed.bands[:, 0]))}, paths


def bucket_tasks(
    signed: list[Done], deduplicated: Done, job: BucketJob, bands: int, folder: Path
) -> list[Task[BucketJob]]:
    """One task a band and part; `job` says where signatures and keep masks lie.

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
            BucketJob(job.signature_folder, job.dedup_folder, job.names, band, part, parts),
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
) -> npt.NDArray[np.uint32]:
    """Pairs of documents with equal hashes.

    Args:
        hashes: (d,) of one band.
        documents: (d,) their numbers, rising.

    Returns:
        (p, 2): the bucket's first document, or the one before, and the later document.
    """
    order = np.argsort(hashes, kind="stable")  # equal hashes stay in the order of documents
    ordered = hashes[order]
    new = np.ones(len(ordered), dtype=bool)
    new[1:] = ordered[1:] != ordered[:-1]
    later = np.flatnonzero(~new)
    firsts = np.flatnonzero(new)
    first = firsts[np.searchsorted(firsts, later) - 1]
    numbers = documents[order]
    with_first = np.stack([numbers[first], numbers[later]], axis=1)
    with_previous = np.stack([numbers[later - 1], numbers[later]], axis=1)
    return np.concatenate([with_first, with_previous[first != later - 1]])


def save(path: Path, array: npt.NDArray[Any]) -> None:
    """Writes an array, complete or not at all."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.save(file, array)


def _column(job: BucketJob) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
    """Hashes of a band's part and their documents: kept by exact deduplication, and signed."""
    hashes = [np.zeros(0, dtype=np.uint64)]
    documents = [np.zeros(0, dtype=np.uint32)]
    start = 0
    for name in job.names:
        table = np.load(job.signature_folder / f"{name}.signatures.npy", mmap_mode="r")
        column = np.array(table[:, job.band])
        del table  # closes the map: there may be more pieces than a process may have open files
        chosen = np.load(job.dedup_folder / f"{name}.keep.npy") & (column != 0)
        if job.parts > 1:
            scaled = (column >> np.uint64(32)) * np.uint64(job.parts)
            chosen &= (scaled >> np.uint64(32)) == job.part
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
        if size >= _BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
