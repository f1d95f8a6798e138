"""The search for text of evaluation sets: tables of their n-grams, and a finder that uses them.

The unit is the shingle of `data_prep.dedup.minhash`: letters and digits of the case-folded text, of
one length where they start with a Chinese, Japanese or Korean character, or half of them are such
("2011" before Chinese), and of another elsewhere.
An item with fewer n-grams than must be shared is searched for as a whole: at its first complete
*anchor*, a shingle of `min_chars` or `min_chars_cjk` letters; an item without an anchor is too
short. Of items of one set with equal letters the first one counts. Files of the tables:
    all.ngrams.npy    (n,) uint64 hashes, rising, once for each set that has them
    all.items.npy     (n,) uint32 the first item of the set with that n-gram
    all.anchors.npy   (w,) uint64 hashes, rising, one for each item that is searched for as a whole
    all.whole.npy     (w, 4) int64: item, letters before the anchor, begin and end of the item in
                      all.letters.npy
    all.letters.npy   uint32 folded code points of the items that are searched for as a whole
Making them needs about 50 bytes of memory a letter of the evaluation sets.

The finder looks up every shingle of a text. A Bloom filter rules out nearly all of them, the sorted
tables decide about the rest. Equal 64-bit hashes count as equal n-grams: 10^11 shingles of a corpus
against 10^7 of evaluation sets meet by chance once in 20 corpora. It needs 200 MB of memory and up
to 32 bytes for each n-gram of the evaluation sets, without the tables, which are memory-mapped.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from data_prep.config import DecontaminateConfig
from data_prep.dedup.minhash import Letters, fold, letter_positions, shingle_hashes, shingle_lengths
from data_prep.pieces import Hashes, Numbers

ARRAYS = (".ngrams.npy", ".items.npy", ".anchors.npy", ".whole.npy", ".letters.npy")
RULE = "by half"
"""Which shingles are short; what was made by another rule is made anew."""
_SHOWN_CHARS = 80
_WINDOW = 1 << 14  # the text that is hashed at a time fits the second-level cache
_STRETCH_CHARS = 1000
_SLOTS_A_HASH = 16


class Tables:
    """The tables while they grow, set by set; items are numbered in order."""

    def __init__(self, config: DecontaminateConfig, listing: IO[str]) -> None:
        self._config = config
        self._listing = listing
        self._num_items = 0
        self._ngrams = [np.zeros(0, dtype=np.uint64)]
        self._ngram_items = [np.zeros(0, dtype=np.uint32)]
        self._anchors: list[int] = []
        self._whole: list[tuple[int, int, int, int]] = []
        self._letters = [np.zeros(0, dtype=np.uint32)]
        self._num_letters = 0

    def add_set(self, name: str, batches: Iterator[list[dict[str, str]]]) -> Counter[str]:
        """Add the items of one set; return the number of each kind."""
        counts = Counter[str](
            dict.fromkeys(("items", "whole", "too short", "repeated", "ngrams"), 0)
        )
        seen: set[bytes] = set()
        hits: list[Any] = [[], []]
        for batch in batches:
            letters, sizes = fold([item["text"] for item in batch])
            lengths = (self._config.ngram, self._config.ngram_cjk)
            anchor_lengths = (self._config.min_chars, self._config.min_chars_cjk)
            hashes, anchors = shingle_hashes(letters, lengths, anchor_lengths, by_half=True)
            complete = _complete(letters, sizes, lengths)
            anchored = _complete(letters, sizes, anchor_lengths)
            end = 0
            for given, size in zip(batch, sizes.tolist(), strict=True):
                here = slice(end, end + size)
                end += size
                item = letters[here]
                digest = hashlib.blake2b(item.tobytes(), digest_size=16).digest()
                if digest in seen:
                    counts["repeated"] += bool(size)
                    continue
                ngrams = hashes[here][complete[here]]
                if _has_different(ngrams, self._config.min_hits):
                    hits[0].append(ngrams)
                    hits[1].append(np.full(len(ngrams), self._num_items, dtype=np.uint32))
                elif anchored[here].any():
                    counts["whole"] += 1
                    self._add_whole(item, anchors[here], int(anchored[here].argmax()))
                else:
                    counts["too short"] += bool(size)
                    continue
                seen.add(digest)
                counts["items"] += 1
                self._num_items += 1
                record = {"set": name, "item": given["place"], "text": given["text"][:_SHOWN_CHARS]}
                self._listing.write(json.dumps(record, ensure_ascii=False) + "\n")
        if hits[0]:
            # `unique` gives the first of equal values: that of the first item.
            ngrams, first = np.unique(np.concatenate(hits[0]), return_index=True)
            counts["ngrams"] = len(ngrams)
            self._ngrams.append(ngrams)
            self._ngram_items.append(np.concatenate(hits[1])[first])
        return counts

    def arrays(self) -> list[npt.NDArray[Any]]:
        """Return the arrays to write, in the order of `ARRAYS`."""
        ngrams = np.concatenate(self._ngrams)
        order = np.argsort(ngrams, kind="stable")  # sets stay in order
        anchors = np.array(self._anchors, dtype=np.uint64)
        by_anchor = np.argsort(anchors, kind="stable")
        whole = np.array(self._whole, dtype=np.int64).reshape(-1, 4)
        items, letters = np.concatenate(self._ngram_items), np.concatenate(self._letters)
        return [ngrams[order], items[order], anchors[by_anchor], whole[by_anchor], letters]

    def _add_whole(self, letters: Letters, hashes: Hashes, anchor: int) -> None:
        begin = self._num_letters
        self._num_letters += len(letters)
        self._letters.append(letters.copy())
        self._anchors.append(int(hashes[anchor]))
        self._whole.append((self._num_items, anchor, begin, self._num_letters))


def _complete(letters: Letters, sizes: Numbers, lengths: tuple[int, int]) -> Any:
    """Return (L,) bool: the shingle that starts here ends within its item."""
    ends = np.repeat(np.cumsum(sizes), sizes)
    return np.arange(len(letters)) + shingle_lengths(letters, *lengths, by_half=True) <= ends


def _has_different(values: Hashes, least: int) -> bool:
    return len(values) >= least and (least == 1 or len(np.unique(values)) >= least)


_Candidates = tuple[Numbers, Hashes]
_NONE: _Candidates = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.uint64))


@dataclass(frozen=True)
class Overlap:
    """A stretch of a document that evaluation sets have, too."""

    text: str
    """Cut off after 1,000 characters."""
    rows: list[int]
    """Rows of the tables, in order of their place."""


def load_tables(folder: Path) -> list[npt.NDArray[Any]]:
    """Map the arrays that stage eval_sets wrote, in the order of `ARRAYS`, into memory."""
    return [np.load(folder / f"all{suffix}", mmap_mode="r") for suffix in ARRAYS]


class Finder:
    """Looks texts up in tables."""

    def __init__(self, arrays: Sequence[npt.NDArray[Any]], config: DecontaminateConfig) -> None:
        self._ngrams, _, self._anchors, self._whole, self._whole_letters = arrays
        self._ngram_sieve, self._anchor_sieve = _Sieve(self._ngrams), _Sieve(self._anchors)
        self._lengths = (config.ngram, config.ngram_cjk)
        self._anchor_lengths = (config.min_chars, config.min_chars_cjk)

    def find(self, texts: list[str]) -> list[list[Overlap]]:
        """Find, for each text, the stretches that evaluation sets have, too."""
        letters, sizes = fold(texts)
        ends = np.cumsum(sizes)
        at_ngrams, at_anchors = self._candidates(letters)
        hits = np.concatenate(
            [self._shared(letters, ends, *at_ngrams), self._whole_items(letters, ends, *at_anchors)]
        )
        overlaps: list[list[Overlap]] = [[] for _ in texts]
        numbers = np.searchsorted(ends, hits[:, 0], side="right")
        for number in np.unique(numbers).tolist():
            begin = ends[number] - sizes[number]
            own = hits[numbers == number] - [begin, begin, 0]
            overlaps[number] = _stretches(texts[number], own)
        return overlaps

    def _candidates(self, letters: Letters) -> list[_Candidates]:
        """Return places where n-grams and where anchors of the tables may begin, with hashes."""
        tables = ((self._ngram_sieve, self._lengths), (self._anchor_sieve, self._anchor_lengths))
        longest = max(self._lengths)  # anchors are no longer
        candidates: list[list[_Candidates]] = [[_NONE], [_NONE]]
        for start in range(0, len(letters), _WINDOW):
            window = letters[start : start + _WINDOW + longest]
            every = shingle_hashes(window, *(lengths for _, lengths in tables), by_half=True)
            for (sieve, _), hashes, parts in zip(tables, every, candidates, strict=True):
                places = sieve.candidates(hashes[:_WINDOW])
                parts.append((start + places, hashes[places]))
        columns = (
            [np.concatenate(column) for column in zip(*parts, strict=True)] for parts in candidates
        )
        return [(places, hashes) for places, hashes in columns]

    def _shared(self, letters: Letters, ends: Numbers, places: Numbers, hashes: Hashes) -> Numbers:
        """Return (h, 3): first letter, letter behind the last, and row of every shared n-gram."""
        places, rows = _look_up(places, hashes, self._ngrams)
        if not len(places):
            return np.zeros((0, 3), dtype=np.int64)
        behind = places + shingle_lengths(letters, *self._lengths, by_half=True)[places]
        within = behind <= ends[np.searchsorted(ends, places, side="right")]
        return cast("Numbers", np.stack([places, behind, rows], axis=1)[within])

    def _whole_items(
        self, letters: Letters, ends: Numbers, places: Numbers, hashes: Hashes
    ) -> Numbers:
        """Return the same as `_shared` for items that the text has as a whole."""
        hits = []
        places, rows = _look_up(places, hashes, self._anchors)
        numbers = np.searchsorted(ends, places, side="right")
        hit = zip(places.tolist(), numbers.tolist(), rows.tolist(), strict=True)
        for place, number, row in hit:
            _, before, begin, end = self._whole[row].tolist()
            first = place - before
            behind = first + end - begin
            start = int(ends[number - 1]) if number else 0
            if first < start or behind > ends[number]:
                continue
            if (letters[first:behind] == self._whole_letters[begin:end]).all():
                hits.append((first, behind, len(self._ngrams) + row))
        return np.array(hits, dtype=np.int64).reshape(-1, 3)


class _Sieve:
    """Rules out quickly that a hash is in a table (a Bloom filter)."""

    def __init__(self, table: Hashes) -> None:
        self._bits = max(10, int(len(table) * _SLOTS_A_HASH).bit_length())
        self._marked = np.zeros(2**self._bits, dtype=bool)
        for start in range(0, len(table), 1 << 20):
            part = np.array(table[start : start + (1 << 20)])
            self._marked[self._first(part)] = True
            self._marked[self._second(part)] = True

    def candidates(self, hashes: Hashes) -> Numbers:
        """Return the places of hashes that may be in the table."""
        # All numbers are in range; `clip` saves numpy the check.
        places = np.flatnonzero(self._marked.take(self._first(hashes), mode="clip"))
        return places[self._marked[self._second(hashes[places])]]

    def _first(self, hashes: Hashes) -> Numbers:
        return cast("Numbers", (hashes >> np.uint64(64 - self._bits)).view(np.int64))

    def _second(self, hashes: Hashes) -> Numbers:
        return cast("Numbers", (hashes & np.uint64(2**self._bits - 1)).view(np.int64))


def _look_up(places: Numbers, wanted: Hashes, table: Hashes) -> tuple[Numbers, Numbers]:
    """Return places whose hash the table has, and the row; once for each row of equal hashes."""
    order = np.argsort(wanted)  # neighbours in the table are looked up one after another
    first = np.searchsorted(table, wanted[order])
    is_hit = np.zeros(len(first), dtype=bool)
    inside = first < len(table)
    is_hit[inside] = table[first[inside]] == wanted[order][inside]
    order, first = order[is_hit], first[is_hit]
    equal = np.searchsorted(table, wanted[order], side="right") - first
    row = np.repeat(first - np.cumsum(equal) + equal, equal) + np.arange(equal.sum())
    return np.repeat(places[order], equal), row


def _stretches(text: str, hits: Numbers) -> list[Overlap]:
    """Join the hits of one document that touch; of equal rows the first one counts."""
    hits = hits[np.lexsort((hits[:, 2], hits[:, 0]))]
    hits = hits[np.sort(np.unique(hits[:, 2], return_index=True)[1])]
    characters = letter_positions(text)
    overlaps = []
    behind = np.maximum.accumulate(hits[:, 1])
    cuts = np.flatnonzero(hits[1:, 0] > behind[:-1]) + 1
    for part in np.split(hits, cuts):
        begin, end = characters[part[0, 0]], characters[part[:, 1].max() - 1] + 1
        overlaps.append(Overlap(text[begin:end][:_STRETCH_CHARS], part[:, 2].tolist()))
    return overlaps
