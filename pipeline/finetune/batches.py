"""Batches of a task: which examples a step takes, and rows of tokens as arrays.

A run reads its examples in the order of a stream: epoch after epoch, each shuffled by (seed,
epoch). Examples of similar length lie side by side, so that little padding is computed. Which ones
a step takes is a pure function of seed and cursor; ranks and restarts change nothing.
"""

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch

from pipeline.config.data import BatchPlan, BatchSpec
from pipeline.data.dataset import Batch
from pipeline.data.loader import MicroBatch
from pipeline.data.run_order import DataRank
from pipeline.errors import DataError
from pipeline.runtime.files import retry_storage, temporary_beside
from pipeline.tasks.kinds.base import Kind, UnitBatch
from pipeline.tasks.kinds.table import KINDS
from pipeline.tasks.readers import encode
from pipeline.tasks.rows import Codec
from pipeline.tasks.task import TaskConfig
from pipeline.tasks.types import Example, HeadSpec, TaskRows, TokenRow, TokenSpan

logger = logging.getLogger(__name__)

_WINDOW_BATCHES = 32
"""Batches whose examples are sorted by length together."""
Corrupt = Callable[[Batch, Sequence[tuple[int, int]]], Batch]
"""Changes a batch whose rows are these (epoch, number)."""
# Version of the files of tokens; files of another version are tokenised again.
_VERSION = 2


@dataclass(frozen=True)
class TaskIdentity:
    """The data of a run, as `pipeline.data.format.DataIdentity`."""

    folder: Path
    fingerprint: str
    content: bytes
    tokenizer_file: str
    tokenizer_sha256: str

    @property
    def location(self) -> str:
        """The folder."""
        return str(self.folder)


def tokenised(
    config: TaskConfig,
    tokenizer: Codec,
    tokenizer_sha256: str,
    examples: Sequence[Example],
    folder: Path | None,
) -> TaskRows:
    """Encode examples, or read them from a folder where they were encoded before.

    Raises:
        ConfigError: see `encode`.
    """
    max_answer = config.head.max_answer  # what is longer is counted
    # All that rows follow from is in a file's name, so runs may share a folder.
    settings = (_VERSION, config.task.kind, config.input, max_answer, tokenizer_sha256)
    key = hashlib.sha256(repr(settings).encode())
    for example in examples:
        key.update(repr((example.texts, example.gold, example.marks, example.words)).encode())
    path = None if folder is None else folder / f"{key.hexdigest()[:32]}.npz"
    if path is not None and path.is_file():
        try:
            return TaskRows(examples, *_read(path))
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            logger.warning("%s is damaged (%s): the rows are tokenised again", path, error)
    rows, counts = encode(config, tokenizer, examples)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        retry_storage(lambda: _write(path, rows, counts), lambda: f"writing {path}")
    return TaskRows(examples, rows, counts)


def _write(path: Path, rows: Sequence[TokenRow], counts: dict[str, int]) -> None:
    unfinished = temporary_beside(path)
    try:
        with unfinished.open("wb") as file:
            # To an open file: given a name, numpy would put .npz behind it.
            np.savez(
                file,
                lengths=np.array([len(row.ids) for row in rows]),
                places=np.array([(row.example, row.part, *row.starts) for row in rows]),
                ids=np.concatenate([row.ids for row in rows]),
                offsets=np.concatenate([row.offsets for row in rows]),
                spans=np.array(json.dumps([row.spans for row in rows])),
                counts=np.array(json.dumps(counts)),
            )
        # Not flushed before: what a power cut tears is noticed, and tokenised again.
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _read(path: Path) -> tuple[list[TokenRow], dict[str, int]]:
    with np.load(path) as file:
        # Each once: every look into the file would read the array again.
        parts = {name: file[name] for name in file.files}
    ends = np.cumsum(parts["lengths"]).tolist()
    spans = json.loads(str(parts["spans"]))
    rows = [
        TokenRow(
            example,
            part,
            parts["ids"][start:end],
            parts["offsets"][start:end],
            tuple(TokenSpan(*each) for each in spans[number]),
            tuple(starts),
        )
        for number, ((example, part, *starts), start, end) in enumerate(
            # Not strict: the starts are one longer than the ends.
            zip(parts["places"].tolist(), [0, *ends], ends, strict=False)
        )
    ]
    return rows, json.loads(str(parts["counts"]))


def collate(
    spec: HeadSpec,
    data: TaskRows,
    units: Sequence[Sequence[int]],
    *,
    pad_id: int,
    with_gold: bool,
    row_weights: dict[str, float] | None = None,
) -> Batch:
    """Make a batch of one row a document, padded at the end.

    `inputs` have `mask` (B, S) bool, what the kind's head needs, and with gold its targets.
    """
    rows = [data.rows[row] for unit in units for row in unit]
    shape = len(rows), max(len(row.ids) for row in rows)
    input_ids = np.full(shape, pad_id, np.int64)
    mask = np.zeros(shape, np.bool_)
    for number, row in enumerate(rows):
        input_ids[number, : len(row.ids)] = row.ids
        mask[number, : len(row.ids)] = True
    inputs: dict[str, npt.NDArray[Any]] = {"mask": mask}
    kind = KINDS[spec.kind]
    of_units = UnitBatch(data, units, shape)
    inputs |= kind.inputs(of_units)
    if with_gold:
        inputs |= kind.targets(spec, of_units)
        if row_weights is not None:
            golds = [data.examples[row.example].gold for row in rows]
            inputs["row_weights"] = np.array([row_weights[str(gold)] for gold in golds], np.float32)
    weight = float(inputs["row_weights"].sum()) if "row_weights" in inputs else float(len(units))
    return Batch(
        input_ids=input_ids,
        documents=mask.astype(np.int32),
        positions=np.where(mask, np.arange(shape[1]), 0),
        segments=None,
        inputs=inputs,
        weights={"loss": weight},
        counts={},
        num_tokens=int(mask.sum()),
        hash=rows_hash(input_ids, mask),
    )


