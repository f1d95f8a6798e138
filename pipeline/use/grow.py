"""`postnorm grow`: a trained model as the start of a wider or deeper one.

Doubling the width changes nothing the model computes. Hidden states become pairs of equal
coordinates, which norms keep; heads are doubled, not widened, so that rotary angles stay the same;
and every matrix that reads a doubled input is halved. Where that norm has none, the embeddings are,
whose norm forgets their scale but for eps, which is then divided by 4. Logits before and after are
compared in float64. Stacking layers is not an identity, but a start (Gong et al. 2019, "Efficient
Training of BERT by Progressively Stacking"); how far it moves logits is reported.

Source of the recipe: Su, kexue.fm/archives/8444, who spreads factors of 2^(-1/2) over norms, biases
and matrices. Here all of it stands at the last norm, so that no other norm sees another variance
beside its eps. Shapes: D hidden size, N heads, H head size, F inner width, E embedding width.
"""

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.config.model import ModelConfig
from pipeline.errors import ConfigError
from pipeline.use.convert import HEAD_BIAS
from pipeline.use.folder import (
    MADE_NEW,
    OPTIMIZER,
    build_model,
    has_head,
    probe_logits,
    publishing,
    require_full_alpha,
    write_model,
    write_tokenizer,
)
from pipeline.use.foreign_config import SENTENCES
from pipeline.use.source import load_source

_OF_EMBEDDING_WIDTH = (
    "encoder.token_embedding",
    "encoder.segment_embedding",
    "encoder.position_embedding",
    "encoder.embedding_norm",
    "head_norm",
)
_TOLERANCE = 1e-6
"""Largest difference of a doubled model's logits, in their standard deviations, in float64."""


@dataclass(frozen=True)
class GrowReport:
    """The larger model, and the size of the smaller one."""

    config: ModelConfig
    num_parameters_before: int
    num_parameters: int
    notes: list[str]
    """What width, depth and noise did to logits of a fixed input, in words."""


def grow(
    source: str | Path, out: Path, *, width: int, depth: int | None, noise: float, seed: int
) -> GrowReport:
    """Write a larger model folder.

    `width`, a power of 2, is a factor on hidden size, heads and inner width; `depth` is a multiple
    of the layers there are.

    Raises:
        ConfigError: an argument is out of range, or doubling would change logits.
        CheckpointError: there is nothing to grow, or `out` cannot be written.
    """
    if width < 1 or width & (width - 1):
        raise ConfigError(f"--width {width} must be 1 or a power of 2")
    if not noise >= 0:
        raise ConfigError(f"--noise {noise} must be at least 0")
    trained = load_source(source)
    require_full_alpha(trained, source, "a grown model has alpha 1")
    config, weights = trained.model.config, dict(trained.model.state_dict())
    before = sum(parameter.numel() for parameter in trained.model.parameters())
    expected, notes = _logits(config, weights), list[str]()
    # First, because doubling may halve the last layer's norm, of which there would be copies.
    if depth is not None:
        config, weights = stack(config, weights, depth)
        if config.num_layers > trained.model.config.num_layers:
            moved = _difference(config, weights, expected)
            notes.append(
                f"depth {depth}: another function, logits are up to {moved:.2g} standard "
                "deviations apart; train it before use"
            )
            expected = _logits(config, weights)
    for _ in range(width.bit_length() - 1):
        config, weights = double_width(config, weights)
        config, note = _require_same(config, weights, expected)
        notes.append(f"width {config.hidden_size}: {note}")
    # Without it the doubled units would learn the same for ever.
    if noise:
        weights = _with_noise(weights, noise, seed)
        moved = _difference(config, weights, expected)
        notes.append(f"noise {noise:g}: with it logits are up to {moved:.2g} deviations apart")
    elif width > 1:
        notes.append("noise 0: doubled units learn the same; to train it, give --noise 0.01")
    if trained.parts is not None or has_head(source):
        notes.append("encoder alone: a head, generator or other part that it had is left out")
    model = build_model(config, weights, str(source))
    facts: dict[str, Any] = {
        "grown_from": {
            "path": Path(source).name,
            "model": asdict(trained.model.config),
            "noise": noise,
            "seed": seed,
        },
        OPTIMIZER: trained.facts.get(OPTIMIZER),
    }
    facts |= {name: trained.facts[name] for name in (MADE_NEW, SENTENCES) if name in trained.facts}
    with publishing(out) as folder:
        write_tokenizer(trained, folder)
        write_model(folder, config, weights, facts)
    return GrowReport(config, before, sum(p.numel() for p in model.parameters()), notes)


