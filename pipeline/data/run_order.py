"""The sequence at each place of a run, and the batches that each rank makes of them in each step.

A run consists of segments with one length of sequences each. In a segment each source has its own
order, and a mix decides whose turn it is. If all weights are equal, all sources are shuffled
together as one.

A source of weight w is seen w times while a source of weight 1 is seen once. Of the first n
sequences each source has its share w N / sum(w N), where N is its number of sequences: to within
two sequences at any point of the run, with up to 20 sources. So a source of weight 2 begins again
when one of weight 1 is half seen, and no document is repeated before its turn.

A step's batch is the run's places from the cursor on, as many as the batch has. For more than one
rank they are sorted by block, and rank r takes the r-th contiguous share, cut into micro-batches:
so it reads few blocks. Which rank computes a sequence is not part of a run's identity; a rank alone
keeps the order of the places. There is no state; any step can be asked for at any time. Nothing
here needs torch: so worker processes are small.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice, takewhile
from typing import NamedTuple

import numpy as np

from pipeline.config.data import BatchSpec, MixConfig, TrainDataConfig
from pipeline.config.schedule import mask_ratio
from pipeline.data.counts import sequences_at
from pipeline.data.dataset import Batch, Inputs, PackedSplit
from pipeline.data.format import DatasetIndex, Source
from pipeline.data.order import (
    NO_LOCATIONS,
    Ints,
    Locations,
    Order,
    OrderStart,
    SequencePool,
    joined,
)
from pipeline.data.packing import Packing, repack
from pipeline.errors import ConfigError, DataError

_SHARE_BITS = 46
_STRETCH = 1 << 16
"""Sequences placed at once: products of a share and this fit into 63 bits."""


class SourceStretch(NamedTuple):
    """The contribution of a source to a stretch of the run."""

    places: Ints
    """(k,) rising places of its sequences in the stretch."""
    first: int
    """Position of the first of these sequences in the source's own order; the others follow."""


