"""The order in which all sequences of a source are seen: a pure function of seed and position.

An epoch permutes the blocks, cuts them into windows, and permutes the sequences inside each window:
random enough to train on, with block-sized reads from storage. World size, workers and restarts do
not matter here; a run resumes by setting a position.

If the length of sequences changes, the new order continues where the old one stopped: first the
rest of the window, packed again, then the epoch's other windows. So every token is seen once in an
epoch, whatever lengths it was cut to.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.data.random import Purpose, permutation

Ints = npt.NDArray[np.int64]


class Locations(NamedTuple):
    """Some sequences, in order: arrays of one length."""

    epochs: Ints
    """How many times the source was seen before."""
    blocks: Ints
    """Position in the split's list of blocks."""
    sequences: Ints
    """Number within the block, or within its leftover."""
    sample_ids: Ints
    """Number in the run, unique together with the epoch."""
    leftover: npt.NDArray[np.bool_]
    """Whether the sequence is from the rest of a window in which the length changed."""

    def rows(self, first: int, stop: int | None = None) -> "Locations":
        """Return the rows of a range, to the end if `stop` is None."""
        return Locations._make(array[first:stop] for array in self)


def joined(parts: list[Locations]) -> Locations:
    """Concatenate locations."""
    return Locations._make(np.concatenate(arrays) for arrays in zip(*parts, strict=True))


@dataclass(frozen=True)
class Material:
    """The sequences that an order arranges."""

    blocks: Ints
    """(b,) the source's blocks: positions in the split's list."""
    counts: Ints
    """(b,) number of sequences in each block."""
    first_ids: Ints
    """(b,) sample id of each block's first sequence."""


@dataclass(frozen=True)
class Start:
    """The point where an order begins, which may be in the middle of an epoch."""

    epoch: int = 0
    window: int = 0
    """First whole window of that epoch; may be one past the last."""
    leftover: Material | None = None
    """Sequences before that window."""


