"""The encoder's architecture."""

from dataclasses import dataclass
from typing import Literal

from pipeline.config.schema import param
from pipeline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """RoFormerV2, with RealFormer's score residual as a switch; defaults are the small size.

    Source: RoFormerV2 as in bojone/bert4keras `bert4keras/models.py` class RoFormerV2; score
    residual as in google-research `realformer/realformer.py`.
    """

    vocab_size: int | None = param(
        None, "rows of the token embedding; null takes the tokenizer's", unit="tokens", ge=6
    )
    num_layers: int = param(6, "encoder layers (attention + feed-forward)", ge=1)
    hidden_size: int = param(384, "width of the residual stream", ge=2)
    num_heads: int = param(6, "attention heads; must divide hidden_size into even parts", ge=1)
    ffn_size: int = param(1536, "inner width of the feed-forward layer", ge=1)
    type_vocab_size: int = param(2, "rows of the segment embedding", ge=1)
    score_residual: Literal["none", "sum"] = param(
        "none", "RealFormer: add the raw attention scores of the layer below (sum) or not (none)"
    )
    rotary_base: float = param(10000.0, "base of the rotary angles, base^(-2i/d)", gt=1)
    norm_eps: float = param(1e-12, "added to the mean square in RMSNorm", gt=0, lt=1)
    dropout: float = param(0.1, "dropout after embeddings and sub-layers, and before the head",
                           ge=0, lt=1)  # fmt: skip
    attention_dropout: float = param(0.1, "dropout on attention probabilities", ge=0, lt=1)
    init: Literal["unit", "rsqrt_depth"] = param(
        "rsqrt_depth",
        "gain of the 1/sqrt(fan_in) initialisation: 1 (unit) or num_layers^(-1/2) (rsqrt_depth)",
    )

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads or self.head_size % 2:
            raise ConfigError(
                f"model.hidden_size={self.hidden_size} must be model.num_heads={self.num_heads} "
                "times an even head size (rotary positions turn pairs of coordinates); "
                "change one of the two"
            )

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads
