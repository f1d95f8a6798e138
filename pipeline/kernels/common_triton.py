"""Parts that all Triton kernels share: rounding, dropout, launches as data, and a first test."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run in the interpreter, which multiplies the bits of bf16 as whole numbers."""


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Round fp32 to nearest, in the interpreter too, which truncates to bf16."""
    # Cut off, the error is 2.9e-3 instead of 1.5e-3.
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(dtype)


PHILOX_ROUNDS = tl.constexpr(7)
"""Fewest rounds that pass BigCrush: Salmon et al. 2011, "Parallel random numbers", table 2."""
RANDOM_VALUES = 1 << 24
"""A dropout probability times this, rounded, is the `threshold` of `is_kept`."""


@triton.jit
def is_kept(seed, row, column, head, threshold):
    """Return which of (rows, columns) values dropout keeps, the same for every tiling.

    A value is kept or dropped by (seed, row, column, head) alone.
    """
    zero = tl.zeros_like(row)
    # Philox for each element spilled up to 1,026 registers (sm_80); this none in the chosen tiles.
    start, key, _, _ = tl.philox(tl.load(seed), row, zero + head, zero, zero, PHILOX_ROUNDS)
    # A keyed Weyl sequence through MurmurHash3's finaliser.
    bits = start[:, None] + column.to(tl.uint32)[None, :] * 0x9E3779B9
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = bits ^ key[:, None]
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return (bits >> 8).to(tl.int32) >= threshold


@dataclass(frozen=True)
class Launch:
    """One kernel with its arguments, as data: it can be compiled ahead of time for any GPU."""

    kernel: Any
    num_programs: int
    arguments: dict[str, Any]
    """Tensors and numbers by name."""
    constants: dict[str, Any]
    """Compile-time constants by name."""
    warps: int
    stages: int

    def run(self) -> None:
        """Start the kernel on the current stream."""
        self.kernel[(self.num_programs,)](
            **self.arguments, **self.constants, num_warps=self.warps, num_stages=self.stages
        )


@triton.jit
def _answer(out):
    tl.store(out, 42)


def try_triton(device: torch.device) -> None:
    """Compile and run the smallest kernel, one that stores a number, to see whether Triton works.

    Raises:
        Exception: any error of Triton: no C compiler, no headers of Python, too old a driver.
    """
    out = torch.zeros(1, dtype=torch.int32, device=device)
    _answer[(1,)](out)
    if out.item() != 42:
        raise RuntimeError(f"a kernel stored {out.item()}, expected 42")
