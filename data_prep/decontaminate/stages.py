"""Stages eval_sets, overlaps and decontaminate: documents that have text of evaluation sets.

A document is contaminated if, for one set, it has `min_hits` different n-grams of the set, or a
short item as a whole. This follows GPT-3's filter (Brown et al. 2020, "Language Models are Few-Shot
Learners", appendix C: 13 words, n-grams in more than 10 documents ignored), but with letters
instead of words, and the whole document is dropped, not 200 characters around the n-gram.
`max_documents` counts over all pieces, so the result does not depend on how they are divided among
tasks.

Stage eval_sets writes the tables of `data_prep.decontaminate.search`, and
    all.items.jsonl           {"set", "item", "text"} a line, `text` cut off
Stage overlaps writes per piece
    NAME.overlaps.jsonl       {"document", "id", "stretches": [{"text", "rows"}]} a line, for
                              documents that were kept so far and share any text: the document's
                              number in the piece, and stretches of text with the rows of the tables
                              that they match, each row once a document, where it is first; rows of
                              all.whole.npy are counted on from those of all.ngrams.npy
Stage decontaminate writes per piece
    NAME.keep.npy             (d,) bool, the mask of the stage before without the dropped documents
    NAME.contaminated.jsonl   {"id", "set", "item", "hits", "text"} a line and set of a contaminated
                              document: the item with most n-grams, the number of n-grams of the
                              set, and the first stretch of text that has one of the item
"""

import json
import mmap
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep import stage
from data_prep.clean.normalise import normalise
from data_prep.config import CleanConfig, DecontaminateConfig
from data_prep.corpus import Progress
from data_prep.decontaminate import eval_items
from data_prep.decontaminate.search import ARRAYS, RULE, Finder, Tables, load_tables
from data_prep.pieces import Pieces, batches, read_documents
from data_prep.types import InputFile
from pipeline.errors import DataError

REASON = "shares text with an evaluation set"
_SHOWN_ITEMS = 50


@dataclass(frozen=True)
class EvalSetJob:
    """Files of all evaluation sets, and settings."""

    files: dict[str, tuple[InputFile, ...]]
    config: DecontaminateConfig
    clean: CleanConfig


def eval_set_task(
    files: dict[str, tuple[InputFile, ...]],
    config: DecontaminateConfig,
    clean: CleanConfig,
    folder: Path,
) -> stage.StageTask[EvalSetJob]:
    """Make the one task of stage eval_sets. Its items are normalised as documents are."""
    listed = {name: [asdict(file) for file in of_set] for name, of_set in files.items()}
    key = stage.make_key(listed, _lengths(config), config.min_hits, clean.of_texts())
    return stage.StageTask("all", folder, key, EvalSetJob(files, config, clean))


def run_eval_sets(task: stage.StageTask[EvalSetJob]) -> stage.Result:
    """Make the tables."""
    job = task.payload
    sets: dict[str, dict[str, int]] = {}
    paths = [task.path(suffix) for suffix in (*ARRAYS, ".items.jsonl")]
    with stage.replacing(paths[-1]) as temporary, temporary.open("w", encoding="utf-8") as listing:
        tables = Tables(job.config, listing)
        for name, files in job.files.items():
            reading = eval_items.Reading()
            counts = tables.add_set(name, batches(_items(files, reading, job.clean)))
            if not counts["items"]:
                raise DataError(
                    f"evaluation set {name!r}: none of its {len(files)} files, such as "
                    f"{files[0].path}, has a text that is long enough to search for "
                    f"({dict(counts)}); correct decontaminate.sets, or lower min_chars"
                )
            sets[name] = {"files": len(files), **counts, **reading}
    for path, array in zip(paths, tables.arrays(), strict=False):
        stage.save_array(path, array)
    return {"sets": sets}, paths


def _items(
    files: tuple[InputFile, ...], reading: eval_items.Reading, clean: CleanConfig
) -> Iterator[dict[str, str]]:
    """Yield {"place", "text"}, normalised, of all items."""
    for file in files:
        for place, text in eval_items.read(file, reading):
            yield {"place": place, "text": normalise(text, clean)}


