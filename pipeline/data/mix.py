"""Which source each sequence of a run is of: sources in fixed shares, evenly interleaved.

A source's weight w says how often its documents are seen while those of a source of weight 1 are
seen once. Of the first n sequences each source has its share w N / sum(w N), N being its number of
sequences: at any point of the run to within two sequences, with up to 20 sources. So a source of
weight 2 begins again when one of weight 1 is half seen: no document is repeated before its turn.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.config.data import MixConfig
from pipeline.data.shards import Source
from pipeline.errors import ConfigError

Ints = npt.NDArray[np.int64]

_SHARE_BITS = 46
_STRETCH = 1 << 16
"""Sequences looked at together: products of a share and this fit into 63 bits."""


class Part(NamedTuple):
    """What a source contributes to a stretch of the run."""

    places: Ints
    """(k,) rising, where in the stretch its sequences stand."""
    first: int
    """Position of the first of them in the source's own order; the others follow."""


class Mix:
    """Interleaving of sources: a pure function of position."""

    def __init__(self, weighted: Sequence[Fraction]) -> None:
        """Takes each source's weight times its number of sequences; all above 0."""
        total = sum(weighted)
        shares = [max(1, int(amount / total * (1 << _SHARE_BITS))) for amount in weighted]
        # Source k is told from all behind it: the first of two by its share of what is left.
        self._shares = shares
        self._left = [sum(shares[k:]) for k in range(len(shares))]

    def counts(self, position: int) -> list[int]:
        """How many of the sequences before a position are of each source."""
        counts = []
        for share, left in zip(self._shares, self._left, strict=True):
            counts.append(_rounded(position, share, left))
            position -= counts[-1]
        return counts

    def parts(self, first: int, count: int) -> list[Part]:
        """The sources' parts of positions first .. first + count - 1, all sources in order."""
        found: list[list[Part]] = [[] for _ in self._shares]
        for at in range(0, count, _STRETCH):
            stretch = self._parts_of_stretch(first + at, min(_STRETCH, count - at))
            for source, part in enumerate(stretch):
                found[source].append(Part(part.places + at, part.first))
        if not count:
            return [Part(np.empty(0, np.int64), n) for n in self.counts(first)]
        return [
            Part(np.concatenate([part.places for part in parts]), parts[0].first) for parts in found
        ]

    def _parts_of_stretch(self, first: int, count: int) -> list[Part]:
        parts = []
        places = np.arange(count)
        for share, left in zip(self._shares, self._left, strict=True):
            # floor((2 p s + l) / 2 l) for p = first .. first + len(places), the large part of it
            # in Python's integers.
            before, rest = divmod(2 * first * share + left, 2 * left)
            steps = np.arange(len(places) + 1)
            counts = (rest // 2 + steps * share) // left
            mine = np.diff(counts) == 1
            parts.append(Part(places[mine], before))
            places, first = places[~mine], first - before
        return parts

    def position(self, source: int, number: int) -> int:
        """Position of a source's sequence of a number, 0 for its first."""
        low, high = number, (number + 4) * self._left[0] // self._shares[source]
        while low < high:
            middle = (low + high) // 2
            if self.counts(middle + 1)[source] > number:
                high = middle
            else:
                low = middle + 1
        return low


def _rounded(position: int, share: int, left: int) -> int:
    """position * share / left to the nearest whole number, a half up."""
    return (2 * position * share + left) // (2 * left)


def weights(sources: Sequence[Source], mix: Sequence[MixConfig]) -> list[Fraction]:
    """Weight of each source of a dataset, as the decimal number that was written.

    Raises:
        ConfigError: the mix names a source that there is not, or one twice, or leaves none.
    """
    names = [source.name for source in sources]
    found = {source.name: Fraction(repr(source.weight)) for source in sources}
    for which, entry in enumerate(mix):
        if entry.source not in names:
            raise ConfigError(
                f"data.mix.{which}.source = {entry.source!r}: the dataset has no such source; "
                f"expected one of {', '.join(map(repr, names))}"
            )
        if entry.source in [other.source for other in mix[:which]]:
            raise ConfigError(f"data.mix.{which}.source = {entry.source!r} stands there twice")
        found[entry.source] = Fraction(repr(entry.weight))
    if not any(found.values()):
        raise ConfigError("data.mix leaves no source: every weight is 0; raise one")
    return [found[name] for name in names]