class Order:
    """Order of a source's sequences of one length."""

    def __init__(
        self,
        material: Material,
        *,
        seed: int,
        window_blocks: int,
        source: int = 0,
        segment: int = 0,
        start: Start | None = None,
    ) -> None:
        """Prepare the order; permutations are drawn when they are first needed.

        `seed` is below 2^32, `source` and `segment` below 2^16. Orders of different sources are
        independent; different segments have the same windows, with the sequences in independent
        orders.
        """
        self._material = material
        self._seed = seed
        self._window_blocks = window_blocks
        self._source = source
        self._segment = segment
        self._start = start or Start()
        self.num_sequences = int(material.counts.sum())
        self._epoch_windows = lru_cache(maxsize=2)(self._epoch_windows_uncached)
        self._window = lru_cache(maxsize=2)(self._window_uncached)
        left = self._start.leftover
        self._num_left = int(left.counts.sum()) if left is not None else 0
        _, ends = self._epoch_windows(self._start.epoch)
        self._skipped = int(ends[self._start.window - 1]) if self._start.window else 0
        """Sequences of the first epoch that stand before the first whole window."""

    def locate(self, first: int, count: int) -> Locations:
        """Find the sequences at positions first .. first + count - 1."""
        parts = []
        while count > 0:
            epoch, window, offset = self._place(first)
            part = self._window(epoch, window).rows(offset, offset + count)
            parts.append(part)
            first, count = first + len(part.epochs), count - len(part.epochs)
        return joined(parts) if parts else NO_LOCATIONS

    def rest_of_window(self, position: int) -> tuple[Start, Locations]:
        """Return the start after a position's window, and the rest of that window."""
        epoch, window, offset = self._place(position)
        if window == _LEFTOVER:
            return Start(epoch, self._start.window), self._window(epoch, window).rows(offset)
        if offset == 0:
            return Start(epoch, window), NO_LOCATIONS
        return Start(epoch, window + 1), self._window(epoch, window).rows(offset)

    def epochs(self, position: int) -> float:
        """Return how many times the source was seen before a position."""
        sequences = position - self._num_left + self._skipped
        return self._start.epoch + sequences / self.num_sequences

    def positions(self, block: int, sequence: int, *, leftover: bool) -> Iterator[int]:
        """Yield the positions of a sequence, rising; endless except for leftovers.

        `leftover` says that it is a sequence of the leftover instead of the source's blocks.
        """
        first_epoch = self._start.epoch
        if leftover:
            yield from self._positions_in(first_epoch, _LEFTOVER, block, sequence)
            return
        epoch = first_epoch
        row = int(np.flatnonzero(self._material.blocks == block)[0])
        while True:
            order, _ = self._epoch_windows(epoch)
            window = int(np.flatnonzero(order == row)[0]) // self._window_blocks
            if epoch > first_epoch or window >= self._start.window:
                yield from self._positions_in(epoch, window, block, sequence)
            epoch += 1

    def _positions_in(self, epoch: int, window: int, block: int, sequence: int) -> Iterator[int]:
        table = self._window(epoch, window)
        offsets = np.flatnonzero((table.blocks == block) & (table.sequences == sequence))
        yield from (self._first_position(epoch, window) + offsets).tolist()

    def _place(self, position: int) -> tuple[int, int, int]:
        """Return the epoch, window and offset in it of a position."""
        if position < self._num_left:
            return self._start.epoch, _LEFTOVER, position
        epoch, offset = divmod(position - self._num_left + self._skipped, self.num_sequences)
        epoch += self._start.epoch
        _, ends = self._epoch_windows(epoch)
        window = int(np.searchsorted(ends, offset, side="right"))
        return epoch, window, offset - (int(ends[window - 1]) if window else 0)

    def _first_position(self, epoch: int, window: int) -> int:
        """Return the position of a window's first sequence."""
        if window == _LEFTOVER:
            return 0
        _, ends = self._epoch_windows(epoch)
        before = (epoch - self._start.epoch) * self.num_sequences
        return self._num_left - self._skipped + before + (int(ends[window - 1]) if window else 0)

    def _epoch_windows_uncached(self, epoch: int) -> tuple[Ints, Ints]:
        """Return the blocks in this epoch's order, and the end of each window in sequences."""
        blocks = permutation(
            len(self._material.counts),
            seed=self._seed,
            purpose=Purpose.BLOCK_ORDER,
            epoch=epoch,
            stream=self._source,
        )
        firsts = np.arange(0, len(blocks), self._window_blocks)
        return blocks, np.cumsum(np.add.reduceat(self._material.counts[blocks], firsts))

    def _window_uncached(self, epoch: int, window: int) -> Locations:
        """Return all sequences of a window in their order."""
        left = window == _LEFTOVER
        if left:
            assert self._start.leftover is not None
            material = self._start.leftover
            members = np.arange(len(material.blocks))
        else:
            material, (blocks, _) = self._material, self._epoch_windows(epoch)
            members = blocks[window * self._window_blocks : (window + 1) * self._window_blocks]
        counts = material.counts[members]
        total = int(counts.sum())
        order = permutation(
            total,
            seed=self._seed,
            purpose=Purpose.SEQUENCE_ORDER,
            epoch=epoch,
            window=_LEFTOVER_COUNTER if left else window,
            stream=self._source + (self._segment << 16),
        )
        sequences = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        ids = np.repeat(material.first_ids[members], counts) + sequences
        return Locations(
            np.full(total, epoch),
            np.repeat(material.blocks[members], counts)[order],
            sequences[order],
            ids[order],
            np.full(total, left),
        )


_LEFTOVER = -1
_LEFTOVER_COUNTER = 0xFFFFFFFF
NO_LOCATIONS = Locations._make([*(np.empty(0, np.int64) for _ in range(4)), np.empty(0, np.bool_)])
