"""The report on transfer: three models a task, resumed, with paired differences."""

from pathlib import Path

import pytest
import yaml

from experiments.transfer import markdown, transfer
from pipeline.errors import ConfigError, RunFolderError
from tests.multitask.test_run import write_mix
from tests.support.tiny_tasks import write_task


@pytest.mark.usefixtures("processes")
def test_each_task_is_tuned_from_three_models(tmp_path: Path, tiny_model: Path) -> None:
    write_mix(tmp_path, tiny_model, train={"num_steps": 30, "lr": 5e-3})
    settings = {
        "run_dir": str(tmp_path / "out"), "mix": "mix.yaml", "tasks": ["classify"],
        "overrides": ["train.epochs=1", "train.lr=1e-3"], "seeds": [1, 2],
    }  # fmt: skip
    (tmp_path / "transfer.yaml").write_text(yaml.safe_dump(settings))
    body = transfer(str(tmp_path / "transfer.yaml"))
    [line] = body["tasks"]
    assert {arm: len(scores) for arm, scores in line["scores"].items()} == {
        "start": 2, "all": 2, "without": 2,
    }  # fmt: skip
    # The stage has learned this very task, and the fine-tuning is too short to.
    gain = line["differences"]["all - start"]
    assert gain["low"] > 0
    means = {arm: sum(scores) / 2 for arm, scores in line["scores"].items()}
    assert gain["mean"] == pytest.approx(means["all"] - means["start"])
    without = yaml.safe_load((tmp_path / "out/without-classify/multitask.yaml").read_text())
    assert sorted(without["tasks"]) == ["regress", "tag"]
    assert "| classify | accuracy |" in markdown(body)
    results = sorted((tmp_path / "out").rglob("seed-*/result.json"))
    times = [path.stat().st_mtime_ns for path in results]
    again = transfer(str(tmp_path / "transfer.yaml"))
    assert [path.stat().st_mtime_ns for path in results] == times, "nothing is trained again"
    assert again["tasks"] == body["tasks"]
    write_mix(tmp_path, tiny_model, train={"num_steps": 31, "lr": 5e-3})
    with pytest.raises(
        ConfigError, match="all is finished, of another mix; choose another run_dir"
    ):
        transfer(str(tmp_path / "transfer.yaml"))


@pytest.mark.usefixtures("processes")
def test_rows_variants_and_a_mix_for_each_seed(tmp_path: Path, tiny_model: Path) -> None:
    write_mix(tmp_path, tiny_model, train={"num_steps": 2, "lr": 5e-3})
    settings = {
        "run_dir": str(tmp_path / "out"), "mix": "mix.yaml", "tasks": ["classify"],
        "overrides": ["train.epochs=1", "train.lr=1e-3"], "seeds": [1, 2], "mix_per_seed": True,
        "rows": [8], "variants": {"equal": ["balance.method=equal"]}, "leave_out": False,
    }  # fmt: skip
    path = tmp_path / "transfer.yaml"
    path.write_text(yaml.safe_dump(settings))
    body = transfer(str(path))
    [line] = body["tasks"]
    assert (line["task"], line["rows"]) == ("classify", 8)
    assert {arm: len(of) for arm, of in line["scores"].items()} == {
        "start": 2, "all": 2, "equal": 2,
    }  # fmt: skip
    assert set(line["differences"]) == {"all - start", "equal - start", "all - equal"}
    assert line["differences"]["all - start"]["method"] == "rows and t"
    for arm, method in (("all", "gradient_norm"), ("equal", "equal")):
        seeds = []
        for seed in (1, 2):
            mix = yaml.safe_load((tmp_path / f"out/{arm}/seed-{seed}/multitask.yaml").read_text())
            assert mix["balance"]["method"] == method
            seeds.append(mix["seed"])
        assert seeds == [1, 2]
    tuned = list((tmp_path / "out/finetune/all/rows-8").iterdir())
    assert sorted(folder.name for folder in tuned) == ["classify+seed-1", "classify+seed-2"]
    head = markdown(body).splitlines()[2]
    assert [cell.strip() for cell in head.split("|")][1:4] == ["task", "rows", "metric"]
    for name in ("all", "finetune", "without-classify", "a/b"):
        with pytest.raises(ConfigError, match=f"variants: {name} cannot be a mix's name"):
            transfer(str(path), (f"variants={{{name}: []}}",))
    with pytest.raises(ConfigError, match=r"rows=\[8, 0\]: expected"):
        transfer(str(path), ("rows=[8, 0]",))


def test_a_mix_that_nothing_can_be_left_out_of(tmp_path: Path, tiny_model: Path) -> None:
    write_mix(tmp_path, tiny_model, ("classify", "tag"))
    write_task(tmp_path, "pair")
    path = tmp_path / "transfer.yaml"
    path.write_text(yaml.safe_dump({"run_dir": str(tmp_path / "out"), "mix": "mix.yaml"}))
    with pytest.raises(ConfigError, match="has 2 tasks; leaving one out needs at least 3"):
        transfer(str(path))
    with pytest.raises(ConfigError, match=r"tasks: pair are not of .*which has classify, tag"):
        transfer(str(path), ("tasks=[pair]",))


@pytest.mark.parametrize("name", ["small-transfer", "small-rows"])
def test_a_shipped_config_is_found_by_name_and_so_is_its_mix(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunFolderError, match=r"runs/(small-zh|structure/runs/.*) does not exist"):
        transfer(name)
