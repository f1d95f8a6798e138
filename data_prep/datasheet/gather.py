"""Gathers `report.json`: all numbers of the datasheet, for the whole dataset and by source.

Bytes are UTF-8 bytes of text. Lengths are those of the documents that the last mask keeps.
"""

import datetime
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.corpus import Corpus
from data_prep.counts import INGEST_STAGES, REPEATED_IDS, Counts
from data_prep.datasheet import samples
from data_prep.inputs import Piece
from data_prep.pieces import Pieces
from data_prep.stage import Done
from pipeline.config.load import provenance
from pipeline.data.shards import SPLITS, DatasetIndex, read_index

REPORT_FILE = "report.json"
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
EDGES = sorted({math.ceil(10 ** (tenth / 10)) for tenth in range(111)})
"""Edges of the histogram's bins in bytes, ten a decade up to 100 GB; a bin holds its lower edge."""
_PIECE_STAGES = {"ingest": INGEST_STAGES, "lines": ("lines",)}
"""Stages that write the text of every piece, and the names under which they count."""
_TOTALS = ["tokens", "documents", "text_bytes", "characters", "unknown", "byte_pieces", "blocks"]
_MERGE_AT = 1 << 17

Records = Mapping[str, list[Done]]
"""Stage -> records of its tasks."""


def gather(
    corpus: Corpus, pieces: Pieces, masks: dict[str, Path], records: Records
) -> dict[str, Any]:
    """Gather the report; the index must be written.

    Args:
        corpus: the corpus that was prepared.
        pieces: its pieces with the last texts.
        masks: stage -> folder of its `NAME.keep.npy`, in order.
        records: records of the stages that write texts, masks, tokenizer or shards.
    """
    index = read_index(corpus.output)
    [trained], [deduplicated] = records["tokenizer"], records["dedup"]
    notes = Counter[str]()
    for done in records["ingest"]:
        notes.update(done.result["notes"])
    # Ingestion counts them within a piece, stage dedup over all pieces.
    notes[REPEATED_IDS] = deduplicated.result["repeated_ids"]
    sources = _by_source(corpus, pieces, masks, records)
    lengths = Lengths()
    for source in sources.values():
        lengths.merge(source.lengths)
    rejected_files = [
        (piece.source.name, corpus.work / "ingest" / f"{name}.rejected.jsonl.zst")
        for piece, name in zip(corpus.pieces, pieces.names, strict=True)
    ]
    rejected = {name: source.rejected_at_ingest() for name, source in sources.items()}
    tokenizer_report = corpus.work / "tokenizer" / "tokenizer.report.json"
    return {
        "key": corpus.key,
        "fingerprint": index.fingerprint,
        "finished": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "vocab_size": index.vocab_size,
        "tokenizer_sample_bytes": trained.result["sample_bytes"],
        "tokenizer_sample": trained.result["sample"],
        "unigram_entropy_nats": index.unigram_entropy_nats,
        "totals": index.totals,
        "num_shards": len(index.shards),
        "num_blocks": len(index.blocks),
        "shard_bytes": {split: _shard_bytes(index, split) for split in SPLITS},
        "stages": {name: counts.to_json() for name, counts in _stages(masks, records).items()},
        "notes": {name: count for name, count in notes.items() if count},
        "repeated_ids": deduplicated.result["examples"],
        "decontaminate": {
            name: value
            for done in records.get("decontaminate", [])
            for name, value in done.result.items()
            if name in ("sets", "items", "ignored_ngrams")
        },
        "sources": {name: source.to_json() for name, source in sources.items()},
        "length_edges": EDGES,
        "lengths": lengths.to_json(),
        "tokenizer_report": json.loads(tokenizer_report.read_bytes()),
        "rejected_samples": samples.collect(
            corpus.config, rejected_files, records["ingest"], rejected
        ),
        "settings": asdict(corpus.config),
        "provenance": provenance(),
    }


def _stages(masks: dict[str, Path], records: Records) -> dict[str, Counts]:
    """Count documents and bytes of all stages that take or drop text, in order."""
    groups = [(stage, names) for stage, names in _PIECE_STAGES.items() if stage in records]
    groups += [(stage, (stage,)) for stage in (*masks, "shards")]
    return {
        name: Counts.total(done.result[name] for done in records[stage])
        for stage, names in groups
        for name in names
    }


def _shard_bytes(index: DatasetIndex, split: str) -> dict[str, int]:
    sizes = [shard.num_bytes for shard in index.shards if shard.split == split]
    return {
        "shards": len(sizes),
        "blocks": len(index.split_blocks(split)),
        "total": sum(sizes),
        "smallest": min(sizes),
        "largest": max(sizes),
    }


