"""Which sequence stands at which place of a run: sources, epochs and lengths put together.

The run is cut into segments, in each of which sequences have one length. In a segment each source
has an order of its own, and a mix says whose turn it is. Where all weights are equal, all sources
are shuffled together as one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from pipeline.config.data import TrainDataConfig
from pipeline.data.dataset import PackedSplit
from pipeline.data.format import DatasetIndex
from pipeline.data.mix import Mix, weights
from pipeline.data.order import NO_LOCATIONS, Ints, Locations, Material, Order, Start
from pipeline.data.packing import Packing, repack
from pipeline.errors import ConfigError

_ID_BITS = 48
"""Sample ids count below this; above it stands what makes those of segments differ."""


_MOST_NAMES = 3


class Group(NamedTuple):
    """Blocks that are shuffled together: a source, or all of them."""

    name: str
    """Of the source, or of all that are in the group."""
    weight: Fraction
    blocks: Ints
    """(b,) positions in the split's list."""


@dataclass(frozen=True)
class Segment:
    """A part of the run in which sequences have one length."""

    first: int
    """Its first place in the run."""
    seq_len: int
    mix: Mix
    orders: tuple[Order, ...]
    """Of each group."""
    leftovers: dict[int, Packing]
    """By block: what was left of windows when the segment began."""

    def locate(self, first: int, count: int) -> Locations:
        """Find the sequences at `count` places of the run from `first` on."""
        parts = self.mix.parts(first - self.first, count)
        if len(parts) == 1:
            return self.orders[0].locate(parts[0].first, count)
        found = Locations._make(np.empty(count, array.dtype) for array in NO_LOCATIONS)
        for order, part in zip(self.orders, parts, strict=True):
            located = order.locate(part.first, len(part.places))
            for into, values in zip(found, located, strict=True):
                into[part.places] = values
        return found


