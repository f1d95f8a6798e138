"""Cross-entropy over a vocabulary, without the logits of all rows, forward or backward.

For a chunk of rows at a time it computes the logits, the losses, the gradient in the place of the
logits, and from it the gradients of inputs and weights. So the gradients exist when the forward
pass ends, from three matrix products without recomputation, and backward only scales them. Liger's
fused linear cross-entropy (`src/liger_kernel/ops/fused_linear_cross_entropy.py`) works like this.

Letters: M rows, R rows of a chunk, E width, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.errors import ConfigError

# RoFormerV2-base, 50,000 tokens, micro-batch 65,536: 88 MiB instead of 1,875
# (`cost.activation_bytes`); 0.99 to 1.10 of plain PyTorch's time on a CPU (`python -m
# benchmarks.vocabulary_loss`).
LOGITS_BYTES = 256 * 2**20
"""Budget for the logits of a chunk. Plain PyTorch has a copy of them in fp32 as well."""

# Rows whose fp32 logits a CPU computes with at a time: 2.7 MB of a vocabulary of 21,128.
_ROWS_IN_CACHE = 32


def vocabulary_loss(
    x_ME: Tensor, weight_VE: Tensor, bias_V: Tensor | None, targets_M: Tensor, *, fused: bool
) -> tuple[Tensor, Tensor]:
    """Sum the cross-entropies of softmax(x W^T + b), and count rows whose likeliest is the target.

    The logits are rounded to the dtype of the inputs; everything after them is at least fp32. From
    forward to backward autograd keeps only the gradients of x, W and b, in their own dtypes. A
    logit of -inf has probability 0; NaN, inf, or -inf for a target make the loss NaN or inf.

    Args:
        x_ME: inputs of the output layer; M may be 0.
        weight_VE: weights of the same dtype.
        bias_V: bias of the same dtype.
        targets_M: int64, each below V. A larger one is an error in plain PyTorch (on a GPU an
            assertion that ends the process), and makes loss and gradients NaN in the fused kernel.
        fused: whether our kernel computes cross-entropy and gradient, instead of plain PyTorch.

    Returns:
        Two 0-dimensional tensors of at least fp32: the sum in nats, and a count without gradient.
        Among equal largest logits the first counts as the likeliest.

    Raises:
        ConfigError: `fused`, and the dtype is neither bf16 nor fp32.
    """
    if fused and x_ME.dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError(
            f"the fused kernel takes bf16 and fp32, this is {x_ME.dtype}; set "
            "kernels.loss=reference"
        )
    # Asked here, because it is always off inside an autograd.Function.
    differentiates = torch.is_grad_enabled()
    loss, correct = _VocabularyLoss.apply(  # type: ignore[no-untyped-call]
        x_ME, weight_VE, bias_V, targets_M, fused, differentiates
    )
    return loss, correct


def rows_of_chunk(num_rows: int, row_bytes: int) -> int:
    """Return the rows of a chunk: as few chunks as fit the budget, equal except for the last."""
    most = max(1, LOGITS_BYTES // row_bytes)
    num_chunks = max(1, -(-num_rows // most))
    return max(1, -(-num_rows // num_chunks))


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        fused: bool,
        differentiates: bool,
    ) -> tuple[Tensor, Tensor]:
        needed = [differentiates and each for each in ctx.needs_input_grad[:3]]
        losses, hits, *gradients = _by_chunks(x, weight, bias, targets.contiguous(), fused, needed)
        ctx.save_for_backward(*gradients)
        loss, correct = losses.sum(), hits.sum()
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # torch's once_differentiable is silent if the gradient is one term among others.
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "gradients of vocabulary_loss are constants: they cannot be differentiated again; "
                "leave out create_graph, or take F.cross_entropy of the model's own `head`"
            )
        # A 0-dimensional factor would be rounded to bf16 first, and all gradients with it.
        factor = d_loss.reshape(1)
        scaled = [
            None if each is None else torch.mul(each, factor, out=torch.empty_like(each))
            for each in ctx.saved_tensors
        ]
        return *scaled, None, None, None


def _by_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, fused: bool, needed: list[bool]
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Compute losses (M,), hits (M,), and those gradients of the losses' sum that are needed."""
    wide = torch.promote_types(x.dtype, torch.float32)
    step = rows_of_chunk(len(x), len(weight) * x.itemsize)
    logits, losses, hits = (
        x.new_empty(len(_to_few_shapes(x[:step])), len(weight)),
        x.new_empty(len(x), dtype=wide),
        x.new_empty(len(x), dtype=wide),
    )
    d_x = torch.empty_like(x) if needed[0] else None
    d_weight: Tensor | None = None
    d_bias = x.new_zeros(len(weight), dtype=wide) if needed[2] else None
    cross_entropy = _by_kernel if fused else _by_torch
    for first in range(0, len(x), step):
        chunk = slice(first, first + step)
        inputs, num_rows = _to_few_shapes(x[chunk]), len(losses[chunk])
        rows = logits[: len(inputs)]
        if bias is None:
            torch.mm(inputs, weight.t(), out=rows)
        else:
            torch.addmm(bias, inputs, weight.t(), out=rows)
        cross_entropy(rows[:num_rows], targets[chunk], losses[chunk], hits[chunk], any(needed))
        rows[num_rows:] = 0
        if d_x is not None:
            d_x[chunk] = (rows @ weight)[:num_rows]
        if needed[1]:
            product = rows.t() @ inputs
            # At least fp32, or each chunk would round the sum; a single chunk needs no sum.
            d_weight = product if d_weight is None else d_weight.to(wide).add_(product)
        if d_bias is not None:
            d_bias += rows.sum(0, dtype=wide)
    if needed[1]:
        d_weight = torch.zeros_like(weight) if d_weight is None else d_weight.to(weight.dtype)
    return losses, hits, d_x, d_weight, None if d_bias is None else d_bias.to(x.dtype)


