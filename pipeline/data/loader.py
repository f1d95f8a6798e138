"""Batches of a run by step: what rank r computes in step k, and nothing else.

Step k consists of positions [k * B, (k + 1) * B) of the order, B the global batch. Rank r takes the
r-th contiguous share of it, cut into micro-batches. The loader has no state; it can be asked for
any step at any time.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from pipeline.config.run import PretrainConfig
from pipeline.data.batch import MicroBatch
from pipeline.data.dataset import PackedSplit
from pipeline.data.order import Location, Order
from pipeline.data.philox import Purpose
from pipeline.data.shards import DatasetIndex

EVAL_MASK_SEED = 0
"""Not the run's seed: the evaluation masks are the same for every run."""
_PREFETCHED_STEPS = 2


@dataclass(frozen=True)
class Share:
    """Which part of every global batch this rank computes."""

    rank: int
    world_size: int


class TrainLoader:
    """Training batches of one rank."""

    def __init__(
        self,
        index: DatasetIndex,
        config: PretrainConfig,
        share: Share,
        counts: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Opens the training split; see `PackedSplit` for `counts` and what can fail."""
        self.split = PackedSplit(index, "train", config.data, counts)
        self.order = Order(
            self.split.sequences_per_block,
            seed=config.seed,
            window_blocks=config.data.window_blocks,
        )
        self._key = (config.seed, Purpose.MASK)
        self._mask_ratio = config.data.mask_ratio
        self._global_batch = config.train.global_batch
        self._micro_batch = config.train.micro_batch
        self._share = share
        config.train.accumulation_steps(share.world_size)  # raises if the batch does not split

    def step_batches(self, cursor: int) -> list[MicroBatch]:
        """This rank's micro-batches of the step that starts at `cursor` sequences.

        The mask ratio is that of step `cursor` / global batch, skipped steps included: batches are
        made ahead, when nobody knows yet which steps will be skipped.
        """
        ratio = self._mask_ratio(cursor // self._global_batch)
        per_rank = self._global_batch // self._share.world_size
        first = cursor + self._share.rank * per_rank
        return [
            self.split.batch(
                [self.order.locate(position) for position in range(at, at + self._micro_batch)],
                self._key,
                ratio,
            )
            for at in range(first, first + per_rank, self._micro_batch)
        ]

    def steps_from(self, cursor: int) -> Iterator[list[MicroBatch]]:
        """Endless steps, prepared ahead by a thread. How far ahead is nobody's state."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="loader")
        pending: list[Future[list[MicroBatch]]] = []
        try:
            while True:
                while len(pending) < _PREFETCHED_STEPS:
                    pending.append(pool.submit(self.step_batches, cursor))
                    cursor += self._global_batch
                yield pending.pop(0).result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class EvalLoader:
    """This rank's share of the held-out sequences, in dataset order, with fixed masks.

    They are of the config's unit and selection at `mask_prob`, whatever the ratio is in training.
    """

    def __init__(
        self,
        index: DatasetIndex,
        config: PretrainConfig,
        share: Share,
        counts: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Opens the eval split; see `PackedSplit` for `counts` and what can fail."""
        self.split = PackedSplit(index, "eval", config.data, counts)
        in_order = (
            (block, sequence)
            for block, count in enumerate(self.split.sequences_per_block.tolist())
            for sequence in range(count)
        )
        places = islice(in_order, config.monitor.eval_sequences)
        locations = [
            Location(epoch=0, block=block, sequence=sequence, sample_id=number)
            for number, (block, sequence) in enumerate(places)
        ]
        self._mine = locations[share.rank :: share.world_size]
        self._micro_batch = config.train.micro_batch

    def batches(self) -> Iterator[MicroBatch]:
        """Yields the same micro-batches each time."""
        for at in range(0, len(self._mine), self._micro_batch):
            yield self.split.batch(
                self._mine[at : at + self._micro_batch], (EVAL_MASK_SEED, Purpose.EVAL_MASK)
            )
