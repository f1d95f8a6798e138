"""The encoder's architecture: every switch that leads from BERT to RealFormer and RoFormerV2."""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from pipeline.config.schema import param
from pipeline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One architecture; the defaults are RoFormerV2 small. `docs/models.md` says where each switch
    comes from, and `configs/model/` holds the named ones.
    """

    SHIPPED: ClassVar = ("model",)

    vocab_size: int | None = param(
        None,
        "rows of the token embedding; null takes the tokenizer's",
        unit="tokens",
        ge=6,
        le=100_000_000,
    )
    num_layers: int = param(6, "encoder layers (attention + feed-forward)", ge=1, le=2_000)
    hidden_size: int = param(384, "width of the residual stream", ge=2, le=1_000_000)
    num_heads: int = param(6, "attention heads; must divide hidden_size", ge=1)
    ffn_size: int = param(1536, "inner width of the feed-forward layer", ge=1, le=10_000_000)
    embedding_size: int | None = param(
        None,
        "width of the embeddings, projected to hidden_size; null takes hidden_size",
        ge=1,
        le=1_000_000,
    )
    type_vocab_size: int = param(2, "rows of the segment embedding", ge=1, le=1_000_000)
    positions: Literal["learned", "rotary", "none"] = param(
        "rotary", "a learned embedding, queries and keys turned by their position, or neither"
    )
    max_positions: int = param(512, "rows of the learned position embedding", ge=1, le=100_000_000)
    position_offset: int = param(0, "row of the first position; RoBERTa's table starts at 2", ge=0)
    rotary_base: float = param(10000.0, "base of the rotary angles, base^(-2i/d)", gt=1)
    rotary_value: bool = param(False, "rotary positions turn values, too; transformers' RoFormer")
    norm_placement: Literal["post", "pre"] = param(
        "post", "x = Norm(x + F(x)), or x = x + F(Norm(x)) with a norm behind the last layer"
    )
    norm: Literal["layernorm", "rmsnorm"] = param(
        "rmsnorm", "normalise mean and variance, or the root of the mean square"
    )
    norm_affine: bool = param(False, "learned gain, and shift in layernorm, of every norm")
    # 1e-12 is that of RoFormerV2's released weights; its later code has 1e-7.
    norm_eps: float = param(1e-12, "added to the variance or mean square", gt=0, lt=1)
    # Before, as RoFormerV2 in bert4keras; BERT has it behind the norm.
    embedding_dropout: Literal["before_norm", "after_norm"] = param(
        "before_norm", "place of the dropout after the embeddings"
    )
    bias: bool = param(False, "of all linear layers of the encoder and of the MLM head")
    activation: Literal["gelu", "gelu_tanh", "relu", "swiglu"] = param(
        "relu", "of the feed-forward; gelu by erf or by its tanh form; swiglu has a third matrix"
    )
    score_residual: Literal["none", "sum", "mean"] = param(
        "none",
        "RealFormer: attend by the attention scores summed over the layers so far (sum), "
        "or by their running mean",
    )
    attention_scale: Literal["sqrt", "entropy_invariant"] = param(
        "sqrt", "scores over sqrt(d), or that times log_512 of the number of keys, 16 at least"
    )
    # DeepNorm in Pre-LN is an error: nothing undoes (2N)^(1/4), and x grows by it in each
    # sub-layer.
    residual: Literal["plain", "deepnorm", "rezero"] = param(
        "plain",
        "x + alpha F(x) with the alpha of train.alpha_warmup_steps (plain), (2N)^(1/4) x + F(x), "
        "or x + g F(x) with one learned g a sub-layer, 0 at first",
    )
    share_layers: bool = param(False, "all layers use the weights of one (ALBERT)")
    mlm_head: Literal["bert", "linear"] = param(
        "linear",
        "dense, activation, norm and the tied embedding with a bias (bert), or dropout and the "
        "tied embedding (linear)",
    )
    pooler: bool = param(False, "tanh layer over the first token, as in BERT; no part of MLM")
    dropout: float = param(
        0.1, "dropout after embeddings and sub-layers, and before a linear head", ge=0, lt=1
    )
    attention_dropout: float = param(0.1, "dropout on attention probabilities", ge=0, lt=1)
    init: Literal["unit", "rsqrt_depth", "bert", "deepnorm"] = param(
        "rsqrt_depth",
        "1/sqrt(fan_in) (unit), that times num_layers^(-1/2) (rsqrt_depth), a normal of 0.02 cut "
        "at 0.04 (bert), or Xavier with DeepNorm's gains (deepnorm)",
    )

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"model.hidden_size={self.hidden_size} must be a multiple of "
                f"model.num_heads={self.num_heads}; change one of the two"
            )
        if self.positions == "rotary" and self.head_size % 2:
            raise ConfigError(
                f"model.hidden_size={self.hidden_size} must be model.num_heads={self.num_heads} "
                "times an even head size (rotary positions turn pairs of coordinates); "
                "change one of the two"
            )
        if self.rotary_value and self.positions != "rotary":
            raise ConfigError(
                f"model.rotary_value=true needs model.positions=rotary, got {self.positions}; "
                "set it, or model.rotary_value=false"
            )
        if self.residual == "deepnorm" and self.norm_placement == "pre":
            raise ConfigError(
                "model.residual=deepnorm must stand with model.norm_placement=post: without a norm "
                f"behind it, x would grow by {(2 * self.num_layers) ** 0.25:.2f} in each of "
                f"{2 * self.num_layers} sub-layers; set model.residual=plain, and another "
                "model.init than deepnorm"
            )
        if self.position_offset >= self.max_positions:
            raise ConfigError(
                f"model.position_offset={self.position_offset} must be below model.max_positions="
                f"{self.max_positions}: no row is left for the first token"
            )

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def embedding_width(self) -> int:
        """Width of the embeddings."""
        return self.embedding_size or self.hidden_size

    @property
    def num_distinct_layers(self) -> int:
        """Layers with weights of their own."""
        return 1 if self.share_layers else self.num_layers

    @property
    def longest_document(self) -> int | None:
        """Most tokens with positions of their own; None without a limit."""
        return self.max_positions - self.position_offset if self.positions == "learned" else None


DEFAULTS: dict[str, Any] = {**asdict(ModelConfig()), "vocab_size": 30522}
"""Values of a config of transformers that names none; the vocabulary's size is BERT's, as there."""
