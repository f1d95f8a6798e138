"""`postnorm rescore` on folders that were written without a model."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands import GROUPS
from pipeline.errors import ConfigError, DataError
from pipeline.finetune.result import predictions_file
from pipeline.runtime import cli
from tests.finetune.result_folders import class_rows, write_run, write_seeds


def _rescore(*words: str) -> None:
    arguments = cli.parse(cli.parser_of("postnorm", "", GROUPS), ["rescore", *words])
    assert not arguments.run(arguments)


def _read(path: Path) -> Any:
    return json.loads((path / "result.json").read_text())


def _one(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    write_run(folder, 7, {"dev": class_rows(1, 40, 1.0), "test": class_rows(2, 60, 1.0)})
    return folder


def test_what_is_right_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _one(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    _rescore(str(folder))
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert f"{_read(folder)['test']['accuracy']:.5f}" in capsys.readouterr().out


def test_a_wrong_number_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _one(tmp_path)
    right = _read(folder)
    wrong = json.loads(json.dumps(right))
    wrong["test"]["accuracy"] = wrong["mean"] = 0.98765
    for number in (1, 2):
        (folder / "result.json").write_text(json.dumps(wrong))
        _rescore(str(folder))
        assert _read(folder) == right
        assert json.loads((folder / f"result.{number}.json").read_text()) == wrong
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert rows["test.accuracy"] == [f"{right['test']['accuracy']:.5f}", "0.98765"]
    assert rows["dev.accuracy"] == [f"{right['dev']['accuracy']:.5f}"]


def test_other_predictions_score_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _one(tmp_path)
    before = _read(folder)
    path = predictions_file(folder, "test")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["prediction"] = row["gold"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _rescore(str(folder), "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["result"] == _read(folder)
    assert found["differences"]["test.accuracy"] == [before["test"]["accuracy"], 1.0]
    assert "dev.accuracy" not in found["differences"]
    assert found["written"] == [str(folder / "result.json")]
    assert _read(folder)["protocol"] == before["protocol"]
    assert _read(folder)["rows"] == {"train": 60, "dev": 40, "test": 60}


def test_seeds_without_a_result_get_one(tmp_path: Path) -> None:
    write_seeds(tmp_path, [1, 2, 3])
    _rescore(str(tmp_path))
    body = _read(tmp_path)
    seeds = [_read(tmp_path / f"seed-{seed}") for seed in (1, 2, 3)]
    assert body["seeds"] == [1, 2, 3]
    assert body["scores"] == [seed["test"]["accuracy"] for seed in seeds]
    assert body["test"]["accuracy"] == pytest.approx(sum(body["scores"]) / 3)
    assert (body["task"], body["prior"]) == ("made-up", seeds[0]["prior"])
    assert not list(tmp_path.glob("**/result.1.json"))


def test_nothing_is_written_if_one_seed_is_bad(tmp_path: Path) -> None:
    write_seeds(tmp_path, [1, 2])
    _rescore(str(tmp_path))
    for seed in (1, 2):  # what is stored is wrong, so that a rewrite would show
        path = tmp_path / f"seed-{seed}" / "result.json"
        path.write_text(path.read_text().replace('"mean": ', '"mean": 9'))
    path = predictions_file(tmp_path / "seed-2", "test")
    path.write_text(path.read_text().replace('"prediction": "tech"', '"prediction": "art"', 1))
    before = {path: path.read_bytes() for path in tmp_path.glob("**/result*.json")}
    with pytest.raises(DataError, match=r"predictions-test\.jsonl:\d+: label 'art' of prediction"):
        _rescore(str(tmp_path))
    assert {path: path.read_bytes() for path in tmp_path.glob("**/result*.json")} == before


def test_a_result_of_more_seeds_than_there_are_is_kept(tmp_path: Path) -> None:
    write_seeds(tmp_path, [1, 2])
    _rescore(str(tmp_path))
    (tmp_path / "seed-2").rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"of seeds \[1, 2\], but there are predictions of \[1\]"):
        _rescore(str(tmp_path))
    assert _read(tmp_path)["seeds"] == [1, 2]


def test_can_stands_beside_raw_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _one(tmp_path)
    raw = _read(folder)
    _rescore(str(folder), "--can", "--tau", "0.5", "--top", "2")
    body = _read(folder)
    can = body.pop("can")
    assert body == raw
    assert can["settings"] == {"top": 2, "tau": 0.5, "alpha": 1.0}
    assert can["splits"]["test"]["before"] == raw["test"]
    assert can["splits"]["test"]["after"] != raw["test"]
    assert 0 < can["splits"]["test"]["changed"] <= can["splits"]["test"]["uncertain"] < 60
    out = capsys.readouterr().out
    assert "CAN (top=2, tau=0.5, alpha=1.0; not tuned)" in out
    values = [can["splits"]["test"][key]["accuracy"] for key in ("before", "after")]
    (line,) = [line for line in out.partition("CAN (")[2].splitlines() if "test.accuracy" in line]
    assert line.split()[1:] == [f"{value:.5f}" for value in values]
    # Without --can it stays, by its own settings.
    _rescore(str(folder))
    assert _read(folder)["can"] == can
    assert not list(folder.glob("result.*.json"))


def test_settings_of_can_without_it_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tau and --alpha without --can: add it, or leave"):
        _rescore(str(_one(tmp_path)), "--tau", "0.5", "--alpha", "2")
