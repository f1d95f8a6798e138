"""Model folders prove what they hold: every flipped byte is named, by every reader."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checkpoints.manifest import state_file
from pipeline.config.model import ModelConfig
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, CheckpointError
from pipeline.model.architecture import read_architecture
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.runtime.tensors import write_file
from pipeline.use.folder import build_model, load_model, newest, write_config, write_model
from pipeline.use.source import load_source
from tests.support.checkpoints import make_checkpoint
from tests.support.damage import flip
from tests.use.test_wrong_folder import COMMANDS

CONFIG = ModelConfig(
    vocab_size=40, num_layers=1, hidden_size=16, num_heads=2, ffn_size=24, score_residual="sum"
)
READERS: dict[str, Callable[[Path], object]] = {
    **{name: COMMANDS[name][0] for name in ("load", "export", "grow", "init_from")},
    "evaluate": load_source,
}


def _weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return dict(MaskedLanguageModel(CONFIG).state_dict())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    write_model(path, CONFIG, _weights(), {"step": 3})
    return path


@pytest.mark.parametrize("reader", READERS)
def test_a_flipped_bit_of_a_weight_is_named_by_every_reader(reader: str, folder: Path) -> None:
    read = READERS[reader]
    read(folder)
    flip(folder / "model.safetensors", -5)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not as it was written") as at:
        read(folder)
    assert at.value.exit_code == EXIT_FAILED_DO_NOT_RETRY


def test_a_changed_config_and_a_missing_file_are_named(folder: Path) -> None:
    path = folder / "config.json"
    good = path.read_text()
    path.write_text(good.replace('"step": 3', '"step": 4'))
    with pytest.raises(CheckpointError, match=r"config\.json is not as it was written"):
        read_architecture(folder)
    path.write_text(good)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        load_model(folder)


def test_a_missing_and_a_surplus_weight_are_named() -> None:
    weights = _weights()
    weights["surprise"] = weights.pop("encoder.segment_embedding.weight")
    with pytest.raises(CheckpointError, match=r"encoder\.segment_emb.* surprise"):
        build_model(CONFIG, weights, "here")


def test_other_logits_of_the_fixed_input_are_named(folder: Path) -> None:
    other = _weights()
    with torch.no_grad():
        other["encoder.token_embedding.weight"][7] += 1
    elsewhere = folder.with_name("other")
    elsewhere.mkdir()
    write_model(elsewhere, CONFIG, other, {})
    # Files that are intact, and logits of another model: as if the code had changed.
    write_config(folder, CONFIG, {}, load_model(elsewhere).model)
    with pytest.raises(CheckpointError, match="logits of the fixed input differ by"):
        load_model(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_written(value: float, tmp_path: Path) -> None:
    weights: dict[str, Any] = _weights()
    weights["encoder.token_embedding.weight"][3, 2] = value
    with pytest.raises(CheckpointError, match=r"1 of the 640 values of encoder\.token_emb"):
        write_model(tmp_path, CONFIG, weights, {})
    assert not list(tmp_path.iterdir())


def test_other_values_and_versions_are_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    body = json.loads((folder / "config.json").read_text())
    del body["integrity"], body["config_sha256"]
    (folder / "config.json").write_text(json.dumps(body))
    with caplog.at_level(logging.WARNING):
        assert load_model(folder).facts["step"] == 3
    assert "has no sha256 of its weights" in caplog.text
    weights = _weights()
    name = "encoder.layers.0.attention.qkv.weight"
    weights[name] = weights[name].to(torch.int8)
    write_file(weights, folder / "model.safetensors")
    write_config(folder, CONFIG, {})  # whose sha256 is right
    with pytest.raises(CheckpointError, match=r"qkv\.weight holds torch\.int8, expected fp32"):
        load_model(folder)


def test_a_damaged_checkpoint_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    earlier, damaged = (make_checkpoint(tmp_path, step) for step in (10, 20))
    flip(damaged / state_file(0, 1), -5)
    assert newest(tmp_path) == earlier
    assert "state/rank-00000-of-00001.safetensors is damaged, its sha256 differs" in caplog.text
    assert "step-00000010 is taken in its place" in caplog.text
    flip(earlier / state_file(0, 1), -5)
    with pytest.raises(CheckpointError, match=r"no good checkpoint.*rank-00000-of-00001"):
        newest(tmp_path)


def test_finite_weights_with_logits_that_overflow_are_not_written(tmp_path: Path) -> None:
    weights = _weights()
    weights["encoder.layers.0.attention.qkv.weight"] *= 1e30
    with pytest.raises(CheckpointError, match="infinite or NaN logits, although its weights are"):
        write_model(tmp_path, CONFIG, weights, {})


@pytest.mark.parametrize(("change", "message"), [
    ({"vocab_size": None}, "vocab_size is null"),
    ({"hidden_size": 10**18}, "hidden_size.*1000000000000000000"),
    ({"num_layers": 10**7}, "num_layers.*10000000"),
])  # fmt: skip
def test_absurd_sizes_are_named(change: dict[str, Any], message: str, folder: Path) -> None:
    body = json.loads((folder / "config.json").read_text())
    del body["config_sha256"]
    body["model"] |= change
    (folder / "config.json").write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)
