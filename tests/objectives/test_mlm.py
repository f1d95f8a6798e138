"""The loss against a sum written out by hand."""

import math

import torch

from pipeline.objectives.mlm import masked_lm_loss


def test_sums_are_those_of_each_position() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(7, 11, dtype=torch.float64), torch.randint(0, 11, (7,))
    sums = masked_lm_loss(logits, targets)
    expected, correct = 0.0, 0
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        expected += math.log(sum(math.exp(value) for value in row)) - row[target]
        correct += row.index(max(row)) == target
    assert abs(float(sums.loss) - expected) < 1e-5
    assert float(sums.correct) == correct
    assert float(sums.weight) == 7


def test_no_masked_position_gives_zero_with_a_gradient() -> None:
    logits = torch.zeros(0, 11, requires_grad=True)
    sums = masked_lm_loss(logits, torch.zeros(0, dtype=torch.int64))
    assert [s.item() for s in (sums.loss, sums.correct, sums.weight)] == [0.0, 0.0, 0.0]
    sums.loss.backward()
    assert logits.grad is not None


def test_bf16_logits_are_summed_in_fp32() -> None:
    logits = torch.zeros(5000, 11, dtype=torch.bfloat16)
    sums = masked_lm_loss(logits, torch.zeros(5000, dtype=torch.int64))
    assert sums.loss.dtype == torch.float32
    assert abs(float(sums.loss) - 5000 * math.log(11)) < 0.1
