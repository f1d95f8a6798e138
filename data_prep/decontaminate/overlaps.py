"""Stage overlaps: where documents share text with evaluation sets.

Every shingle of a document is looked up in the tables of stage eval_sets. A Bloom filter answers
for nearly all of them that they are not there, the sorted tables decide about the rest. Equal
64-bit hashes count as equal n-grams: 10^11 shingles of a corpus against 10^7 of evaluation sets
meet by chance once in 20 corpora.

Writes per piece
    NAME.overlaps.jsonl   {"document", "id", "stretches": [{"text", "rows"}]} a line, for documents
                          that were kept so far and share anything: the document's number in the
                          piece, and stretches of text with the rows of the tables that they match,
                          each row once a document, where it is first; rows of all.whole.npy are
                          counted on from those of all.ngrams.npy

Needs 200 MB of memory and up to 32 bytes for each n-gram of the evaluation sets, not counting the
tables, which are mapped.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.config import DecontaminateConfig
from data_prep.decontaminate.eval_sets import ARRAYS
from data_prep.dedup.minhash import fold, letter_positions, shingle_hashes, shingle_lengths
from data_prep.dedup.near import batches
from data_prep.ingest import read_documents
from data_prep.stage import Done, Task, make_key, replacing

_WINDOW = 1 << 14  # what is hashed at a time fits the second-level cache
_STRETCH_CHARS = 1000
_SLOTS_A_HASH = 16


_Candidates = tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]
_NONE: _Candidates = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.uint64))


@dataclass(frozen=True)
class Overlap:
    """A stretch of a document."""

    text: str
    """Cut off after 1,000 characters."""
    rows: list[int]
    """Rows of the tables, in order of their place."""


@dataclass(frozen=True)
class OverlapJob:
    """One ingested piece."""

    documents: Path
    mask: Path
    eval_folder: Path
    config: DecontaminateConfig


def overlap_tasks(
    upstream: tuple[list[Done], Done, Done],
    names: tuple[str, ...],
    folders: tuple[Path, Path, Path],
    config: DecontaminateConfig,
    folder: Path,
) -> list[Task[OverlapJob]]:
    """One task a piece.

    Args:
        upstream: records of ingest, of the last stage with masks, and of eval_sets.
        names: the pieces.
        folders: of these three.
        config: lengths of n-grams.
        folder: for results.
    """
    ingested, kept, evaluated = upstream
    ingest_folder, mask_folder, eval_folder = folders
    lengths = (config.ngram, config.ngram_cjk, config.min_chars, config.min_chars_cjk)
    tasks = []
    for name, done in zip(names, ingested, strict=True):
        mask = kept.files[f"{name}.keep.npy"]["sha256"]
        tasks.append(
            Task(
                name, folder, make_key(done.digest, mask, evaluated.digest, lengths),
                OverlapJob(
                    ingest_folder / f"{name}.jsonl.zst", mask_folder / f"{name}.keep.npy",
                    eval_folder, config,
                ),
            )
        )  # fmt: skip
    return tasks


def run_overlaps(task: Task[OverlapJob]) -> tuple[dict[str, Any], list[Path]]:
    """Searches one piece."""
    job = task.payload
    finder = Finder(job.eval_folder, job.config)
    path = task.path(".overlaps.jsonl")
    documents = 0
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for batch in batches(_kept(job)):
            found = finder.find([document["text"] for document in batch])
            for document, stretches in zip(batch, found, strict=True):
                if not stretches:
                    continue
                documents += 1
                record = {
                    "document": document["number"], "id": document["id"],
                    "stretches": [vars(stretch) for stretch in stretches],
                }  # fmt: skip
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return {"documents": documents}, [path]


class Finder:
    """Looks texts up in the tables of stage eval_sets."""

    def __init__(self, eval_folder: Path, config: DecontaminateConfig) -> None:
        arrays = [np.load(eval_folder / f"all{suffix}", mmap_mode="r") for suffix in ARRAYS]
        self._ngrams, _, self._anchors, self._whole, self._whole_letters = arrays
        self._ngram_sieve, self._anchor_sieve = _Sieve(self._ngrams), _Sieve(self._anchors)
        self._lengths = (config.ngram, config.ngram_cjk)
        self._anchor_lengths = (config.min_chars, config.min_chars_cjk)

    def find(self, texts: list[str]) -> list[list[Overlap]]:
        """Of each text the stretches that evaluation sets have, too."""
        letters, sizes = fold(texts)
        ends = np.cumsum(sizes)
        at_ngrams, at_anchors = self._candidates(letters)
        hits = np.concatenate(
            [self._shared(letters, ends, *at_ngrams), self._whole_items(letters, ends, *at_anchors)]
        )
        found: list[list[Overlap]] = [[] for _ in texts]
        numbers = np.searchsorted(ends, hits[:, 0], side="right")
        for number in np.unique(numbers).tolist():
            begin = ends[number] - sizes[number]
            own = hits[numbers == number] - [begin, begin, 0]
            found[number] = _stretches(texts[number], own)
        return found

    def _candidates(self, letters: npt.NDArray[np.uint32]) -> list[_Candidates]:
        """Letters where n-grams and where anchors of the tables may begin, and their hashes."""
        tables = ((self._ngram_sieve, self._lengths), (self._anchor_sieve, self._anchor_lengths))
        longest = max(self._lengths)  # anchors are no longer
        found: list[list[_Candidates]] = [[_NONE], [_NONE]]
        for start in range(0, len(letters), _WINDOW):
            window = letters[start : start + _WINDOW + longest]
            every = shingle_hashes(window, *(lengths for _, lengths in tables))
            for (sieve, _), hashes, parts in zip(tables, every, found, strict=True):
                places = sieve.candidates(hashes[:_WINDOW])
                parts.append((start + places, hashes[places]))
        return [
            (
                np.concatenate([part[0] for part in parts]),
                np.concatenate([part[1] for part in parts]),
            )
            for parts in found
        ]

    def _shared(
        self,
        letters: npt.NDArray[np.uint32],
        ends: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
        hashes: npt.NDArray[np.uint64],
    ) -> npt.NDArray[np.int64]:
        """(h, 3): first letter, letter behind the last, and row of every n-gram that is found."""
        places, rows = _look_up(places, hashes, self._ngrams)
        behind = places + shingle_lengths(letters[places], *self._lengths)
        within = behind <= ends[np.searchsorted(ends, places, side="right")]
        found: npt.NDArray[np.int64] = np.stack([places, behind, rows], axis=1)[within]
        return found

    def _whole_items(
        self,
        letters: npt.NDArray[np.uint32],
        ends: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
        hashes: npt.NDArray[np.uint64],
    ) -> npt.NDArray[np.int64]:
        """The same of items that are found as a whole."""
        found = []
        places, rows = _look_up(places, hashes, self._anchors)
        numbers = np.searchsorted(ends, places, side="right")
        for place, number, row in zip(
            places.tolist(), numbers.tolist(), rows.tolist(), strict=True
        ):
            _, before, begin, end = self._whole[row].tolist()
            first = place - before
            behind = first + end - begin
            start = int(ends[number - 1]) if number else 0
            if first < start or behind > ends[number]:
                continue
            if (letters[first:behind] == self._whole_letters[begin:end]).all():
                found.append((first, behind, len(self._ngrams) + row))
        return np.array(found, dtype=np.int64).reshape(-1, 3)


class _Sieve:
    """Answers quickly that a hash is in none of the rows of a table (a Bloom filter)."""

    def __init__(self, table: npt.NDArray[np.uint64]) -> None:
        self._bits = max(10, int(len(table) * _SLOTS_A_HASH).bit_length())
        self._marked = np.zeros(2**self._bits, dtype=bool)
        for start in range(0, len(table), 1 << 20):
            part = np.array(table[start : start + (1 << 20)])
            self._marked[self._first(part)] = True
            self._marked[self._second(part)] = True

    def candidates(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Places of hashes that may be in the table."""
        # All numbers are in range; `clip` saves numpy the check.
        places = np.flatnonzero(self._marked.take(self._first(hashes), mode="clip"))
        found: npt.NDArray[np.int64] = places[self._marked[self._second(hashes[places])]]
        return found

    def _first(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        numbers: npt.NDArray[np.int64] = (hashes >> np.uint64(64 - self._bits)).view(np.int64)
        return numbers

    def _second(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        numbers: npt.NDArray[np.int64] = (hashes & np.uint64(2**self._bits - 1)).view(np.int64)
        return numbers


def _look_up(
    places: npt.NDArray[np.int64], wanted: npt.NDArray[np.uint64], table: npt.NDArray[np.uint64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Places whose hash the table has, and the row; once for each row of equal hashes."""
    order = np.argsort(wanted)  # neighbours in the table are looked up one after another
    first = np.searchsorted(table, wanted[order])
    found = np.zeros(len(first), dtype=bool)
    inside = first < len(table)
    found[inside] = table[first[inside]] == wanted[order][inside]
    order, first = order[found], first[found]
    equal = np.searchsorted(table, wanted[order], side="right") - first
    row = np.repeat(first - np.cumsum(equal) + equal, equal) + np.arange(equal.sum())
    return np.repeat(places[order], equal), row


def _stretches(text: str, hits: npt.NDArray[np.int64]) -> list[Overlap]:
    """Joins the hits of one document that touch; of equal rows the first one counts."""
    hits = hits[np.lexsort((hits[:, 2], hits[:, 0]))]
    hits = hits[np.sort(np.unique(hits[:, 2], return_index=True)[1])]
    characters = letter_positions(text)
    found = []
    behind = np.maximum.accumulate(hits[:, 1])
    cuts = np.flatnonzero(hits[1:, 0] > behind[:-1]) + 1
    for part in np.split(hits, cuts):
        begin, end = characters[part[0, 0]], characters[part[:, 1].max() - 1] + 1
        found.append(Overlap(text[begin:end][:_STRETCH_CHARS], part[:, 2].tolist()))
    return found


def _kept(job: OverlapJob) -> Iterator[dict[str, Any]]:
    keep = np.load(job.mask).tolist()
    for number, (kept, document) in enumerate(
        zip(keep, read_documents(job.documents), strict=True)
    ):
        if kept:
            yield {**document, "number": number}