def _lengths(config: DecontaminateConfig) -> tuple[int | str, ...]:
    return config.ngram, config.ngram_cjk, config.min_chars, config.min_chars_cjk, RULE


@dataclass(frozen=True)
class OverlapJob:
    """One piece, its mask, and the tables."""

    documents: Path
    mask: Path
    eval_folder: Path
    config: DecontaminateConfig


def overlap_tasks(progress: Progress, folder: Path) -> list[stage.StageTask[OverlapJob]]:
    """Make one task per piece."""
    pieces, config = progress.pieces, progress.corpus.config.decontaminate
    [evaluated] = progress.records["eval_sets"]
    made = []
    for name, done in zip(pieces.names, progress.written, strict=True):
        mask = progress.kept.files[f"{name}.keep.npy"]["sha256"]
        key = stage.make_key(done.digest, mask, evaluated.digest, _lengths(config))
        mask_path = pieces.masks / f"{name}.keep.npy"
        eval_folder = progress.folder("eval_sets")
        job = OverlapJob(pieces.documents_path(name), mask_path, eval_folder, config)
        made.append(stage.StageTask(name, folder, key, job))
    return made


def run_overlaps(task: stage.StageTask[OverlapJob]) -> stage.Result:
    """Search one piece for text of evaluation sets."""
    job = task.payload
    finder = Finder(load_tables(job.eval_folder), job.config)
    path = task.path(".overlaps.jsonl")
    documents = 0
    with stage.replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for batch in batches(_kept(job)):
            overlaps = finder.find([document["text"] for document in batch])
            for document, stretches in zip(batch, overlaps, strict=True):
                if not stretches:
                    continue
                documents += 1
                record = {
                    "document": document["number"],
                    "id": document["id"],
                    "stretches": [vars(stretch) for stretch in stretches],
                }
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return {"documents": documents}, [path]


def _kept(job: OverlapJob) -> Iterator[dict[str, Any]]:
    keep = np.load(job.mask).tolist()
    documents = read_documents(job.documents)
    for number, (kept, document) in enumerate(zip(keep, documents, strict=True)):
        if kept:
            yield {**document, "number": number}


@dataclass(frozen=True)
class DecontaminateJob:
    """The pieces with the last masks, the tables, and the overlaps of all pieces."""

    pieces: Pieces
    eval_folder: Path
    overlap_folder: Path
    sets: dict[str, dict[str, int]]
    """Counts of stage eval_sets for every set, in order."""
    config: DecontaminateConfig


def tasks(progress: Progress, folder: Path) -> list[stage.StageTask[DecontaminateJob]]:
    """Make the one task of stage decontaminate."""
    config, [evaluated] = progress.corpus.config.decontaminate, progress.records["eval_sets"]
    folders = progress.folder("eval_sets"), progress.folder("overlaps")
    job = DecontaminateJob(progress.pieces, *folders, evaluated.result["sets"], config)
    overlaps = [done.digest for done in progress.records["overlaps"]]
    digests = [progress.kept.digest, evaluated.digest, overlaps]
    rules = (config.min_hits, config.max_documents, config.action)
    return [stage.StageTask("all", folder, stage.make_key(digests, rules), job)]


def run(task: stage.StageTask[DecontaminateJob]) -> stage.Result:
    """Decide about all documents."""
    job, pieces = task.payload, task.payload.pieces
    rows = _TableRows(job)
    counts, documents_of = stage.StageCounts(), Counter[str]()
    documents_with = Counter[int]()
    listing = _Lines(job.eval_folder / "all.items.jsonl")
    paths = []
    for name in pieces.names:
        before = pieces.keep(name)
        mask = before.copy()
        paths += [task.folder / f"{name}{end}" for end in (".keep.npy", ".contaminated.jsonl")]
        with stage.replacing(paths[-1]) as temporary, temporary.open("w", encoding="utf-8") as file:
            for record in _read(job, name):
                matches = rows.matches(record["stretches"])
                documents_of.update(matches.keys())
                for items, most, hits, text in matches.values():
                    documents_with.update(items)
                    item = json.loads(listing[most])
                    shown = {"id": record["id"], "set": item["set"], "item": item["item"]}
                    shown |= {"hits": hits, "text": text}
                    file.write(json.dumps(shown, ensure_ascii=False) + "\n")
                if matches and job.config.action == "drop":
                    mask[record["document"]] = False
        counts.mask(pieces.sizes(name)[before], mask[before], REASON)
        stage.save_array(paths[-2], mask)
    top = sorted(documents_with.items(), key=lambda pair: (-pair[1], pair[0]))[:_SHOWN_ITEMS]
    return {
        "decontaminate": counts.to_json(),
        "sets": {n: {**counted, "documents": documents_of[n]} for n, counted in job.sets.items()},
        "items": [{**json.loads(listing[item]), "documents": count} for item, count in top],
        "ignored_ngrams": rows.num_ignored,
    }, paths


