"""Initialisation of every parameter.

A truncated normal is cut at twice the standard deviation of the normal it is cut from.

    unit         standard deviation 1 / sqrt(fan_in) after the cut; embeddings take their width
    rsqrt_depth  that times num_layers^(-1/2). Source of both: bojone/bert4keras
                 `bert4keras/models.py`, RoFormerV2.initializer (2022-03-20 and 2022-03-30)
    bert         normal of 0.02 cut at 0.04, so 0.0176 after the cut. Source: google-research/bert
                 `modeling.py`, create_initializer
    deepnorm     Xavier, with gain (8N)^(-1/4) for values, attention output and feed-forward, 1 for
                 queries and keys; embeddings as in unit. Source: Wang et al. 2022
                 (arXiv 2203.00555), figure 2, encoder only
"""

import math

import torch
from torch import Tensor, nn

from pipeline.config.model import ModelConfig

# A normal cut at two standard deviations has 0.87962566 of its standard deviation left.
_CUT_CORRECTION = 1.0 / 0.8796256610342398
_BERT_STD = 0.02


def initialise(module: nn.Module, config: ModelConfig) -> None:
    """Initialise all embeddings and linear layers below `module`, in place.

    Norms and ReZero's gains start as they are made: gain 1, shift 0, and 0.
    """
    for name, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.Linear)):
            for part, gain in _parts(name, child.weight, config):
                with torch.no_grad():
                    _fill(part, _std(part, gain, config, isinstance(child, nn.Embedding)))
        if isinstance(child, nn.Linear) and child.bias is not None:
            nn.init.zeros_(child.bias)


def _parts(name: str, weight: Tensor, config: ModelConfig) -> list[tuple[Tensor, float]]:
    """Return the matrices that are stored as one, each with DeepNorm's gain."""
    beta = (8 * config.num_layers) ** -0.25
    if name.endswith("attention.qkv"):
        return list(zip(weight.chunk(3), (1.0, 1.0, beta), strict=True))
    if name.endswith("feed_forward.inner") and config.activation == "swiglu":
        return [(part, beta) for part in weight.chunk(2)]
    in_layer = name.endswith(("attention.output", "feed_forward.inner", "feed_forward.output"))
    return [(weight, beta if in_layer else 1.0)]


def _std(matrix: Tensor, gain: float, config: ModelConfig, is_embedding: bool) -> float:
    """Return the standard deviation of the normal before it is cut."""
    fan_out, fan_in = matrix.shape
    if config.init == "bert":
        return _BERT_STD
    if config.init == "deepnorm" and not is_embedding:
        return gain * math.sqrt(2.0 / (fan_in + fan_out)) * _CUT_CORRECTION
    depth_gain = config.num_layers**-0.5 if config.init == "rsqrt_depth" else 1.0
    # Linear layers and embeddings both keep their input width last.
    return depth_gain / math.sqrt(fan_in) * _CUT_CORRECTION


def _fill(matrix: Tensor, std: float) -> None:
    # torch's default cut is an absolute 2, which is no cut at all for small deviations.
    nn.init.trunc_normal_(matrix, std=std, a=-2 * std, b=2 * std)
