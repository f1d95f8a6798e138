"""The encoder, composed of the switches of `ModelConfig`, and the masked language model on it.

Where each switch comes from is told in `docs/models.md`. Shapes: tokens lie in rows (B, S) or end
to end (T,), written `...` where both fit; D hidden size, E embedding width, N heads, H head size,
M masked positions, V vocabulary.

Initialisation is `ModelConfig.init`. A truncated normal is cut at twice the standard deviation of
the normal it is cut from.

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
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeline.config.model import ModelConfig
from pipeline.kernels.choose import require_residual_norm
from pipeline.kernels.loss import vocabulary_loss
from pipeline.model.layers import (
    Layer,
    SelfAttention,
    SharedInputs,
    Trace,
    activate,
    make_norm,
    rotary_tables,
    run_layer,
)
from pipeline.model.layout import Layout

# A normal cut at two standard deviations keeps 0.87962566 of its standard deviation.
# Cut at two of its own deviations; `torch.nn.init.trunc_normal_` cuts at an absolute 2.
_CUT_CORRECTION = 1.0 / 0.8796256610342398
_BERT_STD = 0.02


def initialise(module: nn.Module, config: ModelConfig) -> None:
    """Initialise all embeddings and linear layers below `module`, in place.

    Norms and ReZero's gains start as they are made: gain 1, shift 0, and 0.
    """
    for name, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.Linear)):
            initialise_matrix(name, child, config)
        if isinstance(child, nn.Linear) and child.bias is not None:
            nn.init.zeros_(child.bias)


def initialise_matrix(name: str, module: nn.Embedding | nn.Linear, config: ModelConfig) -> None:
    """Initialise the weight of one module, in place; the end of its name says what it is."""
    for part, gain in _parts(name, module.weight, config):
        std = _std(part, gain, config, isinstance(module, nn.Embedding))
        # torch's default cut is an absolute 2, which does not cut small deviations at all.
        nn.init.trunc_normal_(part, std=std, a=-2 * std, b=2 * std)


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


LayerRunner = Callable[
    [nn.Module, Tensor, SharedInputs, Tensor | None, Tensor], tuple[Tensor, Tensor | None]
]
"""As `run_layer`."""


class Encoder(nn.Module):
    """Token ids to hidden states.

    Attributes:
        alpha: 0-dimensional fp32 buffer, the scale of the residual branches; see `set_alpha`.
    """

    def __init__(self, config: ModelConfig, *, embeds: bool = True) -> None:
        """Make an encoder and initialises it from torch's random state.

        `config` has `vocab_size` set. One that does not embed has neither tables nor their norm:
        it is given what `embed` of another returns.
        """
        super().__init__()
        assert config.vocab_size is not None, "the caller sets the vocabulary size"
        self.config = config
        self._embeds = embeds
        width = config.embedding_width
        if embeds:
            self.token_embedding = nn.Embedding(config.vocab_size, width)
            self.segment_embedding = nn.Embedding(config.type_vocab_size, width)
            if config.positions == "learned":
                self.position_embedding = nn.Embedding(config.max_positions, width)
            self.embedding_norm = make_norm(config, width)
            self.embedding_dropout = nn.Dropout(config.dropout)
        if width != config.hidden_size:
            self.embedding_projection = nn.Linear(width, config.hidden_size, bias=config.bias)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_distinct_layers))
        if config.norm_placement == "pre":
            self.final_norm = make_norm(config, config.hidden_size)
        if config.pooler:
            self.pooler = nn.Linear(config.hidden_size, config.hidden_size)
        initialise(self, config)
        # Not part of a checkpoint: alpha follows from the step. On the CPU whatever the default
        # device is: a model made on "meta" gets its weights later, but nobody gives it an alpha.
        self.alpha: Tensor
        self.register_buffer("alpha", torch.ones((), device="cpu"), persistent=False)
        self._group_size: int | None = None
        self._runner: LayerRunner = run_layer
        self._fuses = False
        self._fuses_norms = False

    def set_alpha(self, value: float) -> None:
        """Set the scale of the residual branches for the passes that follow.

        Source: Su 2020, kexue.fm/archives/8620; 1 after the warm-up and wherever none was trained.
        """
        # In place: compiled layers have the tensor as an input, a new one would be a new graph.
        self.alpha.fill_(value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Encoder":
        # `.to(bfloat16)` casts buffers, too; 8 bits cannot hold the alpha of a long warm-up.
        wide = self.alpha
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.alpha.dtype != torch.float32:
            self.alpha = wide.to(self.alpha.device)
        return self

    # Carried scores are the input of each group, so pairs need less than single layers: RealFormer
    # base, 8 x 512 tokens, 3452 MiB without, 1450, 1122 and 1202 with groups of 1, 2 and 3; fused
    # 1847, 788, 614, 657 (`cost.activation_bytes`).
    def checkpoint_activations(self, group_size: int | None) -> None:
        """Make training passes keep the inputs of groups of layers and not what is inside.

        The backward pass computes a group again, dropout included, so that gradients stay the same
        to the bit. The input of a group is x, and the scores if they are carried.

        The last group may have fewer layers. None keeps everything again.

        Source: Chen et al. 2016 (arXiv 1604.06174), section 4.
        """
        self._group_size = group_size

    def run_layers_by(self, runner: LayerRunner) -> None:
        """Make passes without a trace call layers through `runner`, such as a compiled one."""
        self._runner = runner

    def fuse_attention(self) -> None:
        """Compute attention by fused kernels, with carried scores or without.

        Not in passes that trace probabilities, nor over layouts that do not say what kernels need.
        """
        self._fuses = True

    def fuse_residual_norms(self) -> None:
        """Compute residual, alpha, dropout and the norm behind them in one fused kernel.

        Raises:
            ConfigError: there is no kernel for this architecture.
        """
        require_residual_norm(self.config)
        self._fuses_norms = True

    def forward(
        self,
        input_ids: Tensor,
        layout: Layout,
        *,
        segments: Tensor | None = None,
        trace: Trace | None = None,
    ) -> Tensor:
        """Encode a batch.

        `input_ids` and `segments` (all 0 when None) are (B, S) or (T,) int64, as the layout has it.
        Floating (..., E) vectors in place of ids are taken for token embeddings, or for the result
        of `embed` if this encoder does not embed. A trace is filled.

        Returns:
            (..., D) in the parameters' dtype.
        """
        x = self.embed(input_ids, layout, segments) if self._embeds else input_ids
        if self.config.embedding_width != self.config.hidden_size:
            x = self.embedding_projection(x)
        traces_probabilities = trace is not None and trace.keep_probabilities
        needed = layout.cu_seqlens if self.config.score_residual == "none" else layout.spans
        shared = SharedInputs(
            layout, self._tables(layout, x), self._query_scale(layout, x), self.alpha,
            self._num_summed(x.device), trace,
            self._fuses and needed is not None and not traces_probabilities,
            self._fuses_norms,
        )  # fmt: skip
        indices = range(self.config.num_layers)
        if self._group_size is None or trace is not None or not torch.is_grad_enabled():
            x, _ = self._run_layers(x, shared, None, indices)
        else:
            carry_BNSS = None
            for first in indices[:: self._group_size]:
                group = indices[first : first + self._group_size]
                x, carry_BNSS = checkpoint(
                    self._run_layers, x, shared, carry_BNSS, group, use_reentrant=False
                )
        if self.config.norm_placement == "pre":
            x = self.final_norm(x)
        if trace is not None:
            trace.hidden.append(x)
        return x

    def pool(self, x_BD: Tensor) -> Tensor:
        """BERT's pooled output of first tokens' (B, D) hidden states; needs `config.pooler`."""
        return torch.tanh(self.pooler(x_BD))

    def _run_layers(
        self, x: Tensor, shared: SharedInputs, carry_BNSS: Tensor | None, which: range
    ) -> tuple[Tensor, Tensor | None]:
        """Some layers, one after another; as `SelfAttention.forward`."""
        run = self._runner if shared.trace is None else run_layer
        for index in which:
            if shared.trace is not None:
                shared.trace.hidden.append(x)
            layer = self.layers[0 if self.config.share_layers else index]
            x, carry_BNSS = run(layer, x, shared, carry_BNSS, shared.num_summed[index])
        return x, carry_BNSS

    def embed(self, input_ids: Tensor, layout: Layout, segments: Tensor | None = None) -> Tensor:
        """Embed a batch, as `forward` does before the projection: (..., E)."""
        tokens = input_ids if input_ids.is_floating_point() else self.token_embedding(input_ids)
        x = tokens + (
            self.segment_embedding.weight[0] if segments is None
            else self.segment_embedding(segments)
        )  # fmt: skip
        if self.config.positions == "learned":
            x = x + self.position_embedding(layout.positions + self.config.position_offset)
        if self.config.embedding_dropout == "before_norm":
            x = self.embedding_norm(self.embedding_dropout(x))
        else:
            x = self.embedding_dropout(self.embedding_norm(x))
        return x  # type: ignore[no-any-return]

    def _tables(self, layout: Layout, x: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.config.positions != "rotary":
            return None
        base = self.config.rotary_base
        return rotary_tables(layout.positions, self.config.head_size, base, x.dtype)

    # A tensor: a number would make a compiled graph for each layer.
    def _num_summed(self, device: torch.device) -> Tensor:
        counts = torch.arange(1, self.config.num_layers + 1, dtype=torch.float32, device=device)
        return counts if self.config.score_residual == "mean" else torch.ones_like(counts)

    # Of each layer's own scores: the number of keys is the same in every layer, so this is the
    # scale of the carried sum, too; tested against the other form.
    def _query_scale(self, layout: Layout, x: Tensor) -> Tensor | float:
        """1/sqrt(d), or that times log_512 of the number of keys (kexue.fm/archives/8823)."""
        scale = 1.0 / math.sqrt(self.config.head_size)
        if self.config.attention_scale == "sqrt":
            return scale
        # The floor of 16 is bert4keras' (`bert4keras/backend.py`, softmax_plus).
        num_keys = layout.num_keys().clamp(min=16).to(torch.promote_types(x.dtype, torch.float32))
        return (scale * num_keys.log() / math.log(512))[..., None, None].to(x.dtype)


class EncoderModel(nn.Module):
    """An encoder with heads: what an objective trains."""

    config: ModelConfig
    encoder: Encoder

    @property
    def encoders(self) -> tuple[Encoder, ...]:
        """All encoders that a forward pass runs; the first is the one that is kept."""
        return (self.encoder,)

    def set_alpha(self, value: float) -> None:
        """Set the alpha of all encoders, as `Encoder.set_alpha`."""
        for encoder in self.encoders:
            encoder.set_alpha(value)

    def go_on_with(self, config: ModelConfig) -> None:
        """Take over the rotary base and the dropouts of a config, which shape no parameter."""

        def changed(own: ModelConfig) -> ModelConfig:
            return replace(
                own,
                rotary_base=config.rotary_base,
                dropout=config.dropout,
                attention_dropout=config.attention_dropout,
            )

        self.config = changed(self.config)
        for encoder in self.encoders:
            encoder.config = changed(encoder.config)
            for module in encoder.modules():
                if isinstance(module, nn.Dropout):
                    module.p = config.dropout
                elif isinstance(module, SelfAttention):
                    module.dropout = config.attention_dropout
        # The head of a task has a dropout of its own, which the model's config does not say.
        for name, module in self.named_modules():
            if isinstance(module, nn.Dropout) and name.endswith("head_dropout"):
                module.p = config.dropout

    def fuse_loss(self) -> None:
        """Compute losses over the vocabulary by the fused kernel."""
        raise NotImplementedError

    def head(self, x_MD: Tensor) -> Tensor:
        """(M, V) logits of (M, D) hidden states."""
        raise NotImplementedError


class MaskedHead(nn.Module):
    """What gives a module an MLM head, whose output matrix is the token embedding."""

    # A `ModelConfig`; transformers evaluates annotations where exported files have no such name.
    config: Any

    def make_head(self) -> None:
        """Make and initialise the parameters whose names begin with `head_`."""
        config = self.config
        width = config.embedding_width
        if config.mlm_head == "bert":
            self.head_dense = nn.Linear(config.hidden_size, width, bias=config.bias)
            self.head_norm = make_norm(config, width)
            zeros = torch.zeros(config.vocab_size or 0)
            self.head_bias = nn.Parameter(zeros) if config.bias else None
            initialise(self.head_dense, config)
        else:
            self.head_dropout = nn.Dropout(config.dropout)
            if width != config.hidden_size:
                self.head_dense = nn.Linear(config.hidden_size, width, bias=config.bias)
                initialise(self.head_dense, config)

    def project(self, x_MD: Tensor, weight_VE: Tensor) -> Tensor:
        """(M, V) logits of (M, D) hidden states."""
        return F.linear(self._before_output(x_MD), weight_VE, self._output_bias())

    def _before_output(self, x_MD: Tensor) -> Tensor:
        """(M, E)."""
        if self.config.mlm_head == "bert":
            # Where the feed-forward has a gate, the head has BERT's activation.
            activation = "gelu" if self.config.activation == "swiglu" else self.config.activation
            x_ME = activate(self.head_dense(x_MD), activation)
            return self.head_norm(x_ME)  # type: ignore[no-any-return]
        if self.config.embedding_width != self.config.hidden_size:
            x_MD = self.head_dense(x_MD)
        return self.head_dropout(x_MD)  # type: ignore[no-any-return]

    def _output_bias(self) -> Tensor | None:
        """(V,)."""
        return self.head_bias if self.config.mlm_head == "bert" else None


class MaskedLanguageModel(EncoderModel, MaskedHead):
    """Encoder with an MLM head whose output matrix is the token embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.make_head()
        self._fuses_loss = False

    def fuse_loss(self) -> None:
        """Compute cross-entropies by the fused kernel."""
        self._fuses_loss = True

    def forward(
        self,
        input_ids: Tensor,
        layout: Layout,
        masked_index: Tensor,
        segments: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Losses or logits of chosen positions only; no (B, S, V) tensor is made.

        Args:
            input_ids: as in `Encoder.forward`.
            layout: as in `Encoder.forward`.
            masked_index: (M,) int64 numbers of tokens, b * S + s in rows.
            segments: as in `Encoder.forward`.
            targets: (M,) int64 original token ids.

        Returns:
            With targets, the sum of losses and the number of hits, as `vocabulary_loss`, which
            makes no (M, V) tensor either. Without, logits (M, V) in the parameters' dtype.
        """
        x = self.encoder(input_ids, layout, segments=segments)
        x_MD = x.reshape(-1, self.config.hidden_size)[masked_index]
        return self.head(x_MD) if targets is None else self.token_loss(x_MD, targets)

    def token_loss(self, x_MD: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of losses and number of hits of (M, D) hidden states; as `vocabulary_loss`."""
        return vocabulary_loss(
            self._before_output(x_MD),
            self.encoder.token_embedding.weight,
            self._output_bias(),
            targets,
            fused=self._fuses_loss,
        )

    def head(self, x_MD: Tensor) -> Tensor:
        """(M, V) logits of (M, D) hidden states."""
        return self.project(x_MD, self.encoder.token_embedding.weight)


def without_storage(config: ModelConfig) -> EncoderModel:
    """Make a model that has names and shapes but no weights yet, as model folders hold it."""
    with torch.device("meta"):
        return MaskedLanguageModel(config)


def fresh_head(config: ModelConfig) -> dict[str, Tensor]:
    """Initialise the parameters of an MLM head alone, each time the same."""
    # A copy of the random state: a conversion must not change what is drawn after it.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        head = without_storage(config)
        assert isinstance(head, MaskedHead)
        head.make_head()
    return {name: each for name, each in head.state_dict().items() if not each.is_meta}
