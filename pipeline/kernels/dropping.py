"""Dropout inside Triton kernels: what it keeps is a function of a seed and a place alone."""

import triton
import triton.language as tl

PHILOX_ROUNDS = tl.constexpr(7)
"""Fewest that pass BigCrush: Salmon et al. 2011, "Parallel random numbers", table 2."""
RANDOM_VALUES = 1 << 24
"""Parts to which a probability of dropping is rounded: the `threshold` of `is_kept`."""


@triton.jit
def is_kept(seed, row, column, head, threshold):
    """(rows, columns): which values dropout keeps, the same whatever the tile.

    Philox for each row, and from there a Weyl sequence through the finaliser of MurmurHash3, keyed:
    Philox for each element holds so much at a time that registers spill.
    """
    zero = tl.zeros_like(row)
    start, key, _, _ = tl.philox(tl.load(seed), row, zero + head, zero, zero, PHILOX_ROUNDS)
    bits = start[:, None] + column.to(tl.uint32)[None, :] * 0x9E3779B9
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = bits ^ key[:, None]
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return (bits >> 8).to(tl.int32) >= threshold
