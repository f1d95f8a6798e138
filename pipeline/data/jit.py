"""The door to numba: loops over documents and tokens, compiled once a machine.

The machine code is kept beside the source (or in the user's cache folder where that is not
writable), so that a job's other processes and later starts load it.
"""

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def kernel(function: F, **options: str) -> F:
    """Compile a function of scalars, arrays and tuples at its first call, for each set of types.

    It runs without the interpreter's lock, so threads that call it run at once. An index out of
    range is not noticed: callers check what comes from files.
    """
    try:
        made = numba.njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # no folder for the cache can be written: every process compiles anew
        made = numba.njit(nogil=True, **options)(function)
    return cast(F, made)


def inlined(function: F) -> F:
    """Compile a function into the loops that call it, which then compute several values at once."""
    return kernel(function, inline="always")
