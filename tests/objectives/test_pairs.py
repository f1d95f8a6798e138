"""Pair losses against sums written out in float64, and what a config may ask for."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.config.data import DataConfig
from pipeline.config.model import ModelConfig
from pipeline.config.objective import ObjectiveConfig, ObjectiveKind, PairKind
from pipeline.config.runs import PretrainConfig
from pipeline.data.loader import MicroBatch
from pipeline.errors import ConfigError
from pipeline.model.layout import rows
from pipeline.objectives.choose import make_objective
from pipeline.objectives.pairs import PairClassification, PairModel
from tests.distributed.engine_main import micro_batch

KIND: dict[PairKind, ObjectiveKind] = {"nsp": "mlm_nsp", "sop": "mlm_sop"}
CONFIG = ModelConfig(vocab_size=200, num_layers=2, hidden_size=32, num_heads=2, ffn_size=64,
                     pooler=True, dropout=0.0, attention_dropout=0.0, bias=True, norm_affine=True,
                     mlm_head="bert", init="unit", activation="gelu")  # fmt: skip


def _batch(kind: PairKind, num_pairs: int = 3) -> MicroBatch:
    """Random tokens whose pieces are cut in the middle; only the first pieces have labels."""
    plain = micro_batch(2, 1, rows=3)
    positions, documents = plain.positions, plain.documents
    first = torch.nonzero((positions == 0).view(-1) & (documents > 0).view(-1))[:num_pairs, 0]
    return replace(
        plain,
        segments=(positions >= 4).long() * (documents > 0),
        inputs={
            **plain.inputs,
            "pair_first": first,
            "pair_labels": torch.tensor([1, 0, 1, 1, 0])[: len(first)],
        },
        weights={**plain.weights, kind: float(len(first))},
    )


def _model() -> PairModel:
    torch.manual_seed(3)
    model = PairModel(CONFIG).double()
    with torch.no_grad():
        for parameter in model.parameters():  # also those that start at 0
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _total(model: PairModel, batch: MicroBatch, kind: PairKind, weight: float) -> torch.Tensor:
    """The minimised loss, as the engine puts it together."""
    objective = make_objective(ObjectiveConfig(kind=KIND[kind], pair_weight=weight))
    sums = objective(model, batch)
    terms = [factor * sums[n].total / sums[n].weight for n, factor in objective.losses.items()]
    return torch.stack(terms).sum()


@pytest.mark.parametrize("kind", ["nsp", "sop"])
def test_sums_are_those_written_out(kind: PairKind) -> None:
    model, batch = _model(), _batch(kind)
    sums = PairClassification(kind, 1.0)(model, batch)
    layout = rows(batch.documents, batch.positions)
    x = model.encoder(batch.input_ids, layout, segments=batch.segments).view(-1, 32)
    x = x.detach().numpy()
    weights = {name: each.detach().numpy() for name, each in model.named_parameters()}
    expected, right = 0.0, 0
    for place, label in zip(
        batch.inputs["pair_first"].tolist(), batch.inputs["pair_labels"].tolist(), strict=True
    ):
        pooled = np.tanh(
            weights["encoder.pooler.weight"] @ x[place] + weights["encoder.pooler.bias"]
        )
        one, other = weights["objective.weight"] @ pooled + weights["objective.bias"]
        expected += math.log(math.exp(one) + math.exp(other)) - (one, other)[label]
        right += int(other > one) == label
    assert sums[kind].total.item() == pytest.approx(expected, rel=1e-10)
    assert sums[f"{kind}_accuracy"].total.item() == right
    assert sums[kind].weight.item() == sums[f"{kind}_accuracy"].weight.item() == 3
    logits = model(batch.input_ids, layout, batch.inputs["masked_index"], batch.segments)
    of_tokens = 0.0
    for row, target in zip(logits.tolist(), batch.inputs["targets"].tolist(), strict=True):
        of_tokens += math.log(sum(math.exp(value) for value in row)) - row[target]
    assert sums["loss"].total.item() == pytest.approx(of_tokens, rel=1e-10)
    # Segments matter: the same tokens without them have another loss.
    other_sums = PairClassification(kind, 1.0)(model, replace(batch, segments=None))
    assert abs(other_sums["loss"].total.item() - of_tokens) > 1e-3


def test_the_gradient_is_that_of_differences() -> None:
    model, batch = _model(), _batch("sop")
    _total(model, batch, "sop", 0.7).backward()
    named = dict(model.named_parameters())
    rng = np.random.default_rng(0)
    for name, parameter in named.items():
        assert parameter.grad is not None, name
        at = tuple(int(rng.integers(size)) for size in parameter.shape)
        if name.endswith("_embedding.weight"):  # a row that is used
            at = (int(batch.input_ids[0, 1]) if "token" in name else 1, at[1])
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                parameter[at] += step
                values.append(_total(model, batch, "sop", 0.7).item())
                parameter[at] -= step
        difference = (values[0] - values[1]) / 2e-5
        assert parameter.grad[at].item() == pytest.approx(difference, rel=1e-5, abs=1e-8), name


def test_a_batch_without_pairs_gives_zero_with_a_gradient() -> None:
    model = _model()
    sums = PairClassification("nsp", 1.0)(model, _batch("nsp", num_pairs=0))
    assert [each.item() for name in ("nsp", "nsp_accuracy") for each in sums[name]] == [0.0] * 4
    sums["nsp"].total.backward()
    for name in ("pooler", "objective"):
        grads = [p.grad for n, p in model.named_parameters() if name in n]
        assert len(grads) == 2
        assert not any(grad is None or grad.any() for grad in grads)


def test_a_bf16_model_sums_in_fp32_and_the_loss_is_that_of_masked_tokens() -> None:
    objective = PairClassification("sop", 0.5)
    sums = objective(_model().bfloat16(), _batch("sop"))
    assert {each.dtype for pair in sums.values() for each in pair} == {torch.float32}
    assert objective.tracked_loss({"loss": 3.0, "sop": 0.6}) == 3.0
    assert objective.losses == {"loss": 1.0, "sop": 0.5}


def test_what_a_config_may_ask_for() -> None:
    data = DataConfig(dir="unused")
    with pytest.raises(ConfigError, match=r"model\.pooler=false.*set model\.pooler=true"):
        PretrainConfig(run_dir="x", data=data, objective=ObjectiveConfig(kind="mlm_sop"))
    model, objective = ModelConfig(pooler=True, type_vocab_size=1), ObjectiveConfig(kind="mlm_nsp")
    with pytest.raises(ConfigError, match=r"model\.type_vocab_size=1"):
        PretrainConfig(run_dir="x", data=data, model=model, objective=objective)
    with pytest.raises(ConfigError, match=r"pair_weight=0\.5 .* objective\.kind=mlm"):
        ObjectiveConfig(pair_weight=0.5)
