"""Triton kernels over rows: residual, alpha, dropout and RMSNorm in one pass; cross-entropy.

Letters: T tokens end to end, D hidden size, V vocabulary. A program of the norm takes whole rows of
D values, so that each value is read once and written once. Its block is the next power of two,
masked beyond D. D is a compile-time constant: only because it is a known multiple of 8 are masked
accesses 16 bytes wide.

A program of the cross-entropy takes one row of logits and passes over its blocks twice: first for
the softmax's denominator and the likeliest token, then for the gradient, which takes their place.
"""

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.common_triton import RANDOM_VALUES, Launch, is_kept, narrow

Tensors = Mapping[str, Tensor | None]
"""Arguments by their names in the kernels; (T, D) except `rstd` (T,), `alpha` and `seed`."""
_BLOCK = 2048
"""Values that a program takes, unless a row has more."""


@triton.jit
def _places(num_tokens, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return rows and columns of a program, their offsets, and which of them exist."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    real = (row < num_tokens)[:, None] & (column < D)[None, :]
    return row, column, row.to(tl.int64)[:, None] * D + column[None, :], real


@triton.jit
def _factor(alpha, seed, row, column, threshold, keep_scale, DROPS: tl.constexpr):
    """Return the update's factor: alpha times dropout's 0 or 1 / (1 - p). NaN stays NaN."""
    factor = tl.full([1, 1], 1.0, tl.float32) * tl.load(alpha)
    if DROPS:
        kept = is_kept(seed, row, column, 0, threshold)
        factor = tl.where(kept, factor * keep_scale, 0.0)
    return factor


@triton.jit
def residual_norm_kernel(
    x, update, alpha, seed, y, rstd, num_tokens, keep, eps, threshold, keep_scale,
    DROPS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Fill `y`, and `rstd` fp32: 1 / sqrt(mean of squares + eps)."""
    row, column, at, real = _places(num_tokens, D, ROWS, WIDTH)
    x_TD = tl.load(x + at, mask=real, other=0.0)
    update_TD = tl.load(update + at, mask=real, other=0.0).to(tl.float32)
    factor = _factor(alpha, seed, row, column, threshold, keep_scale, DROPS)
    joined_TD = x_TD.to(tl.float32) * keep + update_TD * factor
    scale_T = tl.rsqrt(tl.sum(joined_TD * joined_TD, axis=1) / D + eps)
    y_TD = narrow(joined_TD * scale_T[:, None], y.dtype.element_ty)
    y_TD = tl.where(tl.load(alpha) == 0.0, x_TD, y_TD)
    tl.store(y + at, y_TD, mask=real)
    tl.store(rstd + row, scale_T, mask=row < num_tokens)


@triton.jit
def residual_norm_backward_kernel(
    y, rstd, d_y, alpha, seed, d_x, d_update, num_tokens, keep, threshold, keep_scale,
    DROPS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Fill `d_x` and `d_update`.

    With r = rstd and y = r joined, dr / djoined_k = -r^3 joined_k / D. So the gradient of joined is
    r d_y - r^3 joined mean(d_y joined) = r (d_y - y mean(d_y y)): exact for any eps.
    """
    row, column, at, real = _places(num_tokens, D, ROWS, WIDTH)
    given_TD = tl.load(d_y + at, mask=real, other=0.0)
    wide_TD = given_TD.to(tl.float32)
    y_TD = tl.load(y + at, mask=real, other=0.0).to(tl.float32)
    scale_T = tl.load(rstd + row, mask=row < num_tokens, other=0.0)
    along_T = tl.sum(wide_TD * y_TD, axis=1) / D
    d_joined_TD = (wide_TD - y_TD * along_T[:, None]) * scale_T[:, None]
    factor = _factor(alpha, seed, row, column, threshold, keep_scale, DROPS)
    d_x_TD = narrow(d_joined_TD * keep, d_x.dtype.element_ty)
    d_update_TD = d_joined_TD * factor
    # At alpha 0 y was x, even if the norm would have been infinite.
    passes = tl.load(alpha) == 0.0
    d_x_TD = tl.where(passes, given_TD, d_x_TD)
    d_update_TD = tl.where(passes, 0.0, d_update_TD)
    tl.store(d_x + at, d_x_TD, mask=real)
    tl.store(d_update + at, narrow(d_update_TD, d_update.dtype.element_ty), mask=real)


def forward(tensors: Tensors, keep: float, eps: float, dropout: float) -> Launch:
    """Fill `y` and `rstd`.

    Tensors are `x`, `update`, `alpha`, `seed` (None without dropout), `y` and `rstd`.
    """
    return _launch(residual_norm_kernel, tensors, "x", {"keep": keep, "eps": eps}, dropout)


def backward(tensors: Tensors, keep: float, dropout: float) -> Launch:
    """Fill `d_x` and `d_update` from `y`, `rstd`, `d_y`, and `alpha` and `seed` of forward."""
    return _launch(residual_norm_backward_kernel, tensors, "y", {"keep": keep}, dropout)


def _launch(
    kernel: triton.JITFunction,
    tensors: Tensors,
    like: str,
    numbers: dict[str, float],
    dropout: float,
) -> Launch:
    rows = tensors[like]
    assert rows is not None
    size = rows.shape[-1]
    num_tokens = rows.numel() // size
    width = triton.next_power_of_2(size)
    block_rows = max(1, _BLOCK // width)
    arguments = {
        **tensors,
        **numbers,
        "num_tokens": num_tokens,
        "threshold": round(dropout * RANDOM_VALUES),
        "keep_scale": 1.0 / (1.0 - dropout),
    }
    constants = {"DROPS": dropout > 0, "D": size, "ROWS": block_rows, "WIDTH": width}
    programs = -(-num_tokens // block_rows)
    return Launch(kernel, programs, arguments, constants, 8 if width > _BLOCK else 4, 1)


LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The smallest finite number: unlike -inf, it may be subtracted from -inf."""
_WARPS = 8


@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, hits,
    V: tl.constexpr, BLOCK: tl.constexpr, DIFFERENTIATES: tl.constexpr,
):  # fmt: skip
    """Compute the softmax online (Milakov and Gimelshein 2018, arXiv 1805.02867, algorithm 3)."""
    # 64 bits, because rows times V may exceed 2^31.
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * V
    target = tl.load(targets + row)
    real = (target >= 0) & (target < V)
    # Before the reductions, whose barriers keep it before the gradient is written.
    picked = tl.load(start + target, mask=real, other=float("nan")).to(tl.float32)
    # Each lane keeps its own maximum and sum until the row ends, so that blocks need no exchange
    # between warps.
    most = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    best = tl.zeros([BLOCK], tl.int32)
    for first in range(0, V, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(start + column, mask=column < V, other=float("-inf")).to(tl.float32)
        # The other one of the algorithm's two exponentials is always exp(0).
        factor = tl.exp2(-tl.abs(value - most) * LOG2_E)
        # False for NaN, which thus gets into the sum.
        is_more = value > most
        total = tl.where(is_more, total * factor + 1.0, total + factor)
        best = tl.where(is_more, column, best)
        most = tl.where(is_more, value, most)
    highest = tl.max(most, axis=0)
    denominator = tl.sum(total * tl.exp2((most - highest) * LOG2_E), axis=0)
    # A target that is not a token makes loss and gradient NaN.
    denominator = tl.where(real, denominator, float("nan"))
    likeliest = tl.min(tl.where(most == highest, best, V), axis=0)
    tl.store(losses + row, tl.log(denominator) + (highest - picked))
    tl.store(hits + row, tl.where(likeliest == target, 1.0, 0.0))
    if DIFFERENTIATES:
        scale = 1.0 / denominator
        for first in range(0, V, BLOCK):
            column = first + tl.arange(0, BLOCK)
            value = tl.load(start + column, mask=column < V, other=float("-inf")).to(tl.float32)
            share = tl.exp2((value - highest) * LOG2_E) * scale
            gradient = tl.where(column == target, share - 1.0, share)
            gradient = narrow(gradient, logits.dtype.element_ty)
            tl.store(start + column, gradient, mask=column < V)


def cross_entropy(
    logits_RV: Tensor, targets_R: Tensor, losses_R: Tensor, hits_R: Tensor, differentiates: bool
) -> Launch:
    """Fill `losses` and `hits`, and puts the gradient in the place of the logits.

    Logits are contiguous bf16 or fp32, targets int64; losses and hits are fp32. A hit is 1 where
    the first of the largest logits is the target's, else 0.
    """
    num_rows, size = logits_RV.shape
    arguments = {"logits": logits_RV, "targets": targets_R, "losses": losses_R, "hits": hits_R}
    # A run has one V; as a constant it lets the compiler know where blocks are aligned.
    block = min(_BLOCK, triton.next_power_of_2(size))
    constants = {"V": size, "BLOCK": block, "DIFFERENTIATES": differentiates}
    return Launch(cross_entropy_kernel, num_rows, arguments, constants, _WARPS, 1)
