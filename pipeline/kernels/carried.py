"""Attention by carried scores as one operator of torch, computed by Triton.

It computes what `raw_scores`, `probabilities` and `weighted_values` of `attention` do, but keeps no
matrix of probabilities. Scores of narrow inputs are kept in 16 bits.

Letters: T tokens end to end, N heads, H head size, W slots of a row of scores; see
`carried_triton`, which is imported, with Triton, when something is computed.
"""

from typing import Any

import torch
from torch import Tensor

from pipeline.errors import ConfigError
from pipeline.kernels.choose import HEAD_SIZES, Windows, padded_width

# Gradients of scores are bf16, because they underflow in fp16. Autograd casts a gradient to its
# tensor's dtype, so the tensor with fp16 scores is labelled bf16. Only `scores_of` may read it;
# adding its gradients is right, because they are bf16.
_LABEL = torch.bfloat16
# Clipped to its range: the 8 bits of bf16 would lose more than bf16 matrix products do.
_STORED = torch.float16


# One tensor of queries, keys and values in, one gradient out: turning outside and stacking three
# gradients are 14 reads and writes of (T, D) a layer, 3 to 5% of a step of RealFormerV2-base by
# bytes; now 4. Errors in bf16 against float64, in the interpreter: outputs 2.1e-3, gradients
# 3.3e-3 (PyTorch 4.6e-3 each), as good at a loss scale of 1e-8 as at 1 (`pytest
# tests/kernels/test_carried.py`).
def carried_attention(
    qkv_T3NH: Tensor,
    carry_NTW: Tensor | None,
    windows: Windows,
    *,
    scale: float,
    angles: tuple[Tensor, Tensor] | None = None,
    token_scale: Tensor | None = None,
    num_summed: Tensor,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute softmax((scale q k^T + carry) / num_summed) v, with dropout on the softmax.

    A separate kernel turns and scales queries and keys, because keys are read more than once. Their
    gradients are turned back as they are written into the one tensor of the linear layer before.

    Source: He et al. 2020 (arXiv 2012.11747), section 3.

    Args:
        qkv_T3NH: bf16 or fp32 queries, keys and values.
        carry_NTW: scores of the layer below, as this function gave them; None in the first layer.
        windows: the tokens that each token sees, the same in all layers.
        scale: factor of q k^T.
        angles: cosines and sines of rotary positions, (T, H / 2) fp32; None without.
        token_scale: (T,) factors of queries; None without.
        num_summed: as in `probabilities`, (): l + 1 in layer l for the running mean, 1 for the sum.
            A tensor, so that compiled layers are one graph.
        dropout: probability of dropping a probability.

    Returns:
        (T, N, H) in the dtype of qkv, 0 for a query that sees nothing; and the scores (N, T, W),
        where column c of a token is the c-th token of its window. Scores and their gradient are
        defined only where a query sees a key. With bf16 inputs, the scores' bf16 is a label.

    Raises:
        ConfigError: there is no kernel for the dtype or the head size.
    """
    _require(qkv_T3NH.dtype, qkv_T3NH.shape[-1])
    # Drawn by torch, so that a checkpointed layer draws the same again.
    seed = None
    if dropout > 0:
        # On the device, where the kernel reads it: as a number the host would have to wait for it.
        seed = torch.randint(1 << 62, (1,), dtype=torch.int64, device=qkv_T3NH.device)
    cos, sin = (None, None) if angles is None else angles
    out_TNH, scores_NTW, _, _ = _forward(
        qkv_T3NH, carry_NTW, windows.spans, windows.bounds, cos, sin, token_scale, seed,
        num_summed, windows.longest, scale, dropout, qkv_T3NH.dtype != torch.float32
    )  # fmt: skip
    return out_TNH, scores_NTW


def scores_of(carry_NTW: Tensor) -> Tensor:
    """Return the values of carried scores, (N, T, W) fp16 or fp32, without a gradient."""
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
    qkv: Tensor, carry: Tensor | None, spans: Tensor, bounds: Tensor, cos: Tensor | None,
    sin: Tensor | None, token_scale: Tensor | None, seed: Tensor | None,
    num_summed: Tensor, longest: int, scale: float, dropout: float, compact: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from pipeline.kernels import carried_triton as launches
    from pipeline.kernels.tiles import target_of
    from pipeline.kernels.turn_triton import turn_launch

    turns = cos is not None or token_scale is not None
    out, scores, lse, turned = _empty_results(qkv, longest, compact, turns)
    qkv = qkv.contiguous()
    turning = {"qkv": qkv, "turned": turned, "cos": cos, "sin": sin, "token_scale": token_scale}
    if turns:
        turn_launch(turning).run()
    tensors = {
        **parts_of(qkv, turned),
        "carry": _stored(carry),
        "scores": _stored(scores),
        "out": out,
        "lse": lse,
        "spans": spans,
        "bounds": bounds,
        "seed": seed,
        "num_summed": num_summed,
    }
    numbers = launches.Numbers(longest, scale, dropout)
    launches.forward(tensors, numbers, target_of(qkv.device)).run()
    return out, scores, lse, turned


@_forward.register_fake
def _(qkv: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, _, _, cos, _, token_scale, _, _, longest, _, _, compact = given
    turns = cos is not None or token_scale is not None
    return _empty_results(qkv, longest, compact, turns)


@torch.library.custom_op("postnorm::carried_attention_backward", mutates_args=())
def _backward(
    qkv: Tensor, turned: Tensor, scores: Tensor, out: Tensor, lse: Tensor, d_out: Tensor,
    d_scores: Tensor | None, has_carry: bool, spans: Tensor, bounds: Tensor, cos: Tensor | None,
    sin: Tensor | None, token_scale: Tensor | None, seed: Tensor | None,
    num_summed: Tensor, longest: int, scale: float, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from pipeline.kernels import carried_triton as launches
    from pipeline.kernels.tiles import target_of

    d_qkv, d_carry = _empty_gradients(qkv, scores)
    dq, dk, dv = d_qkv.unbind(1)
    tensors = {
        **parts_of(qkv.contiguous(), turned),
        "scores": _stored(scores),
        "out": out,
        "lse": lse,
        "carry": scores if has_carry else None,
        # The kernels find heads of these by the layout of their own results.
        "d_out": d_out.contiguous(),
        "d_scores": None if d_scores is None else d_scores.contiguous(),
        "dq": dq,
        "dk": dk,
        "dv": dv,
        "d_carry": d_carry,
        "spans": spans,
        "bounds": bounds,
        "cos": cos,
        "sin": sin,
        "token_scale": token_scale,
        "seed": seed,
        "num_summed": num_summed,
    }
    numbers = launches.Numbers(longest, scale, dropout)
    for launch in launches.backward(tensors, numbers, target_of(qkv.device)):
        launch.run()
    return d_qkv, d_carry


@_backward.register_fake
def _(qkv: Tensor, turned: Tensor, scores: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_gradients(qkv, scores)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    qkv, carry, *given = inputs
    *kept, longest, scale, dropout, _ = given
    out, scores, lse, turned = output
    # The last layer's scores are not read, so no gradient of zeros is made for them.
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse, turned)
    ctx.save_for_backward(qkv, turned, scores, out, lse, *kept)
    ctx.has_carry = carry is not None
    ctx.numbers = longest, scale, dropout


def _differentiate(
    ctx: Any, d_out: Tensor | None, d_scores: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    qkv, turned, scores, out, lse, *given = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(out)
    d_qkv, d_carry = _backward(
        qkv, turned, scores, out, lse, d_out, d_scores, ctx.has_carry, *given, *ctx.numbers
    )
    return d_qkv, d_carry if ctx.has_carry else None, *[None] * 11


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def _stored(scores: Tensor | None) -> Tensor | None:
    """Return scores under the dtype that their bits have."""
    return None if scores is None else scores_of(scores)


def parts_of(qkv: Tensor, turned: Tensor) -> dict[str, Tensor]:
    """Return views of queries, keys and values, each (T, N, H); of `turned` unless it is empty."""
    q, k, v = qkv.unbind(1)
    if turned.numel():
        q, k = turned.unbind(1)
    return {"q": q, "k": k, "v": v}


def _empty_results(
    qkv: Tensor, longest: int, compact: bool, turns: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_tokens, _, num_heads, head_size = qkv.shape
    out = qkv.new_empty(num_tokens, num_heads, head_size)
    scores = qkv.new_empty(
        num_heads, num_tokens, padded_width(longest), dtype=_LABEL if compact else torch.float32
    )
    lse = qkv.new_empty(num_heads, num_tokens, dtype=torch.float32)
    turned = qkv.new_empty(num_tokens if turns else 0, 2, num_heads, head_size)
    return out, scores, lse, turned


def _empty_gradients(qkv: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    # A first layer's is needed only where a second pass reads it, which depends on the GPU.
    d_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    return d_qkv, torch.empty_like(scores)
