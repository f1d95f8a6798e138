"""Measurements of the filter rules on a text, with numpy over code points.

Shapes: C characters of the text, U units, N n-grams. A unit is a word of the papers: one Chinese
character or kana, or else a run of other characters between spaces (punctuation included, as in the
papers).
"""

import unicodedata
from functools import cache, cached_property
from typing import cast

import numpy as np
import numpy.typing as npt

from data_prep.dedup.minhash import powers

SPACE, LATIN, LETTER, DIGIT, MARK, SYMBOL, KANA, HAN = range(8)
"""Kinds of characters. LETTER is a letter of another script; SYMBOL is the rest."""

UInt64 = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.intp]

_RANGES = {
    HAN: "3005-3007 3400-4DBF 4E00-9FFF F900-FAFF 20000-3FFFF",
    KANA: "3041-3096 309D-309F 30A1-30FA 30FC-30FF 31F0-31FF FF66-FF9D",
}
# Odd multipliers modulo 2**64, so that each has an inverse; the values themselves are arbitrary.
_OF_UNITS, _MIX = 0xD1342543DE82EF95, 0xF1357AEA2E62A9C5
_BLOCK = 1 << 18
_BUCKETS = 12


@cache
def _kinds() -> npt.NDArray[np.uint8]:
    """Make the table code point -> kind, (0x110000,) uint8."""
    table = np.full(0x110000, SYMBOL, dtype=np.uint8)
    for code in range(0x20000):
        char = chr(code)
        category = unicodedata.category(char)
        if char.isspace():
            table[code] = SPACE
        elif category[0] == "L":
            table[code] = LATIN if "LATIN" in unicodedata.name(char, "") else LETTER
        elif category == "Nd":
            table[code] = DIGIT
        elif category[0] == "M":
            table[code] = MARK
    for kind, ranges in _RANGES.items():
        for text in ranges.split():
            first, last = (int(end, base=16) for end in text.split("-"))
            table[first : last + 1] = kind
    return table


class TextStats:
    """Kinds of characters and units of one text."""

    def __init__(self, text: str) -> None:
        self._codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        self._kinds = _kinds().take(self._codes)
        self.kind_counts: list[int] = np.bincount(self._kinds, minlength=8).tolist()
        """Characters of each kind."""
        self.num_chars = len(self._kinds) - self.kind_counts[SPACE]
        """Characters other than spaces; the n-gram shares are shares of these."""
        cjk = self._kinds >= KANA
        # Unsigned: a space wraps around to 255.
        other = (self._kinds - np.uint8(1)) < KANA - 1
        change = other[1:] != other[:-1]
        self._is_start, self._is_last = cjk.copy(), cjk
        self._is_start[1:] |= change & other[1:]
        self._is_last[:-1] |= change & other[:-1]
        self._is_start[:1] |= other[:1]
        self._is_last[-1:] |= other[-1:]
        self.num_units = int(np.count_nonzero(self._is_start))
        self.num_cjk = self.kind_counts[KANA] + self.kind_counts[HAN]
        self.is_cjk = self.num_cjk > 0 and 2 * self.num_cjk >= self.num_units
        """Whether at least half of the units are Chinese characters or kana."""

    @cached_property
    def _starts(self) -> Ints:
        return np.flatnonzero(self._is_start)

    def num_alphabetic(self) -> int:
        """Count the units that have a letter, without Chinese characters and kana."""
        if not self.num_units:
            return 0
        letters = (self._kinds == LATIN) | (self._kinds == LETTER)
        return int(np.count_nonzero(np.bitwise_or.reduceat(letters, self._starts)))

    @cached_property
    def lengths(self) -> Ints:
        """Characters of each unit, (U,) int64."""
        lengths = np.flatnonzero(self._is_last)
        lengths += 1
        lengths -= self._starts
        return lengths

    def hashes(self) -> UInt64:
        """Hash each unit, (U,) uint64: equal for equal units."""
        starts = self._starts
        hashes = np.empty(len(starts), dtype=np.uint64)
        first = 0
        # Blocks begin at a unit, so that memory and the tables of powers stay small.
        while first < len(starts):
            begin = int(starts[first])
            last = int(np.searchsorted(starts, begin + _BLOCK))
            if last - first > 1 and starts[last - 1] + self.lengths[last - 1] - begin > _BLOCK:
                last -= 1
            lengths = self.lengths[first:last]
            hashes[first:last] = self._block(begin, starts[first:last] - begin, lengths)
            first = last
        hashes *= np.uint64(_MIX)
        return hashes

    def _block(self, begin: int, starts: Ints, lengths: Ints) -> UInt64:
        """Hash the units at `begin + starts`: sum of code * power of the place in the unit."""
        rising, inverses = powers(_BLOCK)
        size = int(starts[-1] + lengths[-1])
        if size > _BLOCK:
            rising = np.resize(rising, size)  # a single endless word
        total = np.empty(size + 1, dtype=np.uint64)
        total[0] = 0
        np.multiply(self._codes[begin : begin + size], rising[:size], out=total[1:])
        np.cumsum(total, out=total)
        hashes = total[starts + lengths]
        hashes -= total[starts]
        hashes *= inverses[starts]
        return cast("UInt64", hashes)


