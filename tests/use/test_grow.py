"""Growth: the same logits from a wider model, a start from a deeper one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.config.model import ModelConfig
from pipeline.errors import CheckpointError, ConfigError
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.model.layout import packed
from pipeline.use.folder import build_model, load_model
from pipeline.use.grow import double_width, grow, stack

BASE = ModelConfig(vocab_size=70, num_layers=3, hidden_size=24, num_heads=3, ffn_size=40)
BATCH = (torch.randint(70, (12,)), packed(torch.tensor([0, 7, 12]), 7, 12), torch.arange(12))


def _weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = MaskedLanguageModel(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return dict(model.state_dict())


def _logits(config: ModelConfig, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    model = MaskedLanguageModel(config).double().eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        return model(*BATCH)


@pytest.mark.parametrize("changes", [
    {"score_residual": "none"}, {"score_residual": "sum"}, {"score_residual": "mean"},
    {"norm_placement": "pre", "score_residual": "sum"}, {"activation": "swiglu"},
    {"residual": "deepnorm"}, {"residual": "rezero"}, {"share_layers": True},
    {"positions": "learned"}, {"attention_scale": "entropy_invariant"},
])  # fmt: skip
@pytest.mark.parametrize("times", [1, 2])
def test_wider_model_gives_the_same_logits(changes: dict[str, object], times: int) -> None:
    config = replace(BASE, **changes)  # type: ignore[arg-type]
    weights = _weights(config)
    expected = _logits(config, weights)
    for _ in range(times):
        config, weights = double_width(config, weights)
    assert config.hidden_size == 24 * 2**times
    assert config.head_size == 8
    found = _logits(config, weights)
    assert float((found - expected).abs().max()) <= 1e-9
    assert float(expected.std()) > 0.1


def test_gradients_of_the_wider_model_are_not_all_alike_after_noise(
    straight_run: Path, tmp_path: Path
) -> None:
    exact = grow(straight_run, tmp_path / "exact", width=2, depth=None, noise=0.0, seed=0)
    noisy = grow(straight_run, tmp_path / "noisy", width=2, depth=None, noise=0.01, seed=0)
    assert exact.num_parameters == noisy.num_parameters > 2 * exact.num_parameters_before
    first, second = load_model(tmp_path / "exact").model, load_model(tmp_path / "noisy").model
    name = "encoder.layers.0.feed_forward.inner.weight"
    weight, other = first.state_dict()[name], second.state_dict()[name]
    assert torch.equal(weight[0::2], weight[1::2])
    assert not torch.equal(other[0::2], other[1::2])
    assert float((weight - other).std() / weight.std()) == pytest.approx(0.01, rel=0.1)


def test_stacked_layers_repeat_in_order() -> None:
    weights = _weights(BASE)
    config, grown = stack(BASE, weights, 6)
    assert config.num_layers == 6
    build_model(config, grown, "test")
    for number in range(6):
        name = "encoder.layers.{}.attention.qkv.weight"
        assert torch.equal(grown[name.format(number)], weights[name.format(number % 3)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 3}, "--width 3 must be 1 or a power of 2"),
        ({"depth": 5}, "--depth 5 must be a multiple of the 2 layers"),
        ({"noise": -1.0}, "--noise -1.0 must be at least 0"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: dict[str, object], message: str, straight_run: Path, tmp_path: Path
) -> None:
    values = {"width": 1, "depth": None, "noise": 0.0, "seed": 0, **arguments}
    with pytest.raises(ConfigError, match=message):
        grow(straight_run, tmp_path / "out", **values)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_what_does_not_double_exactly_is_refused() -> None:
    config = replace(BASE, norm="layernorm", norm_affine=True, bias=True)
    with pytest.raises(ConfigError, match="this model has norm=layernorm, norm_affine=True, bias"):
        double_width(config, _weights(config))


def test_full_folder_is_kept(straight_run: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(CheckpointError, match="is not empty"):
        grow(straight_run, tmp_path, width=2, depth=None, noise=0.0, seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
