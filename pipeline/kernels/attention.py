"""Attention within documents, without and with scores carried from layer to layer.

Shapes: B batch, N heads, S sequence, H head size.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(q_BNSH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, allowed_B1SS: Tensor,
              dropout: float) -> Tensor:  # fmt: skip
    """softmax(q k^T / sqrt(H)) v over the allowed keys.

    Args:
        q_BNSH: (B, N, S, H) queries, already rotated.
        k_BNSH: (B, N, S, H) keys, already rotated.
        v_BNSH: (B, N, S, H) values.
        allowed_B1SS: (B, 1, S, S) bool, true where query (row) may see key (column); every row
            allows at least one key.
        dropout: probability of dropping an attention probability; 0 outside training.

    Returns:
        (B, N, S, H) in q's dtype.
    """
    return F.scaled_dot_product_attention(
        q_BNSH, k_BNSH, v_BNSH, attn_mask=allowed_B1SS, dropout_p=dropout
    )


def score_residual_attention(
    q_BNSH: Tensor,
    k_BNSH: Tensor,
    v_BNSH: Tensor,
    allowed_B1SS: Tensor,
    dropout: float,
    carry_BNSS: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention whose scores are added to those of the layer below.

    S_l = q k^T / sqrt(H) + S_(l-1); output softmax(S_l over the allowed keys) v. S_l is handed on
    unmasked, undropped and with its gradient. It is kept in fp32: it is a sum over all layers.

    Source: He et al. 2020 (arXiv 2012.11747), section 3; google-research
    `realformer/realformer.py`, residual_attention_layer.

    Args:
        q_BNSH: as in `attention`.
        k_BNSH: as in `attention`.
        v_BNSH: as in `attention`.
        allowed_B1SS: as in `attention`.
        dropout: as in `attention`.
        carry_BNSS: (B, N, S, S) fp32 scores of the layer below; None in the first layer.

    Returns:
        (B, N, S, H) in q's dtype, and (B, N, S, S) fp32 scores for the layer above.
    """
    q_BNSH = q_BNSH * (1.0 / math.sqrt(q_BNSH.shape[-1]))
    scores_BNSS = torch.matmul(q_BNSH, k_BNSH.transpose(-1, -2)).to(_carry_dtype(q_BNSH))
    if carry_BNSS is not None:
        scores_BNSS = scores_BNSS + carry_BNSS
    masked_BNSS = scores_BNSS.masked_fill(~allowed_B1SS, float("-inf"))
    share_BNSS = torch.softmax(masked_BNSS, dim=-1).to(v_BNSH.dtype)
    share_BNSS = F.dropout(share_BNSS, dropout, training=dropout > 0)
    return torch.matmul(share_BNSS, v_BNSH), scores_BNSS


def _carry_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
