"""Files of optimizer state that any number of ranks can read.

    state/rank-00000-of-00002.safetensors   what rank 0 of 2 held when it saved

A file holds, for each parameter of which its rank had a part, that part of the flattened parameter
as `master/NAME`, and of Adam's averages as `exp_avg/NAME` and `exp_avg_sq/NAME`, all fp32. A table
in its header says where in the parameter the part starts, and the parameter's shape. Weights that
forward passes use are not stored: they are the master weights, rounded.

How DeepSpeed splits parameters is not in these files; so they fit every split.

Where the states of two checkpoints differ, whatever ranks and stages saved them.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoints.manifest import STATE_FOLDER, state_file
from pipeline.errors import CheckpointError
from pipeline.runtime.tensors import SlicedFile, write_file

MASTER = "master"
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = (MASTER, *MOMENTS)
_TABLE = "postnorm_state"
_FORMAT = 1


@dataclass(frozen=True)
class Part:
    """A stretch of one flattened parameter, and what a rank holds of it."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    """First element of the stretch in the flattened parameter."""
    tensors: dict[str, Tensor]
    """By kind, each (elements,) fp32."""


def write_part(
    folder: Path, rank: int, world_size: int, parts: Iterable[Part], counters: dict[str, int]
) -> None:
    """Writes what one rank holds. Not collective.

    Args:
        folder: the checkpoint.
        rank: whose parts these are.
        world_size: how many ranks write.
        parts: at most one of each parameter.
        counters: the same on every rank.

    Raises:
        OSError: the disk is full or not writable.
    """
    parts = list(parts)
    table = {
        "format": _FORMAT,
        "counters": counters,
        "parts": {part.name: [part.start, list(part.shape)] for part in parts},
    }
    path = folder / state_file(rank, world_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"{kind}/{part.name}": part.tensors[kind] for part in parts for kind in KINDS}
    write_file(tensors, path, {_TABLE: json.dumps(table)})


def expected_files(folder: Path, world_size: int) -> list[str]:
    """Names, below a checkpoint, of all its files: those of the ranks first, in rank order.

    Raises:
        CheckpointError: the file of a rank is missing.
    """
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    of_ranks = [state_file(rank, world_size) for rank in range(world_size)]
    missing = [name for name in of_ranks if name not in found]
    if missing:
        raise CheckpointError(
            f"{folder} has state of {world_size - len(missing)} ranks, expected {world_size}: "
            f"{', '.join(missing)} not found"
        )
    return of_ranks + sorted(found.difference(of_ranks))


class SavedState:
    """The state in a checkpoint, whose tensors are read from disk as far as they are asked for."""

    def __init__(self, folder: Path) -> None:
        """Reads the headers of all ranks' files and checks that their parts fit together.

        Raises:
            CheckpointError: a file is missing or damaged, or the parts leave an element of a
                parameter out, or hold it twice; names the parameter.
        """
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._stretches: dict[str, list[_Stretch]] = {}
        self.counters: dict[str, int] = {}
        for which, path in enumerate(state_paths(folder)):
            file = SlicedFile(path)
            table = _table(file)
            if which and table["counters"] != self.counters:
                raise CheckpointError(
                    f"{path} was saved at {table['counters']}, the files before it at "
                    f"{self.counters}: they are of different steps"
                )
            self.counters = table["counters"]
            for name, (start, shape) in table["parts"].items():
                self._add(file, name, start, tuple(shape))
        for name, stretches in self._stretches.items():
            stretches.sort(key=lambda stretch: stretch.start)
            self._require_whole(name, stretches)

    def require_shapes(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Checks that these parameters are saved, with these shapes, and no others.

        Raises:
            CheckpointError: they are not; names the first that differs.
        """
        for name in [*shapes, *self.shapes]:
            if self.shapes.get(name) != shapes.get(name):
                raise CheckpointError(
                    f"{self.folder} does not fit the model: {name} has shape "
                    f"{_text(self.shapes.get(name))} there, {_text(shapes.get(name))} here"
                )

    def read(self, kind: str, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements `start` to `stop` of a flattened parameter, or of an average of Adam's.

        Returns:
            (stop - start,) fp32, on the CPU.
        """
        stop = math.prod(self.shapes[name]) if stop is None else stop
        found = torch.empty(stop - start)
        for stretch in self._stretches[name]:
            first, last = max(start, stretch.start), min(stop, stretch.stop)
            if first < last:
                found[first - start : last - start] = stretch.file.read(
                    f"{kind}/{name}", first - stretch.start, last - stretch.start
                )
        return found

    def _add(self, file: SlicedFile, name: str, start: int, shape: tuple[int, ...]) -> None:
        counts = {kind: file.shapes.get(f"{kind}/{name}") for kind in KINDS}
        sizes = set(counts.values())
        missing = [f"{kind}/{name}" for kind, count in counts.items() if count is None]
        if missing:
            raise CheckpointError(
                f"{file.path} lacks {', '.join(missing)}: without its optimizer state and weights "
                f"{name} cannot go on as it would have"
            )
        size = sizes.pop()
        if sizes or size is None or len(size) != 1:
            raise CheckpointError(f"{file.path}: {name} is not complete, its parts have {counts}")
        if self.shapes.setdefault(name, shape) != shape:
            raise CheckpointError(
                f"{file.path}: {name} has shape {shape}, in an earlier file {self.shapes[name]}"
            )
        self._stretches.setdefault(name, []).append(_Stretch(start, start + size[0], file))

    def _require_whole(self, name: str, stretches: list["_Stretch"]) -> None:
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
class _Stretch:
    start: int
    stop: int
    file: SlicedFile


def read_weights(folder: Path) -> dict[str, Tensor]:
    """A checkpoint's fp32 master weights by parameter name, put together from all ranks' files.

    Raises:
        CheckpointError: files are missing, damaged or do not fit together.
    """
    saved = SavedState(folder)
    return {name: saved.read(MASTER, name).view(shape) for name, shape in saved.shapes.items()}


def state_paths(folder: Path) -> list[Path]:
    """The files of a checkpoint's state, in rank order.

    Raises:
        CheckpointError: there are none, which an earlier version wrote, or not all.
    """
    paths = sorted((folder / STATE_FOLDER).glob("rank-*.safetensors"))
    if not paths:
        raise CheckpointError(
            f"{folder} holds no {state_file(0, 1)} or the like: an earlier version wrote "
            "it. Export it with that version and start a new run with init_from, or choose another "
            "run_dir"
        )
    world_size = int(paths[0].stem.rpartition("-")[2])
    expected = [folder / state_file(rank, world_size) for rank in range(world_size)]
    if paths != expected:
        differing = sorted(path.name for path in set(paths) ^ set(expected))
        raise CheckpointError(f"{folder} has missing or foreign files: {', '.join(differing)}")
    return paths


def _table(file: SlicedFile) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(file.metadata.get(_TABLE, "{}"))
    if table.get("format") != _FORMAT:
        raise CheckpointError(
            f"{file.path} has format {table.get('format')}, expected {_FORMAT}: another version of "
            "this program wrote it; continue the run with that one"
        )
    return table


def _text(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else str(list(shape))


_CHUNK = 1 << 23
"""Elements compared at once: 32 MiB of each."""


@dataclass(frozen=True)
class TensorDifference:
    """Of one parameter's master weights, or of one of Adam's averages."""

    name: str
    kind: str
    """`master`, `exp_avg` or `exp_avg_sq`."""
    max_abs: float
    """Largest |a - b|."""
    relative: float
    """Norm of a - b over the norm of a; infinite if a is zero, or a value is no number."""


@dataclass(frozen=True)
class StateDifferences:
    """All that differs."""

    num_parameters: int
    """Compared."""
    others: list[str]
    """Counters, and parameters that one lacks or that have another shape."""
    tensors: list[TensorDifference]
    """Only those that differ."""


def state_differences(
    one: Path, other: Path, on_elements: Callable[[int], object] = lambda _: None
) -> StateDifferences:
    """Compares two checkpoints bit by bit.

    Args:
        one: a checkpoint.
        other: another.
        on_elements: called with the number of elements compared.

    Raises:
        CheckpointError: one is damaged or not whole.
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
    found = [
        difference
        for name in shared
        for kind in KINDS
        for difference in _compare(a, b, kind, name, on_elements)
    ]
    return StateDifferences(len(shared), others, found)


def _compare(
    a: SavedState, b: SavedState, kind: str, name: str, on_elements: Callable[[int], object]
) -> Iterator[TensorDifference]:
    numel = math.prod(a.shapes[name])
    largest = of_difference = of_one = 0.0
    differs = False
    for start in range(0, numel, _CHUNK):
        stop = min(start + _CHUNK, numel)
        one, other = (each.read(kind, name, start, stop).double() for each in (a, b))
        # Not `one - other`: NaN is equal to NaN here, and infinity to infinity.
        same = (one == other) | (one.isnan() & other.isnan())
        if not same.all():
            differs = True
            difference = (one - other).masked_fill(same, 0.0)
            # Of a NaN against a number nothing smaller is to be said.
            sizes = difference.abs()
            largest = max(largest, sizes.masked_fill(sizes.isnan(), math.inf).max().item())
            of_difference += difference.square().sum().item()
        of_one += one.square().sum().item()
        on_elements(stop - start)
    if differs:
        relative = math.sqrt(of_difference / of_one) if of_one else math.inf
        yield TensorDifference(name, kind, largest, math.inf if math.isnan(relative) else relative)
