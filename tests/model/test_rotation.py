"""Rotary positions: both ways to write them against the formula, in float64 and bf16."""

import pytest
import torch
from torch import Tensor

from pipeline.model import layers
from pipeline.model.layers import rotary_tables, rotate


def _formula(x: Tensor, positions: Tensor) -> Tensor:
    """(T, N, H) turned pair by pair, by 2 x 2 matrices."""
    num_tokens, num_heads, size = x.shape
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, size, 2).double() / size)
    cos, sin = angles.cos(), angles.sin()
    matrices = torch.stack((cos, -sin, sin, cos), -1).view(num_tokens, size // 2, 2, 2)
    pairs = x.double().view(num_tokens, num_heads, size // 2, 2)
    return torch.einsum("tpij,tnpj->tnpi", matrices, pairs).flatten(-2)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-14), (torch.bfloat16, 3e-3)])
def test_rotation_and_its_gradient(
    dtype: torch.dtype, limit: float, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers.torch.compiler, "is_compiling", lambda: compiled)
    torch.manual_seed(0)
    positions = torch.tensor([0, 1, 2, 300, 0])
    product = torch.randn(5, 3, 2, 8).to(dtype)
    # A view, and a gradient that is one: neither has the strides of a tensor of its own.
    direction = torch.randn(2, 8, 5).to(dtype).permute(2, 0, 1)
    tables = rotary_tables(positions, 8, 10000.0, dtype)
    leaf = product.clone().requires_grad_()
    turned = rotate(leaf.unbind(1)[1], *tables)
    assert turned.dtype == dtype
    turned.backward(direction)
    exact = product.double().requires_grad_()
    wanted = _formula(exact.unbind(1)[1], positions)
    wanted.backward(direction.double())
    assert leaf.grad is not None
    assert exact.grad is not None
    for mine, theirs in ((turned.detach(), wanted.detach()), (leaf.grad, exact.grad)):
        assert float((mine.double() - theirs).norm() / theirs.norm()) < limit