def estimates(size: stage.Size) -> dict[str, stage.Estimate]:
    """Estimate the cost of each stage."""
    text, evaluated, documents = size.text_bytes, size.eval_bytes, size.documents
    memory = 100e6 + 10 * documents / size.pieces
    return {
        "eval_sets": stage.Estimate(
            1, evaluated / 1e6 / 4, 4 * evaluated, 100e6 + 12 * evaluated, len(ARRAYS) + 2
        ),
        "overlaps": stage.Estimate(
            size.pieces, text / 1e6 / 50, 0.001 * text, 200e6 + 6 * evaluated, 2 * size.pieces
        ),
        "decontaminate": stage.Estimate(
            1, documents * 1e-6, documents, memory, 2 * size.pieces + 1
        ),
    }


class _TableRows:
    """Items and sets of the rows of the tables, and the rows that are ignored."""

    def __init__(self, job: DecontaminateJob) -> None:
        whole = np.load(job.eval_folder / "all.whole.npy")
        ngram_items = np.load(job.eval_folder / "all.items.npy")
        self._num_ngrams = len(ngram_items)
        self._items = np.concatenate([ngram_items, whole[:, 0].astype(np.uint32)])
        self._sets = list(job.sets)
        self._set_ends = np.cumsum([counted["items"] for counted in job.sets.values()])
        self._min_hits = job.config.min_hits
        self._ignored = np.zeros(len(self._items), dtype=bool)
        if job.config.max_documents is not None:
            documents = np.zeros(len(self._items), dtype=np.uint32)
            for name in job.pieces.names:
                for record in _read(job, name):
                    documents[[row for part in record["stretches"] for row in part["rows"]]] += 1
            self._ignored = documents > job.config.max_documents

    @property
    def num_ignored(self) -> int:
        """Rows that occur in too many documents."""
        return int(self._ignored.sum())

    def matches(
        self, stretches: list[dict[str, Any]]
    ) -> dict[str, tuple[list[int], int, int, str]]:
        """Describe what a document shares with each set with which it shares enough text, in order.

        Returns:
            Set -> all items with shared text, the one with most n-grams, the number of n-grams,
            and the first text.
        """
        rows = np.concatenate([np.array(part["rows"], dtype=np.int64) for part in stretches])
        stretch = np.repeat(np.arange(len(stretches)), [len(part["rows"]) for part in stretches])
        counted = ~self._ignored[rows]
        rows, stretch = rows[counted], stretch[counted]
        items = self._items[rows]
        sets = np.searchsorted(self._set_ends, items, side="right")
        matches = {}
        for number in np.unique(sets).tolist():
            own = np.flatnonzero(sets == number)
            if len(own) < self._min_hits and not (rows[own] >= self._num_ngrams).any():
                continue
            shared, hits = np.unique(items[own], return_counts=True)
            item = int(shared[hits.argmax()])
            first = own[items[own] == item][0]
            text = stretches[int(stretch[first])]["text"]
            matches[self._sets[number]] = (shared.tolist(), item, len(own), text)
        return matches


class _Lines:
    """The lines of a file, by number."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._lengths = np.fromiter(map(len, file), dtype=np.int64)
        self._ends = np.cumsum(self._lengths)

    def __getitem__(self, number: int) -> bytes:
        end = self._ends[number]
        return self._map[end - self._lengths[number] : end]


def _read(job: DecontaminateJob, name: str) -> Iterator[dict[str, Any]]:
    with (job.overlap_folder / f"{name}.overlaps.jsonl").open("rb") as lines:
        yield from map(json.loads, lines)
