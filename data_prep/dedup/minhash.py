"""MinHash signatures of many documents at a time, in numpy.

The unit is the shingle: n characters in a row of the case-folded text, of which only letters, marks
and digits are left. A shingle that starts with a character of China, Japan or Korea has
`ngram_cjk` characters and any other has `ngram`, so that both carry about as much information and a
document of both scripts needs no special case. With one length for both, either edited Chinese is
missed or unrelated English looks alike (numbers: `benchmarks/minhash.py`).

A long document has most of the short shingles of its language, so that unrelated novels look alike:
with 6 letters 0.06 at 30 kB of English, 0.15 at 200 kB, 0.27 at 5 MB; with 12 letters 0.06 at 5 MB.
So documents from 150,000 letters on have shingles twice as long. Those from 50,000 have both
kinds, half of the bins and bands each, and meet shorter and longer ones in the half that they have
in common: documents that one of the kinds does not join differ in length by a factor of three.

The probability that two documents' minima of a random hash agree is the Jaccard similarity of their
shingle sets (Broder 1997, "On the resemblance and containment of documents"; Leskovec, Rajaraman,
Ullman, "Mining of Massive Datasets", 3.3). One hash function serves all k values: shingles are
spread over k bins by their hash, each bin has its own minimum, and an empty bin takes that of a
bin drawn by its number (one-permutation hashing with optimal densification: Shrivastava 2017,
"Optimal Densification for Fast and Accurate Minwise Hashing"). So the time does not depend on k
where documents are long; filling the bins of a short one takes about k log k steps.

There are always 256 bins: a band has the minima of `rows` bins, and two bands share few. With bins
of its own for every band, 256 bands of 5 find hardly more copies (Chinese with edited characters:
0.99 instead of 0.985), and documents of 130 letters take many times as long.

Letters: D documents, L characters of a window, K = 256 bins, R = 257 bytes of a sketch.
"""

import functools
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from data_prep.pieces import Hashes, Numbers

Letters = npt.NDArray[np.uint32]
# Our own: 95 MB a CPU-second of Chinese, 56 of English. With an earlier setting on the same text
# 124 and 68, where datatrove had 3.0 and 4.0, gaoya 11 and 6, rensa 171 and 86. rensa saves 0.2
# CPU-hours of 280 GB, but its digests changed with 0.5.0: the same text must give the same dataset
# next year.
NUM_BINS = 256
SKETCH_BYTES = NUM_BINS + 1
SHORT, LONG = 1, 2
"""Kinds of shingles that a document has; both is 3."""
LONG_FROM, SHORT_BELOW = 50_000, 150_000
"""Letters from which on a document has long shingles, and below which it has short ones."""
_U64 = np.dtype("<u8")
_EMPTY = np.uint64(2**64 - 1)
_BASE = 0x9E3779B97F4A7C15
# The text that is hashed at a time fits the second-level cache.
_WINDOW = 1 << 14
_ATTEMPTS = 100  # 1 in 40,000 is not enough where a tenth of the bins have something
_FIRST_CJK = 0x2E80  # radicals; above are Han, kana, Hangul syllables and few others
_LAST_LOOKED_UP = 0x20000  # above are rare Han characters, which have no case


@dataclass(frozen=True)
class SignatureSettings:
    """All settings that a signature depends on."""

    ngram: int
    ngram_cjk: int
    bands: int
    rows: int
    min_chars: int


@dataclass(frozen=True)
class Signatures:
    """Signatures of D documents."""

    bands: Hashes
    """(D, bands) hash of the `rows` minima of a band; 0 in all bands of an unsigned document."""
    sketch: npt.NDArray[np.uint8]
    """(D, R) last byte of every minimum, then the kinds of shingles; 0 if unsigned."""


def signatures(texts: list[str], settings: SignatureSettings) -> Signatures:
    """Sign documents with at least `min_chars` letters; needs 40 bytes of memory a character."""
    letters, sizes = fold(texts)
    bands = np.zeros((len(texts), settings.bands), dtype=_U64)
    sketch = np.zeros((len(texts), SKETCH_BYTES), dtype=np.uint8)
    kinds = np.where(sizes < SHORT_BELOW, SHORT, 0) | np.where(sizes >= LONG_FROM, LONG, 0)
    kinds[sizes < settings.min_chars] = 0
    sketch[:, NUM_BINS] = kinds
    for kind in (SHORT, LONG):
        mine = (kinds & kind) > 0
        if not mine.any():
            continue
        minima = np.full((np.count_nonzero(mine), NUM_BINS), _EMPTY, dtype=_U64)
        of_mine = letters if mine.all() else letters[np.repeat(mine, sizes)]
        lengths = kind * settings.ngram, kind * settings.ngram_cjk
        _take_minima(of_mine, np.cumsum(sizes[mine]), lengths, minima)
        _densify(minima)
        for whole, own in (
            (sketch[:, :NUM_BINS], minima.astype(np.uint8)),
            (bands, _band_hashes(minima, settings)),
        ):
            # Who has both kinds has the short one in the first half.
            middle = (whole.shape[1] + 1) // 2
            columns = np.arange(whole.shape[1])
            half = columns < middle if kind == SHORT else columns >= middle
            chosen = (kinds[mine] == kind)[:, None] | half
            whole[mine] = np.where(chosen, own, whole[mine])
    return Signatures(bands, sketch)


