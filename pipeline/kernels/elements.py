"""What Triton kernels do to single values: rounding, and which of them dropout keeps."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""The interpreter multiplies bf16 matrices as if their bits were whole numbers."""
PHILOX_ROUNDS = tl.constexpr(7)
"""Fewest that pass BigCrush: Salmon et al. 2011, "Parallel random numbers", table 2."""
RANDOM_VALUES = 1 << 24
"""A probability of dropping is rounded to this many parts: the `threshold` of `is_kept`."""


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Rounded to the nearest, which the interpreter does not do for bf16: it cuts bits off."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(dtype)


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
