"""Samples of the kept documents, drawn by hash of their ids.

So neither the order of files nor the number of tasks matters. The training sample takes each
source's documents with the lowest hashes, the sample for measurements those with the highest: they
overlap only where a source has too little text. Texts come in the order of the hashes, since
sentencepiece's unigram model depends on the order of lines. Needs 24 bytes of memory a document of
the largest source, and the memory of a source's sample.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data_prep.pieces import Pieces, hash_share, read_documents


@dataclass(frozen=True)
class Sample:
    """Documents of one source."""

    source: str
    documents: dict[tuple[str, int], int]
    """(piece, row) -> its bytes in the sample, in the order of the hashes; all documents but the
    last are whole."""

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of text."""
        return sum(self.documents.values())

    def texts(self, pieces: Pieces) -> Iterator[str]:
        """Read the documents' texts, in the order of `documents`."""
        texts: dict[tuple[str, int], bytes] = {}
        rows: dict[str, list[int]] = {}
        for name, row in sorted(self.documents):
            rows.setdefault(name, []).append(row)
        for name, wanted in rows.items():
            documents = read_documents(pieces.documents_path(name), set(wanted))
            for row, document in zip(wanted, documents, strict=True):
                texts[name, row] = document["text"].encode()[: self.documents[name, row]]
        for place in self.documents:
            yield texts.pop(place).decode(errors="ignore")


def allot(sizes: Mapping[str, int], weights: Mapping[str, float], budget: int) -> dict[str, int]:
    """Split a number of bytes over sources in proportion to weight times size.

    A source that has less than its part gives all its text; the others share the rest.
    """
    given: dict[str, int] = {}
    while waiting := [name for name in sorted(sizes) if name not in given]:
        left = budget - sum(given.values())
        total = sum(weights[name] * sizes[name] for name in waiting)
        parts = {n: left * weights[n] * sizes[n] / total if total else 0.0 for n in waiting}
        short = [name for name in waiting if parts[name] >= sizes[name]]
        given |= {n: sizes[n] for n in short} if short else {n: int(parts[n]) for n in waiting}
    return given


def draw(
    pieces: Pieces, source_of: Mapping[str, str], budgets: Sequence[Mapping[str, int]]
) -> list[list[Sample]]:
    """Draw two samples of every source: with the lowest, and with the highest hashes.

    Args:
        pieces: documents to choose from.
        source_of: piece -> name of its source.
        budgets: bytes by source, of the first sample and of the second.

    Returns:
        Both samples, each with one entry a source, sorted by name.
    """
    drawn: list[list[Sample]] = [[], []]
    for source in sorted(set(source_of.values())):
        names = [name for name in pieces.names if source_of[name] == source]
        rows = [pieces.kept_rows(name) for name in names]
        sizes = np.concatenate([pieces.kept_sizes(name) for name in names])
        hashes = np.concatenate([_hashes(pieces, n, r) for n, r in zip(names, rows, strict=True)])
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


def source_bytes(pieces: Pieces, source_of: Mapping[str, str]) -> dict[str, int]:
    """Count the kept bytes of every source."""
    totals = dict.fromkeys(sorted(set(source_of.values())), 0)
    for name in pieces.names:
        totals[source_of[name]] += int(pieces.kept_sizes(name).sum())
    return totals


def _hashes(pieces: Pieces, name: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
    """Return hashes of the ids, and of the texts to order documents that share an id."""
    texts = np.load(pieces.texts / f"{name}.hashes.npy")
    hashes = np.zeros(len(texts), dtype=[("id", "<f8"), ("text", "<u8")])
    hashes["id"] = [hash_share(i, "sample") for i in pieces.ids(name)]
    hashes["text"] = texts[:, 0]
    selected: npt.NDArray[np.void] = hashes[rows]
    return selected
