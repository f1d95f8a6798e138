"""Samples of the kept documents: by hash of their ids, so that neither the order of files nor the
number of tasks matters.

The training sample takes each source's documents with the lowest hashes, the sample to judge a
tokenizer by those with the highest: they overlap only where a source has no other text. Texts come
in the order of the hashes too, since sentencepiece's unigram model depends on the order of lines.
Needs 24 bytes of memory a document of the largest source, and the memory of a source's sample.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_prep.config import SourceConfig
from data_prep.ingest import read_documents, read_lines
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
    documents: dict[tuple[str, int], int]
    """(piece, row) -> how many of its bytes are in the sample, in the order of the hashes; all but
    the last document are whole."""

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of text."""
        return sum(self.documents.values())

    def texts(self, kept: Kept) -> Iterator[str]:
        """The documents' texts, in the order of `documents`."""
        found: dict[tuple[str, int], bytes] = {}
        rows: dict[str, list[int]] = {}
        for name, row in sorted(self.documents):
            rows.setdefault(name, []).append(row)
        for name, wanted in rows.items():
            documents = read_documents(kept.ingest_folder / f"{name}.jsonl.zst", set(wanted))
            for row, document in zip(wanted, documents, strict=True):
                found[name, row] = document["text"].encode()[: self.documents[name, row]]
        for place in self.documents:
            yield found.pop(place).decode(errors="ignore")


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
        firsts = np.cumsum([0, *map(len, rows)])
        order = np.argsort(hashes, order=("id", "text"))
        for samples, budget, way in zip(drawn, budgets, (order, order[::-1]), strict=True):
            ends = np.cumsum(sizes[way])
            documents = {}
            for i in range(int(np.searchsorted(ends - sizes[way], budget[source]))):
                at = int(way[i])
                piece = int(np.searchsorted(firsts, at, side="right")) - 1
                place = (names[piece], int(rows[piece][at - firsts[piece]]))
                excess = max(0, int(ends[i]) - budget[source])
                documents[place] = int(sizes[at]) - excess
            samples.append(Sample(source, documents))
    return drawn


def source_bytes(kept: Kept) -> dict[str, int]:
    """Kept bytes of every source."""
    totals = dict.fromkeys(sorted({source.name for source in kept.sources}), 0)
    for name, source in zip(kept.names, kept.sources, strict=True):
        totals[source.name] += int(kept.sizes(name).sum())
    return totals


def _hashes(kept: Kept, name: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    """Of the ids, and of the texts for documents that share an id."""
    texts = np.load(kept.ingest_folder / f"{name}.hashes.npy")
    hashes = np.zeros(len(texts), dtype=[("id", "<f8"), ("text", "<u8")])
    ids = read_lines(kept.ingest_folder / f"{name}.ids.jsonl.zst")
    hashes["id"] = [hash_share(i, "sample") for i in ids]
    hashes["text"] = texts[:, 0]
    selected: npt.NDArray[np.void] = hashes[rows]
    return selected
