"""Tiles of the kernels of carried scores: a few for each, and the fastest of them on a GPU.

`python -m benchmarks.tiles` prints what the compiler makes of each, without a GPU. On one,
`python -m benchmarks.gpu_checks` times those that are right, and writes the fastest into `TABLE`,
by `Target.name`. Where a GPU is not in the table, the first of the candidates is taken. A tile
changes the last bits of results, never which probabilities dropout drops.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import triton

from pipeline.kernels.choose import WINDOW_LIMIT

TABLE = Path(__file__).with_name("tiles.json")

Kernel = Literal["forward", "backward_window", "backward_keys", "backward_queries"]
KERNELS: tuple[Kernel, ...] = ("forward", "backward_keys", "backward_queries", "backward_window")
"""The window's comes last: its time stands beside that of the other two."""


class Tile(NamedTuple):
    """Queries and keys that a program works on at a time, and its warps and stages."""

    queries: int
    keys: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.queries} x {self.keys}, {self.warps} warps, stages {self.stages}"


class Shape(NamedTuple):
    """What the choice of a tile depends on, beside the GPU."""

    width: int
    """Slots of a row of scores."""
    head_size: int
    drops: bool
    """Whether dropout drops probabilities."""

    def key(self, kernel: Kernel) -> str:
        """Return the name in the table; windows of several tiles share one."""
        width = self.width if self.width <= WINDOW_LIMIT else "more"
        return f"{kernel} w{width} h{self.head_size}{' dropout' if self.drops else ''}"


class Target(NamedTuple):
    """What kernels are chosen for."""

    capability: tuple[int, int]
    name: str = ""
    """Of the device and of what compiles for it; empty where nothing can have been measured."""

    @property
    def is_wide(self) -> bool:
        """Whether matrix instructions read 64 rows or more from shared memory at a time."""
        return self.capability[0] in (9, 10)


@cache
def target_of(device: torch.device) -> Target:
    """Return a device's; the interpreter takes Hopper's kernels."""
    if device.type != "cuda":
        return Target((9, 0))
    versions = f"torch {torch.__version__}, Triton {triton.__version__}"
    name = f"{torch.cuda.get_device_name(device)}, {versions}"
    return Target(torch.cuda.get_device_capability(device), name)


# On an H200 (Triton 3.6, heads of 64) the first of each took at most 1.2 times the fastest one's
# time. By what ptxas says of sm_80, sm_90 and sm_100 with Triton 3.6 and 3.7 the first ones spill
# no registers, but one with dropout (`python -m benchmarks.tiles`). No list of tiles for packed
# batches: rows have equally long windows, so no program is without work.
def candidates(kernel: Kernel, shape: Shape, gpu: Target) -> tuple[Tile | None, ...]:
    """Return the tiles that a kernel may take, the one without a measurement first.

    None for `backward_window` means the other two kernels of the backward pass in its place.
    """
    width, size = shape.width, shape.head_size
    keys = min(width, 64)
    if kernel == "backward_window":
        return _of_window(shape, gpu)
    if kernel == "backward_queries":
        if size == 128:
            return Tile(128, keys, 8, 2), Tile(64, keys, 8, 2), Tile(64, keys, 4, 2)
        return Tile(128, keys, 4, 3), Tile(64, keys, 4, 3), Tile(128, keys, 8, 3)
    if kernel == "backward_keys":
        few = min(width, 32)
        if size == 128:
            return Tile(keys, few, 8, 1), Tile(few, few, 4, 1), Tile(keys, few, 8, 2)
        if not gpu.is_wide:
            return Tile(keys, few, 4, 2), Tile(few, few, 4, 2), Tile(keys, few, 4, 3)
        square = Tile(keys, keys, 8, 2)
        return Tile(keys, few, 4, 2), square, Tile(128, keys, 8, 2), square._replace(stages=3)
    if size == 128:
        return Tile(128, min(width, 32), 8, 2), Tile(64, min(width, 32), 4, 2)
    if width <= 64:
        return (Tile(width, width, 4, 1),)
    return Tile(64, 64, 4, 2), Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)


def _of_window(shape: Shape, gpu: Target) -> tuple[Tile | None, ...]:
    width = shape.width
    if width > WINDOW_LIMIT or shape.head_size == 128:
        return (None,)
    if width <= 64:
        return Tile(width, width, 4, 1), None
    blocks = Tile(32, width, 8, 2)
    if gpu.capability[0] == 10:
        return Tile(64, width, 8, 1), blocks, Tile(width, width, 8, 1), None
    if gpu.is_wide and not shape.drops:
        return Tile(width, width, 8, 1), blocks, None
    return blocks, Tile(32, width, 8, 1), None


_fixed: dict[Kernel, Tile | None] = {}


@contextmanager
def fixed(kernel: Kernel, tile: Tile | None) -> Iterator[None]:
    """Make a kernel take one tile, whatever was measured; to measure and to test it."""
    before = dict(_fixed)
    _fixed[kernel] = tile
    try:
        yield
    finally:
        _fixed.clear()
        _fixed.update(before)


def tile_of(kernel: Kernel, shape: Shape, gpu: Target) -> Tile | None:
    """Return the tile that a kernel takes; None as in `candidates`."""
    if kernel in _fixed:
        return _fixed[kernel]
    possible = candidates(kernel, shape, gpu)
    # A table of an older revision may name a tile that is not offered any more.
    measured = _fastest(gpu.name).get(shape.key(kernel), possible[0])
    return measured if measured in possible else possible[0]


@cache
def _fastest(name: str) -> dict[str, Tile | None]:
    """Return the table's tiles of a GPU, by `Shape.key`."""
    rows = read_table().get(name, {})
    return {key: Tile(*row["tile"]) if row["tile"] else None for key, row in rows.items()}


def read_table() -> dict[str, dict[str, dict[str, Any]]]:
    """Return `tile` and `ms` of each candidate, by `Target.name` and `Shape.key`."""
    if not TABLE.exists():
        return {}
    return json.loads(TABLE.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def write_table(name: str, rows: dict[str, dict[str, Any]]) -> None:
    """Put a GPU's rows into the table, in the place of those that it had of the same shapes."""
    table = read_table()
    table[name] = table.get(name, {}) | rows
    TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    _fastest.cache_clear()
