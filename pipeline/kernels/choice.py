"""The one place that decides which attention computes carried scores."""

import logging
from importlib.util import find_spec
from typing import Literal

import torch

from pipeline.errors import ConfigError
from pipeline.kernels.windows import HEAD_SIZES

logger = logging.getLogger(__name__)

OLDEST_GPU = (8, 0)
"""Compute capability; before it there are no bf16 matrix instructions."""


def takes_fused(
    asked: Literal["auto", "reference", "fused"],
    *,
    carries: bool,
    head_size: int,
    precision: str,
    device: torch.device,
) -> bool:
    """Whether `carried` is used, or the plain PyTorch of `attention`; logs it.

    Args:
        asked: `train.attention`; `auto` takes the fused kernels on a GPU where they can run.
        carries: whether the model carries scores; if not, torch's own attention is used anyway.
        head_size: of the model.
        precision: `bf16`, or `fp32`, for which the kernels are right and not fast: `auto` leaves
            it to PyTorch.
        device: where it runs.

    Raises:
        ConfigError: the fused kernels are asked for and cannot run.
    """
    obstacle = _obstacle(carries, head_size, device, interpreting=asked == "fused")
    if asked == "fused" and obstacle:
        raise ConfigError(f"train.attention=fused: {obstacle}; set train.attention=auto")
    if asked == "auto" and obstacle is None and precision == "fp32":
        obstacle = "train.precision=fp32, the kernels' tiles are for bf16"
    fused = asked != "reference" and obstacle is None
    reason = obstacle if asked == "auto" and obstacle else f"train.attention={asked}"
    logger.info("attention: %s (%s)", "fused kernels" if fused else "PyTorch", reason)
    return fused


def _obstacle(
    carries: bool, head_size: int, device: torch.device, *, interpreting: bool
) -> str | None:
    """Why the fused kernels cannot run, None if they can; the interpreter is for tests."""
    if not carries:
        return "model.score_residual=none carries no scores, torch's own attention computes it"
    if head_size not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        return f"model.hidden_size over model.num_heads is {head_size}, expected one of {sizes}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device.type != "cuda":
        return None if interpreting and _is_interpreted() else f"the device is {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_GPU:
        return f"this GPU has compute capability {capability[0]}.{capability[1]}, expected 8.0"
    return None


def _is_interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)