class Mix:
    """Interleaving of sources: a pure function of position."""

    def __init__(self, weighted: Sequence[Fraction]) -> None:
        """Take each source's weight times its number of sequences; of 0 it never comes."""
        total = sum(weighted)
        # One at least where there is a weight: rounded to 0, the source would never come.
        shares = [
            max(1, int(amount / total * (1 << _SHARE_BITS))) if amount else 0 for amount in weighted
        ]
        # Each source in turn is divided from all after it, rounded to whole sequences. The largest
        # comes first, because that keeps the sum of rounding errors smallest.
        self._ranked = sorted(range(len(shares)), key=lambda source: (-shares[source], source))
        self._shares = shares
        self._left = [  # 1 where nothing is left to divide
            sum(shares[source] for source in self._ranked[k:]) or 1 for k in range(len(shares))
        ]

    def has(self, source: int) -> bool:
        """Return whether a source is not left out."""
        return bool(self._shares[source])

    def counts(self, position: int) -> list[int]:
        """Count the sequences of each source before a position."""
        counts = [0] * len(self._shares)
        for source, left in zip(self._ranked, self._left, strict=True):
            # position * share / left, to the nearest whole number.
            counts[source] = (2 * position * self._shares[source] + left) // (2 * left)
            position -= counts[source]
        return counts

    def parts(self, first: int, count: int) -> list[SourceStretch]:
        """Divide positions first .. first + count - 1 among the sources, in their order."""
        if len(self._shares) == 1:
            return [SourceStretch(np.arange(count), first)]
        before = self.counts(first)
        places: list[list[Ints]] = [[np.empty(0, np.int64)] for _ in self._shares]
        for at in range(0, count, _STRETCH):
            stretch = self._places(first + at, min(_STRETCH, count - at))
            for source, in_stretch in enumerate(stretch):
                places[source].append(in_stretch + at)
        return [
            SourceStretch(np.concatenate(of_source), number)
            for of_source, number in zip(places, before, strict=True)
        ]

    def _places(self, first: int, count: int) -> list[Ints]:
        """Return the places of each source's sequences in a short stretch."""
        of_sources = [np.empty(0, np.int64)] * len(self._shares)
        places = np.arange(count)
        for source, left in zip(self._ranked, self._left, strict=True):
            # `counts` at first .. first + len(places), with its large part in Python's integers.
            share = self._shares[source]
            before, rest = divmod(2 * first * share + left, 2 * left)
            counts = (rest // 2 + np.arange(len(places) + 1) * share) // left
            mine = np.diff(counts) == 1
            of_sources[source] = places[mine]
            places, first = places[~mine], first - before
        return of_sources

    def position(self, source: int, number: int) -> int:
        """Return the position of a source's sequence by its number, 0 for the first."""
        # A source is at most two sequences behind its share, so its turn comes before `high`.
        low, high = number, (number + 4) * self._left[0] // self._shares[source]
        while low < high:
            middle = (low + high) // 2
            if self.counts(middle + 1)[source] > number:
                high = middle
            else:
                low = middle + 1
        return low


def weights(sources: Sequence[Source], mix: Sequence[MixConfig]) -> list[Fraction]:
    """Return the weight of each source of a dataset, as the decimal number that was written.

    Raises:
        ConfigError: the mix names an unknown source, or one twice, or leaves none.
    """
    names = [source.name for source in sources]
    # By `repr`: 0.1 and 0.3 are then 1 to 3, which their binary values are not.
    weight_of = {source.name: Fraction(repr(source.weight)) for source in sources}
    for which, entry in enumerate(mix):
        if entry.source not in names:
            raise ConfigError(
                f"data.mix.{which}.source = {entry.source!r}: the dataset has no such source; "
                f"expected one of {', '.join(map(repr, names))}"
            )
        if entry.source in [other.source for other in mix[:which]]:
            raise ConfigError(
                f"data.mix.{which}.source = {entry.source!r} is given twice; remove one of the two"
            )
        weight_of[entry.source] = Fraction(repr(entry.weight))
    if not any(weight_of.values()):
        raise ConfigError("data.mix leaves no source: every weight is 0; raise one")
    return [weight_of[name] for name in names]


logger = logging.getLogger(__name__)
_ID_BITS = 48
"""Bits of a sample id that count sequences; the bits above distinguish segments."""
_MOST_NAMES = 3
# One search for sequences, one lock and one layout a block. With windows read in place (a rank of
# 1,024 needs 64 of 131,072 sequences): 4.4 (busy machine) to 10.4 M tokens a CPU-second at 128
# slots.
_SLOTS_TOGETHER, _MOST_TOGETHER = 1 << 16, 16
"""Of a rank: slots and steps that one call makes."""


class Group(NamedTuple):
    """Blocks that are shuffled together: those of one source, or of all sources."""

    name: str
    """Name of the source, or of all sources in the group."""
    weight: Fraction
    blocks: Ints
    """(b,) positions in the split's list."""


@dataclass(frozen=True)
class Segment:
    """A part of the run in which sequences have one length."""

    first: int
    """First place of the segment in the run."""
    seq_len: int
    mix: Mix
    orders: tuple[Order, ...]
    leftovers: dict[int, Packing]
    """Block -> rest of the windows that were not finished when the segment began."""

    def locate(self, first: int, count: int) -> Locations:
        """Find the sequences at `count` places of the run from `first` on."""
        parts = self.mix.parts(first - self.first, count)
        if len(parts) == 1:
            return self.orders[0].locate(parts[0].first, count)
        merged = Locations._make(np.empty(count, array.dtype) for array in NO_LOCATIONS)
        for order, part in zip(self.orders, parts, strict=True):
            located = order.locate(part.first, len(part.places))
            for into, values in zip(merged, located, strict=True):
                into[part.places] = values
        return merged

    def share(self, first: int, count: int, rows: range, steps: int) -> tuple[Locations, Ints]:
        """Return a part of the sequences of steps of `count` each, sorted by block in each step.

        `rows` are those of a step's sorted sequences that are wanted.

        Returns:
            Their locations, step after step, and (steps * len(rows),) places in their steps.
        """
        locations, places = [NO_LOCATIONS], [NO_LOCATIONS.blocks]
        parts = self.mix.parts(first - self.first, count * steps)
        opened = [
            order.windows(part.first, len(part.places))
            for order, part in zip(self.orders, parts, strict=True)
        ]
        for step in range(steps):
            row = 0
            for order, part, windows in zip(self.orders, parts, opened, strict=True):
                ends = np.searchsorted(part.places, (step * count, (step + 1) * count))
                begin, stop = ends.tolist()
                wanted = range(rows.start - row, rows.stop - row)
                for window, which in order.share(windows, part.first + begin, stop - begin, wanted):
                    locations.append(order.located(window, window.order[which]))
                    in_steps = part.places[which + (window.first - part.first)]
                    places.append(in_steps - step * count)
                row += stop - begin
        return joined(locations), np.concatenate(places)


class RunOrder:
    """All places of a stage, which has no end here; a run without stages is one."""

    def __init__(
        self,
        index: DatasetIndex,
        config: TrainDataConfig,
        split: PackedSplit,
        *,
        stage: int = 0,
        after: "RunOrder | None" = None,
        same_mix: bool = True,
        segments_before: int = 0,
    ) -> None:
        """Find the segments; where one begins within a window, read its documents' ends.

        Args:
            index: of the stage's data.
            config: with the stage's data.
            split: of the index.
            stage: place of the stage in the run.
            after: order of the stage before, if that has the same data: where its sources are
                grouped as before, or some of them left out, they go on where they stood.
            same_mix: whether that has the same mix.
            segments_before: number of segments of earlier stages.

        Raises:
            ConfigError: the mix does not fit the dataset.
            DataError: a block is damaged.
        """
        self._split = split
        self._seed = config.seed
        self.groups = _groups(index, config, split)
        of_block = index.blocks.num_tokens[split.rows]
        tokens = [group.weight * int(of_block[group.blocks].sum()) for group in self.groups]
        self._windows = [
            max(1, round(config.data.window_blocks * part / sum(tokens))) for part in tokens
        ]
        self.segments: list[Segment] = []
        groups = None if after is None else _as_before(index, config, split, after.groups)
        if after is not None and groups is None:
            logger.warning(
                "stage %d groups its sources otherwise than the one before (%s, then %s): all of "
                "them begin anew at their first sequences",
                stage,
                ", ".join(group.name for group in after.groups),
                ", ".join(group.name for group in self.groups),
            )
        elif after is not None and groups is not None:
            self.groups = groups
            # A window's number means the same blocks only if windows are as large as before.
            self._windows = after._windows
            self.segments.append(after.segments[-1])
            segments_before -= 1
        self._before = segments_before
        for place in config.batches.stretches:
            if place.stage != stage:
                continue
            is_new = not self.segments or self.segments[-1].seq_len != place.seq_len
            if is_new or (place == config.batches.firsts_of_stages[stage] and not same_mix):
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

        A place counts if any of the tokens `pieces` is seen there.
        """
        of_block = [g for g, found in enumerate(self.groups) if block in found.blocks]
        if not of_block:
            return  # the block's source is left out
        [group] = of_block
        for number, segment in enumerate(self.segments):
            if not segment.mix.has(group):
                continue
            last = number + 1 == len(self.segments)
            end = min(stop, stop if last else self.segments[number + 1].first)
            packings = [(self._split.packing(block, segment.seq_len), False)]
            if block in segment.leftovers:
                packings.append((segment.leftovers[block], True))
            in_segment = set()
            for packing, is_leftover in packings:
                for sequence in _sequences_with(packing, pieces):
                    for position in segment.orders[group].positions(
                        block, sequence, leftover=is_leftover
                    ):
                        place = segment.first + segment.mix.position(group, position)
                        if place >= end:
                            break
                        in_segment.add(place)
            yield from sorted(in_segment)

    def _segment(self, first: int, seq_len: int) -> Segment:
        number = self._before + len(self.segments)
        counts = self._split.counts[seq_len]
        # Even for a segment's own sequences, odd for its leftovers: an id never means two sequences
        # of an epoch, so no two get the same masks.
        first_ids = np.cumsum(counts) - counts + (2 * number << _ID_BITS)
        amounts = [group.weight * int(counts[group.blocks].sum()) for group in self.groups]
        starts = [OrderStart()] * len(self.groups)
        leftovers: dict[int, Packing] = {}
        if self.segments:
            starts, leftovers = self._starts(first, seq_len)
        orders = tuple(
            Order(
                SequencePool(group.blocks, counts[group.blocks], first_ids[group.blocks]),
                seed=self._seed,
                window_blocks=window,
                source=which,
                segment=number,
                start=start,
                once=self._split.once,
            )
            for which, (group, window, start) in enumerate(
                zip(self.groups, self._windows, starts, strict=True)
            )
        )
        return Segment(first, seq_len, Mix(amounts), orders, leftovers)

    def _starts(self, first: int, seq_len: int) -> tuple[list[OrderStart], dict[int, Packing]]:
        """Find where each group continues when the length changes, and the rest of its window."""
        before = self.segments[-1]
        next_id = (2 * (self._before + len(self.segments)) - 1) << _ID_BITS
        starts: list[OrderStart] = []
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
                material = SequencePool(np.array(list(packings)), sizes, ids)
                start = OrderStart(start.epoch, start.window, material)
            starts.append(start)
            leftovers.update(packings)
        return starts, leftovers

    def _repacked(self, before: Segment, rest: Locations, block: int, seq_len: int) -> Packing:
        mine = rest.blocks == block
        if rest.leftover[mine].any():  # then all are, as a window has only one kind
            packing = before.leftovers[block]
        else:
            packing = self._split.packing(block, before.seq_len)
        return repack(packing, rest.sequences[mine], seq_len, self._split.specials)


def _as_before(
    index: DatasetIndex, config: TrainDataConfig, split: PackedSplit, before: list[Group]
) -> list[Group] | None:
    """Return the groups of the stage before with this one's weights, 0 where it leaves one out.

    None where sources that were shuffled together have different weights now, or there are more.
    """
    given, of_block = weights(index.sources, config.data.mix), index.block_source[split.rows]
    left, found = {k for k in np.unique(of_block).tolist() if given[k]}, []
    for group in before:
        sources = np.unique(of_block[group.blocks]).tolist()
        weight, *others = {given[k] for k in sources}
        if others:
            return None
        found.append(group._replace(weight=weight))
        left -= {*sources}
    # As of a dataset that is read without a mix: one weight is that of all.
    one = len({group.weight for group in found if group.weight}) == 1
    found = [of._replace(weight=Fraction(bool(of.weight))) if one else of for of in found]
    return None if left else found


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


def _sequences_with(packing: Packing, tokens: range) -> list[int]:
    """Return the sequences of a block that hold any of some tokens."""
    pieces = np.flatnonzero(
        (packing.piece_start < tokens.stop) & (packing.piece_stop > tokens.start)
    )
    return sorted(set(np.searchsorted(packing.sequence_ends, pieces, side="right").tolist()))


@dataclass(frozen=True)
class DataRank:
    """Which part of every global batch a rank computes."""

    rank: int
    world_size: int


@dataclass(frozen=True)
class StageData:
    """What the batches of a stage are made of; picklable, for worker processes."""

    index: DatasetIndex
    config: TrainDataConfig
    """With the stage's data."""
    inputs: Inputs
    counts: Mapping[int, Ints]
    """(b,) sequences of each block by length, for all lengths of stages with this data."""
    number: int = 0
    """Place of the stage in the run."""
    continues: bool = False
    """Whether its data is that of the stage before."""
    same_mix: bool = True
    """Whether it also has that stage's mix."""
    segments_before: int = 0
    """Segments of the stages before it."""


class _StageSteps(NamedTuple):
    """The open data of a stage."""

    of: StageData
    first: BatchSpec
    split: PackedSplit
    order: RunOrder


class TrainSteps:
    """Training batches, of all stages."""

    def __init__(
        self,
        index: DatasetIndex,
        config: TrainDataConfig,
        inputs: Inputs,
        counts: Mapping[int, Ints] | None = None,
        *,
        stages: Sequence[StageData] = (),
        sharing: bool = False,
    ) -> None:
        """Open the training split; see `PackedSplit` and `RunOrder` for what can fail.

        With `sharing`, what is read and drawn is shared with other processes of the node. `stages`
        are those of a run that has some, the first of which has the other arguments.
        """
        if counts is None:
            counts = sequences_at(index, config.batches.seq_lens, None, config.objective)
        self.plan = config.batches
        self._stages: list[_StageSteps] = []
        every = stages or (StageData(index, config, inputs, counts),)
        # What decides the batches of all stages: other runs of the node may have the same first.
        identity = repr((config.seed, [of.config.data for of in every], self.plan.stretches))
        for stage in every:
            self._open(stage, identity if sharing else None)
        self.split, self.order = self._stages[0].split, self._stages[0].order

    def _open(self, stage: StageData, shared_as: str | None) -> None:
        index, config = stage.index, stage.config
        before = self._stages[-1] if self._stages else None
        if before is not None and stage.continues:
            split = before.split
        else:
            split = PackedSplit(index, "train", config.data, stage.counts, stage.inputs.pairs)
            if shared_as is not None:
                split.share(shared_as)
        order = RunOrder(
            index,
            config,
            split,
            stage=stage.number,
            after=before.order if before is not None and stage.continues else None,
            same_mix=stage.same_mix,
            segments_before=stage.segments_before,
        )
        first = self.plan.firsts_of_stages[stage.number]
        self._stages.append(_StageSteps(stage, first, split, order))

    def of(self, cursor: int) -> _StageSteps:
        """Return the stage of a place of the run (DataError: its data is not there)."""
        number = self.plan.holding(cursor).stage
        for one in self._stages:
            if one.of.number == number:
                return one
        raise DataError(
            f"sequence {cursor} of the run is of stage {number}, whose data is not there; restore "
            "it to look at that stage"
        )

    @property
    def splits(self) -> list[PackedSplit]:
        """The training splits of all stages' data, each once."""
        return list({id(one.split): one.split for one in self._stages}.values())

    @property
    def descriptions(self) -> list[str]:
        """The size of each stage's data in words."""
        return [
            f"{one.split.counts[seq_len].sum():,} sequences of {seq_len} an epoch"
            for one in self._stages
            for seq_len in [one.order.segments[-1].seq_len]
        ]

    def places(self, split: PackedSplit, block: int, pieces: range, stop: int) -> Iterator[int]:
        """Yield the places of the run before `stop` at which tokens of a block of a split are seen.

        A place counts if any of the tokens `pieces` is seen there.
        """
        for number, stage in enumerate(self._stages):
            after = self._stages[number + 1 : number + 2]
            end = min(stop, after[0].first.cursor) if after else stop
            if stage.split is split:
                for place in stage.order.places(block, pieces, end):
                    if place >= stage.first.cursor:
                        yield place

    def segment(self, cursor: int) -> Segment:
        """Return the segment of a place of the run."""
        return self.of(cursor).order.segment(cursor)

    def epochs(self, cursor: int) -> dict[str, float]:
        """Return how often each group of sources was seen before a cursor, in its stage's data."""
        before, there = max(0, cursor - 1), {one.of.number for one in self._stages}
        if self.plan.holding(before).stage not in there:
            before = cursor  # that stage's data is gone
        if self.plan.holding(before).stage not in there:
            return {}
        order = self.of(before).order
        return order.epochs(cursor) if order.segments[0].first < cursor else {}

    def located(self, cursor: int, share: DataRank, steps: int = 1) -> tuple[Locations, Ints]:
        """Find a rank's sequences of equal steps, the first of which starts at a cursor.

        Returns:
            Their locations in the order of its micro-batches, and (B,) their places in their steps.
        """
        size, segment = self.plan.at(cursor).size, self.segment(cursor)
        if share.world_size == 1:
            return segment.locate(cursor, size * steps), np.tile(np.arange(size), steps)
        each = size // share.world_size
        rows = range(share.rank * each, (share.rank + 1) * each)
        return segment.share(cursor, size, rows, steps)

    def together(self, cursor: int, share: DataRank) -> int:
        """Return how many steps are best made by one call: it costs more than a short step."""
        places = self.plan.batches_from(cursor)
        first = next(places)
        slots = first.size // share.world_size * first.seq_len
        more = islice(places, max(0, min(_MOST_TOGETHER, _SLOTS_TOGETHER // slots) - 1))
        return 1 + sum(1 for _ in takewhile(lambda one: self._is_alike(one, first), more))

    def mask_ratio(self, place: BatchSpec) -> float:
        """Return the share of a batch's tokens to predict."""
        stage = self.of(place.cursor)
        return mask_ratio(place.number - stage.first.number, stage.of.config.data)

    def _is_alike(self, one: BatchSpec, other: BatchSpec) -> bool:
        # All but number and cursor, which differ from step to step and matter by the mask ratio
        # alone.
        return one[2:] == other[2:] and self.mask_ratio(one) == self.mask_ratio(other)

    def micro_batches(
        self, cursor: int, share: DataRank, only: int | None = None, steps: int = 1
    ) -> list[Batch]:
        """Return a rank's micro-batches of the step that starts at a cursor, or only one of them.

        `only` is its number, from 0. With `steps`, at most `together`, return those of several.
        """
        place, stage = self.plan.at(cursor), self.of(cursor)
        segment = stage.order.segment(cursor)
        locations, places = self.located(cursor, share, steps)
        if only is not None:
            one = slice(only * place.micro_batch, (only + 1) * place.micro_batch)
            locations, places = locations.rows(one.start, one.stop), places[one]
        slots = stage.split.slots(locations, segment.seq_len, segment.leftovers)
        # The mask ratio's schedule begins anew with the stage.
        number = place.number - stage.first.number
        return stage.of.inputs(
            slots, locations, number, micro_batch=place.micro_batch, places=places
        )
