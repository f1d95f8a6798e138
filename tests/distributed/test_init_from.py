"""Runs that start from trained weights."""

import shutil
from pathlib import Path

import pytest

from pipeline.use.grow import grow
from tests.distributed.conftest import Train
from tests.support.ranks import losses

SHORT = ("train.num_steps=6", "train.warmup_steps=2", "train.alpha_warmup_steps=0",
         "model.dropout=0.0", "model.attention_dropout=0.0",
         "checkpoint.every_steps=3", "train.lr=1e-4")  # fmt: skip


def test_run_from_another_or_grown_model(straight_run: Path, tmp_path: Path, train: Train) -> None:
    copy = tmp_path / "source"
    shutil.copytree(straight_run, copy)
    train("run", f"init_from={copy}", *SHORT)
    trained = sorted(losses(straight_run).items())
    first = losses(tmp_path / "run")[1]
    # It starts where the other run ended, or lower, since it has no dropout.
    assert trained[-1][1] - 1.0 < first < trained[-1][1] + 0.2 < trained[0][1]

    grow(copy, tmp_path / "wide", width=2, depth=None, noise=0.001, seed=1)
    wide = (f"init_from={tmp_path / 'wide'}", "model.hidden_size=64", "model.num_heads=4",
            "model.ffn_size=128")  # fmt: skip
    train("wider", *wide, *SHORT)
    assert losses(tmp_path / "wider")[1] == pytest.approx(first, abs=0.1)

    # A resumed run does not look at where it once came from.
    shutil.rmtree(copy)
    train("run", f"init_from={copy}", *SHORT, "train.num_steps=9")
    assert max(losses(tmp_path / "run")) == 9


def test_other_architecture_or_tokenizer_is_refused(straight_run: Path, train: Train) -> None:
    overrides = (f"init_from={straight_run}", "model.norm=layernorm", "model.vocab_size=1200")
    ranks = train("run", *overrides, *SHORT, world_size=1, code=2)
    assert "model.vocab_size: 1000 there, 1200 here" in ranks.output
    assert "model.norm: rmsnorm there, layernorm here" in ranks.output


def test_what_objectives_lack_is_named(straight_run: Path, tmp_path: Path, train: Train) -> None:
    overrides = (f"init_from={straight_run}", "objective.kind=rtd", "train.num_steps=1",
                 "train.warmup_steps=0", "data.replace_mask_prob=0.85",
                 "data.replace_random_prob=0")  # fmt: skip
    ranks = train("run", *SHORT, *overrides, world_size=1)
    assert "not there, so drawn at random: objective.generator.encoder." in ranks.output
    pairs = tmp_path / "pairs"
    overrides = (f"init_from={straight_run}", "objective.kind=mlm_sop", "model.pooler=true")
    ranks = train("pairs", *SHORT, *overrides, world_size=1)
    assert "drawn at random: encoder.pooler.weight, encoder.pooler.bias, obj" in ranks.output
    assert losses(pairs)[1] < losses(straight_run)[1] - 0.2
    ranks = train("back", *SHORT, f"init_from={pairs}", world_size=1)
    assert "model has no such part: encoder.pooler.weight, encoder.pooler.bias" in ranks.output


def test_every_kind_of_parameter_is_trained_and_resumed(tmp_path: Path, train: Train) -> None:
    # Biases, gains, a scalar and a pooler that no loss reaches, over a stop and a resume.
    switches = ("model.norm_affine=true", "model.bias=true", "model.residual=rezero",
                "model.pooler=true", "model.mlm_head=bert", "model.positions=learned",
                "model.max_positions=64", "model.score_residual=mean", "model.activation=swiglu",
                "model.embedding_size=16")  # fmt: skip
    train("straight", *switches, *SHORT)
    train("parts", *switches, *SHORT, "train.num_steps=3")
    train("parts", *switches, *SHORT)
    whole, parts = losses(tmp_path / "straight"), losses(tmp_path / "parts")
    assert {step: whole[step] for step in (4, 5, 6)} == {step: parts[step] for step in (4, 5, 6)}
