"""The part of the report about single sources: what every stage did with it, and what is left."""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep import ingest
from data_prep.corpus import Corpus
from data_prep.counts import Counts
from data_prep.datasheet.lengths import Lengths
from data_prep.inputs import Piece
from data_prep.stage import Done
from pipeline.data.format import SPLITS

PIECE_STAGES = {"ingest": ingest.STAGES, "lines": ("lines",)}
"""Stages that write the text of every piece, and what they count. The last one's is tokenised."""
_TOTALS = (
    "tokens", "documents", "text_bytes", "characters", "unknown", "byte_pieces", "blocks"
)  # fmt: skip


class SourceReport:
    """Everything about one source."""

    def __init__(self, stages: Iterable[str]) -> None:
        self.stages = {name: Counts() for name in stages}
        self.lengths = Lengths()
        self._pieces: list[Piece] = []
        self._scripts, self._notes = Counter[str](), Counter[str]()
        self._totals = {split: Counter[str]() for split in SPLITS}

    def add_piece(self, piece: Piece, done: Mapping[str, Done]) -> None:
        """Takes the records of a piece by stage."""
        self._pieces.append(piece)
        self._scripts.update(done["ingest"].result["scripts"])
        self._notes.update(done["ingest"].result["notes"])
        for stage, record in done.items():
            for name in PIECE_STAGES[stage]:
                parts = (self.stages[name].to_json(), record.result[name])
                self.stages[name] = Counts.total(parts)

    def add_masked(
        self, stage: str, sizes: npt.NDArray[np.int64], kept: npt.NDArray[np.int64], reason: str
    ) -> None:
        """Takes text bytes of a piece's documents that came to a mask, and of those it keeps."""
        counts = self.stages[stage]
        counts.documents_in += len(sizes)
        counts.bytes_in += int(sizes.sum())
        counts.documents_out += len(kept)
        counts.bytes_out += int(kept.sum())
        _reject_rest(counts, reason)

    def add_sharded(self, split: str, totals: Mapping[str, int]) -> None:
        """Takes what a shard has of this source."""
        self._totals[split].update(totals)

    def finish(self) -> None:
        """Counts the last stage, when everything is added."""
        *_, last, shards = self.stages.values()
        shards.documents_in, shards.bytes_in = last.documents_out, last.bytes_out
        shards.documents_out = sum(total["documents"] for total in self._totals.values())
        shards.bytes_out = sum(total["text_bytes"] for total in self._totals.values())
        _reject_rest(shards, "no tokens")

    def rejected_at_ingest(self) -> dict[str, list[int]]:
        """Reason -> [documents, bytes]."""
        return {k: v for name in ingest.STAGES for k, v in self.stages[name].rejected.items()}

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
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


def by_source(
    corpus: Corpus, names: tuple[str, ...], masks: dict[str, Path], records: dict[str, list[Done]]
) -> dict[str, SourceReport]:
    """Reports of all sources; reads the lengths and masks of one piece at a time.

    Args:
        corpus: what was prepared.
        names: of the pieces.
        masks: stage -> folder of its `NAME.keep.npy`, in order.
        records: stage -> records of its tasks.
    """
    of_pieces = {stage: records[stage] for stage in PIECE_STAGES if stage in records}
    texts = corpus.work / list(of_pieces)[-1]
    stages = [name for stage in of_pieces for name in PIECE_STAGES[stage]]
    sources = {s.name: SourceReport([*stages, *masks, "shards"]) for s in corpus.config.sources}
    reasons = {stage: _reason(stage, records[stage]) for stage in masks}
    for i, (piece, name) in enumerate(zip(corpus.pieces, names, strict=True)):
        source = sources[piece.source.name]
        source.add_piece(piece, {stage: done[i] for stage, done in of_pieces.items()})
        sizes = left = np.load(texts / f"{name}.bytes.npy")
        for stage, folder in masks.items():
            kept = sizes[np.load(folder / f"{name}.keep.npy")]
            source.add_masked(stage, left, kept, reasons[stage])
            left = kept
        source.lengths.add(left)
    for done in records["shards"]:
        for split, found in done.result["sources"].items():
            for source_name, totals in found.items():
                sources[source_name].add_sharded(split, totals)
    for source in sources.values():
        source.finish()
    return sources


def _reason(stage: str, done: list[Done]) -> str:
    """Why a mask drops documents: what its records say, or its name if they say several things."""
    reasons = {reason for record in done for reason in record.result[stage]["rejected"]}
    return reasons.pop() if len(reasons) == 1 else stage


def _reject_rest(counts: Counts, reason: str) -> None:
    dropped = counts.documents_in - counts.documents_out
    if dropped:
        counts.rejected[reason] = [dropped, counts.bytes_in - counts.bytes_out]
