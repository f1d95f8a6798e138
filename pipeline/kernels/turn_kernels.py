"""Triton kernels that turn queries and keys by their positions: rotary, pairs (0, 1), (2, 3), ...

Letters: T tokens, N heads, H head size. `cos` and `sin` are (T, H / 2) fp32, one angle for each
pair, as `pipeline.model.rotary.rotary_tables` makes them. `token_scale` (T,) scales queries.
"""

import triton
import triton.language as tl

from pipeline.kernels.rounding import narrow


@triton.jit
def load_angles(cos, sin, row, real, H: tl.constexpr):
    """(rows, H / 2) of both tables; no turn where not real."""
    at = row[:, None] * (H // 2) + tl.arange(0, H // 2)[None, :]
    cosine = tl.load(cos + at, mask=real[:, None], other=1.0)
    return cosine, tl.load(sin + at, mask=real[:, None], other=0.0)


@triton.jit
def turn(x_RH, cosine, sine):
    """Turns the pairs of (rows, H) fp32 values; by -sine it turns back."""
    even, odd = tl.split(tl.reshape(x_RH, [x_RH.shape[0], x_RH.shape[1] // 2, 2]))
    turned = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)
    return tl.reshape(turned, [x_RH.shape[0], x_RH.shape[1]])


@triton.jit
def turn_kernel(
    qkv, turned, cos, sin, token_scale, num_tokens, num_heads,
    TURNS: tl.constexpr, SCALES: tl.constexpr, H: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """(T, 3, N, H) queries, keys and values to (T, 2, N, H) queries and keys, turned, scaled."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = row < num_tokens
    wide_row = row.to(tl.int64)[:, None] * num_heads
    column = tl.arange(0, H)[None, :]
    if TURNS:
        cosine, sine = load_angles(cos, sin, row, real, H)
    if SCALES:
        scale = tl.load(token_scale + row, mask=real, other=0.0).to(tl.float32)
    for part in range(0, 2 * num_heads):
        x_RH = tl.load(qkv + (3 * wide_row + part) * H + column, mask=real[:, None], other=0.0)
        x_RH = x_RH.to(tl.float32)
        if TURNS:
            x_RH = turn(x_RH, cosine, sine)
        if SCALES:
            x_RH *= tl.where(part < num_heads, scale, 1.0)[:, None]
        x_RH = narrow(x_RH, turned.dtype.element_ty)
        tl.store(turned + (2 * wide_row + part) * H + column, x_RH, mask=real[:, None])
