"""What Triton's interpreter does to bf16, and how kernels are right in it all the same.

Dropout inside Triton kernels: what it keeps is a function of a seed and a place alone.

A launch of a Triton kernel as data, so that it can be compiled ahead of time for any GPU.

The least that Triton can be asked to do, to find out whether it can.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""The interpreter multiplies bf16 matrices as if their bits were whole numbers."""


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Rounds fp32 to the nearest, which the interpreter does not do for bf16: it cuts bits off."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(dtype)


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


@dataclass(frozen=True)
class Launch:
    """One kernel with everything it gets."""

    kernel: Any
    num_programs: int
    arguments: dict[str, Any]
    """Tensors and numbers by name."""
    constants: dict[str, Any]
    """Compiled in."""
    warps: int
    stages: int

    def run(self) -> None:
        """Starts it on the current stream."""
        self.kernel[(self.num_programs,)](
            **self.arguments, **self.constants, num_warps=self.warps, num_stages=self.stages
        )


@triton.jit
def _answer(out):
    tl.store(out, 42)


def try_triton(device: torch.device) -> None:
    """Compiles and runs a kernel that stores a number.

    Raises:
        Exception: whatever Triton fails with: no C compiler, no headers of Python, a driver that is
            too old.
    """
    out = torch.zeros(1, dtype=torch.int32, device=device)
    _answer[(1,)](out)
    if out.item() != 42:
        raise RuntimeError(f"a kernel was to store 42 and stored {out.item()}")
