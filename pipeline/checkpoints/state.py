"""A run's state: tensors as files, which any number of ranks can read and compare, and counters.

    state/rank-00000-of-00002.safetensors   what rank 0 of 2 held when it saved

A file holds the stretches of flattened parameters that its rank had: of the weights as
`master/NAME`, of the averages of the gradient and of its square as `exp_avg/NAME` and
`exp_avg_sq/NAME`, all fp32. A table in its header gives each stretch's start and its parameter's
shape, and what it has if that is not all three (format 2; Muon's matrices have one average). The
weights that forward passes use are not stored: they are the master weights, rounded.

Nothing in these files depends on how DeepSpeed splits parameters, so they fit every split.

What is not a tensor (`TrainState`, with the losses behind the next decision) is in the manifest.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pipeline.checkpoints.manifest import state_file
from pipeline.config.train import SpikeConfig
from pipeline.errors import CheckpointError, NewerFormatError
from pipeline.runtime.checkpoints import STATE_FOLDER
from pipeline.runtime.files import make_folder
from pipeline.runtime.tensors import SlicedFile, write_file

MASTER = "master"
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = (MASTER, *MOMENTS)
_TABLE = "postnorm_state"
_FORMATS = (1, 2)
"""The second is written where a part has not all of `KINDS`, and lists those of each part."""


_CHUNK = 1 << 23
"""Elements compared at once: 32 MiB of each tensor."""


@dataclass(frozen=True)
class TensorShard:
    """A stretch of one flattened parameter, with its optimizer state."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    start: int
    """First element of the stretch in the flattened parameter."""
    tensors: dict[str, Tensor]
    """(elements,) fp32 by kind, of `KINDS`; the weights and what the optimizer keeps of them."""


class Checkpointable(Protocol):
    """All that saving and resuming need of a training engine."""

    def state_parts(self) -> tuple[list[TensorShard], dict[str, int]]:
        """Return this rank's state, as views, and counters that all ranks share. Collective."""

    def load_files(self, folder: Path) -> None:
        """Load the state of a checkpoint, whatever number of ranks wrote it. Collective."""


def write_part(
    folder: Path, rank: int, world_size: int, parts: Iterable[TensorShard], counters: dict[str, int]
) -> None:
    """Write the state that one rank holds. Not collective.

    Raises:
        OSError: the disk is full or not writable.
    """
    parts = list(parts)
    lists_kinds = any(tuple(part.tensors) != KINDS for part in parts)
    table = {
        "format": _FORMATS[lists_kinds],
        "counters": counters,
        "parts": {
            part.name: [part.start, list(part.shape), *([list(part.tensors)] * lists_kinds)]
            for part in parts
        },
    }
    path = folder / state_file(rank, world_size)
    make_folder(path.parent)
    tensors = {f"{kind}/{part.name}": t for part in parts for kind, t in part.tensors.items()}
    write_file(tensors, path, {_TABLE: json.dumps(table)})


def unsound_value(kind: str, values: Tensor) -> str | None:
    """Describe the first of (elements,) values that no training gives; None if there is none.

    Such are NaN and infinity, and negative averages of squares.
    """
    for start in range(0, len(values), _CHUNK):
        chunk = values[start : start + _CHUNK]
        # NaN if a value is: 1.3 ms for 32 MB on a core, where `isfinite().all()` takes 60.
        low, high = map(float, chunk.aminmax())
        if math.isfinite(low) and math.isfinite(high) and not (kind == MOMENTS[1] and low < 0):
            continue
        wrong = ~chunk.isfinite()
        if kind == MOMENTS[1]:
            wrong |= chunk < 0
        place = int(wrong.nonzero()[0])
        return f"element {start + place} is {chunk[place].item()}"
    return None


def expected_files(folder: Path, world_size: int) -> list[str]:
    """List the names of a checkpoint's files: those of the ranks first, in rank order.

    Raises:
        CheckpointError: the file of a rank is missing.
    """
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    of_ranks = [state_file(rank, world_size) for rank in range(world_size)]
    missing = [name for name in of_ranks if name not in names]
    if missing:
        raise CheckpointError(
            f"{folder} has state of {world_size - len(missing)} ranks, expected {world_size}: "
            f"{', '.join(missing)} not found"
        )
    return of_ranks + sorted(names.difference(of_ranks))


