"""What tokens see, as the fused kernels want to know it, and the sizes that they take."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor  # what a model costs is reckoned without torch

HEAD_SIZES = (32, 64, 128)
WINDOW_LIMIT = 128
"""Longest window that is one tile."""


class Windows(NamedTuple):
    """Which tokens see which: each an interval of its window."""

    spans: Tensor
    """(T, 4) int32: keys that a token sees, from and up to, and queries that see it, from and up
    to. Both are inside its window; equal numbers are none."""
    bounds: Tensor
    """(B + 1,) int32: 0, then the end of each window, the last of them T; none is empty."""
    longest: int
    """Tokens of the longest window, or more."""


def padded_width(longest: int) -> int:
    """W: whole tiles, so that no tile of scores needs a mask on its columns."""
    if longest > WINDOW_LIMIT:
        return -(-longest // WINDOW_LIMIT) * WINDOW_LIMIT
    return next(width for width in (16, 32, 64, WINDOW_LIMIT) if longest <= width)
