"""The door to numba: loops over documents and tokens, compiled once a machine."""

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def kernel(function: F, **options: str) -> F:
    """Compile a function of scalars, arrays and tuples at its first call, for each set of types.

    It runs without the interpreter's lock, so threads can run it at the same time. Indices are not
    checked against the range, so callers must check values from files.
    """
    try:
        # Stored beside the source (or in the user's cache folder if that is not writable), so that
        # other processes and later starts load the machine code.
        made = numba.njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # no folder for the cache is writable, so every process compiles
        made = numba.njit(nogil=True, **options)(function)
    return cast(F, made)


def inlined(function: F) -> F:
    """Compile a function into the loops that call it, which then compute several values at once."""
    return kernel(function, inline="always")
