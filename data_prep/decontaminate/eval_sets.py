"""Stage eval_sets: the n-grams of all evaluation sets, in tables that many tasks search.

The unit is the shingle of `data_prep.dedup.minhash`: letters and digits of the case-folded text, of
one length where they start with a Chinese, Japanese or Korean character and of another elsewhere.
Items are normalised as documents are. An item with fewer n-grams than must be shared is looked for
as a whole: at its first complete *anchor*, a shingle of `min_chars` or `min_chars_cjk` letters;
without one it is too short to be looked for. Of items of one set with equal letters the first one
counts.

Writes
    all.ngrams.npy    (n,) uint64 hashes, rising, once for each set that has them
    all.items.npy     (n,) uint32 the first item of the set with that n-gram
    all.anchors.npy   (w,) uint64 hashes, rising, one for each item that is looked for as a whole
    all.whole.npy     (w, 4) int64: item, letters before the anchor, beginning and end of the item
                      in all.letters.npy
    all.letters.npy   uint32 folded code points of the items that are looked for as a whole
    all.items.jsonl   {"set", "item", "text"} a line, `text` cut off

Needs about 50 bytes of memory a letter of the evaluation sets.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from data_prep.clean.normalise import normalise
from data_prep.config import CleanConfig, DecontaminateConfig
from data_prep.decontaminate import eval_items
from data_prep.dedup.minhash import fold, shingle_hashes, shingle_lengths
from data_prep.dedup.near import save
from data_prep.inputs import InputFile
from data_prep.stage import Task, make_key, replacing
from pipeline.errors import DataError

ARRAYS = (".ngrams.npy", ".items.npy", ".anchors.npy", ".whole.npy", ".letters.npy")
_BATCH_CHARS = 1 << 18
_SHOWN_CHARS = 80


@dataclass(frozen=True)
class EvalSetJob:
    """What the task needs to know."""

    files: dict[str, tuple[InputFile, ...]]
    config: DecontaminateConfig
    clean: CleanConfig


def eval_set_task(
    files: dict[str, tuple[InputFile, ...]],
    config: DecontaminateConfig,
    clean: CleanConfig,
    folder: Path,
) -> Task[EvalSetJob]:
    """The one task of this stage."""
    listed = {name: [asdict(file) for file in found] for name, found in files.items()}
    lengths = (config.ngram, config.ngram_cjk, config.min_chars, config.min_chars_cjk)
    key = make_key(listed, lengths, config.min_hits, asdict(clean))
    return Task("all", folder, key, EvalSetJob(files, config, clean))


def run_eval_sets(task: Task[EvalSetJob]) -> tuple[dict[str, Any], list[Path]]:
    """Makes the tables.

    Raises:
        DataError: a file cannot be used, or a set has nothing that can be looked for.
    """
    job = task.payload
    found: dict[str, dict[str, int]] = {}
    paths = [task.path(suffix) for suffix in (*ARRAYS, ".items.jsonl")]
    with replacing(paths[-1]) as temporary, temporary.open("w", encoding="utf-8") as listing:
        tables = _Tables(job, listing)
        for name, files in job.files.items():
            reading = eval_items.Reading()
            counts = tables.add_set(name, _batches(files, reading, job.clean))
            if not counts["items"]:
                raise DataError(
                    f"evaluation set {name!r}: none of its {len(files)} files, such as "
                    f"{files[0].path}, has a text that is long enough to be looked for "
                    f"({dict(counts)}); correct decontaminate.sets, or lower min_chars"
                )
            found[name] = {"files": len(files), **counts, **reading.counts}
    for path, array in zip(paths, tables.arrays(), strict=False):
        save(path, array)
    return {"sets": found}, paths


def _batches(
    files: tuple[InputFile, ...], reading: eval_items.Reading, clean: CleanConfig
) -> Iterator[list[tuple[str, str]]]:
    batch: list[tuple[str, str]] = []
    size = 0
    for file in files:
        for place, text in eval_items.read(file, reading):
            batch.append((place, normalise(text, clean)))
            size += len(text)
            if size >= _BATCH_CHARS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


class _Tables:
    """Grows set by set; items are numbered in order."""

    def __init__(self, job: EvalSetJob, listing: IO[str]) -> None:
        self._config = job.config
        self._listing = listing
        self._num_items = 0
        self._ngrams = [np.zeros(0, dtype=np.uint64)]
        self._ngram_items = [np.zeros(0, dtype=np.uint32)]
        self._anchors: list[int] = []
        self._whole: list[tuple[int, int, int, int]] = []
        self._letters = [np.zeros(0, dtype=np.uint32)]
        self._num_letters = 0

    def add_set(self, name: str, batches: Iterator[list[tuple[str, str]]]) -> Counter[str]:
        """Adds the items of one set; returns how many there are of which kind."""
        counts = Counter[str](
            dict.fromkeys(("items", "whole", "too short", "repeated", "ngrams"), 0)
        )
        seen: set[bytes] = set()
        found: list[Any] = [[], []]
        for batch in batches:
            letters, sizes = fold([text for _, text in batch])
            lengths = (self._config.ngram, self._config.ngram_cjk)
            anchor_lengths = (self._config.min_chars, self._config.min_chars_cjk)
            hashes, anchors = shingle_hashes(letters, lengths, anchor_lengths)
            complete = _complete(letters, sizes, lengths)
            anchored = _complete(letters, sizes, anchor_lengths)
            end = 0
            for (place, text), size in zip(batch, sizes.tolist(), strict=True):
                here = slice(end, end + size)
                end += size
                item = letters[here]
                digest = hashlib.blake2b(item.tobytes(), digest_size=16).digest()
                if digest in seen:
                    counts["repeated"] += bool(size)
                    continue
                ngrams = hashes[here][complete[here]]
                if _has_different(ngrams, self._config.min_hits):
                    found[0].append(ngrams)
                    found[1].append(np.full(len(ngrams), self._num_items, dtype=np.uint32))
                elif anchored[here].any():
                    counts["whole"] += 1
                    self._add_whole(item, anchors[here], int(anchored[here].argmax()))
                else:
                    counts["too short"] += bool(size)
                    continue
                seen.add(digest)
                counts["items"] += 1
                self._num_items += 1
                record = {"set": name, "item": place, "text": text[:_SHOWN_CHARS]}
                self._listing.write(json.dumps(record, ensure_ascii=False) + "\n")
        if found[0]:
            # `unique` gives the first of equal values: of the first item.
            ngrams, first = np.unique(np.concatenate(found[0]), return_index=True)
            counts["ngrams"] = len(ngrams)
            self._ngrams.append(ngrams)
            self._ngram_items.append(np.concatenate(found[1])[first])
        return counts

    def arrays(self) -> list[npt.NDArray[Any]]:
        """What is written, in the order of `ARRAYS`."""
        ngrams = np.concatenate(self._ngrams)
        order = np.argsort(ngrams, kind="stable")  # sets stay in order
        anchors = np.array(self._anchors, dtype=np.uint64)
        by_anchor = np.argsort(anchors, kind="stable")
        whole = np.array(self._whole, dtype=np.int64).reshape(-1, 4)
        return [
            ngrams[order], np.concatenate(self._ngram_items)[order],
            anchors[by_anchor], whole[by_anchor], np.concatenate(self._letters),
        ]  # fmt: skip

    def _add_whole(
        self, letters: npt.NDArray[np.uint32], hashes: npt.NDArray[np.uint64], anchor: int
    ) -> None:
        begin = self._num_letters
        self._num_letters += len(letters)
        self._letters.append(letters.copy())
        self._anchors.append(int(hashes[anchor]))
        self._whole.append((self._num_items, anchor, begin, self._num_letters))


def _complete(
    letters: npt.NDArray[np.uint32], sizes: npt.NDArray[np.int64], lengths: tuple[int, int]
) -> npt.NDArray[np.bool_]:
    """(L,) whether the shingle that starts here ends within its item."""
    ends = np.repeat(np.cumsum(sizes), sizes)
    complete: npt.NDArray[np.bool_] = (
        np.arange(len(letters)) + shingle_lengths(letters, *lengths) <= ends
    )
    return complete


def _has_different(values: npt.NDArray[np.uint64], least: int) -> bool:
    return len(values) >= least and (least == 1 or len(np.unique(values)) >= least)
