"""The model against an independent float64 reference: values, gradients, packing, start."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.config.model import ModelConfig
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.model.layout import Layout, rows
from tests.model import reference

TINY = ModelConfig(vocab_size=50, num_layers=3, hidden_size=24, num_heads=3, ffn_size=40,
                   init="unit", dropout=0.0, attention_dropout=0.0)  # fmt: skip
BOTH = pytest.mark.parametrize("score_residual", ["none", "sum"])


DOCUMENTS = torch.tensor([[1] * 5 + [2] * 6 + [3] * 3 + [0] * 2, [1] * 16])
POSITIONS = torch.tensor([[*range(5), *range(6), *range(3), 0, 0], list(range(16))])


def _batch() -> tuple[torch.Tensor, Layout, torch.Tensor]:
    """Two packed rows: documents of 5, 6 and 3 tokens and 2 of padding; one of 16."""
    ids = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(3))
    return ids, rows(DOCUMENTS, POSITIONS), torch.tensor([1, 6, 9, 12, 16, 31])


def _model(score_residual: str, **changes: object) -> MaskedLanguageModel:
    torch.manual_seed(0)
    config = replace(TINY, score_residual=score_residual, **changes)  # type: ignore[arg-type]
    return MaskedLanguageModel(config).double()


def _reference(model: MaskedLanguageModel) -> np.ndarray:
    weights = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    ids, _, masked_index = _batch()
    batch = [part.numpy() for part in (ids, DOCUMENTS, POSITIONS, masked_index)]
    return reference.logits(weights, model.config, *batch, alpha=model.encoder.alpha.item())


SWITCHES: dict[str, dict[str, object]] = {
    "plain": {}, "sum": {"score_residual": "sum"},
    "eps": {"norm_eps": 0.5, "score_residual": "sum"}, "running mean": {"score_residual": "mean"},
    "entropy-invariant": {"attention_scale": "entropy_invariant", "score_residual": "sum"},
    "deepnorm": {"residual": "deepnorm"},
    "deepnorm, running mean": {"residual": "deepnorm", "score_residual": "mean"},
    "rezero": {"residual": "rezero"}, "swiglu": {"activation": "swiglu"},
    "gains": {"norm_affine": True},
    "layernorm, biases": {"norm": "layernorm", "norm_affine": True, "bias": True},
    "pre-norm": {"norm_placement": "pre", "score_residual": "sum", "norm_affine": True},
    "values turned": {"rotary_value": True, "score_residual": "sum"},
    "no positions": {"positions": "none"},
    "learned": {"positions": "learned", "max_positions": 20, "position_offset": 3},
    "shared, factorised": {"share_layers": True, "embedding_size": 10, "bias": True},
    "bert head": {"mlm_head": "bert", "activation": "gelu", "bias": True},
    "tanh gelu": {"activation": "gelu_tanh"},
}  # fmt: skip


@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_equals_the_reference(name: str) -> None:
    model = _model(**{"score_residual": "none", **SWITCHES[name]})
    with torch.no_grad():  # biases, gains and shifts must be told apart from 0 and 1
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.add_(0.3 * torch.randn_like(parameter))
    plain = _model("none")(*_batch()).detach().numpy()
    # At 0 a block is the identity, whatever its gains and eps; the reference is so without them.
    for alpha in (1.0, 0.4, 0.0) if name in ("plain", "sum") else (1.0, 0.4):
        model.encoder.set_alpha(alpha)
        found = model(*_batch()).detach().numpy()
        np.testing.assert_allclose(found, _reference(model), atol=1e-12)
        assert alpha == 0.0 or name == "plain" or np.abs(found - plain).max() > 1e-3


@BOTH
def test_gradients_equal_finite_differences_of_the_reference(score_residual: str) -> None:
    model = _model(score_residual)
    direction = torch.randn(6, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model.encoder.set_alpha(0.7)
    (model(*_batch()) * direction).sum().backward()
    rng = np.random.default_rng(0)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        step = torch.from_numpy(rng.normal(size=tuple(parameter.shape)))
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter += sign * 1e-7 * step
            values.append((_reference(model) * direction.numpy()).sum())
            with torch.no_grad():
                parameter -= sign * 1e-7 * step
        expected = (values[0] - values[1]) / 2e-7
        found = float((parameter.grad * step).sum())
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6), name


@BOTH
def test_bf16_follows_fp32(score_residual: str) -> None:
    model = _model(score_residual).float()
    exact = model(*_batch())
    rounded = model.bfloat16()(*_batch())
    assert rounded.dtype == torch.bfloat16
    # 8 bits of mantissa over 7 layers of norm; values are of order 1.
    assert (rounded.float() - exact).abs().max() < 0.15


@pytest.mark.parametrize("place", ["dropout", "attention_dropout"])
@BOTH
def test_each_dropout_acts_in_training_only(place: str, score_residual: str) -> None:
    model = _model(score_residual, **{place: 0.5})
    assert not torch.equal(model(*_batch()), model(*_batch()))
    model.eval()
    assert torch.equal(model(*_batch()), model(*_batch()))
