"""The order in which all sequences of a source are seen: a pure function of seed and position.

An epoch permutes the blocks, cuts them into windows, and permutes the sequences inside each window:
random enough to train on, with block-sized reads from storage. World size, workers and restarts do
not matter here; a run resumes by setting a position.

If the length of sequences changes, the new order continues where the old one stopped: first the
rest of the window, packed again, then the epoch's other windows. So every token is seen once in an
epoch, whatever lengths it was cut to.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.data.jit import kernel
from pipeline.data.random import Purpose, permutation

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]
Make = Callable[[], Sequence[Ints32]]
Once = Callable[[tuple[int, int, int, int], Make], Sequence[Ints32]]
"""Returns the arrays of a key, which it may have."""


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
class SequencePool:
    """The sequences that an order arranges."""

    blocks: Ints
    """(b,) the source's blocks: positions in the split's list."""
    counts: Ints
    """(b,) number of sequences in each block."""
    first_ids: Ints
    """(b,) sample id of each block's first sequence."""


@dataclass(frozen=True)
class OrderStart:
    """The point where an order begins, which may be in the middle of an epoch."""

    epoch: int = 0
    window: int = 0
    """First whole window of that epoch; may be one past the last."""
    leftover: SequencePool | None = None
    """Sequences before that window."""


class Window(NamedTuple):
    """The sequences of some blocks in random order; n sequences of m blocks."""

    epoch: int
    number: int
    first: int
    """Position of its first sequence."""
    blocks: Ints
    """(m,) rows of the material."""
    ends: Ints
    """(m,) end of each block's sequences, numbered block after block."""
    order: Ints32
    """(n,) number of the sequence at each place."""
    by_block: Ints32
    """(n,) places of the sequences, rising within a block, block after block."""


class WindowCell(NamedTuple):
    """The sequences of one block of a window that stand in a stretch of positions."""

    depth: float
    """Where the block stands among those of its window, 0 to 1."""
    window: Window
    begin: int
    """First of its rows in `by_block`."""
    stop: int


class Order:
    """Order of a source's sequences of one length."""

    def __init__(
        self,
        material: SequencePool,
        *,
        seed: int,
        window_blocks: int,
        source: int = 0,
        segment: int = 0,
        start: OrderStart | None = None,
        once: Once | None = None,
    ) -> None:
        """Prepare the order; permutations are drawn when they are first needed.

        `once` may give those of a window that another process has drawn.

        `seed` is below 2^32, `source` and `segment` below 2^16. Orders of different sources are
        independent; different segments have the same windows, with the sequences in independent
        orders.
        """
        self._material = material
        self._seed = seed
        self._window_blocks = window_blocks
        self._source = source
        # Not for the order of blocks: a window of a number has the same blocks in every segment, so
        # that `OrderStart` can say by number where a segment goes on.
        self._stream = source + (segment << 16)
        self._start = start or OrderStart()
        self._once = once
        self.num_sequences = int(material.counts.sum())
        # Of this object: a cache on the class would keep every order alive. Two, as a step may
        # reach from one epoch, or window, into the next.
        self._epoch_windows = lru_cache(maxsize=2)(self._epoch_windows_uncached)
        self._drawn = lru_cache(maxsize=2)(self._draw)
        left = self._start.leftover
        self._num_left = int(left.counts.sum()) if left is not None else 0
        _, ends = self._epoch_windows(self._start.epoch)
        self._skipped = int(ends[self._start.window - 1]) if self._start.window else 0
        """Sequences of the first epoch that stand before the first whole window."""

    def locate(self, first: int, count: int) -> Locations:
        """Find the sequences at positions first .. first + count - 1."""
        windows = self.windows(first, count)
        parts = [
            self.located(window, window.order[start:stop])
            for window, start, stop in _stretches(windows, first, count)
        ]
        return joined(parts) if parts else NO_LOCATIONS

    def windows(self, first: int, count: int) -> list[Window]:
        """Return the windows of positions first .. first + count - 1."""
        found: list[Window] = []
        while count > 0:
            epoch, number, start = self._place(first)
            window = self._window(epoch, number)
            found.append(window)
            inside = min(count, len(window.order) - start)
            first, count = first + inside, count - inside
        return found

    def share(
        self, windows: list[Window], first: int, count: int, rows: range
    ) -> Iterator[tuple[Window, Ints32]]:
        """Sort the sequences at positions first .. first + count - 1 by block, and yield some rows.

        Blocks at equal depths of successive windows stand side by side: whoever takes a share of
        each step then stays with a block to its window's end, and goes on with one of the next.

        `rows` may begin below 0 and end above `count`. Yields windows, each with places in it.
        """
        row = 0
        for _, of_window in groupby(_cells(windows, first, count), key=lambda c: c.window.first):
            mine: list[Ints32] = []
            for cell in of_window:
                begin = cell.begin + max(0, rows.start - row)
                stop = min(cell.stop, cell.begin + rows.stop - row)
                row += cell.stop - cell.begin
                if begin < stop:
                    mine.append(cell.window.by_block[begin:stop])
                    window = cell.window
            if mine:
                yield window, np.concatenate(mine)

    def located(self, window: Window, numbers: Ints32) -> Locations:
        """Find sequences of a window by their numbers."""
        left = window.number == _LEFTOVER
        material = self._start.leftover if left else self._material
        assert material is not None
        # Right: a number equal to an end is the first of the next block, and empty blocks are
        # passed over.
        which = np.searchsorted(window.ends, numbers, side="right")
        rows = window.blocks[which]
        sequences = numbers - (window.ends[which] - material.counts[rows])
        total = len(numbers)
        return Locations(
            np.full(total, window.epoch),
            material.blocks[rows],
            sequences,
            material.first_ids[rows] + sequences,
            np.full(total, left),
        )

    def rest_of_window(self, position: int) -> tuple[OrderStart, Locations]:
        """Return the start after a position's window, and the rest of that window."""
        epoch, window, offset = self._place(position)
        if window != _LEFTOVER and offset == 0:
            return OrderStart(epoch, window), NO_LOCATIONS
        table = self._window(epoch, window)
        rest = self.located(table, table.order[offset:])
        return OrderStart(epoch, self._start.window if window == _LEFTOVER else window + 1), rest

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
        located = self.located(table, table.order)
        offsets = np.flatnonzero((located.blocks == block) & (located.sequences == sequence))
        yield from (table.first + offsets).tolist()

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

    def _window(self, epoch: int, window: int) -> Window:
        if self._once is None:
            order, by_block = self._drawn(epoch, window)
        else:
            key = self._stream, epoch, window, 0
            order, by_block = self._once(key, lambda: self._draw(epoch, window))
        first, (members, ends) = self._first_position(epoch, window), self._in(epoch, window)
        return Window(epoch, window, first, members, ends, order, by_block)

    def _in(self, epoch: int, window: int) -> tuple[Ints, Ints]:
        """Return a window's blocks, and the end of each one's sequences."""
        if window == _LEFTOVER:
            assert self._start.leftover is not None
            material = self._start.leftover
            members = np.arange(len(material.blocks))
        else:
            material, (blocks, _) = self._material, self._epoch_windows(epoch)
            members = blocks[window * self._window_blocks : (window + 1) * self._window_blocks]
        return members, np.cumsum(material.counts[members])

    def _draw(self, epoch: int, window: int) -> tuple[Ints32, Ints32]:
        """Put the sequences of a window in their order."""
        _, ends = self._in(epoch, window)
        order = permutation(
            int(ends[-1]),
            seed=self._seed,
            purpose=Purpose.SEQUENCE_ORDER,
            epoch=epoch,
            # A counter's words are below 2^32: -1 is not one, and no window has this number.
            window=_LEFTOVER_COUNTER if window == _LEFTOVER else window,
            stream=self._stream,
            # 4 bytes a place, and two such arrays a window: `PackedSplit.share` counts on it.
        ).astype(np.int32)
        return order, _places_by_block(order, ends)


