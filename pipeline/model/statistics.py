"""What attention looks like: its entropy, and how alike neighbouring layers are.

Falling entropy in every head warns of collapse; with carried scores, layers that all attend alike
are the known danger (He et al. 2020, arXiv 2012.11747, section 5 measures both).
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from pipeline.model.encoder import Encoder
from pipeline.model.layers import Trace
from pipeline.model.layout import Layout


@dataclass(frozen=True)
class AttentionStatistics:
    """Means over real tokens, fp32; L layers, N heads."""

    entropy: Tensor
    """(L, N) nats: 0 looks at one token, log(keys) at all alike."""
    divergence: Tensor
    """(L - 1, N) nats: Jensen-Shannon divergence of a head from the same head one layer below, 0
    for equal attention, log 2 at most."""


@torch.no_grad()
def attention_statistics(
    encoder: Encoder,
    input_ids: Tensor,
    layout: Layout,
    real: Tensor,
) -> AttentionStatistics:
    """Run the encoder once, at the alpha that it has, and measure its attention.

    Args:
        encoder: in evaluation mode if dropout is not wanted in hidden states.
        input_ids: as in `Encoder.forward`.
        layout: as in `Encoder.forward`.
        real: as input_ids, bool: tokens that are no padding.
    """
    trace = Trace()
    encoder(input_ids, layout, trace=trace)
    real_BNS = layout.to_rows(real[..., None, None].float())[..., 0]
    shares = [share.float() for share in trace.probabilities]
    none = torch.zeros(0, encoder.config.num_heads, device=input_ids.device)
    entropy = [_mean(entropy_of(share), real_BNS) for share in shares]
    divergence = [_mean(divergence_of(lower, upper), real_BNS) for lower, upper in pairwise(shares)]
    return AttentionStatistics(
        torch.stack(entropy), torch.stack(divergence) if divergence else none
    )


def entropy_of(share_BNSS: Tensor) -> Tensor:
    """Compute (B, N, S) entropies, in nats, of (B, N, S, S) attention probabilities."""
    terms_BNSS: Tensor = torch.special.xlogy(share_BNSS, share_BNSS)
    return -terms_BNSS.sum(-1)


def divergence_of(first_BNSS: Tensor, second_BNSS: Tensor) -> Tensor:
    """Compute (B, N, S) Jensen-Shannon divergences, in nats, of two (B, N, S, S) attentions."""
    middle_BNSS = (first_BNSS + second_BNSS) / 2
    return entropy_of(middle_BNSS) - (entropy_of(first_BNSS) + entropy_of(second_BNSS)) / 2


def _mean(value_BNS: Tensor, weight_BNS: Tensor) -> Tensor:
    """Compute (N,) weighted means over sequences and slots."""
    return (value_BNS * weight_BNS).sum((0, 2)) / weight_BNS.sum((0, 2))
