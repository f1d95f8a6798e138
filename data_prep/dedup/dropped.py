"""Lists of dropped documents for people to look at: which went, and for which one that stays.

The kept document may be in any piece, so all ids are read once. The memory for that is bounded by
naming at most `LISTED` dropped documents, the first of every piece: about 0.7 GB with ids of 100
characters. The masks, not these lists, say what is dropped.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_prep.ingest import read_lines
from data_prep.stage import replacing

LISTED = 500_000


@dataclass(frozen=True)
class Pieces:
    """Documents are counted over all pieces, in order; this says where a number is."""

    folder: Path
    names: tuple[str, ...]
    ends: npt.NDArray[np.int64]
    """(pieces,) the number behind each piece's last document."""

    @classmethod
    def of(cls, folder: Path, names: Sequence[str]) -> "Pieces":
        """Counts the documents of every piece; `folder` is that of ingestion or of lines."""
        sizes = [
            len(np.load(folder / f"{name}.bytes.npy", mmap_mode="r")) for name in names
        ]  # fmt: skip
        return cls(folder, tuple(names), np.cumsum(sizes, dtype=np.int64))

    @property
    def starts(self) -> list[int]:
        """The number of each piece's first document."""
        return [0, *self.ends[:-1].tolist()]

    def split(self, documents: npt.NDArray[np.int64]) -> list[tuple[int, npt.NDArray[np.int64]]]:
        """Groups rising numbers of documents by the piece that they are in."""
        pieces = np.searchsorted(self.ends, documents, side="right")
        cuts = np.flatnonzero(np.diff(pieces)) + 1
        firsts = pieces[np.concatenate([[0], cuts])].tolist() if len(documents) else []
        return list(zip(firsts, np.split(documents, cuts), strict=False))


@dataclass(frozen=True)
class Dropped:
    """M dropped documents."""

    documents: npt.NDArray[np.int64]
    """(M,) rising."""
    kept: npt.NDArray[np.int64]
    """(M,) the one for which each was dropped."""
    jaccard: npt.NDArray[np.float64] | None = None
    """(M,) estimated similarity of the two, where that is a reason."""


def listed_per_piece(pieces: Pieces) -> int:
    """How many dropped documents of a piece are named."""
    return max(1, LISTED // len(pieces.names))


def write_lists(pieces: Pieces, dropped: Dropped, folder: Path, suffix: str) -> list[Path]:
    """Writes {"id", "kept"[, "jaccard"]} a line to `NAMEsuffix` for every piece.

    Returns:
        The files.
    """
    ids = _ids(pieces, np.union1d(dropped.documents, dropped.kept))
    cuts = np.searchsorted(dropped.documents, pieces.ends).tolist()
    paths = []
    for name, low, high in zip(pieces.names, [0, *cuts], cuts, strict=False):
        path = folder / f"{name}{suffix}"
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            for row in range(low, high):
                record: dict[str, str | float] = {
                    "id": ids[int(dropped.documents[row])], "kept": ids[int(dropped.kept[row])]
                }  # fmt: skip
                if dropped.jaccard is not None:
                    record["jaccard"] = round(float(dropped.jaccard[row]), 3)
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        paths.append(path)
    return paths


def _ids(pieces: Pieces, documents: npt.NDArray[np.int64]) -> dict[int, str]:
    found = {}
    starts = pieces.starts
    for piece, wanted in pieces.split(documents):
        remaining = iter(wanted.tolist())
        next_one = next(remaining)
        lines = read_lines(pieces.folder / f"{pieces.names[piece]}.ids.jsonl.zst")
        for number, text in enumerate(lines, start=starts[piece]):
            if number == next_one:
                found[number] = text
                next_one = next(remaining, -1)
    return found