class RunOrder:
    """All places of a run, from the first to as far as anyone asks."""

    def __init__(self, index: DatasetIndex, config: TrainDataConfig, split: PackedSplit) -> None:
        """Find the segments; of those that begin within a window, reads its documents' ends.

        Args:
            index: of the dataset.
            config: seed, mix, phases.
            split: the training split, with the numbers of sequences at each length of the run.

        Raises:
            ConfigError: the mix does not fit the dataset.
            DataError: a block is damaged.
        """
        self._split = split
        self._seed = config.seed
        self.groups = _groups(index, config, split)
        tokens = [group.weight * _tokens(index, split, group) for group in self.groups]
        self._windows = [
            max(1, round(config.data.window_blocks * part / sum(tokens))) for part in tokens
        ]
        self.segments: list[Segment] = []
        for place in config.batches.stretches:
            if not self.segments or self.segments[-1].seq_len != place.seq_len:
                self.segments.append(self._segment(place.cursor, place.seq_len))

    def segment(self, place: int) -> Segment:
        """Return the segment of a place of the run."""
        return next(found for found in reversed(self.segments) if found.first <= place)

    def epochs(self, cursor: int) -> dict[str, float]:
        """Return how many times each group was seen before a cursor."""
        segment = self.segment(max(0, cursor - 1))
        counts = segment.mix.counts(cursor - segment.first)
        return {
            group.name: order.epochs(count)
            for group, order, count in zip(self.groups, segment.orders, counts, strict=True)
        }

    def places(self, block: int, pieces: range, stop: int) -> Iterator[int]:
        """Yield the places before `stop` at which some tokens of a block are seen, in rising order.

        Args:
            block: position in the split's list.
            pieces: tokens of the block; a place counts if any of them is seen there.
            stop: end of the search.
        """
        of_block = [g for g, found in enumerate(self.groups) if block in found.blocks]
        if not of_block:
            return  # of a source that is left out
        [group] = of_block
        for number, segment in enumerate(self.segments):
            last = number + 1 == len(self.segments)
            end = min(stop, stop if last else self.segments[number + 1].first)
            packings = [(self._split.packing(block, segment.seq_len), False)]
            if block in segment.leftovers:
                packings.append((segment.leftovers[block], True))
            found = set()
            for packing, is_leftover in packings:
                for sequence in _sequences_with(packing, pieces):
                    for position in segment.orders[group].positions(
                        block, sequence, leftover=is_leftover
                    ):
                        place = segment.first + segment.mix.position(group, position)
                        if place >= end:
                            break
                        found.add(place)
            yield from sorted(found)

    def _segment(self, first: int, seq_len: int) -> Segment:
        number = len(self.segments)
        counts = self._split.counts[seq_len]
        first_ids = np.cumsum(counts) - counts + (2 * number << _ID_BITS)
        amounts = [group.weight * int(counts[group.blocks].sum()) for group in self.groups]
        starts = [Start()] * len(self.groups)
        leftovers: dict[int, Packing] = {}
        if number:
            starts, leftovers = self._starts(first, seq_len)
        orders = tuple(
            Order(
                Material(group.blocks, counts[group.blocks], first_ids[group.blocks]),
                seed=self._seed, window_blocks=window, source=which, segment=number, start=start,
            )
            for which, (group, window, start) in enumerate(
                zip(self.groups, self._windows, starts, strict=True)
            )
        )  # fmt: skip
        return Segment(first, seq_len, Mix(amounts), orders, leftovers)

    def _starts(self, first: int, seq_len: int) -> tuple[list[Start], dict[int, Packing]]:
        """Find where each group continues when the length changes, and the rest of its window."""
        before = self.segments[-1]
        next_id = (2 * len(self.segments) - 1) << _ID_BITS
        starts: list[Start] = []
        leftovers: dict[int, Packing] = {}
        counts = before.mix.counts(first - before.first)
        for order, count in zip(before.orders, counts, strict=True):
            start, rest = order.rest_of_window(count)
            packings = {
                int(block): self._repacked(before, rest, int(block), seq_len)
                for block in np.unique(rest.blocks)
            }
            if packings:
                sizes = np.array([packing.num_sequences for packing in packings.values()])
                ids = next_id + np.cumsum(sizes) - sizes
                next_id += int(sizes.sum())
                material = Material(np.array(list(packings)), sizes, ids)
                start = Start(start.epoch, start.window, material)
            starts.append(start)
            leftovers.update(packings)
        return starts, leftovers

    def _repacked(self, before: Segment, rest: Locations, block: int, seq_len: int) -> Packing:
        mine = rest.blocks == block
        if rest.leftover[mine].any():  # then all are: a window is of one kind
            packing = before.leftovers[block]
        else:
            packing = self._split.packing(block, before.seq_len)
        return repack(packing, rest.sequences[mine], seq_len)


def _groups(index: DatasetIndex, config: TrainDataConfig, split: PackedSplit) -> list[Group]:
    given = weights(index.sources, config.data.mix)
    of_block = index.block_source[split.rows]
    present = [k for k, weight in enumerate(given) if weight and (of_block == k).any()]
    if not present:
        raise ConfigError(
            "data.mix leaves only sources without training text; give others a weight"
        )
    if len({given[k] for k in present}) == 1:
        names = " + ".join(index.sources[k].name for k in present)
        if len(present) > _MOST_NAMES:
            names = f"{len(present)} sources"
        return [Group(names or "all", Fraction(1), np.flatnonzero(np.isin(of_block, present)))]
    return [Group(index.sources[k].name, given[k], np.flatnonzero(of_block == k)) for k in present]


def _tokens(index: DatasetIndex, split: PackedSplit, group: Group) -> int:
    return int(index.blocks.num_tokens[split.rows[group.blocks]].sum())


def _sequences_with(packing: Packing, tokens: range) -> list[int]:
    """Return the sequences of a block that hold any of some tokens."""
    pieces = np.flatnonzero(
        (packing.piece_start < tokens.stop) & (packing.piece_stop > tokens.start)
    )
    return sorted(set(np.searchsorted(packing.sequence_ends, pieces, side="right").tolist()))
