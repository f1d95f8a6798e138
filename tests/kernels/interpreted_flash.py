"""What is turned on the way into and out of flash attention, in Triton's interpreter.

Run by `test_flash.py`. The attention itself is a stand-in: torch has it for GPUs alone.
"""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.kernels import flash
from pipeline.model.layers import rotary_tables, rotate

ENDS = torch.tensor([0, 5, 5, 23, 40], dtype=torch.int32)
SCALE = 0.3


def _heads(*tensors: Tensor) -> list[list[Tensor]]:
    """(N, S, H) of each document."""
    pairs = itertools.pairwise(ENDS.tolist())
    wide = [each.double() for each in tensors]
    return [[each[start:end].transpose(0, 1) for each in wide] for start, end in pairs]


def _by_document(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    found = [
        (SCALE * a @ b.transpose(1, 2)).softmax(-1) @ c for a, b, c in _heads(q, k, v)
    ]  # fmt: skip
    return torch.cat(found, 1).transpose(0, 1)


def _attend(qkv: Tensor, turned: Tensor, *_: Any) -> tuple[Tensor, ...]:
    parts = flash.parts_of(qkv, turned)
    out = _by_document(*parts.values()).to(qkv.dtype)
    return out, *(torch.empty(number) for number in (1, 2, 3))


def _gradients(d_out: Tensor, qkv: Tensor, turned: Tensor, *_: Any) -> tuple[Tensor, ...]:
    parts, found = flash.parts_of(qkv, turned), []
    # Autograd does not reach into an operator.
    for q, k, v, d in _heads(*parts.values(), d_out):
        share = (SCALE * q @ k.transpose(1, 2)).softmax(-1)
        d_share = d @ v.transpose(1, 2)
        d_scores = SCALE * share * (d_share - (share * d_share).sum(-1, keepdim=True))
        found.append((d_scores @ k, d_scores.transpose(1, 2) @ q, share.transpose(1, 2) @ d))
    # Strided, as a kernel may give them.
    joined = (torch.cat(each, 1).transpose(0, 1) for each in zip(*found, strict=True))
    return tuple(each.to(qkv.dtype) for each in joined)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("turns", [False, True])
def test_turned_there_and_back(
    turns: bool, scales: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "_attend", _attend)
    monkeypatch.setattr(flash, "_gradients", _gradients)
    generator = torch.Generator().manual_seed(3)
    tokens, heads, size = int(ENDS[-1]), 3, 32
    qkv = torch.randn(tokens, 3, heads, size, generator=generator).to(dtype).requires_grad_()
    d_out = torch.randn(tokens, heads, size, generator=generator).to(dtype)
    positions = torch.arange(tokens) % 19
    cos, sin = rotary_tables(positions, size, 10000.0, torch.float32)
    token_scale = 1 + torch.rand(tokens, generator=generator) if scales else None
    out = flash.flash_attention(
        qkv, ENDS, 18, scale=SCALE, angles=(cos[:, 0], sin[:, 0]) if turns else None,
        token_scale=token_scale,
    )  # fmt: skip
    [gradient] = torch.autograd.grad(out, qkv, d_out)

    wide = qkv.detach().double().requires_grad_()
    q, k, v = wide.unbind(1)
    if turns:
        q, k = rotate(q, cos.double(), sin.double()), rotate(k, cos.double(), sin.double())
    if token_scale is not None:
        q = q * token_scale.double()[:, None, None]
    wanted = _by_document(q, k, v)
    [wanted_gradient] = torch.autograd.grad(wanted, wide, d_out.double())
    limit = 2e-6 if dtype == torch.float32 else 6e-3
    for one, other in ((out, wanted), (gradient, wanted_gradient)):
        assert one.dtype == dtype
        assert float((one.double() - other).norm() / other.norm()) < limit
