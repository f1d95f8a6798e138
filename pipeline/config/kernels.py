"""Which implementations compute a step: for speed and for comparisons, never for results."""

from dataclasses import dataclass
from typing import Literal

from pipeline.config.schema import param

Implementation = Literal["auto", "reference", "fused"]


@dataclass(frozen=True, kw_only=True)
class KernelsConfig:
    """Fused kernels or plain PyTorch (reference); auto takes kernels on GPUs that can run them."""

    attention: Implementation = param(
        "auto", "attention: carried scores by our kernels, models without by flash attention over "
        "documents end to end",
    )  # fmt: skip
    residual_norm: Implementation = param(
        "auto", "residual, its alpha and dropout, and the RMSNorm behind it, in one pass"
    )
    loss: Implementation = param("auto", "cross-entropy and its gradient in one pass over logits")
