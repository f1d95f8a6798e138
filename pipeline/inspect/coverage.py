"""`postnorm coverage CONFIG`: what a planned run will see, before it is started.

The code that training uses walks through one pass of the mix, and counts how often each token is
seen. A pass is over when every source was seen as often as its weight says: a source of weight 1
once; a source of weight 2.5 twice, and half of it once more.

In a run with stages each dataset is walked once, from the first stage that has it, over the borders
to stages that go on in it: as if the last of these had no end.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.checkpoints.manifest import newest_of
from pipeline.config.data import BatchPlan
from pipeline.config.runs import PretrainConfig
from pipeline.config.stages import RunStage
from pipeline.data.counts import BlockCounts, packing_counts
from pipeline.data.dataset import PackedSplit
from pipeline.data.format import DatasetIndex
from pipeline.data.order import Ints
from pipeline.data.packing import Packing
from pipeline.data.run_order import RunOrder, Segment, TrainSteps
from pipeline.data.stages import Counts, open_indexes, stage_data
from pipeline.errors import DataError
from pipeline.objectives.inputs import train_inputs
from pipeline.runtime.summary import progress, table

Times = npt.NDArray[np.uint16]

_STRETCH = 1 << 20
"""Places walked through at once."""


@dataclass(frozen=True)
class SourceCoverage:
    """Coverage of a source, or of sources shuffled together, by one epoch and by the run."""

    name: str
    weight: float
    documents: int
    tokens: int
    pass_epochs: float
    """How often a pass sees the source."""
    least: int
    """How often the token seen least is seen in the pass's whole epochs."""
    most: int
    """How often the token seen most is seen in the pass's whole epochs."""
    most_in_rest: int
    """How often the token seen most is seen in the pass's last, begun epoch."""
    epochs_of_run: float
    """How often the planned run sees the source, in the stages that were walked."""


@dataclass(frozen=True)
class DataCoverage:
    """A pass of a dataset's mix."""

    dir: str
    stages: tuple[str, ...]
    """Titles of the stages that it was walked through; empty in a run without stages."""
    sources: tuple[SourceCoverage, ...]
    pass_sequences: int
    pass_steps: float

    @property
    def is_exact(self) -> bool:
        """Whether each epoch of each source has every token once."""
        return all(
            source.least == source.most == int(source.pass_epochs) and source.most_in_rest <= 1
            for source in self.sources
        )


@dataclass(frozen=True)
class StretchCoverage:
    """Steps of equal batches."""

    stage: str
    """Title of their stage; empty in a run without stages."""
    first_step: int
    num_steps: int
    global_batch: int
    seq_len: int
    fill: float
    """Share of slots that are not padding, over the training split."""
    tokens_per_step: float
    """Slots of a step that are not padding, on average."""
    tokens: float
    """Those of all its steps."""


@dataclass(frozen=True)
class StageCoverage:
    """What a stage sees of its data."""

    stage: str
    """Title."""
    dir: str
    epochs_before: dict[str, float]
    """How often each source was seen before the stage; 0 where its data begins anew."""
    epochs_after: dict[str, float]


@dataclass(frozen=True)
class Coverage:
    """Tokens and documents covered by one epoch and by the whole run."""

    datasets: tuple[DataCoverage, ...]
    """Each dataset once, in order of its first stage."""
    stretches: tuple[StretchCoverage, ...]
    stages: tuple[StageCoverage, ...]
    """Empty in a run without stages."""
    num_steps: int

    @property
    def is_exact(self) -> bool:
        """Whether each epoch of each source of all data has every token once."""
        return all(each.is_exact for each in self.datasets)

    def plain(self) -> dict[str, Any]:
        """Return it as plain values; those of the first dataset stand beside `datasets`, too."""
        first = asdict(self.datasets[0])
        names = ("sources", "pass_sequences", "pass_steps")
        return {name: first[name] for name in names} | asdict(self)


@dataclass(frozen=True)
class _Walk:
    """The order of a dataset through stages that follow one another in it."""

    split: PackedSplit
    orders: Sequence[RunOrder]
    stages: Sequence[RunStage]
    end: int
    """Cursor at which the last of the stages ends."""

    @property
    def order(self) -> RunOrder:
        """The order of its last stage, which has the names and weights of the sources."""
        return self.orders[-1]

    @property
    def first(self) -> int:
        """Cursor at which it begins."""
        return self.stages[0].cursor

    @property
    def segments(self) -> list[Segment]:
        """Its segments, each once."""
        after = [segment for order in self.orders[1:] for segment in order.segments[1:]]
        return [*self.orders[0].segments, *after]

    def epochs(self, place: int) -> dict[str, float]:
        """Return how often each group of sources was seen before a place of the run."""
        begun = [order for order in self.orders if order.segments[0].first < place]
        return _epochs(begun[-1] if begun else self.order, place)


