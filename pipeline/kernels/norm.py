"""Residual, alpha, dropout and RMSNorm without a gain in one pass, as one operator of torch.

It computes in fp32 what `Residual`, `RMSNorm` and the pass at alpha 0 of `pipeline.model.layers` do
in plain PyTorch, and rounds once. Backward needs the operator's own output, which the next layer
keeps anyway, and 4 bytes a token; plain PyTorch keeps an fp32 copy of the sum and dropout's mask.
Triton is imported when something is computed. Letters: D hidden size.
"""

from typing import Any

import torch
from torch import Tensor

from pipeline.errors import ConfigError
from pipeline.kernels.choose import NORM_LIMIT, NORM_MULTIPLE

_REFERENCE = "or set kernels.residual_norm=reference"


def residual_norm(
    x: Tensor, update: Tensor, alpha: Tensor, *, keep: float, dropout: float, eps: float
) -> Tensor:
    """Compute joined / sqrt(mean(joined^2) + eps), joined = keep * x + alpha * Dropout(update).

    At alpha 0 the result is x, bit for bit, and so is its gradient. NaN and infinity of an input
    reach the result even where dropout drops them, as in PyTorch.

    Sources: Zhang and Sennrich 2019 (arXiv 1910.07467), equation 4; alpha, Su 2020
    (kexue.fm/archives/8620).

    Args:
        x: (..., D) bf16 or fp32.
        update: output of a sub-layer; shape and dtype of x.
        alpha: 0-dimensional fp32, read by the kernel. It gets no gradient.
        keep: factor of x.
        dropout: probability of dropping a value of the update; 0 in evaluation.
        eps: added to the mean square.

    Returns:
        (..., D) in x's dtype.

    Raises:
        ConfigError: there is no kernel for the dtype, shape or size, or alpha needs a gradient.
    """
    _require(x, update, alpha)
    # Drawn by torch, so that a checkpointed layer draws the same again.
    seed = None
    if dropout > 0:
        seed = torch.randint(1 << 62, (1,), dtype=torch.int64, device=x.device)
    y, _ = _forward(x, update, alpha, seed, keep, dropout, eps)
    return y  # type: ignore[no-any-return]


def _require(x: Tensor, update: Tensor, alpha: Tensor) -> None:
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError(
            f"the fused residual and norm takes bf16 and fp32, this is {x.dtype}; change it, "
            f"{_REFERENCE}"
        )
    if update.dtype != x.dtype or update.shape != x.shape:
        raise ConfigError(
            f"the update of the fused residual and norm is {update.dtype} "
            f"{tuple(update.shape)}, expected x's {x.dtype} {tuple(x.shape)}; change one of them"
        )
    size = x.shape[-1]
    if size % NORM_MULTIPLE or size > NORM_LIMIT:
        raise ConfigError(
            f"the fused residual and norm takes rows of a multiple of {NORM_MULTIPLE} values up to "
            f"{NORM_LIMIT}, these have {size}; change model.hidden_size, {_REFERENCE}"
        )
    if alpha.requires_grad:
        raise ConfigError(
            "alpha of the fused residual and norm gets no gradient, this one requires it; pass "
            f"alpha.detach(), {_REFERENCE}"
        )
    if alpha.dtype != torch.float32 or alpha.ndim:
        raise ConfigError(
            f"alpha of the fused residual and norm is {alpha.dtype} {tuple(alpha.shape)}, expected "
            "a 0-dimensional fp32 tensor; change it"
        )


@torch.library.custom_op("postnorm::residual_norm", mutates_args=())
def _forward(
    x: Tensor,
    update: Tensor,
    alpha: Tensor,
    seed: Tensor | None,
    keep: float,
    dropout: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    from pipeline.kernels import rows_triton as kernels

    y, rstd = _empty_results(x)
    tensors = {
        # The kernels count rows of D values end to end, whatever shape they have.
        "x": x.contiguous(),
        "update": update.contiguous(),
        "alpha": alpha,
        "seed": seed,
        "y": y,
        "rstd": rstd,
    }
    kernels.forward(tensors, keep, eps, dropout).run()
    return y, rstd


@_forward.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_results(x)


# r (dy - y mean(dy y)), exact for any eps. RoFormerV2-base, 8 x 512 tokens: norms and residuals
# 360 to 6.4 MiB. Rounding y to bf16 costs the gradient 8.7e-5, 3.5e-3 where dy lies along y;
# keeping the rounded sum 1.6e-4 and 3.7e-3. In bf16 against float64: y 1.65e-3 (PyTorch 2.56e-3),
# gradients 1.7e-3 (1.7e-3 and 2.4e-3) (`pytest tests/kernels/test_norm.py`).
@torch.library.custom_op("postnorm::residual_norm_backward", mutates_args=())
def _backward(
    y: Tensor,
    rstd: Tensor,
    d_y: Tensor,
    alpha: Tensor,
    seed: Tensor | None,
    keep: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    from pipeline.kernels import rows_triton as kernels

    d_x, d_update = _empty_gradients(y)
    tensors = {
        "y": y,
        "rstd": rstd,
        "d_y": d_y.contiguous(),
        "alpha": alpha,
        "seed": seed,
        "d_x": d_x,
        "d_update": d_update,
    }
    kernels.backward(tensors, keep, dropout).run()
    return d_x, d_update


@_backward.register_fake
def _(y: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_gradients(y)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, alpha, seed, keep, dropout, _ = inputs
    y, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(y, rstd, alpha, seed)
    ctx.numbers = keep, dropout


def _differentiate(ctx: Any, d_y: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    y, rstd, alpha, seed = ctx.saved_tensors
    return *_backward(y, rstd, d_y, alpha, seed, *ctx.numbers), *[None] * 5


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def _empty_results(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _empty_gradients(y: Tensor) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), y.new_empty(y.shape)
