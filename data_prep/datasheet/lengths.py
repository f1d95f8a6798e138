"""How long documents are: exact quantiles and a histogram, in memory for the distinct lengths."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
EDGES = sorted({math.ceil(10 ** (tenth / 10)) for tenth in range(111)})
"""Limits of the histogram's bins in bytes, ten a decade up to 100 GB; a bin holds its lower one."""
_MERGE_AT = 1 << 17


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
