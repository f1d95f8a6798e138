"""Torch's flash attention over documents, from one tensor of queries, keys and values.

Letters: T tokens end to end, N heads, H head size. Triton is imported when something is turned.
"""

from typing import Any

import torch
from torch import Tensor

from pipeline.kernels.carried import parts_of


# One tensor in and one gradient out, as `carried_attention`. Not cuDNN, which is faster on Hopper
# without a mask: ours needs one or lengths, and both its known faults (NaN for lengths of 64 modulo
# 128, fp32 masks misread) are in masks; with lengths its gradients of queries and keys were wrong
# on an H200 (torch 2.11). Bounds are padded to a multiple of 64: few shapes, no wait.
def flash_attention(
    qkv_T3NH: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    *,
    scale: float,
    angles: tuple[Tensor, Tensor] | None = None,
    token_scale: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute softmax(scale q k^T) v within documents, dropout on the softmax.

    Source of the algorithm: Dao 2023 (arXiv 2307.08691).

    Args:
        qkv_T3NH: bf16 or fp16 queries, keys and values on a GPU.
        cu_seqlens: (D + 1,) int32: 0, then the end of each document, the last of them T. Documents
            may be empty.
        longest: tokens of the longest document, or more.
        scale: factor of q k^T.
        angles: cosines and sines of rotary positions, (T, H / 2) fp32; None without.
        token_scale: (T,) factors of queries; None without.
        dropout: probability of dropping a probability. The kernel draws bytes: of 0.1 it drops 26
            of 256, 0.1016.

    Returns:
        (T, N, H) in the dtype of qkv.
    """
    cos, sin = (None, None) if angles is None else angles
    found = _forward(qkv_T3NH, cu_seqlens, cos, sin, token_scale, longest, scale, dropout)
    return found[0]  # type: ignore[no-any-return]


@torch.library.custom_op("postnorm::flash_attention", mutates_args=())
def _forward(
    qkv: Tensor,
    cu_seqlens: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    token_scale: Tensor | None,
    longest: int,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    qkv = qkv.contiguous()
    turned = _empty_turned(qkv, cos, token_scale)
    if turned.numel():
        from pipeline.kernels.turn_triton import turn_launch

        given = {"qkv": qkv, "turned": turned, "cos": cos, "sin": sin, "token_scale": token_scale}
        turn_launch(given).run()
    return *_attend(qkv, turned, cu_seqlens, longest, scale, dropout), turned


@_forward.register_fake
def _(qkv: Tensor, cu_seqlens: Tensor, *given: Any) -> tuple[Tensor, ...]:
    cos, _, token_scale, *numbers = given
    turned = _empty_turned(qkv, cos, token_scale)
    return *_attend(qkv, turned, cu_seqlens, *numbers), turned


def _attend(
    qkv: Tensor, turned: Tensor, cu_seqlens: Tensor, longest: int, scale: float, dropout: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return outputs, logarithms of the softmax's sums, and the two tensors of dropout's state."""
    parts = parts_of(qkv, turned)
    # A mask over rows would keep torch from its flash kernels, and would compute scores only to
    # discard them. `torch.nn.attention.varlen`, the public way to this kernel, has no dropout.
    out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
        parts["q"],
        parts["k"],
        parts["v"],
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        dropout,
        False,  # not causal
        False,  # no matrix of probabilities for debugging
        scale=scale,
    )
    return out, lse, state, unused


@torch.library.custom_op("postnorm::flash_attention_backward", mutates_args=())
def _backward(
    d_out: Tensor,
    qkv: Tensor,
    turned: Tensor,
    out: Tensor,
    lse: Tensor,
    state: Tensor,
    unused: Tensor,
    cu_seqlens: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    token_scale: Tensor | None,
    longest: int,
    scale: float,
    dropout: float,
) -> Tensor:
    numbers = longest, scale, dropout
    gradients = _gradients(
        d_out.contiguous(), qkv.contiguous(), turned, out, lse, state, unused, cu_seqlens, *numbers
    )
    if not turned.numel():
        return torch.stack(gradients, 1)
    from pipeline.kernels.turn_triton import turn_back_launch

    d_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    dq, dk, dv = (each.contiguous() for each in gradients)
    given = {"dq": dq, "dk": dk, "dv": dv, "d_qkv": d_qkv, "cos": cos, "sin": sin}
    turn_back_launch(given | {"token_scale": token_scale}).run()
    return d_qkv


def _gradients(
    d_out: Tensor,
    qkv: Tensor,
    turned: Tensor,
    out: Tensor,
    lse: Tensor,
    state: Tensor,
    unused: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return those of queries, keys and values as the kernel saw them, each (T, N, H)."""
    parts = parts_of(qkv, turned)
    return torch.ops.aten._flash_attention_backward(  # type: ignore[no-any-return]
        d_out,
        parts["q"],
        parts["k"],
        parts["v"],
        out,
        lse,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        dropout,
        False,
        state,
        unused,
        scale=scale,
    )


@_backward.register_fake
def _(d_out: Tensor, qkv: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    qkv, cu_seqlens, cos, sin, token_scale, *ctx.numbers = inputs
    out, lse, state, unused, turned = output
    ctx.mark_non_differentiable(lse, state, unused, turned)
    ctx.save_for_backward(qkv, turned, out, lse, state, unused, cu_seqlens, cos, sin, token_scale)


def _differentiate(ctx: Any, d_out: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    return _backward(d_out, *ctx.saved_tensors, *ctx.numbers), *[None] * 7


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def _empty_turned(qkv: Tensor, cos: Tensor | None, token_scale: Tensor | None) -> Tensor:
    num_tokens, _, num_heads, head_size = qkv.shape
    turns = cos is not None or token_scale is not None
    return qkv.new_empty(num_tokens if turns else 0, 2, num_heads, head_size)
