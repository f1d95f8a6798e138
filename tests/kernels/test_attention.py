"""Score-carrying attention against an identity: summed scores are those of concatenated heads."""

import math

import pytest
import torch

from pipeline.kernels.attention import attention, score_residual_attention


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def allowed() -> torch.Tensor:
    documents = torch.tensor([[1] * 4 + [2] * 3 + [0] * 2, [1] * 9])
    return (documents[:, :, None] == documents[:, None, :])[:, None]


def test_carried_scores_equal_attention_over_concatenated_queries_and_keys(
    allowed: torch.Tensor,
) -> None:
    # sum_l q_l . k_l = concat(q_1 .. q_l) . concat(k_1 .. k_l): layer 3 is plain attention with a
    # three times wider head, for which torch's own implementation is the oracle.
    torch.manual_seed(0)
    queries, keys = [_random(2, 3, 9, 4) for _ in range(3)], [_random(2, 3, 9, 4) for _ in range(3)]
    value = _random(2, 3, 9, 4)
    carry = None
    for q, k in zip(queries, keys, strict=True):
        found, carry = score_residual_attention(q, k, value, allowed, 0.0, carry)
    wide_q = torch.cat(queries, dim=-1) * math.sqrt(3)  # scaled by 1/sqrt(4), not 1/sqrt(12)
    expected = attention(wide_q, torch.cat(keys, dim=-1), value, allowed, 0.0)
    torch.testing.assert_close(found, expected)
    direction = torch.randn_like(found)
    inputs = [*queries, *keys, value]
    found_grads = torch.autograd.grad((found * direction).sum(), inputs, retain_graph=True)
    expected_grads = torch.autograd.grad((expected * direction).sum(), inputs)
    for found_grad, expected_grad in zip(found_grads, expected_grads, strict=True):
        torch.testing.assert_close(found_grad, expected_grad)


def test_first_layer_is_plain_attention(allowed: torch.Tensor) -> None:
    torch.manual_seed(0)
    q, k, v = (_random(2, 3, 9, 4) for _ in range(3))
    found, _ = score_residual_attention(q, k, v, allowed, 0.0, None)
    torch.testing.assert_close(found, attention(q, k, v, allowed, 0.0))


def test_carry_is_unmasked_and_has_a_gradient(allowed: torch.Tensor) -> None:
    torch.manual_seed(0)
    q, k, v = (_random(2, 3, 9, 4) for _ in range(3))
    _, carry = score_residual_attention(q, k, v, allowed, 0.0, None)
    torch.testing.assert_close(carry, q @ k.transpose(-1, -2) / 2)
    carry.sum().backward()
    assert q.grad is not None
    assert q.grad.abs().sum() > 0


def test_carry_of_bf16_is_kept_in_fp32(allowed: torch.Tensor) -> None:
    q, k, v = (torch.randn(2, 3, 9, 4).bfloat16() for _ in range(3))
    out, carry = score_residual_attention(q, k, v, allowed, 0.0, None)
    assert (out.dtype, carry.dtype) == (torch.bfloat16, torch.float32)


def test_dropout_keeps_the_mean(allowed: torch.Tensor) -> None:
    torch.manual_seed(0)
    q, k = torch.zeros(1, 400, 9, 4), torch.zeros(1, 400, 9, 4)
    v = torch.ones(1, 400, 9, 4)
    out, _ = score_residual_attention(q, k, v, torch.ones(1, 1, 9, 9, dtype=torch.bool), 0.25, None)
    # 3,600 rows of 9 Bernoulli(0.75) / 0.75: standard deviation of the mean 0.0032.
    assert float(out.mean()) == pytest.approx(1.0, abs=0.015)
    assert out.std() > 0.1