class NGrams:
    """n-grams of units of one text, n measured in `step` units."""

    def __init__(self, measured: TextStats, step: int) -> None:
        self._units = measured.hashes()
        self._lengths = measured.lengths
        self._ends = np.zeros(len(self._lengths) + 1, dtype=np.intp)
        np.cumsum(self._lengths, out=self._ends[1:])
        self._kept = {1: self._units}
        self._num_chars = measured.num_chars
        self._step = step

    def _windows(self, size: int) -> UInt64:
        """Hash each run of `size` units, (U - size + 1,) uint64: a polynomial of their hashes."""
        count = len(self._units) - size + 1
        if count <= 0:
            return self._units[:0]
        power = 1 << (size.bit_length() - 1)
        hashes, rest = self._doubled(power)[:count], size - power
        while rest:
            part = 1 << (rest.bit_length() - 1)
            hashes = hashes * np.uint64(pow(_OF_UNITS, part, 1 << 64))
            hashes += self._doubled(part)[size - rest :][:count]
            rest -= part
        return hashes

    def _doubled(self, size: int) -> UInt64:
        """Return `_windows` of a power of two, from a cache."""
        if size not in self._kept:
            half = self._doubled(size // 2)
            hashes = half[: -size // 2] * np.uint64(pow(_OF_UNITS, size // 2, 1 << 64))
            hashes += half[size // 2 :]
            self._kept[size] = hashes
        return self._kept[size]

    def _chars(self, size: int) -> Ints:
        return cast("Ints", self._ends[size:] - self._ends[:-size])

    def top_bound(self, n: int) -> float:
        """Return an upper bound of `top(n)`, without sorting.

        n-grams are put into buckets by hash; the fullest bucket holds at least as many characters
        as the top n-gram.
        """
        size = n * self._step
        hashes = self._windows(size)
        if not len(hashes):
            return 0.0
        buckets = (hashes >> np.uint64(64 - _BUCKETS)).view(np.intp)
        weights = np.bincount(buckets, weights=self._chars(size))
        return float(weights.max() / self._num_chars)

    def top(self, n: int) -> float:
        """Return the share of characters in occurrences of the most frequent n-gram.

        Each character counts once. Of several equally frequent n-grams the longest counts, and of
        those the first; 0 if no n-gram occurs twice.
        """
        size = n * self._step
        ordered, bits = _ordered(self._windows(size))
        if len(ordered) < 2:
            return 0.0
        hashes = ordered >> np.uint64(bits)
        firsts = np.flatnonzero(np.append(True, hashes[1:] != hashes[:-1]))
        counts = np.diff(np.append(firsts, len(hashes)))
        most = int(counts.max())
        if most < 2:
            return 0.0
        places = (ordered & np.uint64((1 << bits) - 1)).view(np.intp)
        tied = firsts[counts == most]
        best = tied[np.lexsort((places[tied], -self._chars(size)[places[tied]]))[0]]
        return float(self._covered(places[best : best + most], size) / self._num_chars)

    def duplicates(self, limits: dict[int, float]) -> tuple[int, float] | None:
        """Find the first n whose duplicate n-grams hold more than their share of the characters.

        A duplicate equals an earlier n-gram of the text; a character in several counts once.

        `limits`: n -> highest share. Returns n and the share, or None if all are within theirs.
        """
        orders = sorted(limits)
        places: Ints | None = None
        hashes = self._units[:0]
        for order, n in enumerate(orders):
            size = n * self._step
            if places is None:
                hashes = self._windows(size)
            else:
                grown = orders[order - 1] * self._step
                hashes, places = self._grow(hashes, places, grown, size)
            repeated = _Repeated(hashes)
            later = repeated.later()
            at = later if places is None else places[later]
            lowest = min(limits[m] for m in orders[order:])
            # Counting a character once per n-gram is faster, and often enough to decide.
            if int((self._ends[at + size] - self._ends[at]).sum()) <= lowest * self._num_chars:
                return None
            share = self._covered(at, size) / self._num_chars
            if share > limits[n]:
                return n, share
            # A duplicate at some n is one at each smaller n: once a share is below all remaining
            # limits, the rest passes, and only places that were repeated are looked at again.
            if share <= lowest:
                return None
            every = repeated.every()
            hashes = hashes[every]
            places = every if places is None else places[every]
        return None

    def _grow(self, hashes: UInt64, places: Ints, old: int, new: int) -> tuple[UInt64, Ints]:
        """Hash the n-grams of `new` units at those places that have so many units left."""
        fits = places <= len(self._units) - new
        hashes, places = hashes[fits], places[fits]
        for offset in range(old, new):
            hashes = hashes * np.uint64(_OF_UNITS) + self._units[places + offset]
        return hashes, places

    def _covered(self, places: Ints, size: int) -> int:
        """Count characters in n-grams of `size` units at these places."""
        opened = np.zeros(len(self._units) + 1, dtype=np.int8)
        opened[places] = 1
        # The last n-gram that begins at or before a unit; far before the text where there is none.
        unit = np.arange(len(opened))
        begun = np.maximum.accumulate(np.where(opened, unit, -size))
        return int(self._lengths[(unit - begun < size)[:-1]].sum())


def _ordered(hashes: UInt64) -> tuple[UInt64, int]:
    """Sort hashes, with their lowest bits replaced by their place; also return the number of bits.

    One sort of plain integers does the work of an argsort, which is several times slower.
    """
    bits = len(hashes).bit_length()
    ordered = hashes >> np.uint64(bits)
    ordered <<= np.uint64(bits)
    ordered |= np.arange(len(hashes), dtype=np.uint64)
    ordered.sort()
    return ordered, bits


class _Repeated:
    """Hashes that occur more than once."""

    def __init__(self, hashes: UInt64) -> None:
        self._ordered, bits = _ordered(hashes)
        self._mask = np.uint64((1 << bits) - 1)
        same = (self._ordered[1:] ^ self._ordered[:-1]) <= self._mask
        self._later = np.flatnonzero(same) + 1

    def later(self) -> Ints:
        """Return the places of repeated hashes, without the first of equal ones."""
        return cast("Ints", (self._ordered[self._later] & self._mask).view(np.intp))

    def every(self) -> Ints:
        """Return all places of repeated hashes, in order, so that the first one stays the first."""
        every = np.union1d(self._later, self._later - 1)
        places: Ints = (self._ordered[every] & self._mask).view(np.intp)
        places.sort()
        return places
