"""`python -m pipeline grow`: a trained model as the start of a wider or deeper one.

Doubling the width changes nothing the model computes. Hidden states become pairs of equal
coordinates, which a norm without gain keeps; heads are doubled, not widened, so that rotary angles
stay the same; and every matrix that reads a doubled input is halved. Stacking layers is no
identity, but a start (Gong et al. 2019, "Efficient Training of BERT by Progressively Stacking").

Source of the idea of repeating coordinates: Su, kexue.fm/archives/8444. Shapes: D hidden size, N
heads, H head size, F inner width.
"""

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.config.model import ModelConfig
from pipeline.errors import ConfigError
from pipeline.use.folder import (
    MADE_NEW,
    build_model,
    copy_tokenizer,
    load_trained,
    publishing,
    require_full_alpha,
    tokenizer_folder,
    write_model,
)

# Doubling is exact only with these values.
_DOUBLES: dict[str, object] = {
    "norm": "rmsnorm",
    "norm_affine": False,
    "bias": False,
    "mlm_head": "linear",
    "pooler": False,
    "embedding_size": None,
}


@dataclass(frozen=True)
class GrowReport:
    """The larger model, and the size of the smaller one."""

    config: ModelConfig
    num_parameters_before: int
    num_parameters: int


def grow(
    source: Path, out: Path, *, width: int, depth: int | None, noise: float, seed: int
) -> GrowReport:
    """Write a larger model folder.

    `width`, a power of 2, is a factor on hidden size, heads and inner width; `depth` is a multiple
    of the layers there are. `noise` is a share of each matrix' own deviation; without it the
    doubled units would learn the same for ever.

    Raises:
        ConfigError: an argument is out of range, or the architecture cannot be doubled.
        CheckpointError: there is nothing to grow, or `out` cannot be written.
    """
    if width < 1 or width & (width - 1):
        raise ConfigError(f"--width {width} must be 1 or a power of 2")
    if not noise >= 0:
        raise ConfigError(f"--noise {noise} must be at least 0")
    trained = load_trained(source)
    require_full_alpha(trained, source, "a grown model has alpha 1")
    config, weights = trained.model.config, dict(trained.model.state_dict())
    before = sum(parameter.numel() for parameter in trained.model.parameters())
    for _ in range(width.bit_length() - 1):
        config, weights = double_width(config, weights)
    if depth is not None:
        config, weights = stack(config, weights, depth)
    if noise:
        weights = _with_noise(weights, noise, seed)
    model = build_model(config, weights, str(source))
    facts: dict[str, Any] = {
        "grown_from": {
            "path": source.name,
            "model": asdict(trained.model.config),
            "noise": noise,
            "seed": seed,
        }
    }
    if MADE_NEW in trained.facts:
        facts[MADE_NEW] = trained.facts[MADE_NEW]
    with publishing(out) as folder:
        write_model(folder, config, weights, facts)
        copy_tokenizer(tokenizer_folder(source), folder)
    return GrowReport(config, before, sum(p.numel() for p in model.parameters()))


def double_width(
    config: ModelConfig, weights: dict[str, Tensor]
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Double the width; logits stay the same up to eps in the first norm.

    Raises:
        ConfigError: the architecture has gains, biases or a head that do not double exactly.
    """
    wrong = {
        name: getattr(config, name)
        for name, value in _DOUBLES.items()
        if getattr(config, name) != value
    }
    if wrong:
        raise ConfigError(
            "width doubles exactly only with "
            + ", ".join(f"{name}={value}" for name, value in _DOUBLES.items())
            + "; this model has "
            + ", ".join(f"{name}={value}" for name, value in wrong.items())
        )
    grown = {name: _doubled(name, tensor, config.num_heads) for name, tensor in weights.items()}
    return replace(
        config,
        hidden_size=2 * config.hidden_size,
        num_heads=2 * config.num_heads,
        ffn_size=2 * config.ffn_size,
    ), grown


def stack(
    config: ModelConfig, weights: dict[str, Tensor], depth: int
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Repeat all layers, in their order, to make a deeper model.

    Raises:
        ConfigError: `depth` is not a multiple of the number of layers.
    """
    times, rest = divmod(depth, config.num_layers)
    if rest or times < 1:
        raise ConfigError(
            f"--depth {depth} must be a multiple of the {config.num_layers} layers there are"
        )
    grown = {}
    for name, tensor in weights.items():
        match = re.fullmatch(r"encoder\.layers\.(\d+)\.(.+)", name)
        if match is None or config.share_layers:
            grown[name] = tensor
            continue
        for number in range(int(match[1]), depth, config.num_layers):
            grown[f"encoder.layers.{number}.{match[2]}"] = tensor.clone()
    return replace(config, num_layers=depth), grown


def _doubled(name: str, weight: Tensor, num_heads: int) -> Tensor:
    """Double one matrix; the last dimension of a weight is its input."""
    if name.endswith("residual.gain"):
        return weight
    # Pairs of equal inputs would count twice; the norm behind an embedding forgets its scale, and
    # the halves make the tied output matrix give the logits of before.
    halved = weight.repeat_interleave(2, dim=-1) / 2
    if "embedding" in name:
        return halved
    if name.endswith("attention.qkv.weight"):
        heads = halved.view(3, num_heads, -1, halved.shape[1])
        return heads.repeat_interleave(2, dim=1).flatten(0, 2)
    if name.endswith("attention.output.weight"):
        heads = weight.view(len(weight), num_heads, -1).repeat_interleave(2, dim=1).flatten(1)
        return heads.repeat_interleave(2, dim=0) / 2
    return halved.repeat_interleave(2, dim=0)


def _with_noise(weights: dict[str, Tensor], noise: float, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    noisy = {}
    for name, weight in weights.items():
        drawn = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        noisy[name] = weight + noise * weight.std() * drawn if weight.ndim == 2 else weight
    return noisy
