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
from pipeline.data.format import Source
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
        """Take each source's weight times its number of sequences; all above 0."""
        total = sum(weighted)
        shares = [max(1, int(amount / total * (1 << _SHARE_BITS))) for amount in weighted]
        # One source is told from all behind it, rounded to whole sequences, then the next from what
        # is left. The largest first: what rounding leaves over is smallest so.
        self._ranked = sorted(range(len(shares)), key=lambda source: (-shares[source], source))
        self._shares = shares
        self._left = [sum(shares[source] for source in self._ranked[k:])
                      for k in range(len(shares))]  # fmt: skip

    def counts(self, position: int) -> list[int]:
        """Count the sequences of each source before a position."""
        counts = [0] * len(self._shares)
        for source, left in zip(self._ranked, self._left, strict=True):
            # position * share / left, to the nearest whole number.
            counts[source] = (2 * position * self._shares[source] + left) // (2 * left)
            position -= counts[source]
        return counts

    def parts(self, first: int, count: int) -> list[Part]:
        """Divide positions first .. first + count - 1 among the sources, in their order."""
        before = self.counts(first)
        places: list[list[Ints]] = [[np.empty(0, np.int64)] for _ in self._shares]
        for at in range(0, count, _STRETCH):
            stretch = self._places(first + at, min(_STRETCH, count - at))
            for source, found in enumerate(stretch):
                places[source].append(found + at)
        return [
            Part(np.concatenate(found), number)
            for found, number in zip(places, before, strict=True)
        ]

    def _places(self, first: int, count: int) -> list[Ints]:
        """Return the places of each source's sequences in a short stretch."""
        found = [np.empty(0, np.int64)] * len(self._shares)
        places = np.arange(count)
        for source, left in zip(self._ranked, self._left, strict=True):
            # As in `counts` for first .. first + len(places); the large part in Python's integers.
            share = self._shares[source]
            before, rest = divmod(2 * first * share + left, 2 * left)
            counts = (rest // 2 + np.arange(len(places) + 1) * share) // left
            mine = np.diff(counts) == 1
            found[source] = places[mine]
            places, first = places[~mine], first - before
        return found

    def position(self, source: int, number: int) -> int:
        """Return the position of a source's sequence by its number, 0 for the first."""
        low, high = number, (number + 4) * self._left[0] // self._shares[source]
        while low < high:
            middle = (low + high) // 2
            if self.counts(middle + 1)[source] > number:
                high = middle
            else:
                low = middle + 1
        return low


def weights(sources: Sequence[Source], mix: Sequence[MixConfig]) -> list[Fraction]:
    """Return the weight of each source of a dataset, as the decimal number that was written.

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
