"""A checkpoint of replaced-token detection: all of it is probed and evaluated, its encoder used."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.checkpoints.probe import probe
from pipeline.checkpoints.state import KINDS, TensorShard, write_part
from pipeline.config.model import ModelConfig
from pipeline.errors import CheckpointError
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.runtime.checkpoints import FOLDER, name_of
from pipeline.use.export import export
from pipeline.use.folder import (
    MADE_NEW,
    load_checkpoint,
    load_model,
    load_objective,
)
from pipeline.use.source import initial_weights
from tests.distributed import rtd_main as case
from tests.distributed.engine_main import MODEL
from tests.support.checkpoints import write_manifest

CONFIG = replace(MODEL, mlm_head="bert", max_positions=64)


def _state(weight: Tensor) -> dict[str, Tensor]:
    """Master weights, and averages of Adam's that are not negative."""
    flat = weight.detach().flatten()
    return {kind: flat.clone() if kind == KINDS[0] else flat.square() for kind in KINDS}


def _run(
    folder: Path, model: torch.nn.Module, config: ModelConfig, *, without: str = "-", **more: Any
) -> Path:
    """A run's folder with one checkpoint of these weights; returns the checkpoint."""
    path = folder / FOLDER / name_of(4)
    parts = [
        TensorShard(name, tuple(weight.shape), 0, _state(weight))
        for name, weight in model.named_parameters()
        if not name.startswith(without)
    ]
    write_part(path, 0, 1, parts, {"updates": 4, "global_steps": 4, "skipped_steps": 0})
    write_manifest(path, 4, 1, None, {"seed": 1, "model": asdict(config), **more})
    return path


OF_RTD = {"objective": {"kind": "rtd", "generator_size": 0.5}}


def test_all_parts_are_read_back(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = case.OBJECTIVE.make_model(CONFIG)
    found = probe(_run(tmp_path / "good", model, CONFIG, **OF_RTD))
    assert found.num_parameters == sum(weight.numel() for weight in model.parameters())
    part = "objective.discriminator.output"
    with pytest.raises(CheckpointError, match=part):
        probe(_run(tmp_path / "less", model, CONFIG, without=part, **OF_RTD))
    with pytest.raises(CheckpointError, match="head_"):
        probe(_run(tmp_path / "mlm", model, CONFIG))
    probe(_run(tmp_path / "plain", MaskedLanguageModel(CONFIG), CONFIG))


def test_an_evaluation_has_all_parts(tmp_path: Path) -> None:
    model, [batch, _] = case.model(seed=1), case.micro_batches(2)
    loaded, _ = load_objective(_run(tmp_path, model, MODEL, **OF_RTD), case.OBJECTIVE)
    expected, found = case.OBJECTIVE(model.eval(), batch), case.OBJECTIVE(loaded, batch)
    for name, pair in expected.items():
        assert torch.equal(found[name].total, pair.total), name


@pytest.mark.parametrize("config", [CONFIG, MODEL], ids=["bert head", "linear head"])
def test_the_encoder_goes_on_with_a_head_that_is_new(tmp_path: Path, config: ModelConfig) -> None:
    torch.manual_seed(1)
    model = case.OBJECTIVE.make_model(config)
    loaded, _, made_new = load_checkpoint(_run(tmp_path / "run", model, config, **OF_RTD))
    encoder = loaded.encoder.state_dict()
    assert encoder.keys() == model.encoder.state_dict().keys()
    for name, value in model.encoder.state_dict().items():
        assert torch.equal(encoder[name], value), name
    assert made_new
    assert all(name.startswith("head_") for name in made_new) == (config.mlm_head == "bert")
    export(tmp_path / "run", tmp_path / "model")
    assert load_model(tmp_path / "model").facts[MADE_NEW] == made_new
    # Further runs start from it, with this objective or another.
    weights = initial_weights(tmp_path / "run").weights
    missing, _ = case.OBJECTIVE.make_model(config).load_state_dict(weights, strict=False)
    assert all(name.startswith("objective.") for name in missing)
    MaskedLanguageModel(config).load_state_dict(weights)
