"""Attention by carried scores as one operator of torch, computed by Triton.

What it computes is what `raw_scores`, `probabilities` and `weighted_values` of `attention` do; no
matrix of probabilities is kept. Scores of narrow inputs are kept in 16 bits: the scores in fp16,
cut off at its ends, since the 8 bits of bf16 lose more than bf16 matrix products do; their gradient
in bf16, since in fp16 it underflows. Autograd casts a gradient to its tensor's dtype, so the tensor
that carries fp16 scores is labelled bf16. Only `scores_of` may read it; to add its gradients is
right, for they are bf16.

Letters: T tokens end to end, N heads, H head size, W slots of a row of scores; see
`carried_kernels`, which is loaded when something is computed, and Triton with it.
"""

from typing import Any

import torch
from torch import Tensor

from pipeline.errors import ConfigError
from pipeline.kernels.windows import HEAD_SIZES, Windows, padded_width

_LABEL = torch.bfloat16
_STORED = torch.float16


def carried_attention(
    q_TNH: Tensor,
    k_TNH: Tensor,
    v_TNH: Tensor,
    carry_NTW: Tensor | None,
    windows: Windows,
    *,
    scale: float,
    num_summed: int = 1,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """softmax((scale q k^T + carry) / num_summed) v, dropout on the softmax.

    Source: He et al. 2020 (arXiv 2012.11747), section 3.

    Args:
        q_TNH: bf16 or fp32 queries; any strides, the last of them 1.
        k_TNH: keys.
        v_TNH: values.
        carry_NTW: scores of the layer below, as this function gave them; None in the first layer.
        windows: who sees whom, the same in all layers.
        scale: of q k^T.
        num_summed: as in `probabilities`: l + 1 in layer l for the running mean, 1 for the sum.
        dropout: probability of dropping a probability.

    Returns:
        (T, N, H) in q's dtype, 0 for a query that sees nothing; and the scores (N, T, W), where
        column c of a token is the c-th token of its window. Scores and their gradient mean
        something only where a query sees a key. Where the inputs are bf16, their bf16 is a label.

    Raises:
        ConfigError: the dtype or the head size is none that there are kernels for.
    """
    _require(q_TNH.dtype, q_TNH.shape[-1])
    # Drawn by torch, so that a checkpointed layer draws the same again.
    seed = None
    if dropout > 0:
        seed = torch.randint(1 << 62, (1,), dtype=torch.int64, device=q_TNH.device)
    out_TNH, scores_NTW, _ = _forward(
        q_TNH, k_TNH, v_TNH, carry_NTW, windows.spans, windows.bounds, seed, windows.longest,
        scale, 1.0 / num_summed, dropout, q_TNH.dtype != torch.float32,
    )  # fmt: skip
    return out_TNH, scores_NTW


def scores_of(carry_NTW: Tensor) -> Tensor:
    """The values that carried scores have, (N, T, W) fp16 or fp32; without a gradient."""
    carry_NTW = carry_NTW.detach()
    return carry_NTW.view(_STORED) if carry_NTW.dtype == _LABEL else carry_NTW


def _require(dtype: torch.dtype, head_size: int) -> None:
    if head_size not in HEAD_SIZES:
        raise ConfigError(
            f"the fused kernels take heads of {', '.join(map(str, HEAD_SIZES))}, these have "
            f"{head_size}; change model.num_heads, or set kernels.attention=reference"
        )
    if dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError(
            f"the fused kernels take bf16 and fp32, this is {dtype}; set "
            "kernels.attention=reference"
        )


@torch.library.custom_op("postnorm::carried_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, carry: Tensor | None, spans: Tensor, bounds: Tensor,
    seed: Tensor | None, longest: int, scale: float, temperature: float, dropout: float,
    compact: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from pipeline.kernels import carried_launches as launches

    out, scores, lse = _empty_results(q, longest, compact)
    q, k, v = _rows_in_one_piece(q, k, v)
    tensors = {
        "q": q, "k": k, "v": v, "carry": _stored(carry), "scores": _stored(scores), "out": out,
        "lse": lse, "spans": spans, "bounds": bounds, "seed": seed,
    }  # fmt: skip
    numbers = launches.Numbers(longest, scale, temperature, dropout)
    launches.forward(tensors, numbers).run()
    return out, scores, lse


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, carry: Tensor | None, spans: Tensor, bounds: Tensor,
    seed: Tensor | None, longest: int, scale: float, temperature: float, dropout: float,
    compact: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _empty_results(q, longest, compact)


@torch.library.custom_op("postnorm::carried_attention_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, scores: Tensor, out: Tensor, lse: Tensor, d_out: Tensor,
    d_scores: Tensor | None, has_carry: bool, spans: Tensor, bounds: Tensor, seed: Tensor | None,
    longest: int, scale: float, temperature: float, dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from pipeline.kernels import carried_launches as launches

    dq, dk, dv, d_carry = _empty_gradients(q, scores)
    q, k, v = _rows_in_one_piece(q, k, v)
    tensors = {
        "q": q, "k": k, "v": v, "scores": _stored(scores), "out": out, "lse": lse,
        "carry": scores if has_carry else None, "d_out": d_out.contiguous(),
        "d_scores": None if d_scores is None else d_scores.contiguous(),
        "dq": dq, "dk": dk, "dv": dv, "d_carry": d_carry,
        "spans": spans, "bounds": bounds, "seed": seed,
    }  # fmt: skip
    numbers = launches.Numbers(longest, scale, temperature, dropout)
    for launch in launches.backward(tensors, numbers, launches.capability_of(q.device)):
        launch.run()
    return dq, dk, dv, d_carry


@_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, scores: Tensor, out: Tensor, lse: Tensor, d_out: Tensor,
    d_scores: Tensor | None, has_carry: bool, spans: Tensor, bounds: Tensor, seed: Tensor | None,
    longest: int, scale: float, temperature: float, dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return _empty_gradients(q, scores)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, carry, spans, bounds, seed, longest, scale, temperature, dropout, _ = inputs
    out, scores, lse = output
    # Nobody reads the last layer's scores: no gradient of zeros is made for them.
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, scores, out, lse, spans, bounds, seed)
    ctx.has_carry = carry is not None
    ctx.numbers = longest, scale, temperature, dropout


def _differentiate(
    ctx: Any, d_out: Tensor | None, d_scores: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, v, scores, out, lse, spans, bounds, seed = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(out)
    dq, dk, dv, d_carry = _backward(
        q, k, v, scores, out, lse, d_out, d_scores, ctx.has_carry, spans, bounds, seed,
        *ctx.numbers,
    )  # fmt: skip
    return dq, dk, dv, d_carry if ctx.has_carry else None, *[None] * 8


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def _stored(scores: Tensor | None) -> Tensor | None:
    """What is under the label."""
    return None if scores is None else scores_of(scores)


def _rows_in_one_piece(*tensors: Tensor) -> list[Tensor]:
    return [each if each.stride(-1) == 1 else each.contiguous() for each in tensors]


def _empty_results(q: Tensor, longest: int, compact: bool) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, num_heads, _ = q.shape
    scores = q.new_empty(
        num_heads, num_tokens, padded_width(longest), dtype=_LABEL if compact else torch.float32
    )
    lse = q.new_empty(num_heads, num_tokens, dtype=torch.float32)
    return q.new_empty(q.shape), scores, lse


def _empty_gradients(q: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # A first layer's is used where a second pass reads it, which depends on the GPU.
    d_carry = torch.empty_like(scores)
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape), d_carry
