"""One encoder layer and its parts: rotary positions, norms, attention, feed-forward, residual.

Shapes: tokens lie in rows (B, S) or end to end (T,), written `...` where both fit; D hidden size, N
heads, H head size.

Rotary positions are in the interleaved form: coordinates (0, 1), (2, 3), ... turn together. Source:
Su et al. 2021 (arXiv 2104.09864), equation 34; bojone/bert4keras `bert4keras/backend.py`,
apply_rotary_position_embeddings.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.config.model import ModelConfig
from pipeline.kernels.attention import attention, probabilities, raw_scores, weighted_values
from pipeline.kernels.carried import carried_attention
from pipeline.kernels.choose import HEAD_SIZES
from pipeline.kernels.flash import flash_attention
from pipeline.kernels.norm import residual_norm
from pipeline.model.layout import Layout


def rotary_tables(
    positions: Tensor, head_size: int, base: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles position * base^(-2i / head_size).

    They are computed where they are used and are no buffers: a module cast to bf16 casts its
    buffers too, and 8 bits cannot hold an angle.

    `positions` are (...) int64; the base is 10000 in the paper.

    Returns:
        Two (..., 1, H / 2) tables, fp32 at least: one angle for each pair of coordinates.
    """
    exponents = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float64)
    frequencies = base ** (-exponents / head_size)
    # In fp32 the angles of 65,536 positions are up to 0.0024 off.
    angles = positions[..., None, None].double() * frequencies
    wide = torch.promote_types(dtype, torch.float32)
    return angles.cos().to(wide), angles.sin().to(wide)


