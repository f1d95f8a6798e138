"""What `report.json` says about a dataset: all numbers of the datasheet, whole and by source.

Bytes are UTF-8 bytes of text. Lengths are those of the documents that the last mask keeps. Needs
memory for one piece and the distinct lengths of all documents of a source.
"""

import datetime
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep import ingest, samples
from data_prep.corpus import Corpus
from data_prep.counts import Counts
from data_prep.inputs import Piece
from data_prep.stage import Done
from pipeline.config.load import provenance
from pipeline.data.shards import SPLITS, DatasetIndex, read_index

REPORT_FILE = "report.json"
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
EDGES = sorted({math.ceil(10 ** (tenth / 10)) for tenth in range(111)})
"""Limits of the length histograms in bytes, ten a decade up to 100 GB; a bin holds its lower."""
_MERGE_AT = 1 << 17


def make(
    corpus: Corpus, names: tuple[str, ...], masks: dict[str, Path], records: dict[str, list[Done]]
) -> dict[str, Any]:
    """Gathers everything; the index is written already.

    Args:
        corpus: what was prepared.
        names: of the pieces.
        masks: stage -> folder of its `NAME.keep.npy`, in order.
        records: stage -> records of its tasks.
    """
    made = read_index(corpus.output)
    [trained] = records["tokenizer"]
    stages = {
        name: Counts.total(done.result[name] for done in records["ingest"])
        for name in ingest.STAGES
    }
    for name in (*masks, "shards"):
        stages[name] = Counts.total(done.result[name] for done in records[name])
    sources = _sources(corpus, names, masks, records)
    lengths = Lengths()
    for source in sources.values():
        lengths.merge(source.lengths)
    rejected = {name: source.rejected_at_ingest() for name, source in sources.items()}
    pieces = [
        (piece.source.name, corpus.work / "ingest" / f"{name}.rejected.jsonl")
        for piece, name in zip(corpus.pieces, names, strict=True)
    ]
    return {
        "key": corpus.key,
        "fingerprint": made.fingerprint,
        "finished": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "vocab_size": made.vocab_size,
        "tokenizer_sample_bytes": trained.result["sample_bytes"],
        "unigram_entropy_nats": made.unigram_entropy_nats,
        "totals": made.totals,
        "num_shards": len(made.shards),
        "num_blocks": len(made.blocks),
        "shard_bytes": {split: _shard_bytes(made, split) for split in SPLITS},
        "stages": {name: counts.to_json() for name, counts in stages.items()},
        "notes": _notes(records["ingest"]),
        "sources": {name: source.to_json() for name, source in sources.items()},
        "length_edges": EDGES,
        "lengths": lengths.to_json(),
        "rejected_samples": samples.collect(corpus.config, pieces, records["ingest"], rejected),
        "settings": asdict(corpus.config),
        "provenance": provenance(),
    }


