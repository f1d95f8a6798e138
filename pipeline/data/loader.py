"""Micro-batches of a run as tensors, made ahead by a thread or by worker processes."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.config.data import BatchSpec, EvalDataConfig, TrainDataConfig
from pipeline.data.counts import sequences_at
from pipeline.data.dataset import Batch, Inputs, PackedSplit
from pipeline.data.format import DatasetIndex
from pipeline.data.jit import kernel
from pipeline.data.order import Ints, Locations
from pipeline.data.run_order import DataRank, StageData, TrainSteps
from pipeline.data.workers import Workers
from pipeline.errors import DataError, StorageError

_MULTIPLE = 64


def document_bounds(documents: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Find where pieces and paddings of sequences begin, if these lie end to end, and the end.

    `documents` is (B, S), as in `Batch`.

    Returns:
        (D + 1,) int32 from 0 to B * S. Its end is repeated, as of empty documents, up to a multiple
        of 64: micro-batches then have few different shapes.
    """
    starts = _starts(documents)
    bounds = np.full(-(-(len(starts) + 1) // _MULTIPLE) * _MULTIPLE, documents.size, np.int32)
    bounds[: len(starts)] = starts
    return bounds


@kernel
def _starts(documents: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    rows, slots = documents.shape
    starts, count = np.empty(rows * slots, np.int32), 0
    for row in range(rows):
        for slot in range(slots):
            if slot == 0 or documents[row, slot] != documents[row, slot - 1]:
                starts[count] = row * slots + slot
                count += 1
    return starts[:count]


@dataclass(frozen=True)
class MicroBatch:
    """A `Batch` as tensors: B sequences of S slots, and what the objective needs beside them."""

    input_ids: Tensor
    documents: Tensor
    positions: Tensor
    segments: Tensor | None
    cu_seqlens: Tensor
    """(D + 1,) int32, of `document_bounds`."""
    inputs: dict[str, Tensor]
    weights: dict[str, float]
    """Loss weights by name, on the host like everything that is not a tensor."""
    counts: dict[str, int]
    num_tokens: int
    hash: int

    @classmethod
    def of(cls, batch: Batch, *, pin: bool = False) -> "MicroBatch":
        """Tensors that share the arrays' memory, or copies that a GPU can fetch by itself."""

        def tensor(array: npt.NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).pin_memory() if pin else torch.from_numpy(array)

        return cls(
            input_ids=tensor(batch.input_ids),
            documents=tensor(batch.documents),
            positions=tensor(batch.positions),
            segments=None if batch.segments is None else tensor(batch.segments),
            cu_seqlens=tensor(document_bounds(batch.documents)),
            inputs={name: tensor(array) for name, array in batch.inputs.items()},
            weights=batch.weights,
            counts=batch.counts,
            num_tokens=batch.num_tokens,
            hash=batch.hash,
        )

    def to(self, device: torch.device) -> "MicroBatch":
        """Copy the tensors to a device without waiting for the copy."""
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        inputs = {name: each.to(device, non_blocking=True) for name, each in self.inputs.items()}
        return replace(self, inputs=inputs, **moved)


class TrainLoader:
    """Training batches of one rank."""

    def __init__(
        self,
        index: DatasetIndex,
        config: TrainDataConfig,
        inputs: Inputs,
        share: DataRank,
        counts: Mapping[int, Ints] | None = None,
        stages: Sequence[StageData] = (),
    ) -> None:
        """Open the training split; see `TrainSteps` for `counts`, `stages` and what can fail.

        Raises:
            ConfigError: a batch does not split evenly over the ranks.
        """
        config.batches.require_split(share.world_size)
        if counts is None:
            counts = sequences_at(index, config.batches.seq_lens, None, config.objective)
        # With workers these make the steps.
        sharing = share.world_size > 1 and not config.data.workers
        self.steps = TrainSteps(index, config, inputs, counts, stages=stages, sharing=sharing)
        self._share = share
        self._data = config.data
        self._start_workers: Callable[[], Workers] | None = None
        if config.data.workers:
            self._start_workers = partial(
                Workers, config.data.workers, index, config, inputs, share, counts, stages
            )

    @property
    def description(self) -> str:
        """Its size in words."""
        return "; then ".join(self.steps.descriptions)

    def samples(self, place: BatchSpec) -> list[list[int]]:
        """Return [epoch, sample id] of each sequence of a batch, over all ranks."""
        found, _ = self.steps.located(place.cursor, DataRank(0, 1))
        return [list(map(int, pair)) for pair in zip(found.epochs, found.sample_ids, strict=True)]

    def positions_in_batch(self, place: BatchSpec, share: DataRank) -> list[int]:
        """Return which sequences of a batch a rank computes, counted from its first."""
        return list(map(int, self.steps.located(place.cursor, share)[1]))

    def epochs(self, cursor: int) -> dict[str, float]:
        """Return how often each group of sources was seen before a cursor."""
        return self.steps.epochs(cursor)

    def step_batches(self, cursor: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of the step that starts at `cursor` sequences."""
        return [MicroBatch.of(batch) for batch in self.steps.micro_batches(cursor, self._share)]

    def steps_from(self, cursor: int) -> Iterator[list[MicroBatch]]:
        """Endless steps, made ahead.

        Raises:
            PostnormError: a step cannot be made; those before it were given.
        """
        calls, steps = max(1, self._data.workers), self._data.prefetch_steps
        # How far ahead, and by which worker, is no state: a resume begins at the cursor alone.
        pending: deque[_Made] = deque()
        with ExitStack() as stack:
            workers = None
            if self._start_workers:
                workers = self._start_workers()
                stack.callback(workers.close)
            # One thread: `Workers.take` gives what was asked for first, so steps stay in order.
            pool = ThreadPoolExecutor(1, thread_name_prefix="loader")
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
            made: Iterator[list[MicroBatch]] = iter(())
            while True:
                while len(pending) < calls or sum(one.steps for one in pending) < steps:
                    count = self.steps.together(cursor, self._share)
                    make: Callable[[], list[Batch]] = partial(
                        self.steps.micro_batches, cursor, self._share, steps=count
                    )
                    if workers:
                        workers.ask(cursor, count)
                        make = workers.take
                    pending.append(_Made(cursor, count, pool.submit(_tensors, make)))
                    cursor += count * self.steps.plan.at(cursor).size
                step = next(made, None)
                if step is None:
                    made = self._each(pending.popleft())
                else:
                    yield step

    def _each(self, made: "_Made") -> Iterator[list[MicroBatch]]:
        """Yield the steps of one call."""
        try:
            batches = made.batches.result()
        except (DataError, StorageError):
            if made.steps == 1:
                raise
            # One of the steps cannot be made. Those before it can.
            size = self.steps.plan.at(made.cursor).size
            for step in range(made.steps):
                at = made.cursor + step * size
                yield _tensors(partial(self.steps.micro_batches, at, self._share))
            return
        each = len(batches) // made.steps
        for step in range(made.steps):
            yield batches[step * each : (step + 1) * each]


class _Made(NamedTuple):
    """Micro-batches of some equal steps, which are being made."""

    cursor: int
    steps: int
    batches: Future[list[MicroBatch]]


def _tensors(make: Callable[[], list[Batch]]) -> list[MicroBatch]:
    # Copied to pinned memory here: the training thread then only starts the copy to the GPU.
    pin = torch.cuda.is_available()
    return [MicroBatch.of(batch, pin=pin) for batch in make()]


class EvalLoader:
    """This rank's share of the held-out sequences, the same each time, one source after another.

    Where there are more than `sequences`, each source gives its first ones in proportion to its
    size, one at least.
    """

    def __init__(
        self,
        index: DatasetIndex,
        config: EvalDataConfig,
        inputs: Inputs,
        share: DataRank,
        counts: Mapping[int, Ints] | None = None,
    ) -> None:
        self._seq_len = config.data.seq_len
        if counts is None:
            counts = sequences_at(index, [self._seq_len], None, config.objective)
        self.split = PackedSplit(index, "eval", config.data, counts, inputs.pairs)
        self.sources = tuple(source.name for source in index.sources)
        """Names; those without held-out text, too."""
        of_block = self.split.counts[self._seq_len]
        source_of_block = index.block_source[self.split.rows].astype(np.int64)
        blocks = _first_blocks(of_block, source_of_block, config.sequences)
        numbers = np.arange(int(of_block.sum()))
        first_ids = np.cumsum(of_block) - of_block
        ids = np.concatenate([numbers[first_ids[b] : first_ids[b] + n] for b, n in blocks])
        of_id = np.repeat([b for b, _ in blocks], [n for _, n in blocks])
        self._all = Locations(
            np.zeros_like(ids), of_id, ids - first_ids[of_id], ids, np.zeros(len(ids), np.bool_)
        )
        self._source = source_of_block[of_id]
        self._share = share
        self._inputs = inputs
        self._micro_batch = config.micro_batch

    @property
    def num_sequences(self) -> int:
        """Sequences of all ranks."""
        return len(self._source)

    @property
    def num_batches(self) -> int:
        """How many `batches` gives, on every rank."""
        size = self._share.world_size * self._micro_batch
        of_source = np.bincount(self._source, minlength=len(self.sources))
        return int((-(-of_source // size)).sum())

    def batches(self) -> Iterator[tuple[int, MicroBatch]]:
        """Yield the same micro-batches each time, each with the number of its only source."""
        rank, world_size = self._share.rank, self._share.world_size
        size = world_size * self._micro_batch
        for source in range(len(self.sources)):
            rows = np.flatnonzero(self._source == source)
            for at in range(0, len(rows), size):
                # By turns, so that of a last, smaller batch as many ranks as possible get a
                # sequence.
                mine = rows[at : at + size][rank::world_size]
                if len(mine):
                    batch = self._made(mine)
                else:
                    # Every rank yields as many, so that weights that are divided over ranks can be
                    # gathered for each batch.
                    batch = self._inputs.without_targets(self._made(rows[:1]))
                yield source, MicroBatch.of(batch)

    def spread(self, count: int) -> MicroBatch:
        """Select at most `count` of all ranks' sequences, evenly spaced: the same on every rank."""
        total = len(self._source)
        count = min(count, total)
        return MicroBatch.of(self._made(np.arange(count) * total // count))

    def _made(self, rows: Ints) -> Batch:
        locations = Locations._make(array[rows] for array in self._all)
        slots = self.split.slots(locations, self._seq_len)
        [batch] = self._inputs(slots, locations, 0, micro_batch=len(rows), places=rows)
        return batch


def _first_blocks(counts: Ints, source_of_block: Ints, limit: int) -> list[tuple[int, int]]:
    """Blocks with how many of their sequences are taken, by source."""
    total, found = int(counts.sum()), []
    for source in np.unique(source_of_block).tolist():
        of_source = np.flatnonzero(source_of_block == source)
        size = int(counts[of_source].sum())
        left = size if total <= limit else max(1, limit * size // total)
        for block in of_source.tolist():
            taken = min(left, int(counts[block]))
            left -= taken
            if taken:
                found.append((block, taken))
    return found