def rotate(x_NH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn (..., N, H) queries or keys by the angles of `rotary_tables`; keeps dtype."""
    # Neither inductor nor ONNX has complex numbers.
    if torch.compiler.is_compiling() or _is_traced():
        even, odd = _pairs(x_NH.to(cos.dtype)).unbind(-1)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return turned.flatten(-2).to(x_NH.dtype)
    return _Turn.apply(x_NH, cos, sin)  # type: ignore[no-any-return, no-untyped-call]


def _is_traced() -> bool:
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def _pairs(x_NH: Tensor) -> Tensor:
    # Sizes in a reshape would be constants of a traced graph.
    return x_NH.unflatten(-1, (-1, 2))  # type: ignore[no-any-return, no-untyped-call]


# 8.3 to 2.9 ms on a CPU. Compiled code keeps the real formula: inductor has no complex numbers.
class _Turn(torch.autograd.Function):
    """One complex product each way, where autograd makes a dozen passes of the lines above."""

    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(cos, sin)
        # A gradient may come with any strides, and numbers of a pair must be neighbours.
        pairs = torch.view_as_complex(_pairs(x_NH.to(cos.dtype).contiguous()))
        return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2).to(x_NH.dtype)

    @staticmethod
    def backward(ctx: Any, d_turned_NH: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return rotate(d_turned_NH, cos, -sin), None, None


@dataclass
class Trace:
    """Filled by a forward pass that is given one."""

    keep_probabilities: bool = True
    """Whether probabilities are wanted: they cost memory and fused attention."""
    hidden: list[Tensor] = field(default_factory=list)
    """(..., D) after the embeddings, then after each layer."""
    probabilities: list[Tensor] = field(default_factory=list)
    """(B, N, S, S) attention probabilities of each layer, before dropout."""


class SharedInputs(NamedTuple):
    """What all layers of one forward pass share."""

    layout: Layout
    tables: tuple[Tensor, Tensor] | None
    query_scale: Tensor | float
    alpha: Tensor
    """0-dimensional fp32, of the encoder."""
    num_summed: Tensor
    """(L,) fp32: what each layer's scores are divided by, as in `probabilities`."""
    trace: Trace | None
    fused: bool
    """Whether fused kernels compute attention."""
    fused_norm: bool
    """Whether they compute residual, alpha, dropout and the norm behind."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps), times a gain if affine, in fp32 inside.

    Source: Zhang and Sennrich 2019 (arXiv 1910.07467), equation 4.
    """

    def __init__(self, size: int, eps: float, *, affine: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last dimension; keeps shape and dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # Rounded before the gain: a gain in bf16 times fp32 would make everything behind it fp32.
        x = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return x if self.weight is None else x * self.weight


def make_norm(config: ModelConfig, size: int) -> nn.Module:
    """Return the norm that the config asks for."""
    if config.norm == "rmsnorm":
        return RMSNorm(size, config.norm_eps, affine=config.norm_affine)
    return nn.LayerNorm(size, config.norm_eps, elementwise_affine=config.norm_affine)


def activate(x: Tensor, activation: str) -> Tensor:
    """Apply `ModelConfig.activation`; swiglu halves the last dimension.

    Source of swiglu: Shazeer 2020 (arXiv 2002.05202), equation 6.
    """
    if activation == "swiglu":
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value
    if activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


class SelfAttention(nn.Module):
    """Multi-head attention, with RealFormer's carried scores if the config asks for them."""

    def __init__(self, config: ModelConfig) -> None:
        """Make the projections; those of queries, keys and values are one matrix."""
        super().__init__()
        self.num_heads = config.num_heads
        self.score_residual = config.score_residual
        self.turns_values = config.rotary_value
        self.dropout = config.attention_dropout
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=config.bias)
        self.output = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)
        # Numbers of matrices in weights, for optimizers that tell them apart.
        self.hidden_matrices = {"qkv.weight": 3, "output.weight": 1}

    def forward(
        self, x: Tensor, shared: SharedInputs, carry_BNSS: Tensor | None, num_summed: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        `carry_BNSS` are the scores of the layer below, None in the first layer; `num_summed` is
        this layer's of `SharedInputs`.

        Returns:
            (..., D), and the scores for the layer above, None if they are not carried.
        """
        layout = shared.layout
        trace = shared.trace if shared.trace and shared.trace.keep_probabilities else None
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        carries = self.score_residual != "none"
        if shared.fused:
            return self._fused(qkv, shared, carry_BNSS, num_summed)
        q, k, v = self._turned(qkv, shared)
        dropout = self.dropout if self.training else 0.0
        q_BNSH, k_BNSH, v_BNSH = layout.to_rows(q), layout.to_rows(k), layout.to_rows(v)
        if carries or trace is not None:
            scores_BNSS = raw_scores(q_BNSH, k_BNSH, carry_BNSS if carries else None)
            share_BNSS = probabilities(scores_BNSS, layout.allowed, num_summed)
            if trace is not None:
                trace.probabilities.append(share_BNSS)
            context_BNSH = weighted_values(share_BNSS, v_BNSH, dropout)
            # Alpha scales what is added to x, never the carried scores.
            carry_BNSS = scores_BNSS if carries else None
        else:
            context_BNSH = attention(q_BNSH, k_BNSH, v_BNSH, layout.allowed, dropout)
        return self.output(layout.from_rows(context_BNSH)), carry_BNSS

    def _turned(self, qkv: Tensor, shared: SharedInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, turned and scaled, keys and values of (..., 3, N, H)."""
        q, k, v = qkv.unbind(-3)
        if shared.tables is not None:
            q, k = rotate(q, *shared.tables), rotate(k, *shared.tables)
            v = rotate(v, *shared.tables) if self.turns_values else v
        # A query sees as many keys in every layer, so that scaling it by their number commutes
        # with the carry: it is the scale of the sum.
        return q * shared.query_scale, k, v

    def _fused(
        self, qkv: Tensor, shared: SharedInputs, carry_NTW: Tensor | None, num_summed: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the same from (..., 3, N, H) without moving tokens; the carry is the kernels'."""
        layout, angles, token_scale, scale = shared.layout, None, None, 1.0
        if qkv.shape[-1] not in HEAD_SIZES:  # which flash attention takes, and turning does not
            qkv = torch.stack(self._turned(qkv, shared), -3)
        else:
            if isinstance(shared.query_scale, Tensor):
                token_scale = shared.query_scale.flatten()
            else:
                scale = shared.query_scale
            if shared.tables is not None:
                cos, sin = shared.tables
                if self.turns_values:  # the kernels turn queries and keys alone
                    q, k, v = qkv.unbind(-3)
                    qkv = torch.stack((q, k, rotate(v, cos, sin)), -3)
                angles = cos.flatten(0, -2), sin.flatten(0, -2)
        dropout = self.dropout if self.training else 0.0
        if self.score_residual == "none":
            assert layout.cu_seqlens is not None, "the encoder looks"
            carry_NTW = None
            context_TNH = flash_attention(
                qkv.flatten(0, -4), layout.cu_seqlens, layout.allowed.shape[-1], scale=scale,
                angles=angles, token_scale=token_scale, dropout=dropout,
            )  # fmt: skip
        else:
            windows = layout.windows()
            assert windows is not None, "the encoder looks"
            context_TNH, carry_NTW = carried_attention(
                qkv.flatten(0, -4), carry_NTW, windows, scale=scale, angles=angles,
                token_scale=token_scale, num_summed=num_summed, dropout=dropout,
            )  # fmt: skip
        return self.output(context_TNH.view(*qkv.shape[:-3], -1)), carry_NTW


class FeedForward(nn.Module):
    """W2 act(W1 x)."""

    def __init__(self, config: ModelConfig) -> None:
        """Make the projections; swiglu's gate and value are one matrix."""
        super().__init__()
        self.activation = config.activation
        num_inner = 2 if config.activation == "swiglu" else 1
        inner_size = config.ffn_size * num_inner
        self.hidden_matrices = {"inner.weight": num_inner, "output.weight": 1}
        self.inner = nn.Linear(config.hidden_size, inner_size, bias=config.bias)
        self.output = nn.Linear(config.ffn_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Keep shape and dtype of (..., D)."""
        if not torch.compiler.is_compiling():
            return self.output(self._inner(x))  # type: ignore[no-any-return]
        # Of (B, S, D), compiled code keeps which values are above 0 beside them: a byte for each.
        return self.output(self._inner(x.flatten(0, -2))).view_as(x)  # type: ignore[no-any-return]

    def _inner(self, x: Tensor) -> Tensor:
        in_epilogue = self.activation == "relu" and self.inner.bias is None and x.is_cuda
        if in_epilogue and torch.compiler.is_compiling() and x.dtype == torch.bfloat16:
            return _ReluProduct.apply(x, self.inner.weight)  # type: ignore[no-any-return, no-untyped-call]
        return activate(self.inner(x), self.activation)


# Inductor does not fuse a library's product with what follows: 2.8 ms of a step of 109 (base,
# 65,536 tokens, H200).
class _ReluProduct(torch.autograd.Function):
    """relu(x W^T) of (T, D) by cuBLAS's epilogue."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        # Which exists with a bias only.
        bias = weight.new_zeros(weight.shape[0])
        out = torch.ops.aten._addmm_activation(bias, x_TD, weight.t())
        ctx.save_for_backward(x_TD, weight, out)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x_TD, weight, out = ctx.saved_tensors
        d_inner = torch.where(out > 0, d_out, 0.0)
        return d_inner @ weight, d_inner.t() @ x_TD


class Residual(nn.Module):
    """Joins x and a sub-layer's F(x); alpha scales F(x) whatever the rule.

    Sources: alpha, Su 2020 (kexue.fm/archives/8620) and RoFormerV2 (kexue.fm/archives/8998);
    DeepNorm, arXiv 2203.00555, figure 2, encoder only; ReZero, arXiv 2003.04887, equation 1.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        deepnorm = config.residual == "deepnorm"
        self.keep = (2 * config.num_layers) ** 0.25 if deepnorm else 1.0
        # (1,), not (): DeepSpeed 0.19.8 cannot send a 0-dimensional bf16 parameter to other ranks.
        self.gain = nn.Parameter(torch.zeros(1)) if config.residual == "rezero" else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, update: Tensor, alpha: Tensor) -> Tensor:
        """keep * x + alpha * gain * Dropout(update), (..., D)."""
        update = self.dropout(update)
        if self.gain is not None:
            update = self.gain * update
        # A 0-dimensional fp32 tensor does not change the dtype of bf16 activations.
        update = alpha * update
        return (x if self.keep == 1.0 else self.keep * x) + update


class Layer(nn.Module):
    """Attention and feed-forward, each with its residual, and a norm behind or before it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pre_norm = config.norm_placement == "pre"
        self.attention = SelfAttention(config)
        self.attention_residual = Residual(config)
        self.attention_norm = make_norm(config, config.hidden_size)
        self.feed_forward = FeedForward(config)
        self.feed_forward_residual = Residual(config)
        self.feed_forward_norm = make_norm(config, config.hidden_size)

    def forward(
        self, x: Tensor, shared: SharedInputs, carry_BNSS: Tensor | None, num_summed: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer; arguments and result as in `SelfAttention.forward`."""
        if self.pre_norm:
            update, carry_BNSS = self.attention(
                self.attention_norm(x), shared, carry_BNSS, num_summed
            )
            x = self.attention_residual(x, update, shared.alpha)
            update = self.feed_forward(self.feed_forward_norm(x))
            return self.feed_forward_residual(x, update, shared.alpha), carry_BNSS
        update, carry_BNSS = self.attention(x, shared, carry_BNSS, num_summed)
        x = _join_and_norm(self.attention_residual, self.attention_norm, x, update, shared)
        update, residual = self.feed_forward(x), self.feed_forward_residual
        return _join_and_norm(residual, self.feed_forward_norm, x, update, shared), carry_BNSS


def _join_and_norm(
    residual: Residual, norm: nn.Module, x: Tensor, update: Tensor, shared: SharedInputs
) -> Tensor:
    """Norm(residual), but x where alpha is 0: normed again it would differ by eps and rounding."""
    if shared.fused_norm:
        assert isinstance(norm, RMSNorm), "the encoder looks"
        dropout = residual.dropout.p if residual.training else 0.0
        return residual_norm(
            x, update, shared.alpha, keep=residual.keep, dropout=dropout, eps=norm.eps
        )
    normed = norm(residual(x, update, shared.alpha))
    # With RoBERTa's eps of 1e-5 over embeddings of deviation 0.02 the norm would differ from x by
    # half a percent: "alpha 0 is the identity" should not depend on eps.
    return torch.where(shared.alpha == 0, x, normed)


def run_layer(
    layer: nn.Module, x: Tensor, shared: SharedInputs, carry_BNSS: Tensor | None, num_summed: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Call a layer; as `Layer.forward`."""
    return layer(x, shared, carry_BNSS, num_summed)  # type: ignore[no-any-return]
