"""Attention without carried scores over documents end to end, by torch's flash kernel.

A mask over rows keeps torch from its flash kernels and computes what it then throws away; lengths
of documents do neither. `torch.nn.attention.varlen` is the public way to the same kernel, but has
no dropout.
"""

import torch
from torch import Tensor


def flash_attention(
    q_TNH: Tensor,
    k_TNH: Tensor,
    v_TNH: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    dropout: float,
) -> Tensor:
    """softmax(q k^T) v within documents, dropout on the softmax; the queries are scaled already.

    Source of the algorithm: Dao 2023 (arXiv 2307.08691).

    Args:
        q_TNH: bf16 or fp16 queries on a GPU; any strides, the last of them 1.
        k_TNH: keys.
        v_TNH: values.
        cu_seqlens: (D + 1,) int32: 0, then the end of each document, the last of them T. Documents
            may be empty.
        longest: tokens of the longest document, or more.
        dropout: probability of dropping a probability.

    Returns:
        (T, N, H) in q's dtype.
    """
    out_TNH, *_ = torch.ops.aten._flash_attention_forward(
        q_TNH, k_TNH, v_TNH, cu_seqlens, cu_seqlens, longest, longest, dropout,
        False,  # not causal
        False,  # no matrix of probabilities for debugging
        scale=1.0,
    )  # fmt: skip
    return out_TNH  # type: ignore[no-any-return]
