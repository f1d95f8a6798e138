"""`postnorm coverage CONFIG`: what a planned run will see, before it is started.

The code that training uses walks through one pass of the mix, and counts how often each token is
seen. A pass is over when every source was seen as often as its weight says: a source of weight 1
once; a source of weight 2.5 twice, and half of it once more.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.config.data import TrainDataConfig
from pipeline.data.counts import BlockCounts, packing_counts
from pipeline.data.format import DatasetIndex
from pipeline.data.objects import open_index
from pipeline.data.order import Ints
from pipeline.data.packing import Packing
from pipeline.data.run_order import Segment, TrainSteps
from pipeline.errors import DataError
from pipeline.objectives.inputs import train_steps
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
    """How often the planned run sees the source."""


@dataclass(frozen=True)
class StretchCoverage:
    """Steps of equal batches."""

    first_step: int
    num_steps: int
    global_batch: int
    seq_len: int
    fill: float
    """Share of slots that are not padding, over the training split."""
    tokens_per_step: float
    """Slots of a step that are not padding, on average."""


@dataclass(frozen=True)
class Coverage:
    """Tokens and documents covered by one epoch and by the whole run."""

    sources: tuple[SourceCoverage, ...]
    stretches: tuple[StretchCoverage, ...]
    pass_sequences: int
    pass_steps: float
    num_steps: int

    @property
    def is_exact(self) -> bool:
        """Whether each epoch of each source has every token once."""
        return all(
            source.least == source.most == int(source.pass_epochs) and source.most_in_rest <= 1
            for source in self.sources
        )


def coverage(config: TrainDataConfig, num_steps: int) -> Coverage:
    """Walk through a pass of a run's data and lay out its steps.

    Raises:
        ConfigError: the config does not fit the dataset.
        DataError: the dataset is damaged.
    """
    index = open_index(config.data)
    counts = {
        length: packing_counts(index, length, None, config.objective)
        for length in config.batches.seq_lens
    }
    steps = train_steps(index, config, {length: each.sequences for length, each in counts.items()})
    stop = _pass_end(steps)
    last = steps.plan.holding(stop)
    return Coverage(
        sources=tuple(_sources(steps, stop, config.batches.number(num_steps).cursor)),
        stretches=tuple(_stretches(num_steps, index, steps, counts)),
        pass_sequences=stop,
        pass_steps=last.number + (stop - last.cursor) / last.size,
        num_steps=num_steps,
    )


def _pass_end(steps: TrainSteps) -> int:
    """Find the place before which every group is seen at least as often as its weight says."""

    def is_before(place: int) -> bool:
        epochs = steps.order.epochs(place)
        return any(epochs[group.name] < group.weight for group in steps.order.groups)

    low, high = 0, 1
    while is_before(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_before(middle) else (low, middle)
    return high


def _sources(steps: TrainSteps, stop: int, run_stop: int) -> Iterator[SourceCoverage]:
    """Walk through the places before `stop`."""
    in_pass, in_run = steps.order.epochs(stop), steps.order.epochs(run_stop)
    whole_epochs = np.zeros(len(steps.split.rows), np.int64)
    for group in steps.order.groups:
        whole_epochs[group.blocks] = int(in_pass[group.name])
    whole, rest = _times_seen(steps, stop, whole_epochs)
    blocks = steps.split.reader.index.blocks
    for group in steps.order.groups:
        rows = steps.split.rows[group.blocks]
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


def _times_seen(steps: TrainSteps, stop: int, whole_epochs: Ints) -> tuple[Ints, Ints]:
    """Count how often the tokens of blocks are seen before a place.

    `whole_epochs` (b,) are the epochs of each block that are over then.

    Returns:
        (b, 2) the least and the most that any token of a block is seen in these epochs, and (b, 2)
        the same of the epoch that has begun.
    """
    of_whole, of_rest = _TokenTimes(steps), _TokenTimes(steps)
    segments = steps.order.segments
    ends = [*(segment.first for segment in segments[1:]), stop]
    with progress("coverage", stop, "sequence") as advance:
        for segment, end in zip(segments, ends, strict=True):
            counts = steps.split.counts[segment.seq_len]
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

    def __init__(self, steps: TrainSteps) -> None:
        self._split = steps.split
        self._whole = np.zeros(len(steps.split.rows), np.int64)
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
    num_steps: int, index: DatasetIndex, steps: TrainSteps, counts: dict[int, BlockCounts]
) -> Iterator[StretchCoverage]:
    firsts = [place for place in steps.plan.stretches if place.number < num_steps]
    ends = [*(place.number for place in firsts[1:]), num_steps]
    rows = steps.split.rows
    tokens = int(index.blocks.num_tokens[rows].sum())
    for place, end in zip(firsts, ends, strict=True):
        each = counts[place.seq_len]
        slots = int(each.sequences[rows].sum()) * place.seq_len
        fill = (tokens + steps.split.specials * int(each.pieces[rows].sum())) / slots
        yield StretchCoverage(
            first_step=place.number + 1,
            num_steps=end - place.number,
            global_batch=place.size,
            seq_len=place.seq_len,
            fill=fill,
            tokens_per_step=fill * place.size * place.seq_len,
        )


def coverage_text(found: Coverage) -> Iterator[str]:
    """Write the report as tables (DataError: tokens are lost or repeated, after the tables)."""
    rows: list[tuple[str, ...]] = [(
        "source", "weight", "documents", "tokens", "epochs of a pass", "of the run",
        "each token in an epoch",
    )]  # fmt: skip
    for source in found.sources:
        whole = int(source.pass_epochs)
        each = (source.least / whole, source.most / whole) if whole else (0, source.most_in_rest)
        shown = f"{each[0]:g}{f' to {each[1]:g}' if each[0] != each[1] else ''}"
        epochs = f"{source.pass_epochs:.3f}", f"{source.epochs_of_run:.3f}"
        sizes = f"{source.weight:g}", f"{source.documents:,}", f"{source.tokens:,}"
        rows.append((source.name, *sizes, *epochs, shown))
    yield from table(rows, right=range(1, 6))
    rows = [("from step", "steps", "batch", "seq_len", "fill", "tokens a step")]
    for part in found.stretches:
        numbers = part.first_step, part.num_steps, part.global_batch, part.seq_len
        fill = f"{part.fill:.2%}", f"{part.tokens_per_step:,.0f}"
        rows.append((*(f"{number:,}" for number in numbers), *fill))
    yield from ("", *table(rows, right=range(6)), "")
    yield (
        f"a pass: {found.pass_sequences:,} sequences, {found.pass_steps:,.1f} steps; the planned "
        f"run: {found.num_steps:,} steps"
    )
    if not found.is_exact:
        raise DataError(
            "an epoch does not have every token once: a bug, or the cached numbers of sequences "
            "are of other data; delete packing-*.npz in the dataset's folder and try again"
        )
    yield "every token of every document is seen once in each epoch of its source"