def coverage(config: PretrainConfig) -> Coverage:
    """Walk through a pass of each dataset of a run, and lay out the run's steps.

    Raises:
        ConfigError: the config does not fit a dataset.
        DataError: a dataset is missing or damaged.
    """
    timeline, num_steps = config.timeline, config.train.num_steps
    newest = newest_of(config)
    known = [*newest.fingerprints, newest.fingerprint] if newest else []
    current = timeline.at(newest.cursor).number if newest else 0
    counts: dict[str, dict[int, BlockCounts]] = {}

    def opened(index: DatasetIndex, lengths: Sequence[int]) -> tuple[DatasetIndex, Counts]:
        found = {each: packing_counts(index, each, None, config.objective) for each in lengths}
        counts[index.location] = found
        return index, {length: each.sequences for length, each in found.items()}

    indexes = open_indexes(timeline, current, known)
    stages = stage_data(timeline, indexes, config.train_data_of, train_inputs, opened)
    first = stages[0]
    given = first.index, first.config, first.inputs, first.counts
    steps = TrainSteps(*given, stages=stages)
    there = [timeline.stages[stage.number] for stage in stages]
    ends = {stage.number: timeline.end(stage) for stage in there}
    run_end = config.batches.number(num_steps).cursor
    cursors = {number: run_end if end is None else end for number, end in ends.items()}
    once: dict[str, _Walk] = {}
    for walk in _walks(steps, there, cursors):
        once.setdefault(walk.stages[0].data.dir, walk)
    titled = timeline.has_stages
    return Coverage(
        datasets=tuple(_walked(steps.plan, walk, titled) for walk in once.values()),
        stretches=tuple(_stretches(config, steps, there, counts)),
        stages=tuple(
            StageCoverage(
                stage.title,
                stage.data.dir,
                _epochs(steps.of(stage.cursor).order, stage.cursor),
                _epochs(steps.of(stage.cursor).order, cursors[stage.number]),
            )
            for stage in there
            if titled
        ),
        num_steps=num_steps,
    )


def _epochs(order: RunOrder, cursor: int) -> dict[str, float]:
    if order.segments[0].first >= cursor:  # its data begins there
        return dict.fromkeys((group.name for group in order.groups), 0.0)
    return order.epochs(cursor)


def _walks(steps: TrainSteps, stages: Sequence[RunStage], ends: Mapping[int, int]) -> list[_Walk]:
    """Join the stages that go on in the order of the one before."""
    chains: list[list[RunStage]] = []
    for stage in stages:
        if chains and steps.of(stage.cursor).order.segments[0].first < stage.cursor:
            chains[-1].append(stage)
        else:
            chains.append([stage])
    return [
        _Walk(
            steps.of(chain[0].cursor).split,
            [steps.of(stage.cursor).order for stage in chain],
            chain,
            ends[chain[-1].number],
        )
        for chain in chains
    ]


def _walked(plan: BatchPlan, walk: _Walk, titled: bool) -> DataCoverage:
    stop = _pass_end(walk)
    # Where another stage follows, the walk goes on with its own batches.
    is_last = plan.stretches[-1].stage == walk.stages[-1].number
    last = plan.holding((stop if is_last else min(stop, walk.end)) - 1)
    steps = last.number + (stop - last.cursor) / last.size
    return DataCoverage(
        dir=walk.stages[0].data.dir,
        stages=tuple(stage.title for stage in walk.stages if titled and stage.cursor < stop),
        sources=tuple(_sources(walk, stop)),
        pass_sequences=stop - walk.first,
        pass_steps=steps - walk.stages[0].first_batch,
    )


