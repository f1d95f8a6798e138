"""Batches of a run as tensors, made ahead by a thread or by worker processes."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch

from pipeline.config.run import PretrainConfig
from pipeline.data.batch import MicroBatch
from pipeline.data.counts import sequences_at
from pipeline.data.dataset import Batch, Masks, PackedSplit
from pipeline.data.order import Ints, Locations
from pipeline.data.philox import Purpose
from pipeline.data.shards import DatasetIndex
from pipeline.data.steps import Share, TrainSteps
from pipeline.data.workers import Workers

EVAL_MASK_SEED = 0
"""Not the run's seed: the evaluation masks are the same for every run."""


class TrainLoader:
    """Training batches of one rank."""

    def __init__(
        self,
        index: DatasetIndex,
        config: PretrainConfig,
        share: Share,
        counts: Mapping[int, Ints] | None = None,
    ) -> None:
        """Opens the training split; see `TrainSteps` for `counts` and what can fail.

        Raises:
            ConfigError: a batch does not split evenly over the ranks.
        """
        config.batches.require_split(share.world_size)
        if counts is None:
            counts = sequences_at(index, config.batches.seq_lens, None)
        self.steps = TrainSteps(index, config, counts)
        self._share = share
        self._prefetched = max(config.data.prefetch_steps, config.data.workers)
        self._start_workers = partial(
            Workers, config.data.workers, index, config, share, counts
        ) if config.data.workers else None  # fmt: skip

    def step_batches(self, cursor: int) -> list[MicroBatch]:
        """This rank's micro-batches of the step that starts at `cursor` sequences."""
        return [MicroBatch.of(batch) for batch in self.steps.micro_batches(cursor, self._share)]

    def steps_from(self, cursor: int) -> Iterator[list[MicroBatch]]:
        """Endless steps, made ahead. How far ahead, and by whom, is nobody's state.

        Raises:
            PostnormError: a step cannot be made; those before it were given.
        """
        places = self.steps.plan.batches_from(cursor)
        pending: list[Future[list[MicroBatch]]] = []
        with ExitStack() as stack:
            workers = None
            if self._start_workers:
                workers = self._start_workers()
                stack.callback(workers.close)
            pool = ThreadPoolExecutor(1, thread_name_prefix="loader")
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
            while True:
                while len(pending) < self._prefetched:
                    at = next(places).cursor
                    make: Callable[[], list[Batch]] = partial(
                        self.steps.micro_batches, at, self._share
                    )
                    if workers:
                        workers.ask(at)
                        make = workers.take
                    pending.append(pool.submit(_tensors, make))
                yield pending.pop(0).result()


def _tensors(make: Callable[[], list[Batch]]) -> list[MicroBatch]:
    # Copied to pinned memory here: the training thread then only starts the copy to the GPU.
    pin = torch.cuda.is_available()
    return [MicroBatch.of(batch, pin=pin) for batch in make()]


class EvalLoader:
    """This rank's share of the held-out sequences, in dataset order, with fixed masks.

    They are of the config's unit and selection at `mask_prob`, whatever the ratio is in training.
    """

    def __init__(
        self,
        index: DatasetIndex,
        config: PretrainConfig,
        share: Share,
        counts: Mapping[int, Ints] | None = None,
    ) -> None:
        """Opens the eval split; see `PackedSplit` for `counts` and what can fail."""
        self._seq_len = config.data.seq_len
        if counts is None:
            counts = sequences_at(index, [self._seq_len], None)
        self.split = PackedSplit(index, "eval", config.data, counts)
        of_block = self.split.counts[self._seq_len]
        # No more blocks than the sequences that are wanted can lie in.
        of_block = of_block[: config.monitor.eval_sequences]
        blocks = np.repeat(np.arange(len(of_block)), of_block)
        numbers = np.arange(len(blocks))
        sequences = numbers - np.repeat(np.cumsum(of_block) - of_block, of_block)
        all_sequences = Locations(
            np.zeros_like(numbers), blocks, sequences, numbers, np.zeros(len(numbers), np.bool_)
        )
        mine = slice(share.rank, config.monitor.eval_sequences, share.world_size)
        self._mine = Locations._make(array[mine] for array in all_sequences)
        self._masks = Masks(EVAL_MASK_SEED, Purpose.EVAL_MASK, config.data.mask_prob)
        self._micro_batch = config.train.micro_batch

    def batches(self) -> Iterator[MicroBatch]:
        """Yields the same micro-batches each time."""
        for at in range(0, len(self._mine.blocks), self._micro_batch):
            rows = self._mine.rows(at, at + self._micro_batch)
            slots = self.split.slots(rows, self._seq_len)
            [batch] = self.split.masked(slots, rows, self._masks, micro_batch=self._micro_batch)
            yield MicroBatch.of(batch)
