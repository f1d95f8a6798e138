"""Triton kernel of cross-entropy over rows of logits, and its gradient in their place.

V is the vocabulary. A program takes one row and passes over its blocks twice: first for the
softmax's denominator and the likeliest token, then for the gradient.
"""

import triton
import triton.language as tl
from torch import Tensor

from pipeline.kernels.common_triton import Launch, narrow

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The smallest finite number: unlike -inf, it may be subtracted from -inf."""
_BLOCK, _WARPS = 2048, 8


@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, hits,
    V: tl.constexpr, BLOCK: tl.constexpr, DIFFERENTIATES: tl.constexpr,
):  # fmt: skip
    """Compute the softmax online (Milakov and Gimelshein 2018, arXiv 1805.02867, algorithm 3).

    Each lane keeps its own maximum and sum until the row ends, so that blocks need no exchange
    between warps. One of the algorithm's two exponentials is always exp(0) and is left out.
    """
    # 64 bits, because rows times V may exceed 2^31.
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * V
    target = tl.load(targets + row)
    real = (target >= 0) & (target < V)
    # Before the reductions, whose barriers keep it before the gradient is written.
    picked = tl.load(start + target, mask=real, other=float("nan")).to(tl.float32)
    most = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    best = tl.zeros([BLOCK], tl.int32)
    for first in range(0, V, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(start + column, mask=column < V, other=float("-inf")).to(tl.float32)
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

    Args:
        logits_RV: contiguous bf16 or fp32.
        targets_R: contiguous int64.
        losses_R: contiguous fp32, filled with each row's loss.
        hits_R: contiguous fp32, 1 where the first of the largest logits is the target's, else 0.
        differentiates: whether the gradient of the losses' sum is wanted.
    """
    num_rows, size = logits_RV.shape
    arguments = {"logits": logits_RV, "targets": targets_R, "losses": losses_R, "hits": hits_R}
    # A run has one V; as a constant it lets the compiler know where blocks are aligned.
    block = min(_BLOCK, triton.next_power_of_2(size))
    constants = {"V": size, "BLOCK": block, "DIFFERENTIATES": differentiates}
    return Launch(cross_entropy_kernel, num_rows, arguments, constants, _WARPS, 1)
