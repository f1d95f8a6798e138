"""Exported folders: the same numbers, loadable alone, refused where they would be wrong."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.checkpoints.manifest import newest_good
from pipeline.config.model import ModelConfig
from pipeline.data.format import CLS_ID, MASK_ID, SEP_ID, DatasetIndex
from pipeline.errors import CheckpointError, DataError
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.model.layout import rows
from pipeline.runtime.checkpoints import read_manifest
from pipeline.tokenizer.sentencepiece import Tokenizer
from pipeline.use.export import ExportReport, compare, export
from pipeline.use.folder import load_model
from pipeline.use.grow import grow
from pipeline.use.model import load
from pipeline.use.source import initial_weights, load_source
from tests.support.ranks import Ranks, newest_state


@pytest.fixture(scope="module")
def exported(straight_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "model"
    assert export(straight_run, out).max_abs_diff <= 1e-3
    return out


def test_folder_is_complete(exported: Path, dataset: DatasetIndex) -> None:
    assert sorted(p.name for p in exported.iterdir()) == ["config.json", "model.safetensors",
                                                          "tokenizer.model"]  # fmt: skip
    config = json.loads((exported / "config.json").read_text())
    assert config["data_fingerprint"] == dataset.fingerprint
    assert config["model"]["vocab_size"] == 1000
    assert config["step"] == config["scores"]["step"] == 40
    assert 0 < config["scores"]["accuracy"] < 1
    assert 0 <= config["max_abs_diff"] <= 1e-3
    tokenizer = (dataset.folder / "tokenizer.model").read_bytes()
    assert (exported / "tokenizer.model").read_bytes() == tokenizer


def test_weights_are_masters(exported: Path, straight_run: Path) -> None:
    weights = load_file(exported / "model.safetensors")
    state = newest_state(straight_run)
    assert len(weights) == 2 + 2 * 4
    for name, value in weights.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, state[f"master {name}"])
    assert load_model(exported).model.config == load_source(straight_run).model.config


def test_fill_mask_gives_the_best_tokens(exported: Path, straight_run: Path) -> None:
    text = "The [MASK] statement is used to [MASK] a value."
    masks = load(exported).fill_mask(text, top=4)
    assert load(straight_run).fill_mask(text, top=4) == masks
    loaded = load_model(exported)
    assert isinstance(loaded.tokenizer, Tokenizer)
    ids = torch.tensor([[CLS_ID, *loaded.tokenizer.encode_with_masks(text), SEP_ID]])
    places = (ids[0] == MASK_ID).nonzero()[:, 0]
    with torch.no_grad():
        layout = rows(torch.ones_like(ids), torch.arange(ids.shape[1])[None])
        logits = loaded.model(ids, layout, places)
    for row, candidates in zip(logits, masks, strict=True):
        row[:5] = float("-inf")
        shares = row.softmax(-1)
        assert candidates[0].token == loaded.tokenizer.piece(int(row.argmax()))
        assert candidates[0].probability == pytest.approx(float(shares.max()))
        chances = [candidate.probability for candidate in candidates]
        assert chances == sorted(chances, reverse=True)
        assert len(chances) == 4


def test_empty_runs_and_full_folders_are_refused(tmp_path: Path, straight_run: Path) -> None:
    (tmp_path / "attempts.jsonl").write_text("{}\n")
    with pytest.raises(CheckpointError, match="has no checkpoints yet: "):
        export(tmp_path, tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    with pytest.raises(CheckpointError, match="is not empty; choose another"):
        export(straight_run, tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["precious"]


def test_alpha_warm_up(dataset: DatasetIndex, tmp_path: Path, start_ranks: type[Ranks]) -> None:
    overrides = ("train.alpha_warmup_steps=39", "checkpoint.every_steps=4")
    ranks = start_ranks(tmp_path / "run", dataset, *overrides)
    ranks.wait_for_step(9)
    ranks.wait_for_checkpoint(4)
    ranks.kill()
    with pytest.raises(CheckpointError, match=r"alpha is 0\.\d+, and an exported"):
        export(tmp_path / "run", tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"alpha is 0\.\d+, and a grown model"):
        grow(tmp_path / "run", tmp_path / "out", width=2, depth=None, noise=0.0, seed=0)
    with pytest.raises(CheckpointError, match=r"alpha is 0\.\d+, and a run that starts from it"):
        initial_weights(tmp_path / "run")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "run.out", "run.yaml"]

    newest, _ = newest_good(tmp_path / "run/checkpoints")
    assert newest is not None
    alpha = read_manifest(newest).alpha
    assert 0 < alpha < 1
    model = load(tmp_path / "run")
    vectors = model.encode(["The assert statement."])
    assert model.alpha == pytest.approx(alpha)
    # At another alpha the vectors are others.
    model.module.encoder.set_alpha(1.0)
    assert (model.encode(["The assert statement."]) != vectors).any()
    assert float(load_source(tmp_path / "run").model.encoder.alpha) == pytest.approx(alpha)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.model"])
def test_damaged_export_is_refused(exported: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(exported, tmp_path / "out")
    path = tmp_path / "out" / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises((CheckpointError, DataError), match=re.escape(str(path))):
        load_model(tmp_path / "out")


def test_a_model_of_few_positions_is_compared_at_them(tmp_path: Path) -> None:
    config = ModelConfig(num_layers=1, hidden_size=16, num_heads=2, ffn_size=24, vocab_size=50,
                         positions="learned", max_positions=9)  # fmt: skip
    model = MaskedLanguageModel(config).eval()
    assert compare(model, model) == ExportReport(0.0, 4 * 18 * 50)
