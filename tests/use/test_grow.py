"""Growth: the same logits from a wider model, a start from a deeper one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.config.model import ModelConfig
from pipeline.errors import ConfigError
from pipeline.model.architecture import HEAD_FILE
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.model.layout import packed
from pipeline.use.folder import build_model, load_model, probe_logits, write_model
from pipeline.use.grow import double_width, grow, stack
from tests.parity.test_hugging_face import randomised

BASE = ModelConfig(vocab_size=70, num_layers=3, hidden_size=24, num_heads=3, ffn_size=40)
BATCH = (torch.randint(70, (12,)), packed(torch.tensor([0, 7, 12]), 7, 12), torch.arange(12))


def _weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return dict(randomised(MaskedLanguageModel(config).double()).state_dict())


def _outputs(
    config: ModelConfig, weights: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits, and pooled vectors if there is a pooler."""
    model = MaskedLanguageModel(config).double().eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        pooled = model.encoder.pool(model.encoder(*BATCH[:2])) if config.pooler else None
        return model(*BATCH), pooled


BERT: dict[str, object] = {"norm": "layernorm", "norm_affine": True, "bias": True,
                           "mlm_head": "bert", "pooler": True, "activation": "gelu",
                           "embedding_dropout": "after_norm"}  # fmt: skip
PLAIN: list[dict[str, object]] = [
    {"score_residual": "none"}, {"score_residual": "sum"}, {"score_residual": "mean"},
    {"norm_placement": "pre", "score_residual": "sum"}, {"activation": "swiglu"},
    {"residual": "deepnorm"}, {"residual": "rezero"}, {"share_layers": True},
    {"positions": "learned"}, {"attention_scale": "entropy_invariant"},
]  # fmt: skip
# Kinds with gains double exactly whatever eps is: one beside which a scaled variance would be seen.
GAINS: list[dict[str, object]] = [
    {"norm_eps": 1e-2, **changes}
    for changes in (
        {**BERT, "positions": "learned"}, BERT, {**BERT, "score_residual": "sum"},
        {**BERT, "score_residual": "mean", "positions": "learned", "norm_placement": "pre"},
        {**BERT, "embedding_size": 10}, {**BERT, "share_layers": True, "embedding_size": 24},
        {"norm_affine": True, "bias": True, "pooler": True},
        {"norm_affine": True, "norm_placement": "pre", "rotary_value": True},
        {"embedding_size": 10, "bias": True},
    )
]  # fmt: skip


@pytest.mark.parametrize("changes", [*PLAIN, *GAINS])
def test_wider_model_gives_the_same_logits(changes: dict[str, object]) -> None:
    config = replace(BASE, **changes)  # type: ignore[arg-type]
    weights = _weights(config)
    expected, pooled = _outputs(config, weights)
    assert float(expected.std()) > 0.1
    for times in (2, 4):
        config, weights = double_width(config, weights)
        assert (config.hidden_size, config.head_size) == (24 * times, 8)
        found, wide = _outputs(config, weights)
        assert float((found - expected).abs().max()) <= 1e-9
    if pooled is not None:
        torch.testing.assert_close(wide, pooled.repeat_interleave(4, -1))


def _small(folder: Path, **changes: object) -> Path:
    """A model folder whose embeddings are as small as at initialisation."""
    config = replace(BASE, score_residual="sum", **changes)  # type: ignore[arg-type]
    torch.manual_seed(1)
    folder.mkdir()
    write_model(folder, config, dict(MaskedLanguageModel(config).state_dict()), {})
    return folder


def test_eps_is_repaired_or_the_growth_refused(tmp_path: Path) -> None:
    source = _small(tmp_path / "small", norm_eps=1e-7)
    report = grow(source, tmp_path / "wide", width=2, depth=None, noise=0.0, seed=0)
    # As it was done before, the halved embedding beside the same eps moves logits.
    (moved, _), (kept, _) = _outputs(*double_width(*_read(source))), _outputs(*_read(source))
    assert float((moved - kept).abs().max() / kept.std()) > 1e-6
    assert report.config.norm_eps == 2.5e-8
    assert "norm_eps=2.5e-08" in report.notes[0]
    folders = (source, tmp_path / "wide")
    before, after = (load_model(path).model.double()(*BATCH).detach() for path in folders)
    assert float((after - before).abs().max() / before.std()) <= 1e-6
    large = _small(tmp_path / "large", norm_eps=0.02)
    with pytest.raises(ConfigError, match=r"logits differ by .* norm_eps=0\.005; expected 1e-06"):
        grow(large, tmp_path / "out", width=2, depth=None, noise=0.0, seed=0)
    assert not (tmp_path / "out").exists()


def _read(folder: Path) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    model = load_model(folder).model
    return model.config, dict(model.state_dict())


def test_what_depth_and_noise_do_is_said(tmp_path: Path) -> None:
    source = _small(tmp_path / "small")
    report = grow(source, tmp_path / "deep", width=2, depth=6, noise=0.01, seed=0)
    names = [note.partition(":")[0] for note in report.notes]
    assert names == ["depth 6", "width 48", "noise 0.01"]
    moved = float(report.notes[0].partition("up to ")[2].split()[0])
    deeper = stack(*_read(source), 6)
    before, after = (
        probe_logits(build_model(*each, "test").double()) for each in (_read(source), deeper)
    )
    assert moved == pytest.approx(float((after - before).abs().max() / before.std()), rel=0.05)


def test_a_head_that_is_left_out_is_named(tmp_path: Path) -> None:
    source = _small(tmp_path / "small")
    (source / HEAD_FILE).write_bytes(b"a head of the smaller width")
    report = grow(source, tmp_path / "wide", width=2, depth=None, noise=0.01, seed=0)
    assert "a head" in report.notes[-1]
    assert not (tmp_path / "wide" / HEAD_FILE).exists()


def test_gradients_of_the_wider_model_differ_by_noise(straight_run: Path, tmp_path: Path) -> None:
    exact = grow(straight_run, tmp_path / "exact", width=2, depth=None, noise=0.0, seed=0)
    noisy = grow(straight_run, tmp_path / "noisy", width=2, depth=None, noise=0.01, seed=0)
    assert [("--noise 0.01" in of.notes[-1]) for of in (exact, noisy)] == [True, False]
    assert exact.num_parameters == noisy.num_parameters > 2 * exact.num_parameters_before
    assert load_model(tmp_path / "exact").facts["optimizer"] == "adamw"
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


@pytest.mark.parametrize(("arguments", "message"), [
    ({"width": 3}, "--width 3 must be 1 or a power of 2"),
    ({"depth": 5}, "--depth 5 must be a multiple of the 2 layers"),
    ({"noise": -1.0}, "--noise -1.0 must be at least 0"),
])  # fmt: skip
def test_wrong_arguments_are_refused(
    arguments: dict[str, object], message: str, straight_run: Path, tmp_path: Path
) -> None:
    values = {"width": 1, "depth": None, "noise": 0.0, "seed": 0, **arguments}
    with pytest.raises(ConfigError, match=message):
        grow(straight_run, tmp_path / "out", **values)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