def _cells(windows: list[Window], first: int, count: int) -> list[WindowCell]:
    """Divide the sequences at positions first .. first + count - 1 by block, and sort by depth."""
    found = []
    for window, start, stop in _stretches(windows, first, count):
        begins, stops = _in_stretch(window.by_block, window.ends, start, stop)
        found += [
            WindowCell(row / len(begins), window, begin, end)
            for row, (begin, end) in enumerate(zip(begins.tolist(), stops.tolist(), strict=True))
        ]
    # Stable, and quotients are rounded alike everywhere: every rank sorts the same way.
    return sorted(found, key=lambda cell: cell.depth)


def _stretches(windows: list[Window], first: int, count: int) -> Iterator[tuple[Window, int, int]]:
    """Yield the windows that hold some of positions first .. first + count - 1: which of theirs."""
    for window in windows:
        start, stop = max(0, first - window.first), first + count - window.first
        stop = min(stop, len(window.order))
        if start < stop:
            yield window, start, stop


@kernel
def _places_by_block(order: Ints32, ends: Ints) -> Ints32:
    """Sort places by the block of their sequence, stably."""
    block_of = np.empty(len(order), np.int32)
    at = 0
    for block in range(len(ends)):
        block_of[at : ends[block]] = block
        at = ends[block]
    next_of = np.zeros(len(ends), np.int64)
    next_of[1:] = ends[:-1]
    places = np.empty(len(order), np.int32)
    for place in range(len(order)):
        block = block_of[order[place]]
        places[next_of[block]] = place
        next_of[block] += 1
    return places


@kernel
def _in_stretch(by_block: Ints32, ends: Ints, start: int, stop: int) -> tuple[Ints, Ints]:
    """Find the rows of `by_block`, from and to, of each block with places from start to stop."""
    begins, stops = np.empty(len(ends), np.int64), np.empty(len(ends), np.int64)
    first = 0
    for block in range(len(ends)):
        places = by_block[first : ends[block]]
        begins[block] = first + np.searchsorted(places, start)
        stops[block] = first + np.searchsorted(places, stop)
        first = ends[block]
    return begins, stops


_LEFTOVER = -1
_LEFTOVER_COUNTER = 0xFFFFFFFF
NO_LOCATIONS = Locations._make([*(np.empty(0, np.int64) for _ in range(4)), np.empty(0, np.bool_)])
