"""Decides which implementations compute a step, and holds the sizes that fused kernels take.

Importable without torch: plans of runs ask, too.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from pipeline.config.model import ModelConfig
from pipeline.config.train import Implementation, KernelsConfig
from pipeline.errors import ConfigError
from pipeline.runtime import log

if TYPE_CHECKING:
    import torch
    from torch import Tensor

logger = logging.getLogger(__name__)

HEAD_SIZES = (32, 64, 128)
"""Head sizes of the kernels of attention by carried scores."""
WINDOW_LIMIT = 128
"""Longest window that is one tile."""
OLDEST_GPU = (8, 0)
"""Least compute capability; earlier GPUs have no bf16 matrix instructions."""
NORM_MULTIPLE = 8
"""Divides the hidden sizes of the fused residual and norm: 16 bytes of bf16."""
NORM_LIMIT = 4096
"""Largest hidden size of the fused residual and norm."""
# Largest head of torch's flash attention.
_FLASH_LIMIT = 256


class Windows(NamedTuple):
    """The tokens that each token sees: an interval of its window."""

    spans: Tensor
    """(T, 4) int32: first and one past the last key that a token sees, then the same of the queries
    that see it. Both lie inside its window; equal numbers are an empty interval."""
    bounds: Tensor
    """(B + 1,) int32: 0, then the end of each window, the last of them T; no window is empty."""
    longest: int
    """Tokens of the longest window, or more."""


def padded_width(longest: int) -> int:
    """Return W, a whole number of tiles."""
    # Whole tiles: no tile of scores needs a mask on its columns.
    if longest > WINDOW_LIMIT:
        return -(-longest // WINDOW_LIMIT) * WINDOW_LIMIT
    return next(width for width in (16, 32, 64, WINDOW_LIMIT) if longest <= width)


class Choice(NamedTuple):
    """Whether fused kernels compute a part; otherwise plain PyTorch does."""

    attention: bool = False
    residual_norm: bool = False
    loss: bool = False


REFERENCE = Choice()


def choose(
    asked: KernelsConfig, model: ModelConfig, precision: str, device: torch.device
) -> Choice:
    """Decide which parts fused kernels compute, and log it.

    The kernels are correct but slow in fp32, so `auto` then means PyTorch.

    Raises:
        ConfigError: fused kernels are asked for and cannot run.
    """
    triton = _for_triton(device)
    flash = triton
    if model.score_residual == "none":
        # Which needs Triton for what is turned and scaled on the way.
        turns = model.positions == "rotary" or model.attention_scale == "entropy_invariant"
        turns &= model.head_size in HEAD_SIZES
        flash = _for_flash(device) or (triton if turns else None)
    attention = _for_attention(model, precision) or flash
    norm = residual_norm_obstacle(model) or triton
    return Choice(
        attention=_takes("attention", asked.attention, attention, precision),
        residual_norm=_takes("residual_norm", asked.residual_norm, norm, precision),
        loss=_takes("loss", asked.loss, triton, precision),
    )


def expected_on_gpu(asked: KernelsConfig, model: ModelConfig, precision: str) -> Choice:
    """Return what `choose` decides on a GPU that runs all kernels; for plans, without torch."""
    attention, norm = _for_attention(model, precision), residual_norm_obstacle(model)
    return Choice(
        attention=_is_fused(asked.attention, attention, precision),
        residual_norm=_is_fused(asked.residual_norm, norm, precision),
        loss=_is_fused(asked.loss, None, precision),
    )


def require_residual_norm(model: ModelConfig) -> None:
    """Check that the fused residual and norm fits a model (ConfigError: it does not)."""
    if obstacle := residual_norm_obstacle(model):
        raise ConfigError(f"no fused residual and norm for this model: {obstacle}")


def _is_fused(asked: Implementation, obstacle: str | None, precision: str) -> bool:
    return obstacle is None and (asked == "fused" or (asked == "auto" and precision != "fp32"))


def _takes(part: str, asked: Implementation, obstacle: str | None, precision: str) -> bool:
    if asked == "fused" and obstacle:
        raise ConfigError(f"kernels.{part}=fused: {obstacle}; set kernels.{part}=auto")
    reason = f"kernels.{part}={asked}"
    fused = _is_fused(asked, obstacle, precision)
    if asked == "auto" and not fused:
        reason = obstacle or "train.precision=fp32, the kernels are tuned for bf16"
    name = part.replace("_", " and ")
    text = "%s: %s (%s)"
    logger.info(text, name, "fused kernels" if fused else "PyTorch", reason, extra=log.ASIDE)
    return fused


def _for_attention(model: ModelConfig, precision: str) -> str | None:
    """Return why no device has fused attention for this model; None if one has."""
    if model.score_residual == "none":
        if precision == "fp32":
            return "train.precision=fp32, flash attention takes bf16"
        if model.head_size % 8 == 0 and model.head_size <= _FLASH_LIMIT:
            return None
        return (
            f"model.hidden_size over model.num_heads is {model.head_size}, flash attention takes "
            f"multiples of 8 up to {_FLASH_LIMIT}"
        )
    if model.head_size not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        return (
            f"model.hidden_size over model.num_heads is {model.head_size}, expected one of {sizes}"
        )
    return None


def residual_norm_obstacle(model: ModelConfig) -> str | None:
    """Return why there is no fused residual and norm for an encoder; None if there is one."""
    found = (model.norm, model.norm_affine, model.norm_placement, model.residual == "rezero")
    if found == ("rmsnorm", False, "post", False):
        if model.hidden_size % NORM_MULTIPLE == 0 and model.hidden_size <= NORM_LIMIT:
            return None
        return (
            f"model.hidden_size={model.hidden_size}, expected a multiple of {NORM_MULTIPLE} up to "
            f"{NORM_LIMIT}"
        )
    return (
        f"model.norm={model.norm}, norm_affine={model.norm_affine}, norm_placement="
        f"{model.norm_placement}, residual={model.residual}; the kernel is for rmsnorm without "
        "gain, post, and any residual but rezero"
    )


def _for_flash(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"the device is {device.type}, flash attention over documents is for GPUs"
    return _for_gpu(device)


def _for_triton(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cuda":
        if too_old := _for_gpu(device):
            return too_old
    elif not _is_interpreted():
        return f"the device is {device.type}"
    from pipeline.kernels.common_triton import try_triton

    try:
        try_triton(device)
    except Exception as error:  # noqa: BLE001 - it fails in many ways, and none may end a run
        text = str(error).strip().partition("\n")[0]
        return f"Triton cannot run a kernel here: {type(error).__name__}: {text}"
    return None


def _for_gpu(device: torch.device) -> str | None:
    import torch

    capability = torch.cuda.get_device_capability(device)
    if capability >= OLDEST_GPU:
        return None
    return f"this GPU has compute capability {capability[0]}.{capability[1]}, expected 8.0"


def _is_interpreted() -> bool:
    """Return whether Triton interprets kernels on the CPU, as in tests."""
    import triton

    return bool(triton.knobs.runtime.interpret)
