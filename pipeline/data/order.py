"""The order in which an endless run sees all sequences: a pure function of seed and position.

An epoch permutes the blocks, cuts them into windows of `window_blocks`, and permutes the sequences
inside each window: random enough to train on, and slow storage sees block-sized reads. Position g
of the run is position g mod N of epoch g div N. World size, workers and restarts do not occur here;
to resume is to set g.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pipeline.data.philox import Purpose, permutation


@dataclass(frozen=True)
class Location:
    """One sequence."""

    epoch: int
    block: int
    """Position in the list of blocks that the order was made for."""
    sequence: int
    """Number within the block."""
    sample_id: int
    """Number within the dataset at this sequence length, the same in every epoch."""


class Order:
    """Global order of the sequences of a split."""

    def __init__(
        self, sequences_per_block: npt.NDArray[np.int64], *, seed: int, window_blocks: int
    ) -> None:
        """Keeps the counts; permutations are drawn when first needed.

        Args:
            sequences_per_block: (b,) number of packed sequences of each block.
            seed: below 2^32.
            window_blocks: blocks whose sequences are shuffled together.
        """
        self._counts = sequences_per_block
        self._first_id = np.cumsum(sequences_per_block) - sequences_per_block
        self._seed = seed
        self._window = window_blocks
        self.num_sequences = int(sequences_per_block.sum())
        self._epoch_blocks = lru_cache(maxsize=2)(self._epoch_blocks_uncached)
        self._window_order = lru_cache(maxsize=4)(self._window_order_uncached)

    def locate(self, position: int) -> Location:
        """The sequence at a position of the run, 0 for the first."""
        epoch, offset = divmod(position, self.num_sequences)
        _, window_ends = self._epoch_blocks(epoch)
        window = int(np.searchsorted(window_ends, offset, side="right"))
        window_start = int(window_ends[window - 1]) if window else 0
        members, ends, order = self._window_order(epoch, window)
        rank_in_window = int(order[offset - window_start])
        which = int(np.searchsorted(ends, rank_in_window, side="right"))
        block = int(members[which])
        sequence = rank_in_window - int(ends[which] - self._counts[block])
        return Location(epoch, block, sequence, int(self._first_id[block]) + sequence)

    def _epoch_blocks_uncached(
        self, epoch: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Blocks in this epoch's order, and the end offset of each window in sequences."""
        blocks = permutation(
            len(self._counts), seed=self._seed, purpose=Purpose.BLOCK_ORDER, epoch=epoch
        )
        firsts = np.arange(0, len(blocks), self._window)
        return blocks, np.cumsum(np.add.reduceat(self._counts[blocks], firsts))

    def _window_order_uncached(
        self, epoch: int, window: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """A window's blocks, their ends in sequences, and the order of all its sequences."""
        blocks, _ = self._epoch_blocks(epoch)
        members = blocks[window * self._window : (window + 1) * self._window]
        ends = np.cumsum(self._counts[members])
        order = permutation(
            int(ends[-1]),
            seed=self._seed, purpose=Purpose.SEQUENCE_ORDER, epoch=epoch, stream=window,
        )  # fmt: skip
        return members, ends, order