class SavedState:
    """The state in a checkpoint; tensors are read from disk only as far as they are needed."""

    def __init__(self, folder: Path) -> None:
        """Read the headers of all ranks' files and check that their parts fit together.

        Raises:
            CheckpointError: a file is missing or damaged, or an element of a parameter is missing
                or stored twice; names the parameter.
        """
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.kinds: dict[str, tuple[str, ...]] = {}
        """What is saved of each parameter, of `KINDS`."""
        self._stretches: dict[str, list[_FlatRange]] = {}
        self.counters: dict[str, int] = {}
        for which, path in enumerate(state_paths(folder)):
            file = SlicedFile(path)
            table = _table(file)
            if which and table["counters"] != self.counters:
                raise CheckpointError(
                    f"{path} was saved at {table['counters']}, the files before it at "
                    f"{self.counters}: they belong to different steps"
                )
            self.counters = table["counters"]
            for name, (start, shape, *kinds) in table["parts"].items():
                self._add(file, name, start, tuple(shape), tuple(kinds[0]) if kinds else KINDS)
        for name, stretches in self._stretches.items():
            stretches.sort(key=lambda stretch: stretch.start)
            self._require_whole(name, stretches)

    def require_shapes(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Check that exactly these parameters are saved, with these shapes.

        Raises:
            CheckpointError: a parameter differs; names the first.
        """
        for name in [*shapes, *self.shapes]:
            if self.shapes.get(name) != shapes.get(name):
                raise CheckpointError(
                    f"{self.folder} does not fit the model: {name} has shape "
                    f"{_text(self.shapes.get(name))} there, {_text(shapes.get(name))} here"
                )

    def read(self, kind: str, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Read elements `start` to `stop` of a flattened parameter or of an average of it.

        Returns:
            (stop - start,) fp32, on the CPU.

        Raises:
            CheckpointError: the optimizer that saved it does not keep such an average.
        """
        if kind not in self.kinds[name]:
            raise CheckpointError(
                f"{self.folder} has no {kind} of {name}: another optimizer saved it. Set "
                "train.optimizer as it was, or begin a new run with init_from"
            )
        stop = math.prod(self.shapes[name]) if stop is None else stop
        # Not zeros: `_require_whole` made sure that every element is read.
        values = torch.empty(stop - start)
        for stretch in self._stretches[name]:
            first, last = max(start, stretch.start), min(stop, stretch.stop)
            if first < last:
                values[first - start : last - start] = stretch.file.read(
                    f"{kind}/{name}", first - stretch.start, last - stretch.start
                )
        return values

    def non_finite(self) -> Iterator[str]:
        """Read all values and yield a text for each tensor with one that no training gives."""
        for name, stretches in self._stretches.items():
            for kind in self.kinds[name]:
                for stretch in stretches:
                    values = stretch.file.read(f"{kind}/{name}", 0, stretch.stop - stretch.start)
                    if text := unsound_value(kind, values):
                        where = f" of those from {stretch.start} on" if stretch.start else ""
                        yield f"{self.folder}: {kind}/{name}: {text}{where}"

    def _add(
        self,
        file: SlicedFile,
        name: str,
        start: int,
        shape: tuple[int, ...],
        kinds: tuple[str, ...],
    ) -> None:
        counts = {kind: file.shapes.get(f"{kind}/{name}") for kind in kinds}
        sizes = set(counts.values())
        missing = [f"{kind}/{name}" for kind, count in counts.items() if count is None]
        if missing:
            raise CheckpointError(
                f"{file.path} lacks {', '.join(missing)}: {name} needs its weights and optimizer "
                "state to continue unchanged"
            )
        size = sizes.pop()
        if sizes or size is None or len(size) != 1:
            raise CheckpointError(f"{file.path}: {name} is not complete, its parts have {counts}")
        if self.shapes.setdefault(name, shape) != shape:
            raise CheckpointError(
                f"{file.path}: {name} has shape {shape}, in an earlier file {self.shapes[name]}"
            )
        if self.kinds.setdefault(name, kinds) != kinds:
            raise CheckpointError(
                f"{file.path}: {name} has {', '.join(kinds)}, in an earlier file "
                f"{', '.join(self.kinds[name])}"
            )
        self._stretches.setdefault(name, []).append(_FlatRange(start, start + size[0], file))

    def _require_whole(self, name: str, stretches: list["_FlatRange"]) -> None:
        at, end = 0, math.prod(self.shapes[name])
        for stretch in [*stretches, None]:
            start = stretch.start if stretch else end
            if start != at:
                raise CheckpointError(
                    f"{self.folder} {'lacks' if start > at else 'has twice'} elements "
                    f"{min(at, start)} to {max(at, start) - 1} of {name}, which has {end}"
                )
            at = stretch.stop if stretch else end


@dataclass(frozen=True)
class _FlatRange:
    start: int
    stop: int
    file: SlicedFile


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read a checkpoint's fp32 master weights by parameter name, from all ranks' files.

    Raises:
        CheckpointError: files are missing, damaged or do not fit together.
    """
    saved = SavedState(folder)
    return {name: saved.read(MASTER, name).view(shape) for name, shape in saved.shapes.items()}


def state_paths(folder: Path) -> list[Path]:
    """List the files of a checkpoint's state, in rank order.

    Raises:
        CheckpointError: some are missing, or all are because an earlier version wrote it.
    """
    paths = sorted((folder / STATE_FOLDER).glob("rank-*.safetensors"))
    if not paths:
        raise CheckpointError(
            f"{folder} has no files like {state_file(0, 1)}: an earlier version wrote it. Export "
            "it with that version and start a new run with init_from, or choose another run_dir"
        )
    world_size = int(paths[0].stem.rpartition("-")[2])
    expected = [folder / state_file(rank, world_size) for rank in range(world_size)]
    if paths != expected:
        differing = sorted(path.name for path in set(paths) ^ set(expected))
        raise CheckpointError(f"{folder} has missing or foreign files: {', '.join(differing)}")
    return paths


def _table(file: SlicedFile) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(file.metadata.get(_TABLE, "{}"))
    if not isinstance(table.get("format"), int):
        raise CheckpointError(f"{file.path} says nothing of the state's parts: copy it again")
    if table["format"] not in _FORMATS:
        raise NewerFormatError(
            f"{file.path} has format {table['format']}, expected {_FORMATS[-1]}: a newer version "
            "wrote it. Continue the run with that one, or choose another run_dir; nothing was "
            "changed"
        )
    return table


def _text(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else str(list(shape))


@dataclass(frozen=True)
class TensorDifference:
    """How one parameter's master weights, or one of their averages, differ."""

    name: str
    kind: str
    """`master`, `exp_avg` or `exp_avg_sq`."""
    max_abs: float
    """Largest |a - b|."""
    relative: float
    """Norm of a - b over the norm of a; infinite if a is zero or a value is NaN."""


@dataclass(frozen=True)
class StateDifferences:
    """All differences between the states of two checkpoints."""

    num_parameters: int
    others: list[str]
    """Counters that differ, and parameters that one lacks or that have another shape."""
    tensors: list[TensorDifference]


def state_differences(
    one: Path, other: Path, on_elements: Callable[[int], object] = lambda _: None
) -> StateDifferences:
    """Compare the states of two checkpoints bit by bit, whatever ranks and stages saved them.

    `on_elements` is called with the number of elements compared.

    Raises:
        CheckpointError: one is damaged or incomplete.
    """
    a, b = SavedState(one), SavedState(other)
    others = [
        f"counter {name}: {a.counters.get(name)} against {b.counters.get(name)}"
        for name in sorted(a.counters.keys() | b.counters.keys())
        if a.counters.get(name) != b.counters.get(name)
    ]
    others += [
        f"{name}: shape {a.shapes.get(name)} against {b.shapes.get(name)}"
        for name in {**a.shapes, **b.shapes}
        if a.shapes.get(name) != b.shapes.get(name)
    ]
    shared = [name for name, shape in a.shapes.items() if b.shapes.get(name) == shape]
    others += [
        f"{name}: {', '.join(a.kinds[name])} against {', '.join(b.kinds[name])}"
        for name in shared
        if a.kinds[name] != b.kinds[name]
    ]
    tensors = [
        difference
        for name in shared
        for kind in a.kinds[name]
        if kind in b.kinds[name]
        for difference in _compare(a, b, kind, name, on_elements)
    ]
    return StateDifferences(len(shared), others, tensors)


def _compare(
    a: SavedState, b: SavedState, kind: str, name: str, on_elements: Callable[[int], object]
) -> Iterator[TensorDifference]:
    numel = math.prod(a.shapes[name])
    largest = of_difference = of_one = 0.0
    differs = False
    for start in range(0, numel, _CHUNK):
        stop = min(start + _CHUNK, numel)
        one, other = (each.read(kind, name, start, stop).double() for each in (a, b))
        # Not `one - other == 0`: NaN counts as equal to NaN, and infinity to infinity.
        same = (one == other) | (one.isnan() & other.isnan())
        if not same.all():
            differs = True
            difference = (one - other).masked_fill(same, 0.0)
            # NaN against a number counts as an infinite difference.
            sizes = difference.abs()
            largest = max(largest, sizes.masked_fill(sizes.isnan(), math.inf).max().item())
            of_difference += difference.square().sum().item()
        of_one += one.square().sum().item()
        on_elements(stop - start)
    if differs:
        relative = math.sqrt(of_difference / of_one) if of_one else math.inf
        yield TensorDifference(name, kind, largest, math.inf if math.isnan(relative) else relative)


# The standard deviation of normal noise is this times the median distance from the median.
_TO_DEVIATION = 1.4826
# How far above its best a loss is that has diverged: half of what was learned, and at least a nat.
_LOST = 0.5
_LEAST_LOST_NATS = 1.0


@dataclass
class LossHistory:
    """Losses of applied steps, as many as the next decision about a spike or a divergence needs.

    They are the same on all ranks and are saved with every checkpoint, so a run that was killed
    decides like one that was not.
    """

    usual: list[float] = field(default_factory=list)
    """The last `window_steps` losses before those in `high`."""
    high: list[tuple[int, float]] = field(default_factory=list)
    """(batch, loss) of the last steps, all above the limit: the first, and of the others the last
    `window_steps`."""
    start: float | None = None
    """What a model that has learned nothing has: the first loss, or a uniform guess if lower."""
    best: float | None = None
    """The least median of `steps_in_a_row` losses in a row; before these the first loss."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "LossHistory":
        """Build it from a manifest; those of earlier versions have less, or no losses."""
        high = [(batch, loss) for batch, loss in values.get("high", [])]
        return cls(list(values.get("usual", [])), high, values.get("start"), values.get("best"))

    def limit(self, config: SpikeConfig) -> float:
        """Return the loss above which a step counts as high.

        Until the window is full that is what has diverged.
        """
        if len(self.usual) < config.window_steps:
            return self.ceiling
        usual = np.array(self.usual)
        median = float(np.median(usual))
        deviation = _TO_DEVIATION * float(np.median(np.abs(usual - median)))
        return min(self.ceiling, median + max(config.rise_nats, config.deviations * deviation))

    @property
    def ceiling(self) -> float:
        """The loss above which a run that stays there has diverged; infinite before the first."""
        if self.start is None or self.best is None:
            return math.inf
        return self.best + max(_LEAST_LOST_NATS, _LOST * (self.start - self.best))

    def add(
        self, batch: int, loss: float, config: SpikeConfig, uniform_guess: float | None = None
    ) -> None:
        """Add the loss of the next applied step; NaN (a batch without targets) is ignored.

        `uniform_guess` is the loss of a model for which all answers are alike; None: not known.
        """
        if math.isnan(loss):
            return
        if self.start is None:
            self.start = loss if uniform_guess is None else min(loss, uniform_guess)
            self.best = loss
        if loss > self.limit(config):
            self.high.append((batch, loss))
            # Where nothing goes back, they may be all that are to come.
            del self.high[1 : -config.window_steps]
            return
        # The loss came back down, so the high ones were noise and belong to the window.
        self.usual += [before for _, before in self.high] + [loss]
        self.usual = self.usual[-config.window_steps :]
        self.high = []
        if len(self.usual) >= config.steps_in_a_row:
            assert self.best is not None
            self.best = min(self.best, float(np.median(self.usual[-config.steps_in_a_row :])))

    def is_spike(self, config: SpikeConfig) -> bool:
        """Return whether the last steps form a spike."""
        return len(self.high) >= config.steps_in_a_row

    def has_diverged(self, config: SpikeConfig) -> bool:
        """Return whether the last steps are far above the best ones."""
        last = [loss for _, loss in self.high[-config.steps_in_a_row :]]
        return len(last) == config.steps_in_a_row and min(last) > self.ceiling

    def last(self, config: SpikeConfig) -> list[float]:
        """Return the losses of the last steps, at most `steps_in_a_row`, the newest at the end."""
        losses = [*self.usual, *(loss for _, loss in self.high)]
        return losses[-config.steps_in_a_row :]


@dataclass
class TrainState:
    """Counters of a run; learning rate, alpha and data follow from them and the config."""

    step: int = 0
    """Optimizer steps applied."""
    cursor: int = 0
    """Position in the data order: sequences consumed, including those of skipped steps and of
    batches left out."""
    skipped: int = 0
    """Steps skipped because a gradient was not finite."""
    skipped_in_a_row: int = 0
    """Steps skipped since the last applied one."""
    left_out: int = 0
    """Batches left out by `train.skip_batches` and after loss spikes."""
    rewinds: int = 0
    """How often the run had gone back because of a loss spike."""
    losses: LossHistory = field(default_factory=LossHistory)
    elapsed_s: float = 0.0
    """Training time of all attempts up to the last log line, on rank 0's clock."""

    held_out_loss: float | None = None
    """Loss of the newest evaluation, in nats."""
    held_out_step: int | None = None
    weights: dict[str, dict[str, float]] = field(default_factory=dict)
    """What the weighing of several losses remembers."""

    def leave_out(self, num_sequences: int) -> None:
        """Count a batch that is not trained on."""
        self.cursor += num_sequences
        self.left_out += 1

    def advance(self, num_sequences: int, *, applied: bool) -> None:
        """Count one step."""
        self.cursor += num_sequences
        if applied:
            self.step += 1
            self.skipped_in_a_row = 0
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1