def rows_hash(input_ids: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_]) -> int:
    """Add up hashes of rows without their padding."""
    digests = [
        hashlib.blake2b(ids[seen].tobytes(), digest_size=8).digest()
        for ids, seen in zip(input_ids, mask, strict=True)
    ]
    # A sum, so that hashes of parts of a batch add up to that of the whole.
    return sum(int.from_bytes(digest, "little") for digest in digests) % 2**64


def class_weights(examples: Sequence[Example], labels: Sequence[str]) -> dict[str, float]:
    """Return rows / (classes x rows of the class) by class, as scikit-learn's "balanced"."""
    counts = Counter(str(example.gold) for example in examples)
    present = [label for label in labels if counts[label]]
    return {label: len(examples) / (len(present) * counts[label]) for label in present}


class TaskStream:
    """Training batches of one rank, as `pipeline.train.run.TrainingData`; a unit is a sequence."""

    def __init__(
        self,
        spec: HeadSpec,
        data: TaskRows,
        plan: BatchPlan,
        share: DataRank,
        seed: int,
        pad_id: int,
        row_weights: dict[str, float] | None,
        corrupt: Corrupt | None = None,
    ) -> None:
        """Take the examples (DataError: there is none)."""
        self._spec, self._data, self._plan, self._share = spec, data, plan, share
        self._seed, self._pad_id, self._row_weights = seed, pad_id, row_weights
        self._corrupt = corrupt
        self._units = KINDS[spec.kind].scoring_groups(data.rows)
        if not self._units:
            raise DataError("train has no rows; see data.train of the task")
        lengths = [max(len(data.rows[row].ids) for row in unit) for unit in self._units]
        self._lengths = np.array(lengths)
        # A step may reach from one epoch into the next.
        self._order = lru_cache(maxsize=2)(self._shuffled)

    @property
    def num_units(self) -> int:
        """Units of an epoch."""
        return len(self._units)

    def rows_of(self, unit: int) -> list[int]:
        """Return the numbers of a unit's rows."""
        return self._units[unit]

    @property
    def description(self) -> str:
        """Its size in words."""
        return f"{len(self._data.examples):,} examples an epoch in {len(self._data.rows):,} rows"

    def steps_from(self, cursor: int) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of endless steps."""
        # Made by the training thread: it takes a thousandth of the step that follows.
        pin = torch.cuda.is_available()
        for place in self._plan.batches_from(cursor):
            size = place.size // self._share.world_size
            first = place.cursor + self._share.rank * size
            taken = self._located(first, size)
            yield [
                MicroBatch.of(self._batch(taken[at : at + place.micro_batch]), pin=pin)
                for at in range(0, size, place.micro_batch)
            ]

    def samples(self, place: BatchSpec) -> list[list[int]]:
        """Return [epoch, unit] of each unit of a batch."""
        return [list(pair) for pair in self._located(place.cursor, place.size)]

    def positions_in_batch(self, place: BatchSpec, share: DataRank) -> list[int]:
        """Return which units of a batch a rank computes, counted from its first."""
        size = place.size // share.world_size
        return list(range(share.rank * size, (share.rank + 1) * size))

    def epochs(self, cursor: int) -> dict[str, float]:
        """Return how often the examples were seen before a cursor."""
        return {"train": cursor / len(self._units)}

    def _batch(self, taken: Sequence[tuple[int, int]]) -> Batch:
        made = collate(
            self._spec,
            self._data,
            [self._units[unit] for _, unit in taken],
            pad_id=self._pad_id,
            with_gold=True,
            row_weights=self._row_weights,
        )
        if self._corrupt is None:
            return made
        return self._corrupt(
            made, [(epoch, row) for epoch, unit in taken for row in self._units[unit]]
        )

    def _located(self, first: int, size: int) -> list[tuple[int, int]]:
        """Return (epoch, unit) of some places of the stream."""
        pairs = (divmod(place, len(self._units)) for place in range(first, first + size))
        return [(epoch, int(self._order(epoch)[place])) for epoch, place in pairs]

    def _shuffled(self, epoch: int) -> npt.NDArray[np.int64]:
        """Shuffle units, sort them by length within windows, and shuffle the batches of windows."""
        random = np.random.default_rng((self._seed, epoch))
        order = random.permutation(len(self._units))
        batch = self._plan.at(0).size
        window = _WINDOW_BATCHES * batch
        parts = []
        for at in range(0, len(order), window):
            part = order[at : at + window]
            part = part[np.argsort(self._lengths[part], kind="stable")]
            whole = len(part) // batch * batch
            batches = part[:whole].reshape(-1, batch)
            # What is left over comes last, so that batches begin where the stream's do.
            parts += [random.permutation(batches).reshape(-1), part[whole:]]
        return np.concatenate(parts)


def by_length(data: TaskRows, kind: Kind) -> list[list[list[int]]]:
    """Return all units in batches of at most `kind.batch_rows` rows, the longest first."""
    units = sorted(
        kind.scoring_groups(data.rows), key=lambda unit: -max(len(data.rows[r].ids) for r in unit)
    )
    batches: list[list[list[int]]] = []
    for unit in units:
        if not batches or sum(map(len, batches[-1])) + len(unit) > kind.batch_rows:
            batches.append([])
        batches[-1].append(unit)
    return batches
