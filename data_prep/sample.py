"""Samples of the kept documents: by hash of their ids, so that neither the order of files nor the
number of tasks matters.

The training sample takes each source's documents with the lowest hashes, the sample to judge a
tokenizer by those with the highest: they overlap only where a source has no other text.
Needs 16 bytes of memory a document of the largest source.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_prep.config import SourceConfig
from data_prep.ingest import read_documents, read_ids
from data_prep.shards import hash_share


@dataclass(frozen=True)
class Kept:
    """Pieces, and what deduplication kept of them."""

    ingest_folder: Path
    keep_folder: Path
    names: tuple[str, ...]
    sources: tuple[SourceConfig, ...]
    """The source of each piece."""

    def rows(self, name: str) -> npt.NDArray[np.int64]:
        """Rows of a piece's kept documents."""
        return np.flatnonzero(np.load(self.keep_folder / f"{name}.keep.npy"))

    def sizes(self, name: str) -> npt.NDArray[np.int64]:
        """UTF-8 bytes of a piece's kept documents."""
        sizes: npt.NDArray[np.int64] = np.load(self.ingest_folder / f"{name}.bytes.npy")
        return sizes[self.rows(name)]

    def of_source(self, source: str) -> list[str]:
        """Names of a source's pieces."""
        return [n for n, s in zip(self.names, self.sources, strict=True) if s.name == source]


@dataclass(frozen=True)
class Sample:
    """Documents of one source."""

    source: str
    documents: dict[str, dict[int, int]]
    """piece -> row -> how many of its bytes are in the sample; all but one document are whole."""

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return sum(map(len, self.documents.values()))

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of text."""
        return sum(sum(rows.values()) for rows in self.documents.values())

    def texts(self, kept: Kept) -> Iterator[str]:
        """The documents' texts."""
        for name, rows in self.documents.items():
            last = max(rows, default=-1)
            for row, document in enumerate(
                read_documents(kept.ingest_folder / f"{name}.jsonl.zst")
            ):
                if row > last:
                    break
                if row in rows:
                    yield document["text"].encode()[: rows[row]].decode(errors="ignore")


def allot(sizes: Mapping[str, int], weights: Mapping[str, float], budget: int) -> dict[str, int]:
    """Splits a number of bytes over sources in proportion to weight times size.

    A source that has less than its part gives all it has; the others share what is left over.
    """
    given: dict[str, int] = {}
    while waiting := [name for name in sorted(sizes) if name not in given]:
        left = budget - sum(given.values())
        total = sum(weights[name] * sizes[name] for name in waiting)
        parts = {n: left * weights[n] * sizes[n] / total if total else 0.0 for n in waiting}
        short = [name for name in waiting if parts[name] >= sizes[name]]
        given |= {n: sizes[n] for n in short} if short else {n: int(parts[n]) for n in waiting}
    return given


def draw(kept: Kept, budgets: Sequence[Mapping[str, int]]) -> list[list[Sample]]:
    """Draws two samples of every source: with the lowest, and with the highest hashes.

    Args:
        kept: documents to choose from.
        budgets: bytes by source, of the first sample and of the second.

    Returns:
        Both samples, each with one entry a source, sorted by name.
    """
    drawn: list[list[Sample]] = [[], []]
    for source in sorted({source.name for source in kept.sources}):
        names = kept.of_source(source)
        rows = [kept.rows(name) for name in names]
        sizes = np.concatenate([kept.sizes(name) for name in names])
        hashes = np.concatenate([_hashes(kept, n, r) for n, r in zip(names, rows, strict=True)])
        piece = np.repeat(np.arange(len(names)), [len(part) for part in rows])
        row = np.concatenate(rows)
        order = np.lexsort((sizes, hashes))
        for samples, budget, way in zip(drawn, budgets, (order, order[::-1]), strict=True):
            documents: dict[str, dict[int, int]] = {name: {} for name in names}
            ends = np.cumsum(sizes[way])
            for i in range(int(np.searchsorted(ends, budget[source])) + 1):
                start = int(ends[i - 1]) if i else 0
                if i < len(way) and start < budget[source]:
                    at = int(way[i])
                    taken = min(int(sizes[at]), budget[source] - start)
                    documents[names[int(piece[at])]][int(row[at])] = taken
            samples.append(Sample(source, documents))
    return drawn


def source_bytes(kept: Kept) -> dict[str, int]:
    """Kept bytes of every source."""
    totals = dict.fromkeys(sorted({source.name for source in kept.sources}), 0)
    for name, source in zip(kept.names, kept.sources, strict=True):
        totals[source.name] += int(kept.sizes(name).sum())
    return totals


def _hashes(kept: Kept, name: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    ids = read_ids(kept.ingest_folder / f"{name}.ids.jsonl.zst")
    return np.array([hash_share(i, "sample") for i in ids], dtype=np.float64)[rows]