def _pass_end(walk: _Walk) -> int:
    """Find the place before which every group is seen at least as often as its weight says."""

    def is_before(place: int) -> bool:
        epochs = walk.epochs(place)
        return any(epochs[group.name] < group.weight for group in walk.order.groups)

    low, high = 0, 1
    while is_before(walk.first + high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_before(walk.first + middle) else (low, middle)
    return walk.first + high


def _sources(walk: _Walk, stop: int) -> Iterator[SourceCoverage]:
    """Walk through the places before `stop`."""
    in_pass, in_run = walk.epochs(stop), walk.epochs(walk.end)
    whole_epochs = np.zeros(len(walk.split.rows), np.int64)
    for group in walk.order.groups:
        whole_epochs[group.blocks] = int(in_pass[group.name])
    whole, rest = _times_seen(walk, stop, whole_epochs)
    blocks = walk.split.reader.index.blocks
    for group in walk.order.groups:
        rows = walk.split.rows[group.blocks]
        yield SourceCoverage(
            name=group.name,
            weight=float(group.weight),
            documents=int(blocks.num_documents[rows].sum()),
            tokens=int(blocks.num_tokens[rows].sum()),
            pass_epochs=in_pass[group.name],
            least=int(whole[group.blocks, 0].min()),
            most=int(whole[group.blocks, 1].max()),
            most_in_rest=int(rest[group.blocks, 1].max()),
            epochs_of_run=in_run[group.name],
        )


def _times_seen(walk: _Walk, stop: int, whole_epochs: Ints) -> tuple[Ints, Ints]:
    """Count how often the tokens of blocks are seen before a place.

    `whole_epochs` (b,) are the epochs of each block that are over then.

    Returns:
        (b, 2) the least and the most that any token of a block is seen in these epochs, and (b, 2)
        the same of the epoch that has begun.
    """
    of_whole, of_rest = _TokenTimes(walk.split), _TokenTimes(walk.split)
    segments = walk.segments
    ends = [*(segment.first for segment in segments[1:]), stop]
    with progress("coverage", stop - walk.first, "sequence") as advance:
        for segment, end in zip(segments, ends, strict=True):
            counts = walk.split.counts[segment.seq_len]
            firsts = np.cumsum(counts) - counts
            seen = np.zeros((2, int(counts.sum())), np.uint16)
            left = {
                block: np.zeros((2, packing.num_sequences), np.uint16)
                for block, packing in segment.leftovers.items()
            }
            for first in range(segment.first, min(end, stop), _STRETCH):
                places = segment.locate(first, min(_STRETCH, end - first, stop - first))
                is_rest = (places.epochs >= whole_epochs[places.blocks]).astype(np.int64)
                regular = ~places.leftover
                numbers = firsts[places.blocks[regular]] + places.sequences[regular]
                np.add.at(seen, (is_rest[regular], numbers), 1)
                for block in np.unique(places.blocks[places.leftover]).tolist():
                    mine = places.leftover & (places.blocks == block)
                    np.add.at(left[block], (is_rest[mine], places.sequences[mine]), 1)
                advance(len(places.blocks))
            for kind, times in enumerate((of_whole, of_rest)):
                times.add(segment, seen[kind], {block: both[kind] for block, both in left.items()})
    return of_whole.least_and_most(), of_rest.least_and_most()


class _TokenTimes:
    """How often the tokens of blocks are seen, by token only where a block's tokens differ."""

    def __init__(self, split: PackedSplit) -> None:
        self._split = split
        self._whole = np.zeros(len(split.rows), np.int64)
        self._in_part: dict[int, Ints] = {}

    def add(self, segment: Segment, times: Times, left: dict[int, Times]) -> None:
        """Add how often the sequences of all blocks, and those of leftovers, are seen."""
        ends = np.cumsum(self._split.counts[segment.seq_len])
        for block, of_block in enumerate(np.split(times, ends[:-1])):
            if (of_block == of_block[0]).all():
                self._whole[block] += of_block[0]
            else:
                self._add_tokens(block, self._split.packing(block, segment.seq_len), of_block)
        for block, of_block in left.items():
            self._add_tokens(block, segment.leftovers[block], of_block)

    def _add_tokens(self, block: int, packing: Packing, times: Times) -> None:
        blocks = self._split.reader.index.blocks
        num_tokens = int(blocks.num_tokens[self._split.rows[block]])
        rises = np.zeros(num_tokens + 1, np.int64)
        of_piece = np.repeat(times.astype(np.int64), np.diff(packing.sequence_ends, prepend=0))
        np.add.at(rises, packing.piece_start, of_piece)
        np.add.at(rises, packing.piece_stop, -of_piece)
        before = self._in_part.get(block, np.zeros(num_tokens, np.int64))
        self._in_part[block] = before + np.cumsum(rises)[:-1]

    def least_and_most(self) -> Ints:
        """Return (b, 2): the least and the most that any token of each block is seen."""
        found = np.stack((self._whole, self._whole), axis=1)
        for block, times in self._in_part.items():
            found[block] += times.min(), times.max()
        return found


def _stretches(
    config: PretrainConfig,
    steps: TrainSteps,
    stages: Sequence[RunStage],
    counts: Mapping[str, Mapping[int, BlockCounts]],
) -> Iterator[StretchCoverage]:
    there, num_steps = {stage.number: stage for stage in stages}, config.train.num_steps
    firsts = [place for place in steps.plan.stretches if place.number < num_steps]
    ends = [*(after.number for _, after in pairwise(firsts)), num_steps]
    for place, end in zip(firsts, ends, strict=True):
        if place.stage not in there:
            continue  # it is over, and its data is no longer there
        split = steps.of(place.cursor).split
        rows, index = split.rows, split.reader.index
        tokens = int(index.blocks.num_tokens[rows].sum())
        each = counts[index.location][place.seq_len]
        slots = int(each.sequences[rows].sum()) * place.seq_len
        fill = (tokens + split.specials * int(each.pieces[rows].sum())) / slots
        of_step = fill * place.size * place.seq_len
        yield StretchCoverage(
            stage=there[place.stage].title if config.timeline.has_stages else "",
            first_step=place.number + 1,
            num_steps=end - place.number,
            global_batch=place.size,
            seq_len=place.seq_len,
            fill=fill,
            tokens_per_step=of_step,
            tokens=(end - place.number) * of_step,
        )


def coverage_text(found: Coverage) -> Iterator[str]:
    """Write the report as tables (DataError: tokens are lost or repeated, after the tables)."""
    if found.stages:
        yield from (*_stretches_table(found.stretches), "", *_stages_table(found.stages))
        for each in found.datasets:
            yield from ("", f"{each.dir}, walked through {', '.join(each.stages)}:")
            yield from (*_sources_table(each.sources), _pass_text(each))
        yield from ("", f"the planned run: {found.num_steps:,} steps")
    else:
        [only] = found.datasets
        yield from (*_sources_table(only.sources), "", *_stretches_table(found.stretches), "")
        yield f"{_pass_text(only)}; the planned run: {found.num_steps:,} steps"
    for each in found.datasets:
        if not each.is_exact:
            raise DataError(
                f"{each.dir}: an epoch does not have every token once: a bug, or the cached "
                "numbers of sequences are of other data; delete packing-*.npz in the dataset's "
                "folder and try again"
            )
    where = "in what was walked, " if found.stages else ""
    yield f"{where}every token of every document is seen once in each epoch of its source"


def _pass_text(each: DataCoverage) -> str:
    return f"a pass: {each.pass_sequences:,} sequences, {each.pass_steps:,.1f} steps"


def _sources_table(sources: Sequence[SourceCoverage]) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [(
        "source", "weight", "documents", "tokens", "epochs of a pass", "of the run",
        "each token in an epoch",
    )]  # fmt: skip
    for source in sources:
        whole = int(source.pass_epochs)
        each = (source.least / whole, source.most / whole) if whole else (0, source.most_in_rest)
        shown = f"{each[0]:g}{f' to {each[1]:g}' if each[0] != each[1] else ''}"
        epochs = f"{source.pass_epochs:.3f}", f"{source.epochs_of_run:.3f}"
        sizes = f"{source.weight:g}", f"{source.documents:,}", f"{source.tokens:,}"
        rows.append((source.name, *sizes, *epochs, shown))
    yield from table(rows, right=range(1, 6))


def _stretches_table(stretches: Sequence[StretchCoverage]) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [
        ("from step", "steps", "batch", "seq_len", "fill", "tokens a step", "tokens")
    ]
    for part in stretches:
        numbers = part.first_step, part.num_steps, part.global_batch, part.seq_len
        amounts = f"{part.fill:.2%}", f"{part.tokens_per_step:,.0f}", f"{part.tokens:,.0f}"
        rows.append((*(f"{number:,}" for number in numbers), *amounts))
    if not stretches[0].stage:
        yield from table(rows, right=range(7))
        return
    titles = ["stage", *(part.stage for part in stretches)]
    with_stages = [(title, *row) for title, row in zip(titles, rows, strict=True)]
    yield from table(with_stages, right=range(1, 8))


def _stages_table(stages: Sequence[StageCoverage]) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("stage", "data", "source", "epochs before", "after")]
    for stage in stages:
        for name, after in stage.epochs_after.items():
            before = stage.epochs_before[name]
            rows.append((stage.stage, stage.dir, name, f"{before:.3f}", f"{after:.3f}"))
    yield from table(rows, right=(3, 4))
