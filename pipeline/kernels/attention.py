"""Attention in PyTorch, over rows with or without carried scores.

Letters: B sequences, N heads, S slots of a sequence, H head size. A mask broadcasts to (B, N, S, S)
and is true where a query (row) may see a key (column); a row that allows nothing gives NaN.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Slots up to which `_ShortRows` is faster; 4 heads of 64, two cores with AMX.
_SHORT = 256


def attention(
    q_BNSH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, allowed: Tensor, dropout: float
) -> Tensor:
    """Compute softmax(q k^T) v over the allowed keys; the queries are scaled already.

    Args:
        q_BNSH: (B, N, S, H) queries.
        k_BNSH: (B, N, S, H) keys.
        v_BNSH: (B, N, S, H) values.
        allowed: bool mask.
        dropout: probability of dropping an attention probability; 0 outside training.

    Returns:
        (B, N, S, H) in q's dtype.
    """
    trains = torch.is_grad_enabled() and q_BNSH.requires_grad and not dropout
    if trains and q_BNSH.is_cpu and q_BNSH.dtype == torch.bfloat16 and q_BNSH.shape[-2] <= _SHORT:
        return _ShortRows.apply(  # type: ignore[no-any-return, no-untyped-call]
            q_BNSH, k_BNSH, v_BNSH, allowed
        )
    return F.scaled_dot_product_attention(
        q_BNSH, k_BNSH, v_BNSH, attn_mask=allowed, dropout_p=dropout, scale=1.0
    )


# 21 of 23 ms a layer at 32 x 128 slots went into that backward kernel.
class _ShortRows(torch.autograd.Function):
    """Attention in bf16 on a CPU, as six products of whole rows.

    The backward pass of torch 2.13's kernel for CPUs multiplies blocks in fp32: both passes over
    rows of 128 slots take it three to four times as long. This keeps the probabilities besides,
    which `pipeline.model.cost` does not count.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q_BNSH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, allowed: Tensor
    ) -> Tensor:
        scores_BNSS = raw_scores(q_BNSH, k_BNSH, None).masked_fill_(~allowed, float("-inf"))
        share_BNSS = torch.softmax(scores_BNSS, dim=-1).to(q_BNSH.dtype)
        ctx.save_for_backward(q_BNSH, k_BNSH, v_BNSH, share_BNSS)
        return torch.matmul(share_BNSS, v_BNSH)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, d_out_BNSH: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_BNSH, k_BNSH, v_BNSH, share_BNSS = ctx.saved_tensors
        d_share_BNSS = torch.matmul(d_out_BNSH, v_BNSH.transpose(-1, -2))
        # share * (d_share - sum(share * d_share)), in fp32 inside.
        d_scores_BNSS = torch.ops.aten._softmax_backward_data(
            d_share_BNSS, share_BNSS, -1, share_BNSS.dtype
        )
        return (
            torch.matmul(d_scores_BNSS, k_BNSH),
            torch.matmul(d_scores_BNSS.transpose(-1, -2), q_BNSH),
            torch.matmul(share_BNSS.transpose(-1, -2), d_out_BNSH),
            None,
        )


def raw_scores(q_BNSH: Tensor, k_BNSH: Tensor, carry_BNSS: Tensor | None) -> Tensor:
    """Compute S_l = q k^T + S_(l-1), unmasked, (B, N, S, S).

    It is passed on with its gradient.

    Source: He et al. 2020 (arXiv 2012.11747), section 3; google-research
    `realformer/realformer.py`, residual_attention_layer.

    Queries are scaled; `carry_BNSS` is S_(l-1), None in the first layer.
    """
    # At least fp32, because it is a sum over all layers: the product itself too, of which bf16
    # would keep 8 bits.
    wide = torch.promote_types(q_BNSH.dtype, torch.float32)
    scores_BNSS = torch.matmul(q_BNSH.to(wide), k_BNSH.to(wide).transpose(-1, -2))
    return scores_BNSS if carry_BNSS is None else scores_BNSS + carry_BNSS


def probabilities(scores_BNSS: Tensor, allowed: Tensor, num_summed: Tensor | int) -> Tensor:
    """Compute the softmax over the allowed keys, in the scores' dtype.

    Args:
        scores_BNSS: (B, N, S, S) from `raw_scores`.
        allowed: bool mask, applied here and never carried.
        num_summed: scores are divided by this, a number or 0-dimensional fp32: 1 for the sum,
            l + 1 in layer l for the running mean. The carry itself stays a sum.
    """
    masked_BNSS = (scores_BNSS / num_summed).masked_fill(~allowed, float("-inf"))
    return torch.softmax(masked_BNSS, dim=-1)


def weighted_values(share_BNSS: Tensor, v_BNSH: Tensor, dropout: float) -> Tensor:
    """Multiply probabilities, some of them dropped, by values; (B, N, S, H) in v's dtype."""
    share_BNSS = F.dropout(share_BNSS.to(v_BNSH.dtype), dropout, training=dropout > 0)
    return torch.matmul(share_BNSS, v_BNSH)