# oneDNN compiles for each number of rows, of which each step has a new one: 64 to 30 ms.
def _to_few_shapes(x: Tensor) -> Tensor:
    """Append rows of zeros, an eighth at most, on a CPU: oneDNN compiles for each number of rows.

    The number of masked tokens is another one in each step: compiling took half of the loss.
    """
    multiple = 1 << max(0, len(x).bit_length() - 4)
    return F.pad(x, (0, 0, 0, -len(x) % multiple)) if x.is_cpu else x


def _by_kernel(
    logits: Tensor, targets: Tensor, losses: Tensor, hits: Tensor, differentiates: bool
) -> None:
    from pipeline.kernels import rows_triton as kernels

    kernels.cross_entropy(logits, targets, losses, hits, differentiates).run()


def _by_torch(
    logits: Tensor, targets: Tensor, losses: Tensor, hits: Tensor, differentiates: bool
) -> None:
    """Do what the kernel does; overwrite wide logits in any case."""
    if logits.is_cpu and len(logits) > _ROWS_IN_CACHE:
        # A copy of all logits in fp32 would go to memory and back six times.
        for first in range(0, len(logits), _ROWS_IN_CACHE):
            rows = slice(first, first + _ROWS_IN_CACHE)
            _by_torch(logits[rows], targets[rows], losses[rows], hits[rows], differentiates)
        return
    wide, index = logits.to(losses.dtype), targets[:, None]
    most, best = wide.max(-1, keepdim=True)
    picked = wide.gather(-1, index)
    total = wide.sub_(most).exp_().sum(-1, keepdim=True)
    losses.copy_((total.log() + (most - picked))[:, 0])
    hits.copy_((best == index)[:, 0])
    if differentiates:
        wide.div_(total)
        wide.scatter_(-1, index, wide.gather(-1, index) - 1)
        logits.copy_(wide)
