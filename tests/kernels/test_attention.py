"""Score-carrying attention against three oracles, in float64, values and gradients.

The implementation sums layer by layer. Summed scores are also those of concatenated heads, for
which torch's own attention is an oracle; and a loop over queries, keys and coordinates is one that
knows no matrix product.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.kernels import attention as module
from pipeline.kernels.attention import attention, probabilities, raw_scores, weighted_values

LAYERS, B, N, S, H = 3, 2, 2, 7, 4


@pytest.fixture
def allowed() -> Tensor:
    documents = torch.tensor([[1] * 3 + [2] * 2 + [0] * 2, [1] * S])
    return (documents[:, :, None] == documents[:, None, :])[:, None]


@pytest.fixture
def inputs() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Scaled queries, keys and values of each layer."""
    torch.manual_seed(0)
    shape = (B, N, S, H)
    return [
        tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3))  # type: ignore[misc]
        for _ in range(LAYERS)
    ]


def _layer_by_layer(inputs: list[tuple[Tensor, ...]], allowed: Tensor, mean: bool) -> list[Tensor]:
    outputs, carry = [], None
    for number, (q, k, v) in enumerate(inputs):
        carry = raw_scores(q, k, carry)
        share = probabilities(carry, allowed, number + 1 if mean else 1)
        outputs.append(weighted_values(share, v, 0.0))
    return outputs


def _concatenated(inputs: list[tuple[Tensor, ...]], allowed: Tensor, mean: bool) -> list[Tensor]:
    outputs = []
    for number in range(LAYERS):
        wide_q = torch.cat([q for q, _, _ in inputs[: number + 1]], dim=-1)
        wide_k = torch.cat([k for _, k, _ in inputs[: number + 1]], dim=-1)
        scale = 1.0 / (number + 1) if mean else 1.0
        wide, v = (wide_q, wide_k), inputs[number][2]
        outputs.append(F.scaled_dot_product_attention(*wide, v, attn_mask=allowed, scale=scale))
    return outputs


def _loop(inputs: list[tuple[Tensor, ...]], allowed: Tensor, mean: bool) -> list[Tensor]:
    outputs = []
    for number in range(LAYERS):
        rows = []
        for b in range(B):
            for n in range(N):
                for query in range(S):
                    keys = [key for key in range(S) if bool(allowed[b, 0, query, key])]
                    scores = []
                    for key in keys:
                        score = torch.zeros((), dtype=torch.float64)
                        for q, k, _ in inputs[: number + 1]:
                            for h in range(H):
                                score = score + q[b, n, query, h] * k[b, n, key, h]
                        scores.append(score / (number + 1) if mean else score)
                    total = sum(score.exp() for score in scores)
                    row = [score.exp() / total * inputs[number][2][b, n, key]
                           for score, key in zip(scores, keys, strict=True)]  # fmt: skip
                    rows.append(torch.stack(row).sum(0))
        outputs.append(torch.stack(rows).view(B, N, S, H))
    return outputs


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("oracle", [_concatenated, _loop])
def test_layers_equal_the_oracle(oracle, mean, inputs, allowed) -> None:  # type: ignore[no-untyped-def]
    found, expected = _layer_by_layer(inputs, allowed, mean), oracle(inputs, allowed, mean)
    flat = [tensor for layer in inputs for tensor in layer]
    torch.manual_seed(1)
    directions = [torch.randn(B, N, S, H, dtype=torch.float64) for _ in range(LAYERS)]
    grads = []
    for outputs in (found, expected):
        value = sum((o * d).sum() for o, d in zip(outputs, directions, strict=True))
        grads.append(torch.autograd.grad(value, flat))
    for mine, wanted in zip([*found, *grads[0]], [*expected, *grads[1]], strict=True):
        assert float((mine - wanted).detach().abs().max()) <= 1e-12


def _bf16_errors(seq_len: int, short: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Of attention and its three gradients against float64, with rows of two documents."""
    monkeypatch.setattr(module, "_SHORT", short)
    torch.manual_seed(0)
    exact = torch.randn(2, seq_len, 3, 2, 16).bfloat16().double()
    # As the model has it: views of one product, and a gradient that is a view, too.
    direction = torch.randn(2, seq_len, 2, 16).bfloat16().double().transpose(1, 2)
    documents = torch.arange(seq_len) >= seq_len // 3
    allowed = (documents[:, None] == documents)[None, None]
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        product = exact.to(dtype).detach().requires_grad_()
        q, k, v = (each.transpose(1, 2) for each in product.unbind(2))
        out = attention(q, k, v, allowed, 0.0)
        assert (out.grad_fn.name() == "_ShortRowsBackward") == (  # type: ignore[union-attr]
            dtype == torch.bfloat16 and seq_len <= short
        )
        out.backward(direction.to(dtype))
        found.append([out.detach(), *product.grad.unbind(2)])
    return [float((b - a).norm() / a.norm()) for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("seq_len", [5, 64, 200])
def test_short_rows_of_bf16_err_as_torch(seq_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = _bf16_errors(seq_len, 256, monkeypatch)
    for error, of_torch in zip(mine, _bf16_errors(seq_len, 4, monkeypatch), strict=True):
        assert error < max(1.25 * of_torch, 4e-3)


def test_carry_of_bf16_is_kept_in_fp32(allowed: Tensor) -> None:
    torch.manual_seed(0)
    exact, carry = torch.zeros(B, N, S, S, dtype=torch.float64), None
    for _ in range(12):
        q, k, v = (torch.randn(B, N, S, H).bfloat16() for _ in range(3))
        carry = raw_scores(q, k, carry)
        exact += q.double() @ k.double().transpose(-1, -2)
    assert carry is not None
    # A product of bf16 is exact in fp32, so that only sums round; rounded to bf16 a layer's scores
    # would be off by up to 2^-9 of themselves, here by more than 1e-2.
    assert float((carry - exact).abs().max()) <= 1e-5
    out = weighted_values(probabilities(carry, allowed, 1), v, 0.0)
    assert (out.dtype, carry.dtype) == (torch.bfloat16, torch.float32)


def test_dropout_keeps_the_mean() -> None:
    torch.manual_seed(0)
    out = weighted_values(torch.full((1, 400, 9, 9), 1 / 9), torch.ones(1, 400, 9, 4), 0.25)
    # 3,600 rows of 9 Bernoulli(0.75) / 0.75, each of mean 1 and deviation sqrt(1/3) / 3: the mean
    # of all has deviation 0.0032.
    assert float(out.mean()) == pytest.approx(1.0, abs=0.015)
    assert float(out[..., 0].std()) == pytest.approx(math.sqrt(1 / 3) / 3, rel=0.1)
