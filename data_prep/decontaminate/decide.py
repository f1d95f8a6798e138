"""Stage decontaminate: which documents are dropped because evaluation sets have their text.

A document is found if, for one set, it has `min_hits` different n-grams of the set, or a short item
as a whole. As in GPT-3's filter (Brown et al. 2020, "Language Models are Few-Shot Learners",
appendix C: 13 words, n-grams in more than 10 documents ignored), but letters instead of words, and
the whole document is dropped, not 200 characters around the n-gram. `max_documents` counts over
all pieces, and so does not depend on how they are divided among tasks.

Writes per piece
    NAME.keep.npy             (d,) bool, the mask of the stage before without what is dropped
    NAME.contaminated.jsonl   {"id", "set", "item", "hits", "text"} a line and set of a document
                              that is found: the item with most n-grams, how many n-grams of the
                              set there are, and the first stretch of text that has one of the item
"""

import json
import mmap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from data_prep.config import DecontaminateConfig
from data_prep.counts import Counts
from data_prep.dedup.near import save
from data_prep.stage import Done, Task, make_key, replacing

REASON = "shares text with an evaluation set"
_SHOWN_ITEMS = 50


@dataclass(frozen=True)
class DecontaminateJob:
    """Where everything lies."""

    ingest_folder: Path
    mask_folder: Path
    eval_folder: Path
    overlap_folder: Path
    names: tuple[str, ...]
    sets: dict[str, dict[str, int]]
    """What stage eval_sets counted of every set, in order."""
    config: DecontaminateConfig


def decontaminate_task(
    job: DecontaminateJob, upstream: tuple[Done, Done, list[Done]], folder: Path
) -> Task[DecontaminateJob]:
    """The one task of this stage; `upstream`: the last masks, eval_sets and overlaps."""
    kept, evaluated, overlaps = upstream
    rules = (job.config.min_hits, job.config.max_documents, job.config.action)
    digests = [kept.digest, evaluated.digest, [done.digest for done in overlaps]]
    return Task("all", folder, make_key(digests, rules), job)


def run_decontaminate(task: Task[DecontaminateJob]) -> tuple[dict[str, Any], list[Path]]:
    """Decides about all documents."""
    job = task.payload
    rows = _Rows(job)
    counts, documents_of = Counts(), Counter[str]()
    documents_with = Counter[int]()
    listing = _Lines(job.eval_folder / "all.items.jsonl")
    paths = []
    for name in job.names:
        mask = np.load(job.mask_folder / f"{name}.keep.npy")
        sizes = np.load(job.ingest_folder / f"{name}.bytes.npy")
        counts.documents_in += int(mask.sum())
        counts.bytes_in += int(sizes[mask].sum())
        paths += [task.folder / f"{name}{end}" for end in (".keep.npy", ".contaminated.jsonl")]
        with replacing(paths[-1]) as temporary, temporary.open("w", encoding="utf-8") as file:
            for record in _read(job, name):
                found = rows.contaminated(record["stretches"])
                documents_of.update(found.keys())
                for matched in found.values():
                    documents_with.update(matched.items)
                    _write(file, record["id"], matched, listing)
                if found and job.config.action == "drop":
                    counts.reject(REASON, int(sizes[record["document"]]))
                    mask[record["document"]] = False
        counts.documents_out += int(mask.sum())
        counts.bytes_out += int(sizes[mask].sum())
        save(paths[-2], mask)
    top = sorted(documents_with.items(), key=lambda pair: (-pair[1], pair[0]))[:_SHOWN_ITEMS]
    return {
        "decontaminate": counts.to_json(),
        "sets": {
            name: {**found, "documents": documents_of[name]} for name, found in job.sets.items()
        },
        "items": [{**json.loads(listing[item]), "documents": count} for item, count in top],
        "ignored_ngrams": rows.num_ignored,
    }, paths


@dataclass(frozen=True)
class _Match:
    """What a document shares with one set."""

    item: int
    hits: int
    text: str
    items: list[int]
    """All items of the set that it shares something with."""


class _Rows:
    """What the rows of the tables stand for, and which are ignored."""

    def __init__(self, job: DecontaminateJob) -> None:
        whole = np.load(job.eval_folder / "all.whole.npy")
        ngram_items = np.load(job.eval_folder / "all.items.npy")
        self._num_ngrams = len(ngram_items)
        self._items = np.concatenate([ngram_items, whole[:, 0].astype(np.uint32)])
        self._sets = list(job.sets)
        self._set_ends = np.cumsum([found["items"] for found in job.sets.values()])
        self._min_hits = job.config.min_hits
        self._ignored = np.zeros(len(self._items), dtype=bool)
        if job.config.max_documents is not None:
            documents = np.zeros(len(self._items), dtype=np.uint32)
            for name in job.names:
                for record in _read(job, name):
                    documents[[row for part in record["stretches"] for row in part["rows"]]] += 1
            self._ignored = documents > job.config.max_documents

    @property
    def num_ignored(self) -> int:
        """Rows that stand in too many documents."""
        return int(self._ignored.sum())

    def contaminated(self, stretches: list[dict[str, Any]]) -> dict[str, _Match]:
        """Sets with which a document shares enough, in order."""
        rows = np.concatenate([np.array(part["rows"], dtype=np.int64) for part in stretches])
        stretch = np.repeat(np.arange(len(stretches)), [len(part["rows"]) for part in stretches])
        counted = ~self._ignored[rows]
        rows, stretch = rows[counted], stretch[counted]
        items = self._items[rows]
        sets = np.searchsorted(self._set_ends, items, side="right")
        found = {}
        for number in np.unique(sets).tolist():
            own = np.flatnonzero(sets == number)
            if len(own) < self._min_hits and not (rows[own] >= self._num_ngrams).any():
                continue
            shared, hits = np.unique(items[own], return_counts=True)
            item = int(shared[hits.argmax()])
            first = own[items[own] == item][0]
            found[self._sets[number]] = _Match(
                item, len(own), stretches[int(stretch[first])]["text"], shared.tolist()
            )
        return found


class _Lines:
    """Lines of a file by their number."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        step = 1 << 24
        parts = [np.zeros(1, dtype=np.int64)]
        for start in range(0, len(self._map), step):
            part = np.frombuffer(self._map[start : start + step], dtype=np.uint8)
            parts.append(start + 1 + np.flatnonzero(part == ord("\n")))
        self._starts: npt.NDArray[np.int64] = np.concatenate(parts)

    def __getitem__(self, number: int) -> bytes:
        return self._map[self._starts[number] : self._starts[number + 1]]


def _read(job: DecontaminateJob, name: str) -> Iterator[dict[str, Any]]:
    with (job.overlap_folder / f"{name}.overlaps.jsonl").open("rb") as lines:
        for line in lines:
            yield json.loads(line)


def _write(file: IO[str], document_id: str, matched: _Match, listing: _Lines) -> None:
    item = json.loads(listing[matched.item])
    record = {
        "id": document_id, "set": item["set"], "item": item["item"], "hits": matched.hits,
        "text": matched.text,
    }  # fmt: skip
    file.write(json.dumps(record, ensure_ascii=False) + "\n")
