"""The objective's sums against sums written out by hand."""

import math

import torch

from pipeline.config.model import ModelConfig
from pipeline.data.batch import MicroBatch
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.model.layout import rows
from pipeline.objectives.mlm import MaskedLanguageModeling

CONFIG = ModelConfig(vocab_size=11, num_layers=2, hidden_size=16, num_heads=2, ffn_size=24)


def _model() -> MaskedLanguageModel:
    torch.manual_seed(0)
    return MaskedLanguageModel(CONFIG).eval()


def _batch(num_masked: int) -> MicroBatch:
    ids = torch.randint(0, 11, (2, 8))
    index = torch.randperm(16)[:num_masked].sort().values
    return MicroBatch(
        input_ids=ids, documents=torch.ones(2, 8, dtype=torch.int32),
        positions=torch.arange(8).expand(2, -1), masked_index=index,
        targets=torch.randint(0, 11, (num_masked,)), num_tokens=16, unmasked_documents=0, hash=0,
    )  # fmt: skip


def test_sums_are_those_of_each_position_at_the_alpha_that_is_set() -> None:
    model, batch = _model(), _batch(7)
    objective = MaskedLanguageModeling(torch.device("cpu"))
    found = []
    for alpha in (1.0, 0.25):
        objective.set_alpha(alpha)
        sums = objective(model, batch)
        layout = rows(batch.documents, batch.positions)
        logits = model(batch.input_ids, layout, batch.masked_index, torch.tensor(alpha))
        expected, correct = 0.0, 0
        for row, target in zip(logits.tolist(), batch.targets.tolist(), strict=True):
            expected += math.log(sum(math.exp(value) for value in row)) - row[target]
            correct += row.index(max(row)) == target
        assert abs(sums.loss.item() - expected) < 1e-5
        assert (sums.correct.item(), sums.weight.item()) == (correct, 7)
        found.append(sums.loss.item())
    assert found[0] != found[1]


def test_no_masked_position_gives_zero_with_a_gradient() -> None:
    model = _model()
    sums = MaskedLanguageModeling(torch.device("cpu"))(model, _batch(0))
    assert [s.item() for s in (sums.loss, sums.correct, sums.weight)] == [0.0, 0.0, 0.0]
    sums.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_a_bf16_model_sums_in_fp32() -> None:
    sums = MaskedLanguageModeling(torch.device("cpu"))(_model().bfloat16(), _batch(7))
    for each in (sums.loss, sums.correct, sums.weight):
        assert each.dtype == torch.float32
