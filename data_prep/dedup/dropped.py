"""Lists that name dropped documents and, for each, the document that is kept instead.

The lists are for people; the masks decide. The kept document may be in any piece, so all ids are
read once. At most `LISTED` dropped documents are named, the first ones of every piece, which bounds
the memory: about 0.7 GB with ids of 100 characters.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_prep.pieces import Pieces
from data_prep.stage import replacing

LISTED = 500_000


@dataclass(frozen=True)
class Dropped:
    """M dropped documents."""

    documents: npt.NDArray[np.int64]
    """(M,) rising."""
    kept: npt.NDArray[np.int64]
    """(M,) the document that is kept instead of each."""
    jaccard: npt.NDArray[np.float64] | None = None
    """(M,) estimated similarity of the two; None for equal documents."""


def listed_per_piece(pieces: Pieces) -> int:
    """Return the number of dropped documents that are named per piece."""
    return max(1, LISTED // len(pieces.names))


def list_bytes(num_documents: float) -> float:
    """Estimate the memory for the ids in the lists."""
    return 1400 * min(num_documents / 5, LISTED)


def write_lists(pieces: Pieces, dropped: Dropped, folder: Path, suffix: str) -> list[Path]:
    """Write {"id", "kept"[, "jaccard"]} a line to `NAMEsuffix` for every piece.

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
                    "id": ids[int(dropped.documents[row])],
                    "kept": ids[int(dropped.kept[row])],
                }
                if dropped.jaccard is not None:
                    record["jaccard"] = round(float(dropped.jaccard[row]), 3)
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        paths.append(path)
    return paths


def _ids(pieces: Pieces, documents: npt.NDArray[np.int64]) -> dict[int, str]:
    ids = {}
    starts = pieces.starts
    for piece, wanted in pieces.split(documents):
        remaining = iter(wanted.tolist())
        next_one = next(remaining)
        for number, text in enumerate(pieces.ids(pieces.names[piece]), start=starts[piece]):
            if number == next_one:
                ids[number] = text
                next_one = next(remaining, -1)
    return ids
