"""Means of models: against means written out, and what has none is named."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.errors import CheckpointError, ConfigError
from pipeline.runtime.checkpoints import FOLDER, name_of, published
from pipeline.use.average import average
from pipeline.use.folder import (
    ObjectiveParts,
    TrainedModel,
    load_model,
    publishing,
    write_model,
    write_tokenizer,
)
from pipeline.use.source import load_source
from pipeline.use.surgery import Surgery, convert
from tests.support import warm

pytestmark = pytest.mark.usefixtures("processes")


def test_last_checkpoints_of_a_run(straight_run: Path, tmp_path: Path) -> None:
    done = warm.run("pipeline", "average", tmp_path / "mean", straight_run, "--last", "2")
    assert done.returncode == 0, done.stderr
    assert f"{straight_run}@30" in done.stdout
    found = load_model(tmp_path / "mean")
    one, two = (load_source(f"{straight_run}@{step}").model.state_dict() for step in (30, 40))
    for name, tensor in found.model.state_dict().items():
        mean = (one[name].double() + two[name].double()) / 2
        assert torch.equal(tensor, mean.float()), name
    assert [of["step"] for of in found.facts["averaged_from"]] == [30, 40]
    assert found.facts["optimizer"] == "adamw"
    assert (
        found.require_tokenizer().content == load_source(straight_run).require_tokenizer().content
    )
    # The distance from the mean of two is half their difference.
    apart = sum(float((one[n] - two[n]).double().square().sum()) for n in one) / 4
    norm = sum(
        float(tensor.double().square().sum()) for tensor in found.model.state_dict().values()
    )
    assert f"{(apart / norm) ** 0.5:.2%} of its norm" in done.stdout


def test_the_start_is_none_of_the_last(straight_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(straight_run, run)
    newest, *others = published(run / FOLDER)
    others[-1].rename(newest.with_name(name_of(0)))
    with pytest.raises(ConfigError, match=f"has {len(others)} checkpoints"):
        average([run], tmp_path / "mean", last=len(others) + 1)


def test_three_models_of_which_two_are_one(straight_run: Path, tmp_path: Path) -> None:
    report = average([straight_run] * 3, tmp_path / "same")
    assert report.distance < 1e-6
    same, of = load_model(tmp_path / "same").model.state_dict(), load_source(straight_run)
    assert all(torch.equal(same[n], tensor) for n, tensor in of.model.state_dict().items())


def _write(trained: TrainedModel, folder: Path) -> Path:
    with publishing(folder) as new:
        write_tokenizer(trained, new)
        write_model(new, trained.model.config, dict(trained.model.state_dict()), {})
    return folder


def test_parts_of_an_objective_are_left_out_and_named(
    straight_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, parts = load_source(straight_run), ObjectiveParts("rtd", {"head": torch.ones(2)})
    for name in "ab":
        with publishing(tmp_path / name) as new:
            write_tokenizer(run, new)
            write_model(new, run.model.config, dict(run.model.state_dict()), {}, parts=parts)
    average([tmp_path / "a", tmp_path / "b"], tmp_path / "mean")
    told = [
        record.message for record in caplog.records if "parts of its objective" in record.message
    ]
    assert [text.split(":")[0] for text in told] == [str(tmp_path / name) for name in "ab"]
    assert load_model(tmp_path / "mean").parts is None


def test_what_has_no_mean_is_named(straight_run: Path, tmp_path: Path) -> None:
    run = load_source(straight_run)
    base = tmp_path / "base"
    convert(straight_run, base, surgery=Surgery(rotary_base=500.0))
    bare = _write(replace(run, tokenizer=None), tmp_path / "bare")
    out = tmp_path / "out"
    for sources, last, kind, facts in (
        ([straight_run, base], None, CheckpointError, ("rotary_base is 10000.0 and 500.0",)),
        ([straight_run, bare], None, CheckpointError, ("tokenizer", "0 here")),
        ([straight_run], None, ConfigError, ("1 model", "--last N")),
        ([straight_run, bare], 2, ConfigError, ("--last 2 with 2 models",)),
        ([straight_run], 9, ConfigError, ("has 2 checkpoints, of steps 30, 40", "checkpoint.keep")),
    ):  # fmt: skip
        with pytest.raises(kind) as caught:
            average(sources, out, last=last)
        for fact in facts:
            assert fact in str(caught.value)
    assert not out.exists()
