"""Attention over documents end to end; its kernel is for GPUs, here are what it gets and gives."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.config.model import ModelConfig
from pipeline.data.loader import document_bounds
from pipeline.kernels.flash import flash_attention
from pipeline.model import layers
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.model.layout import Layout, packed, rows
from tests.support.triton import NEEDS_TRITON, Interpreter

DOCUMENTS = np.array([[1] * 5 + [2] * 6 + [3] + [0] * 2, [1] * 14, [1] * 13 + [0]], np.int32)


def _rows() -> Layout:
    documents = torch.from_numpy(DOCUMENTS)
    bounds = torch.from_numpy(document_bounds(DOCUMENTS))
    return rows(documents, torch.arange(14).expand(3, -1), bounds)


def test_bounds_of_documents_are_the_mask() -> None:
    layout = _rows()
    assert layout.cu_seqlens.dtype == torch.int32
    number = torch.searchsorted(layout.cu_seqlens, torch.arange(DOCUMENTS.size), right=True)
    number = number.view(DOCUMENTS.shape)
    assert torch.equal(number[:, :, None] == number[:, None, :], layout.allowed[:, 0])


@pytest.mark.parametrize(("num_documents", "length"), [(1, 64), (63, 64), (64, 128), (200, 256)])
def test_few_lengths_of_bounds(num_documents: int, length: int) -> None:
    bounds = document_bounds(np.arange(num_documents, dtype=np.int32).repeat(3)[None])
    assert len(bounds) == length
    assert bounds[:num_documents].tolist() == list(range(0, 3 * num_documents, 3))
    assert set(bounds[num_documents:].tolist()) == {3 * num_documents}


def _stand_in(
    qkv_T3NH: Tensor, cu_seqlens: Tensor, longest: int, *, scale: float,
    angles: tuple[Tensor, Tensor] | None, token_scale: Tensor | None, dropout: float,
) -> Tensor:  # fmt: skip
    """Document by document, in torch."""
    q_TNH, k_TNH, v_TNH = qkv_T3NH.unbind(1)
    if angles is not None:
        q_TNH, k_TNH = (layers.rotate(x, *(a[:, None] for a in angles)) for x in (q_TNH, k_TNH))
    if token_scale is not None:
        q_TNH = q_TNH * token_scale[:, None, None]
    found = []
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        assert end - start <= longest
        q, k, v = (each[start:end].transpose(0, 1) for each in (q_TNH, k_TNH, v_TNH))
        found.append(F.scaled_dot_product_attention(q, k, v, scale=scale, dropout_p=dropout))
    return torch.cat(found, 1).transpose(0, 1).contiguous()


# Heads of 32 are turned by a kernel before attention, those of 16 by the model.
@pytest.mark.parametrize("hidden_size", [32, 64])
@pytest.mark.parametrize("scale", ["sqrt", "entropy_invariant"])
@pytest.mark.parametrize(
    "make", [_rows, lambda: packed(torch.tensor([0, 4, 5, 12, 42]), 30, 42)], ids=["rows", "packed"]
)
def test_the_model_is_the_same(
    make: Callable[[], Layout], scale: str, hidden_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=50, num_layers=2, hidden_size=hidden_size, num_heads=2, ffn_size=40,
        dropout=0.0, attention_dropout=0.0, attention_scale=scale,  # type: ignore[arg-type]
    )  # fmt: skip
    model = MaskedLanguageModel(config).double()
    layout, ids = make(), torch.randint(0, 50, (42,))
    ids = ids.view(layout.positions.shape)
    calls = []

    def counted(*inputs: Any, **more: Any) -> Tensor:
        calls.append(more["angles"] is None)
        return _stand_in(*inputs, **more)

    monkeypatch.setattr(layers, "flash_attention", counted)
    found = []
    for _ in range(2):
        hidden = model.encoder(ids, layout)
        weights = list(model.encoder.parameters())
        found.append([hidden, *torch.autograd.grad(hidden.square().sum(), weights)])
        model.encoder.fuse_attention()
    assert calls == [hidden_size == 32] * 2  # layers of the second pass
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("turns", [False, True])
def test_the_kernel_has_a_gradient_and_is_one_graph(turns: bool) -> None:
    kind: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
    leaf = torch.empty(64, 3, 3, 32, **kind, requires_grad=True)
    bounds = torch.empty(9, device="meta", dtype=torch.int32)
    angles = tuple(torch.empty(64, 16, device="meta") for _ in range(2)) if turns else None

    def attend(qkv: Tensor) -> Tensor:
        return flash_attention(qkv, bounds, 32, scale=0.1, angles=angles, dropout=0.1)  # type: ignore[arg-type]

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for run in (attend, compiled):
        out = run(leaf)
        assert out.shape == (64, 3, 32)
        [gradient] = torch.autograd.grad(out.sum(), leaf)
        assert gradient.shape == leaf.shape


@NEEDS_TRITON
def test_turned_on_the_way(interpreter: Interpreter) -> None:
    interpreter("tests/kernels/interpreted_flash.py")
