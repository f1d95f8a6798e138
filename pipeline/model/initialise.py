"""Initialisation of every matrix.

Truncated normal with standard deviation gain / sqrt(fan_in), cut at twice the standard deviation
of the normal it is cut from; embeddings take the hidden size as fan-in. gain = num_layers^(-1/2) in
the published code ("rsqrt_depth"), 1 in the version of the alpha warm-up ("unit").

Source: bojone/bert4keras `bert4keras/models.py`, RoFormerV2.initializer.
"""

import math

from torch import nn

from pipeline.config.model import ModelConfig

# A normal cut at two standard deviations has 0.87962566 of its standard deviation left.
_CUT_CORRECTION = 1.0 / 0.8796256610342398


def initialise(module: nn.Module, config: ModelConfig) -> None:
    """Initialises all embeddings and linear layers below `module`, in place."""
    gain = config.num_layers**-0.5 if config.init == "rsqrt_depth" else 1.0
    for child in module.modules():
        if isinstance(child, (nn.Embedding, nn.Linear)):
            # Both keep their input width last: (vocabulary, D) and (out, in).
            std = gain / math.sqrt(child.weight.shape[1]) * _CUT_CORRECTION
            nn.init.trunc_normal_(child.weight, std=std, a=-2 * std, b=2 * std)
