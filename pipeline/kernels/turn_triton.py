"""Triton kernels that turn queries and keys by rotary positions, and their gradients back.

Letters: T tokens end to end, N heads, H head size (32, 64 or 128). Coordinates (0, 1), (2, 3), ...
turn together. The tables `cos` and `sin`, (T, H / 2) fp32, are those of
`pipeline.model.layers.rotary_tables`; `token_scale` (T,) scales queries.
"""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.common_triton import Launch, narrow

Tensors = Mapping[str, Tensor | None]

_ROWS = 16


@triton.jit
def load_angles(cos, sin, row, real, H: tl.constexpr):
    """Load (rows, H / 2) of both tables; the angle 0 where not real."""
    at = row[:, None] * (H // 2) + tl.arange(0, H // 2)[None, :]
    cosine = tl.load(cos + at, mask=real[:, None], other=1.0)
    return cosine, tl.load(sin + at, mask=real[:, None], other=0.0)


@triton.jit
def turn(x_RH, cosine, sine):
    """Turn the pairs of (rows, H) fp32 values; with -sine, turn them back."""
    even, odd = tl.split(tl.reshape(x_RH, [x_RH.shape[0], x_RH.shape[1] // 2, 2]))
    turned = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)
    return tl.reshape(turned, [x_RH.shape[0], x_RH.shape[1]])


@triton.jit
def _place(num_tokens, num_heads, H: tl.constexpr, BLOCK: tl.constexpr):
    """Return a program's rows, which of them there are, rows times heads, and columns of a head."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return row, row < num_tokens, row.to(tl.int64)[:, None] * num_heads, tl.arange(0, H)[None, :]


# Apart from attention: turned in its loads, keys would be turned once for each block of queries,
# and not go straight to shared memory.
@triton.jit
def turn_kernel(
    qkv,
    turned,
    cos,
    sin,
    token_scale,
    num_tokens,
    num_heads,
    TURNS: tl.constexpr,
    SCALES: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Turn and scale queries and keys of (T, 3, N, H) into (T, 2, N, H)."""
    row, real, wide_row, column = _place(num_tokens, num_heads, H, BLOCK)
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


# Three gradients apart, and then stacked and turned, were 7.0 ms of a step of 109 as compiled code
# (base, 65,536 tokens, H200); by bytes they are 1.7.
@triton.jit
def turn_back_kernel(
    dq,
    dk,
    dv,
    d_qkv,
    cos,
    sin,
    token_scale,
    num_tokens,
    num_heads,
    TURNS: tl.constexpr,
    SCALES: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill (T, 3, N, H) with gradients (T, N, H) of what `turn_kernel` wrote, and of values."""
    row, real, wide_row, column = _place(num_tokens, num_heads, H, BLOCK)
    if TURNS:
        cosine, sine = load_angles(cos, sin, row, real, H)
    if SCALES:
        scale = tl.load(token_scale + row, mask=real, other=0.0).to(tl.float32)
    for head in range(0, num_heads):
        source = (wide_row + head) * H + column
        target = (3 * wide_row + head) * H + column
        q_RH = tl.load(dq + source, mask=real[:, None], other=0.0).to(tl.float32)
        k_RH = tl.load(dk + source, mask=real[:, None], other=0.0).to(tl.float32)
        v_RH = tl.load(dv + source, mask=real[:, None], other=0.0)
        if TURNS:
            q_RH = turn(q_RH, cosine, -sine)
            k_RH = turn(k_RH, cosine, -sine)
        if SCALES:
            q_RH *= scale[:, None]
        dtype = d_qkv.dtype.element_ty
        tl.store(d_qkv + target, narrow(q_RH, dtype), mask=real[:, None])
        tl.store(d_qkv + target + num_heads * H, narrow(k_RH, dtype), mask=real[:, None])
        tl.store(d_qkv + target + 2 * num_heads * H, v_RH, mask=real[:, None])


def turn_launch(tensors: Tensors) -> Launch:
    """Fill `turned`.

    Tensors are `qkv`, `turned`, `cos` and `sin` or None, `token_scale` or None.
    """
    return _launch(turn_kernel, tensors, "qkv")


def turn_back_launch(tensors: Tensors) -> Launch:
    """Fill `d_qkv`.

    Tensors are `dq`, `dk`, `dv`, contiguous, `d_qkv`, `cos` and `sin` or None, `token_scale` or
    None.
    """
    return _launch(turn_back_kernel, tensors, "d_qkv")


def of_turn(tensors: Tensors) -> dict[str, bool]:
    """Return the constants that say what there is to do."""
    return {"TURNS": tensors["cos"] is not None, "SCALES": tensors["token_scale"] is not None}


def _launch(kernel: Any, tensors: Tensors, packed: str) -> Launch:
    of_packed = tensors[packed]
    assert of_packed is not None, packed
    num_tokens, _, num_heads, head_size = of_packed.shape
    constants = of_turn(tensors) | {"H": head_size, "BLOCK": _ROWS}
    known = {**tensors, "num_tokens": num_tokens, "num_heads": num_heads}
    arguments = {name: known[name] for name in kernel.arg_names if name not in constants}
    return Launch(kernel, -(-num_tokens // _ROWS), arguments, constants, 4, 3)