class _SourceReport:
    """Counts of every stage for one source, and the documents that are left of it."""

    def __init__(self, stages: Iterable[str]) -> None:
        self.stages = {name: Counts() for name in stages}
        self.lengths = Lengths()
        self._pieces: list[Piece] = []
        self._scripts, self._notes = Counter[str](), Counter[str]()
        self._totals = {split: Counter[str]() for split in SPLITS}

    def add_piece(self, piece: Piece, records: Mapping[str, Done]) -> None:
        """Add the records of a piece by stage."""
        self._pieces.append(piece)
        self._scripts.update(records["ingest"].result["scripts"])
        self._notes.update(records["ingest"].result["notes"])
        for stage, record in records.items():
            for name in _PIECE_STAGES[stage]:
                self.stages[name].add(record.result[name])

    def add_masked(
        self, stage: str, sizes: npt.NDArray[np.int64], kept: npt.NDArray[np.int64], reason: str
    ) -> None:
        """Add text bytes of a piece's documents before a mask, and of those that it keeps."""
        counts = self.stages[stage]
        counts.documents_in += len(sizes)
        counts.bytes_in += int(sizes.sum())
        counts.documents_out += len(kept)
        counts.bytes_out += int(kept.sum())
        _reject_rest(counts, reason)

    def add_sharded(self, split: str, totals: Mapping[str, int]) -> None:
        """Add the totals of this source in a shard."""
        self._totals[split].update(totals)

    def finish(self) -> None:
        """Count the last stage, when everything is added."""
        *_, last, shards = self.stages.values()
        shards.documents_in, shards.bytes_in = last.documents_out, last.bytes_out
        shards.documents_out = sum(total["documents"] for total in self._totals.values())
        shards.bytes_out = sum(total["text_bytes"] for total in self._totals.values())
        _reject_rest(shards, "no tokens")

    def rejected_at_ingest(self) -> dict[str, list[int]]:
        """Return reason -> [documents, bytes]."""
        return {k: v for name in INGEST_STAGES for k, v in self.stages[name].rejected.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        whole = sum(self._totals.values(), Counter())
        files = [file for piece in self._pieces for file in piece.files]
        return {
            "files": len({file.path for file in files}),
            "file_bytes": sum(file.range_bytes for file in files),
            "stages": {name: counts.to_json() for name, counts in self.stages.items()},
            "scripts": dict(sorted(self._scripts.items())),
            "notes": {name: count for name, count in self._notes.items() if count},
            "lengths": self.lengths.to_json(),
            **{name: whole[name] for name in _TOTALS},
            "unknown_share": round(whole["unknown"] / max(1, whole["tokens"]), 6),
            "byte_piece_share": round(whole["byte_pieces"] / max(1, whole["tokens"]), 6),
            "totals": {
                split: {name: total[name] for name in _TOTALS}
                for split, total in self._totals.items()
            },
        }


def _by_source(
    corpus: Corpus, pieces: Pieces, masks: dict[str, Path], records: Records
) -> dict[str, _SourceReport]:
    """Report on all sources; reads the lengths and masks of one piece at a time."""
    of_pieces = {stage: records[stage] for stage in _PIECE_STAGES if stage in records}
    stages = [name for stage in of_pieces for name in _PIECE_STAGES[stage]]
    sources = {s.name: _SourceReport([*stages, *masks, "shards"]) for s in corpus.config.sources}
    reasons = {stage: _reason(stage, records[stage]) for stage in masks}
    for i, (piece, name) in enumerate(zip(corpus.pieces, pieces.names, strict=True)):
        source = sources[piece.source.name]
        source.add_piece(piece, {stage: done[i] for stage, done in of_pieces.items()})
        sizes = left = pieces.sizes(name)
        for stage, folder in masks.items():
            kept = sizes[np.load(folder / f"{name}.keep.npy")]
            source.add_masked(stage, left, kept, reasons[stage])
            left = kept
        source.lengths.add(left)
    for done in records["shards"]:
        for split, of_sources in done.result["sources"].items():
            for source_name, totals in of_sources.items():
                sources[source_name].add_sharded(split, totals)
    for source in sources.values():
        source.finish()
    return sources


def _reason(stage: str, done: list[Done]) -> str:
    """Return the reason for which a mask drops documents, or its name if there are several."""
    reasons = {reason for record in done for reason in record.result[stage]["rejected"]}
    return reasons.pop() if len(reasons) == 1 else stage


def _reject_rest(counts: Counts, reason: str) -> None:
    dropped = counts.documents_in - counts.documents_out
    if dropped:
        counts.rejected[reason] = [dropped, counts.bytes_in - counts.bytes_out]


class Lengths:
    """The exact distribution of document lengths, as distinct values and their counts."""

    def __init__(self) -> None:
        self._parts: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
        self._size, self._limit = 0, _MERGE_AT

    def add(self, values: npt.NDArray[np.int64]) -> None:
        """Add the lengths of a piece's documents."""
        self._append(*np.unique(values, return_counts=True))

    def merge(self, other: "Lengths") -> None:
        """Add all lengths of another distribution."""
        self._append(*other.table())

    def table(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return rising (n,) values, and the number of documents of each."""
        if not self._parts:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        all_values, all_counts = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        values, places = np.unique(all_values, return_inverse=True)
        counts = np.zeros(len(values), dtype=np.int64)
        np.add.at(counts, places, all_counts)
        self._parts, self._size = [(values, counts)], len(values)
        self._limit = max(_MERGE_AT, 2 * len(values))
        return values, counts

    def to_json(self) -> dict[str, Any]:
        """Return the histogram over `EDGES`, and quantiles, which are lengths of documents.

        At least a share q of the documents is no longer than the quantile q. `half_of_text`: half
        of the bytes are in documents of at least this length.
        """
        values, counts = self.table()
        histogram = np.zeros(len(EDGES) - 1, dtype=np.int64)
        if not len(values):
            return {"histogram": histogram.tolist(), "quantiles": {}}
        np.add.at(histogram, np.searchsorted(EDGES, values, side="right") - 1, counts)
        up_to = np.cumsum(counts)
        quantiles = {"min": int(values[0])}
        for q in QUANTILES:
            rank = math.ceil(q * int(up_to[-1]))
            quantiles[str(q)] = int(values[np.searchsorted(up_to, rank)])
        quantiles["max"] = int(values[-1])
        text = np.cumsum((values * counts)[::-1])
        quantiles["half_of_text"] = int(values[::-1][np.searchsorted(text, int(text[-1]) / 2)])
        return {"histogram": histogram.tolist(), "quantiles": quantiles}

    def _append(self, values: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> None:
        self._parts.append((values, counts))
        self._size += len(values)
        if self._size > self._limit:
            self.table()
