"""The model against an independent float64 reference: values, gradients, packing, start."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.config.load import load
from pipeline.config.model import ModelConfig
from pipeline.config.run import PretrainConfig
from pipeline.model.encoder import MaskedLanguageModel, RMSNorm
from tests.model import reference

CONFIGS = Path(__file__).parents[2] / "configs" / "model"
TINY = ModelConfig(
    vocab_size=50, num_layers=3, hidden_size=24, num_heads=3, ffn_size=40, init="unit",
    dropout=0.0, attention_dropout=0.0,
)  # fmt: skip
BOTH = pytest.mark.parametrize("score_residual", ["none", "sum"])


def _batch() -> tuple[torch.Tensor, ...]:
    """Two packed rows: documents of 5, 6 and 3 tokens and 2 of padding; one of 16."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 50, (2, 16), generator=generator)
    documents = torch.tensor([[1] * 5 + [2] * 6 + [3] * 3 + [0] * 2, [1] * 16])
    positions = torch.tensor([[*range(5), *range(6), *range(3), 0, 0], list(range(16))])
    masked_index = torch.tensor([1, 6, 9, 12, 16, 31])
    return ids, documents, positions, masked_index


def _model(score_residual: str, **changes: object) -> MaskedLanguageModel:
    torch.manual_seed(0)
    config = replace(TINY, score_residual=score_residual, **changes)  # type: ignore[arg-type]
    return MaskedLanguageModel(config).double()


def _reference(model: MaskedLanguageModel, alpha: float) -> np.ndarray:
    weights = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    batch = [part.numpy() for part in _batch()]
    return reference.logits(weights, model.encoder.config, *batch, alpha=alpha)


@BOTH
@pytest.mark.parametrize("alpha", [1.0, 0.3, 0.0])
def test_logits_equal_the_reference(score_residual: str, alpha: float) -> None:
    model = _model(score_residual)
    found = model(*_batch(), alpha=torch.tensor(alpha, dtype=torch.float64))
    # float64; the rotary tables are fp32, which leaves 1e-7.
    np.testing.assert_allclose(found.detach().numpy(), _reference(model, alpha), atol=2e-6)


@BOTH
def test_eps_is_used(score_residual: str) -> None:
    model = _model(score_residual, norm_eps=0.5)
    np.testing.assert_allclose(model(*_batch()).detach().numpy(), _reference(model, 1.0), atol=2e-6)


@BOTH
def test_gradients_equal_finite_differences_of_the_reference(score_residual: str) -> None:
    model = _model(score_residual)
    direction = torch.randn(6, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (model(*_batch(), alpha=torch.tensor(0.7, dtype=torch.float64)) * direction).sum().backward()
    rng = np.random.default_rng(0)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        step = torch.from_numpy(rng.normal(size=tuple(parameter.shape)))
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter += sign * 1e-7 * step
            values.append((_reference(model, 0.7) * direction.numpy()).sum())
            with torch.no_grad():
                parameter -= sign * 1e-7 * step
        expected = (values[0] - values[1]) / 2e-7
        found = float((parameter.grad * step).sum())
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6), name


@BOTH
def test_document_is_not_changed_by_its_neighbours(score_residual: str) -> None:
    model = _model(score_residual)
    ids, documents, positions, _ = _batch()
    packed = model.encoder(ids, documents, positions)[0, 5:11]
    alone = model.encoder(ids[:1, 5:11], torch.ones(1, 6), torch.arange(6)[None])[0]
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-12)


@BOTH
def test_batch_size_and_masked_positions_do_not_matter(score_residual: str) -> None:
    model = _model(score_residual)
    ids, documents, positions, _ = _batch()
    every = model(ids, documents, positions, torch.arange(32))
    some = model(ids[1:], documents[1:], positions[1:], torch.tensor([4]))
    torch.testing.assert_close(every[20:21], some, rtol=0, atol=1e-12)


def test_alpha_zero_makes_every_layer_the_identity() -> None:
    model = _model("sum")
    ids, documents, positions, _ = _batch()
    encoded = model.encoder(ids, documents, positions, alpha=torch.zeros(()))
    embedded = model.encoder.token_embedding(ids) + model.encoder.segment_embedding.weight[0]
    norm = RMSNorm(TINY.norm_eps)
    # Each norm adds eps = 1e-12 to a mean square that is 1, or 0.05 in the first.
    torch.testing.assert_close(encoded, norm(embedded), rtol=0, atol=1e-10)


def test_alpha_of_one_is_the_default() -> None:
    model = _model("sum")
    torch.testing.assert_close(model(*_batch()), model(*_batch(), alpha=torch.ones(())))


@BOTH
def test_bf16_follows_fp32(score_residual: str) -> None:
    model = _model(score_residual).float()
    exact = model(*_batch())
    rounded = model.bfloat16()(*_batch(), alpha=torch.ones(()))
    assert rounded.dtype == torch.bfloat16
    # 8 bits of mantissa over 7 layers of norm; values are of order 1.
    assert (rounded.float() - exact).abs().max() < 0.15


def test_dropout_acts_in_training_only() -> None:
    model = _model("sum", dropout=0.2, attention_dropout=0.2)
    assert not torch.equal(model(*_batch()), model(*_batch()))
    model.eval()
    assert torch.equal(model(*_batch()), model(*_batch()))


@pytest.mark.parametrize("place", ["dropout", "attention_dropout"])
@BOTH
def test_each_dropout_is_at_work(place: str, score_residual: str) -> None:
    model = _model(score_residual, **{place: 0.5})
    assert not torch.equal(model(*_batch()), model(*_batch()))


# Published sizes at vocabulary 12,000: 15.23 M, 94.15 M, 314.28 M.
@pytest.mark.parametrize(
    ("size", "millions"), [("small", 15.23), ("base", 94.15), ("large", 314.28)]
)
@pytest.mark.parametrize("family", ["roformer_v2", "realformer_v2"])
def test_presets_have_the_published_number_of_parameters(
    size: str, millions: float, family: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"run_dir: r\ndata: {{dir: d}}\nmodel: {{from: {CONFIGS}/{family}-{size}.yaml}}\n"
    )
    config = load(PretrainConfig, path, ["model.vocab_size=12000"]).config.model
    assert config.score_residual == ("sum" if family == "realformer_v2" else "none")
    with torch.device("meta"):
        model = MaskedLanguageModel(config)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.005)


@pytest.mark.parametrize(
    ("init", "gain"), [("unit", lambda n: 1.0), ("rsqrt_depth", lambda n: n**-0.5)]
)
def test_initialisation_is_a_truncated_normal(init: str, gain: Callable[[int], float]) -> None:
    config = ModelConfig(
        vocab_size=3000, num_layers=4, hidden_size=256, num_heads=4, ffn_size=1024,
        init=init,  # type: ignore[arg-type]
    )  # fmt: skip
    torch.manual_seed(0)
    model = MaskedLanguageModel(config)
    fan_in = {"feed_forward.output.weight": 1024}
    for name, parameter in model.named_parameters():
        fan = next((f for suffix, f in fan_in.items() if name.endswith(suffix)), 256)
        std = gain(4) / fan**0.5
        if parameter.numel() > 10_000:
            assert float(parameter.detach().std()) == pytest.approx(std, rel=0.02), name
        # bert4keras draws with 1.13684723 times the wanted deviation and cuts at two of those.
        assert float(parameter.detach().abs().max()) <= 2 * 1.13684723 * std * 1.0001, name
        assert float(parameter.detach().abs().max()) >= 1.5 * std, name
