"""Reads and compares the sketches of all pieces; `data_prep.dedup.near` says what the files hold.

Letters: P pairs.
"""

import functools
import os
from collections import OrderedDict
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from data_prep.dedup.minhash import NUM_BINS, similarity
from data_prep.pieces import Pieces

_BLOCK_PAIRS = 1 << 15
_OPEN_FILES = 128
_CACHED_ROWS = 1 << 18
_LOW = np.uint64(2**32 - 1)

Row = npt.NDArray[np.uint8]


class Sketches:
    """Sketches of all documents of `pieces`."""

    def __init__(self, pieces: Pieces, folder: Path) -> None:
        self.pieces = pieces
        self._paths = [folder / f"{name}.sketch.npy" for name in pieces.names]
        self._starts = pieces.starts

    def agreements(self, pairs: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint16]:
        """Count the bytes in which the sketches of each pair agree: (P,).

        Holds the rows of all later documents, and those of the earlier ones piece by piece.

        Args:
            pairs: (P,) later document * 2^32 + earlier one, in any order.
        """
        counts = np.zeros(len(pairs), dtype=np.uint16)
        later, later_row = np.unique((pairs >> np.uint64(32)).astype(np.int64), return_inverse=True)
        parts = [self._read(piece, part) for piece, part in self.pieces.split(later)]
        later_rows = np.concatenate(parts) if parts else np.zeros((0, NUM_BINS), dtype=np.uint8)
        earlier = (pairs & _LOW).astype(np.int64)
        order = np.argsort(earlier, kind="stable")
        done = 0
        for piece, documents in self.pieces.split(earlier[order]):
            wanted, row = np.unique(documents, return_inverse=True)
            rows = self._read(piece, wanted)
            for start in range(0, len(documents), _BLOCK_PAIRS):
                stop = min(start + _BLOCK_PAIRS, len(documents))
                block = order[done + start : done + stop]
                equal = rows[row[start:stop]] == later_rows[later_row[block]]
                counts[block] = np.count_nonzero(equal, axis=1)
            done += len(documents)
        return counts

    def rows(self) -> "Rows":
        """Open a reader of single sketches."""
        return Rows(self.pieces, self._paths)

    def _read(self, piece: int, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        # A map is closed at once: there may be more pieces than a process may have open files.
        table = np.load(self._paths[piece], mmap_mode="r")
        return np.array(table[documents - self._starts[piece]])


def least_agreements(threshold: float) -> int:
    """Return the agreements from which on the estimated similarity reaches a threshold up to 1."""
    return int(np.argmax(similarity(np.arange(NUM_BINS + 1)) >= threshold))


class Rows:
    """Reads one sketch at a time, with few system calls; keeps some files open until its end."""

    def __init__(self, pieces: Pieces, paths: list[Path]) -> None:
        self._ends, self._starts = pieces.ends, pieces.starts
        self._paths = paths
        self._files: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._row = functools.lru_cache(maxsize=_CACHED_ROWS)(self._read)

    def __enter__(self) -> "Rows":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle, _ in self._files.values():
            os.close(handle)

    def agreements(self, first: int, other: int) -> int:
        """Count the bytes in which the sketches of two documents agree."""
        return int(np.count_nonzero(self._row(first) == self._row(other)))

    def _read(self, document: int) -> Row:
        piece = int(np.searchsorted(self._ends, document, side="right"))
        if piece not in self._files:
            if len(self._files) >= _OPEN_FILES:
                os.close(self._files.popitem(last=False)[1][0])
            handle = os.open(self._paths[piece], os.O_RDONLY)
            values = (int(self._ends[piece]) - self._starts[piece]) * NUM_BINS
            self._files[piece] = handle, os.fstat(handle).st_size - values
        self._files.move_to_end(piece)
        handle, first = self._files[piece]
        place = first + (document - self._starts[piece]) * NUM_BINS
        return np.frombuffer(os.pread(handle, NUM_BINS, place), dtype=np.uint8)
