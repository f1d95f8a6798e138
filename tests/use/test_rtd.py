"""A checkpoint of replaced-token detection: all of it is probed and evaluated, its encoder used."""

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.checkpoints.probe import probe
from pipeline.checkpoints.state import KINDS, TensorShard, write_part
from pipeline.config.model import ModelConfig
from pipeline.config.objective import ObjectiveConfig
from pipeline.errors import CheckpointError
from pipeline.model.encoder import MaskedLanguageModel
from pipeline.model.layout import rows
from pipeline.objectives.choose import make_objective
from pipeline.runtime.checkpoints import FOLDER, name_of
from pipeline.tokenizer.fast import BertOptions, word_piece
from pipeline.train.initial import _parts
from pipeline.use.export import export
from pipeline.use.folder import (
    MADE_NEW,
    load_checkpoint,
    load_model,
    load_objective,
)
from pipeline.use.source import initial_weights
from pipeline.use.surgery import Surgery, convert
from tests.distributed import rtd_main as case
from tests.distributed.engine_main import MODEL
from tests.parity.test_hugging_face import randomised
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
    loaded, _, made_new, _ = load_checkpoint(_run(tmp_path / "run", model, config, **OF_RTD))
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


@pytest.mark.parametrize("config", [CONFIG, MODEL], ids=["bert head", "linear head"])
def test_generator_and_discriminator_go_on_in_another_vocabulary(
    tmp_path: Path, config: ModelConfig
) -> None:
    letters = list("abcdefgh")
    old = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{x}" for x in letters)]
    new = [*old[:5], *reversed(old[5:]), "abc"]
    torch.manual_seed(1)
    model = randomised(case.OBJECTIVE.make_model(config))
    checkpoint = _run(tmp_path / "run", model, config, **OF_RTD)
    (checkpoint / "tokenizer.json").write_text(word_piece(old, BertOptions(), tmp_path))
    (tmp_path / "new.json").write_text(word_piece(new, BertOptions(), tmp_path))
    convert(f"{tmp_path / 'run'}@4", tmp_path / "changed", surgery=Surgery(tmp_path / "new.json"))
    initial = initial_weights(tmp_path / "changed")
    assert initial.parts is not None
    assert initial.parts.objective == OF_RTD["objective"]
    changed = case.OBJECTIVE.make_model(replace(config, vocab_size=len(new))).eval()
    run: Any = SimpleNamespace(identity_at=lambda: OF_RTD, init_from="changed")
    weights = initial.weights | _parts(changed, initial, run)
    missing, _ = changed.load_state_dict(weights, strict=False)
    assert not missing
    ids = torch.tensor([[2, 5, 14, 4, 9, 4, 3]])
    layout, places = rows(torch.ones_like(ids), torch.arange(7)[None]), torch.tensor([3, 5])
    there = torch.tensor([new.index(piece) for piece in old])
    with torch.no_grad():
        logits, moved = model(ids, layout, places), changed(there[ids], layout, places)
        torch.testing.assert_close(moved[:, there], logits[:, : len(old)], atol=1e-5, rtol=0)
        said = [of.objective.discriminator(of.encoder(each, layout))
                for of, each in ((model, ids), (changed, there[ids]))]  # fmt: skip
    torch.testing.assert_close(*said, atol=1e-5, rtol=0)
    # "abc" begins as the mean of what it was.
    table = changed.encoder.token_embedding.weight
    parts = [new.index(piece) for piece in ("a", "##b", "##c")]
    torch.testing.assert_close(table[-1], table[parts].mean(0))
    if config.mlm_head == "bert":
        bias = changed.objective.generator.head_bias
        torch.testing.assert_close(bias[-1], bias[parts].mean())


@pytest.mark.parametrize("identity", [
    {}, {"objective": {"kind": "mlm_sbo"}}, {"objective": {"kind": "rtd", "generator_size": 1.0}},
])  # fmt: skip
def test_parts_of_another_objective_are_left_out_with_a_word(
    tmp_path: Path, identity: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = case.OBJECTIVE.make_model(MODEL)
    initial = initial_weights(_run(tmp_path, model, MODEL, **OF_RTD).parents[1])
    objective = ObjectiveConfig(**identity.get("objective", {"kind": "rtd"}))
    run: Any = SimpleNamespace(identity_at=lambda: identity, init_from=tmp_path)
    assert _parts(make_objective(objective).make_model(MODEL), initial, run) == {}
    assert "parameters of its objective rtd are left out" in caplog.text