def _logits(config: ModelConfig, weights: dict[str, Tensor]) -> Tensor:
    return probe_logits(build_model(config, weights, "the grown model").double())


def _difference(config: ModelConfig, weights: dict[str, Tensor], expected: Tensor) -> float:
    """Return the largest difference of logits, in standard deviations of the expected ones."""
    found = _logits(config, weights)
    return float((found - expected).abs().max() / expected.std())


def _require_same(
    config: ModelConfig, weights: dict[str, Tensor], expected: Tensor
) -> tuple[ModelConfig, str]:
    """Return the config with which a doubled model computes what it did before, and a note.

    Raises:
        ConfigError: there is none.
    """
    repaired = replace(config, norm_eps=config.norm_eps / 4)
    differences = []
    for tried in (config, repaired):
        differences.append(_difference(tried, weights, expected))
        if differences[-1] <= _TOLERANCE:
            eps = "" if tried is config else f", with norm_eps={tried.norm_eps:.3g} for the same"
            return tried, f"logits at most {differences[-1]:.1e} standard deviations apart{eps}"
    raise ConfigError(
        f"doubled to a width of {config.hidden_size}, logits differ by {differences[0]:.2g} "
        f"standard deviations, and by {differences[1]:.2g} with norm_eps={repaired.norm_eps:.3g}; "
        f"expected {_TOLERANCE:g} at most. Halved embeddings are too small beside norm_eps="
        f"{config.norm_eps:.3g}: take a model with gains (norm_affine), or a smaller norm_eps"
    )


def double_width(
    config: ModelConfig, weights: dict[str, Tensor]
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Double the width; logits stay the same, up to eps where embeddings are halved."""
    last = _last_norm(config)
    factorised = config.embedding_width != config.hidden_size
    grown = {name: _doubled(name, tensor, config, last) for name, tensor in weights.items()}
    return replace(
        config,
        hidden_size=2 * config.hidden_size,
        num_heads=2 * config.num_heads,
        ffn_size=2 * config.ffn_size,
        embedding_size=config.embedding_size if factorised else None,
    ), grown


# The half of a doubling stands here, so that it is exact for any epsilon. RMSNorm without a gain
# halves the embeddings, and norm_eps is divided by 4 where that is seen.
def _last_norm(config: ModelConfig) -> str | None:
    """Name the norm whose result the tied output reads; None if it cannot be halved alone."""
    if not config.norm_affine:
        return None
    if config.mlm_head == "bert":
        return "head_norm"
    if config.norm_placement == "pre":
        return "encoder.final_norm"
    if config.share_layers and config.num_layers > 1:
        return None
    return f"encoder.layers.{config.num_layers - 1}.feed_forward_norm"


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


def _doubled(name: str, weight: Tensor, config: ModelConfig, last: str | None) -> Tensor:
    """Double one parameter; the last dimension of a matrix is its input."""
    module, _, kind = name.rpartition(".")
    if name == HEAD_BIAS or kind == "gain":
        return weight
    # Factorised embeddings stay as they are: only their projection and the head's matrix grow.
    factorised = config.embedding_width != config.hidden_size
    if factorised and module in _OF_EMBEDDING_WIDTH:
        return weight
    if module.endswith("_embedding"):
        return weight.repeat_interleave(2, dim=-1) / (2 if last is None else 1)
    if module.endswith("_norm"):
        # The tied output would count each pair twice: gain and shift of the norm before it are
        # halved.
        halves = module == last and not factorised
        return weight.repeat_interleave(2) / (2 if halves else 1)
    if module.endswith("attention.qkv"):
        heads = weight.view(3, config.num_heads, -1, *weight.shape[1:])
        weight = heads.repeat_interleave(2, dim=1).flatten(0, 2)
    elif not (factorised and module == "head_dense"):
        weight = weight.repeat_interleave(2, dim=0)
    if kind == "bias" or module == "encoder.embedding_projection":
        return weight
    if module.endswith("attention.output"):
        heads = weight.view(len(weight), config.num_heads, -1)
        return heads.repeat_interleave(2, dim=1).flatten(1) / 2
    # Pairs of equal inputs would count twice. The pooler reads what may be halved already.
    is_halved = last is not None and last.startswith("encoder.") and not factorised
    scale = 1 if module == "encoder.pooler" and is_halved else 2
    return weight.repeat_interleave(2, dim=-1) / scale


def _with_noise(weights: dict[str, Tensor], noise: float, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    noisy = {}
    for name, weight in weights.items():
        drawn = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        noisy[name] = weight + noise * weight.std() * drawn if weight.ndim == 2 else weight
    return noisy
