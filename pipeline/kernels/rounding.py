"""What Triton's interpreter does to bf16, and how kernels are right in it all the same."""

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
