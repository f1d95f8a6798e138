"""The objective's sums against sums written out by hand."""

import math

import torch

from pipeline.model.layout import rows
from pipeline.objectives.mlm import MaskedLanguageModeling
from tests.distributed.engine_main import micro_batch, model


def test_sums_are_those_of_each_position_at_the_alpha_that_is_set() -> None:
    trained, batch = model(seed=1), micro_batch(2, 1, rows=2)
    objective = MaskedLanguageModeling(torch.device("cpu"))
    found = []
    for alpha in (1.0, 0.25):
        objective.set_alpha(alpha)
        sums = objective(trained, batch)
        layout = rows(batch.documents, batch.positions)
        logits = trained(batch.input_ids, layout, batch.masked_index, torch.tensor(alpha))
        expected, correct = 0.0, 0
        for row, target in zip(logits.tolist(), batch.targets.tolist(), strict=True):
            expected += math.log(sum(math.exp(value) for value in row)) - row[target]
            correct += row.index(max(row)) == target
        assert abs(sums.loss.item() - expected) < 1e-5 * expected
        assert (sums.correct.item(), sums.weight.item()) == (correct, len(batch.targets))
        found.append(sums.loss.item())
    assert found[0] != found[1]


def test_no_masked_position_gives_zero_with_a_gradient() -> None:
    trained, batch = model(seed=1), micro_batch(1, 0, rows=2)
    assert not len(batch.targets)
    sums = MaskedLanguageModeling(torch.device("cpu"))(trained, batch)
    assert [s.item() for s in (sums.loss, sums.correct, sums.weight)] == [0.0, 0.0, 0.0]
    sums.loss.backward()
    for name, parameter in trained.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_a_bf16_model_sums_in_fp32() -> None:
    objective = MaskedLanguageModeling(torch.device("cpu"))
    sums = objective(model(seed=1).bfloat16(), micro_batch(2, 1, rows=2))
    for each in (sums.loss, sums.correct, sums.weight):
        assert each.dtype == torch.float32