class Lengths:
    """The exact distribution of document lengths, as distinct values and their counts."""

    def __init__(self) -> None:
        self._values: list[npt.NDArray[np.int64]] = []
        self._counts: list[npt.NDArray[np.int64]] = []
        self._size, self._limit = 0, _MERGE_AT

    def add(self, values: npt.NDArray[np.int64]) -> None:
        """Takes the lengths of a piece's documents."""
        self._append(*np.unique(values, return_counts=True))

    def merge(self, other: "Lengths") -> None:
        """Takes all that another has."""
        self._append(*other.table())

    def table(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Rising (n,) values, and how many documents have each."""
        if not self._values:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        values, places = np.unique(np.concatenate(self._values), return_inverse=True)
        counts = np.zeros(len(values), dtype=np.int64)
        np.add.at(counts, places, np.concatenate(self._counts))
        self._values, self._counts, self._size = [values], [counts], len(values)
        self._limit = max(_MERGE_AT, 2 * len(values))
        return values, counts

    def to_json(self) -> dict[str, Any]:
        """Histogram over `EDGES`; quantiles, which are lengths that documents have.

        At least a share q of the documents is no longer than the quantile q. `half_of_text`: half
        of the bytes are in documents of at least this length.
        """
        values, counts = self.table()
        if not len(values):
            return {"histogram": [0] * (len(EDGES) - 1), "quantiles": {}}
        bins = np.searchsorted(EDGES, values, side="right") - 1
        histogram = np.zeros(len(EDGES) - 1, dtype=np.int64)
        np.add.at(histogram, bins, counts)
        up_to = np.cumsum(counts)
        quantiles = {
            str(q): int(values[np.searchsorted(up_to, math.ceil(q * int(up_to[-1])))])
            for q in QUANTILES
        }
        text = np.cumsum((values * counts)[::-1])
        half = values[::-1][np.searchsorted(text, int(text[-1]) / 2)]
        return {
            "histogram": histogram.tolist(),
            "quantiles": {
                "min": int(values[0]), **quantiles, "max": int(values[-1]),
                "half_of_text": int(half),
            },
        }  # fmt: skip

    def _append(self, values: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> None:
        self._values.append(values)
        self._counts.append(counts)
        self._size += len(values)
        if self._size > self._limit:
            self.table()


class _Source:
    """Everything about one source."""

    def __init__(self, stages: Iterable[str]) -> None:
        self.lengths = Lengths()
        self.stages = {name: Counts() for name in stages}
        self._pieces: list[Piece] = []
        self._ingested: list[Done] = []
        self._totals = {split: Counter[str]() for split in SPLITS}

    def add_piece(self, piece: Piece, done: Done) -> None:
        self._pieces.append(piece)
        self._ingested.append(done)

    def add_masked(
        self, stage: str, sizes: npt.NDArray[np.int64], kept: npt.NDArray[np.int64], reason: str
    ) -> None:
        """Text bytes of a piece's documents that came to a mask, and of those that it keeps."""
        counts = self.stages[stage]
        counts.documents_in += len(sizes)
        counts.bytes_in += int(sizes.sum())
        counts.documents_out += len(kept)
        counts.bytes_out += int(kept.sum())
        _reject_rest(counts, reason)

    def add_sharded(self, totals: dict[str, dict[str, int]]) -> None:
        for split, numbers in totals.items():
            self._totals[split].update(numbers)

    def finish(self, before_shards: str) -> None:
        """Derives the counts of ingestion and shards."""
        for name in ingest.STAGES:
            self.stages[name] = Counts.total(done.result[name] for done in self._ingested)
        last, shards = self.stages[before_shards], self.stages["shards"]
        shards.documents_in, shards.bytes_in = last.documents_out, last.bytes_out
        shards.documents_out = sum(total["documents"] for total in self._totals.values())
        shards.bytes_out = sum(total["text_bytes"] for total in self._totals.values())
        _reject_rest(shards, "no tokens")

    def rejected_at_ingest(self) -> dict[str, list[int]]:
        return {k: v for name in ingest.STAGES for k, v in self.stages[name].rejected.items()}

    def to_json(self) -> dict[str, Any]:
        scripts = Counter[str]()
        for done in self._ingested:
            scripts.update(done.result["scripts"])
        files = [file for piece in self._pieces for file in piece.files]
        return {
            "files": len({file.path for file in files}),
            "file_bytes": sum(file.range_bytes for file in files),
            "stages": {name: counts.to_json() for name, counts in self.stages.items()},
            "scripts": dict(sorted(scripts.items())),
            "notes": _notes(self._ingested),
            "lengths": self.lengths.to_json(),
            "totals": {
                split: {name: total[name] for name in _TOTALS}
                for split, total in self._totals.items()
            },
        }


_TOTALS = ("tokens", "documents", "text_bytes", "characters", "blocks")


def _sources(
    corpus: Corpus, names: tuple[str, ...], masks: dict[str, Path], records: dict[str, list[Done]]
) -> dict[str, _Source]:
    stages = (*ingest.STAGES, *masks, "shards")
    sources = {source.name: _Source(stages) for source in corpus.config.sources}
    reasons = {stage: _reason(stage, records[stage]) for stage in masks}
    for piece, name, done in zip(corpus.pieces, names, records["ingest"], strict=True):
        source = sources[piece.source.name]
        source.add_piece(piece, done)
        sizes = np.load(corpus.work / "ingest" / f"{name}.bytes.npy")
        left = sizes
        for stage, folder in masks.items():
            kept = sizes[np.load(folder / f"{name}.keep.npy")]
            source.add_masked(stage, left, kept, reasons[stage])
            left = kept
        source.lengths.add(left)
    for done in records["shards"]:
        for name, totals in done.result["sources"].items():
            sources[name].add_sharded(totals)
    for source in sources.values():
        source.finish(list(masks)[-1])
    return sources


def _reason(stage: str, done: list[Done]) -> str:
    """Why a mask drops documents: what its records say, or its name if they say several things."""
    reasons = {reason for record in done for reason in record.result[stage]["rejected"]}
    return reasons.pop() if len(reasons) == 1 else stage


def _reject_rest(counts: Counts, reason: str) -> None:
    dropped = counts.documents_in - counts.documents_out
    if dropped:
        counts.rejected[reason] = [dropped, counts.bytes_in - counts.bytes_out]


def _notes(ingested: Iterable[Done]) -> dict[str, int]:
    notes = Counter[str]()
    for done in ingested:
        notes.update(done.result["notes"])
    return {name: count for name, count in notes.items() if count}


def _shard_bytes(made: DatasetIndex, split: str) -> dict[str, int]:
    sizes = [shard.num_bytes for shard in made.shards if shard.split == split]
    return {
        "shards": len(sizes),
        "blocks": len(made.split_blocks(split)),
        "total": sum(sizes),
        "smallest": min(sizes),
        "largest": max(sizes),
    }