def agreements(one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint16]:
    """Count the bins in which sketches agree; (..., R) each, (...) uint16 of at most K.

    If one document has both kinds of shingles and the other has one, the half that they have in
    common counts twice. Without a common kind there is no agreement.
    """
    equal = one[..., :NUM_BINS] == other[..., :NUM_BINS]
    first = np.count_nonzero(equal[..., : NUM_BINS // 2], axis=-1)
    second = np.count_nonzero(equal[..., NUM_BINS // 2 :], axis=-1)
    kinds, others = one[..., NUM_BINS], other[..., NUM_BINS]
    common, twice = kinds & others, np.where(kinds == others, 1, 2)
    counted = np.where(common & SHORT | (kinds == others), first, 0)
    counted = counted + np.where(common & LONG | (kinds == others), second, 0)
    return cast("npt.NDArray[np.uint16]", (twice * counted).astype(np.uint16))


def similarity(agreements: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Estimate Jaccard similarities from the agreements of two sketches.

    The standard error is at most 0.032, or 0.044 where half of the sketches is compared. Unequal
    minima have an equal last byte once in 256 (Li and Konig 2010, "b-Bit Minwise Hashing").
    """
    share = np.asarray(agreements, dtype=np.float64) / NUM_BINS
    return np.maximum(0.0, (share - 1 / 256) / (1 - 1 / 256))


def fold(texts: list[str]) -> tuple[Letters, Numbers]:
    """Fold case and drop everything but letters, marks and digits.

    Returns:
        The code points of all texts in a row, and (D,) how many each text has.
    """
    points = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), dtype="<u4")
    folded = _fold_table()[points]
    kept = folded != 0
    ends = np.cumsum([len(text) for text in texts], dtype=np.int64).tolist()
    starts = [0, *ends[:-1]]
    sizes = [np.count_nonzero(kept[a:b]) for a, b in zip(starts, ends, strict=True)]
    return folded[kept], np.array(sizes, dtype=np.int64)


def letter_positions(text: str) -> Numbers:
    """Return the (L,) places of the characters of a text that `fold` keeps."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    return np.flatnonzero(_fold_table()[points])


def shingle_lengths(letters: Letters, ngram: int, ngram_cjk: int, *, by_half: bool = False) -> Any:
    """Return (L,) int64 letters of the shingle that starts at every letter."""
    [is_cjk] = _have_cjk_length(letters, [(ngram, ngram_cjk)], by_half)
    return np.where(is_cjk, np.int64(ngram_cjk), np.int64(ngram))


def _have_cjk_length(letters: Letters, lengths: Sequence[tuple[int, int]], by_half: bool) -> Any:
    """Return (L,) bool for each pair of lengths: the shingle that starts here has that of CJK.

    By half, it is judged by the letters that it has at either length, so none outside of it counts.
    """
    cjk = letters >= _FIRST_CJK
    if not by_half or not cjk.any():
        return [cjk] * len(lengths)
    sums = np.zeros(len(cjk) + 1, dtype=np.int32)
    np.cumsum(cjk, out=sums[1:])
    others, found = np.flatnonzero(~cjk), [cjk.copy() for _ in lengths]
    for size, is_cjk in zip(map(min, lengths), found, strict=True):
        whole = others[others + size <= len(cjk)]
        is_cjk[whole[2 * (sums[whole + size] - sums[whole]) >= size]] = True
    return found


def shingle_hashes(letters: Letters, *lengths: tuple[int, int], by_half: bool = False) -> list[Any]:
    """Hash the shingles that start at every letter; zeros follow the last letter.

    Args:
        letters: (L,) folded code points.
        lengths: of shingles that start with other and with CJK characters; any number of pairs.
        by_half: also those of which half is CJK have that length, such as "2011" before Chinese.

    Returns:
        (L,) uint64 for each pair.
    """
    count = len(letters)
    every = {length for pair in lengths for length in pair}
    padded = np.zeros(count + max(every), dtype=_U64)
    padded[:count] = letters
    by_length = _window_hashes(padded, every)
    are_cjk = _have_cjk_length(letters, lengths, by_half)
    return [
        _mix(np.where(is_cjk, by_length[of_cjk][:count], by_length[other][:count]))
        for is_cjk, (other, of_cjk) in zip(are_cjk, lengths, strict=True)
    ]


@functools.cache
def _fold_table() -> Letters:
    """Make the table code point -> case-folded code point, 0 if dropped."""
    table = np.arange(0x110000, dtype=np.uint32)
    for point in range(_LAST_LOOKED_UP):
        character = chr(point)
        kept = unicodedata.category(character)[0] in "LMN"
        table[point] = ord(character.casefold()[0]) if kept else 0
    return table


def _window_hashes(values: Hashes, lengths: set[int]) -> dict[int, Any]:
    """Hash every window of each length by a polynomial modulo 2^64: (L - length + 1,).

    The last value has weight 1, each one before it `_BASE` times more.
    """
    # With weights that fall from the first value on, a window is the difference of two running
    # sums; a power of the base, which is odd and so has an inverse, makes its last weight 1 again.
    rising, inverses = powers(1 << len(values).bit_length())
    sums = np.zeros(len(values) + 1, dtype=_U64)
    np.cumsum(values * inverses[: len(values)], out=sums[1:])
    return {
        length: (sums[length:] - sums[: len(sums) - length])
        * rising[length - 1 : length - 1 + len(sums) - length]
        for length in lengths
    }


@functools.lru_cache(maxsize=4)
def powers(count: int) -> tuple[Hashes, Hashes]:
    """Make (count,) powers of the base and of its inverse, from 0 on."""
    factors = np.ones((2, count), dtype=_U64)
    factors[:, 1:] = np.array([[_BASE], [pow(_BASE, -1, 2**64)]], dtype=_U64)
    np.multiply.accumulate(factors, axis=1, out=factors)
    return factors[0], factors[1]


def _mix(values: Hashes) -> Hashes:
    """Apply the finaliser of splitmix64 (Steele, Lea, Flood 2014), a bijection on all bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return cast("Hashes", values ^ (values >> np.uint64(31)))


def bins(hashes: Hashes, num_bins: int) -> Numbers:
    """Map hashes to numbers below `num_bins`, by equal ranges of their upper half."""
    scaled = (hashes >> np.uint64(32)) * np.uint64(num_bins)
    return cast("Numbers", (scaled >> np.uint64(32)).astype(np.int64))


def _take_minima(letters: Letters, ends: Numbers, lengths: tuple[int, int], minima: Hashes) -> None:
    """Lower (D, K) `minima` to the least hash of each document's shingles in each bin."""
    num_bins = minima.shape[1]
    longest = max(lengths)
    flat = minima.reshape(-1)
    for start in range(0, len(letters), _WINDOW):
        stop = min(start + _WINDOW, len(letters))
        window = letters[start : stop + longest]
        [hashes] = shingle_hashes(window, lengths)
        hashes = hashes[: stop - start]
        first, last = np.searchsorted(ends, [start, stop - 1], side="right").tolist()
        here = ends[first : last + 1]
        sizes = np.diff(np.minimum(here, stop), prepend=start)
        letters_each = shingle_lengths(window[: stop - start], *lengths)
        complete = np.arange(start, stop) + letters_each <= np.repeat(here, sizes)
        document = np.repeat(np.arange(first, last + 1), sizes)[complete]
        hashes = hashes[complete]
        np.minimum.at(flat, document * num_bins + bins(hashes, num_bins), hashes)


def _densify(minima: Hashes) -> None:
    """Fill the empty bins of (D, K); every row has a bin that is not empty.

    Bin j tries bins drawn by hash of (j, attempt) until one is not empty, the same in every
    document. Where few bins are full ("aaaa..."), the last attempt goes on to the next full one.
    """
    num_bins = minima.shape[1]
    full = minima != _EMPTY
    original = minima.copy()
    rows, columns = np.nonzero(~full)
    for attempt in range(1, _ATTEMPTS + 1):
        if not len(rows):
            return
        seeds = np.arange(num_bins, dtype=_U64) + np.uint64(attempt * num_bins)
        drawn = bins(_mix(seeds * np.uint64(_BASE)), num_bins)[columns]
        hit = full[rows, drawn]
        minima[rows[hit], columns[hit]] = original[rows[hit], drawn[hit]]
        rows, columns, drawn = rows[~hit], columns[~hit], drawn[~hit]
    for row in np.unique(rows):
        mine = rows == row
        places = np.flatnonzero(full[row])
        following = places[np.searchsorted(places, drawn[mine]) % len(places)]
        minima[row, columns[mine]] = original[row, following]


def bins_of_bands(bands: int, rows: int) -> Numbers:
    """Choose the (bands, rows) bins whose minima make a band.

    256 bands are one choice of `rows` different bins, shifted by 0, 1, 2 and so on; so each bin is
    in the same number of bands. The next 256 have a choice of their own.
    """
    table = np.empty((bands, rows), dtype=np.int64)
    for start in range(0, bands, NUM_BINS):
        seeds = np.arange(start, start + NUM_BINS, dtype=_U64) * np.uint64(_BASE)
        chosen = np.argsort(_mix(seeds), kind="stable")[:rows]
        bands_here = np.arange(min(NUM_BINS, bands - start))
        table[start : start + NUM_BINS] = (bands_here[:, None] + chosen) % NUM_BINS
    return table


def _band_hashes(minima: Hashes, settings: SignatureSettings) -> Hashes:
    """Hash the minima of each band, (D, bands) without 0."""
    hashes = np.zeros((len(minima), settings.bands), dtype=_U64)
    for columns in bins_of_bands(settings.bands, settings.rows).T:
        hashes = _mix(hashes * np.uint64(_BASE) + minima[:, columns])
    return cast("Hashes", np.maximum(hashes, np.uint64(1)))
