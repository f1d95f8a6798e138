"""Where the states of two checkpoints differ, whatever ranks and stages saved them."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.train.state_files import KINDS, SavedState

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
