"""The objective's sums against sums written out by hand."""

import math

from pipeline.model.layout import rows
from pipeline.objectives.mlm import MaskedLanguageModeling
from tests.distributed.engine_main import micro_batch, model


def test_sums_are_those_of_each_position_at_the_alpha_that_is_set() -> None:
    trained, batch = model(seed=1), micro_batch(2, 1, rows=2)
    objective = MaskedLanguageModeling()
    found = []
    for alpha in (1.0, 0.25):
        trained.encoder.set_alpha(alpha)
        sums = objective(trained, batch)
        layout = rows(batch.documents, batch.positions)
        logits = trained(batch.input_ids, layout, batch.inputs["masked_index"])
        expected, correct = 0.0, 0
        for row, target in zip(logits.tolist(), batch.inputs["targets"].tolist(), strict=True):
            expected += math.log(sum(math.exp(value) for value in row)) - row[target]
            correct += row.index(max(row)) == target
        loss, weight = sums["loss"]
        assert abs(loss.item() - expected) < 1e-5 * expected
        assert weight.item() == len(batch.inputs["targets"]) == batch.weights["loss"]
        assert [each.item() for each in sums["accuracy"]] == [correct, weight.item()]
        found.append(loss.item())
    assert found[0] != found[1]


def test_no_masked_position_gives_zero_with_a_gradient() -> None:
    trained, batch = model(seed=1), micro_batch(1, 0, rows=2)
    assert not len(batch.inputs["targets"])
    sums = MaskedLanguageModeling()(trained, batch)
    assert [each.item() for pair in sums.values() for each in pair] == [0.0] * 4
    sums["loss"].total.backward()
    for name, parameter in trained.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name
