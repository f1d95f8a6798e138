"""Fine-tunings side by side on this machine: scores compared, and a second call does nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.processes import Processes
from tests.support.tiny_tasks import write_task, write_tiny_model


def _launch(*words: str, code: int = 0) -> str:
    done = warm.run("postnorm", *words)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def write_sweep(folder: Path) -> Path:
    """Two rates with one seed each; the lower learns nothing, and has a folder of its own."""
    write_task(folder, "classify", train={"epochs": 4, "batch": 8, "lr": 1e-3})
    model = write_tiny_model(folder / "model")
    values = {"verb": "finetune", "dir": str(folder / "runs"),
              "runs": [
                  {"config": "my-classify.yaml", "model": str(model), "train.lr": 1e-7,
                   "folder": "low/seed-1"},
                  {"config": "my-classify.yaml", "model": str(model), "train.lr": 5e-3},
              ],
              "metric": {"name": "score", "best": "max"}}  # fmt: skip
    path = folder / "sweep.yaml"
    path.write_text(json.dumps(values))
    return path


def test_two_rates_side_by_side(tmp_path: Path, processes: Processes) -> None:
    path = write_sweep(tmp_path)
    _launch("submit", "--sweep", str(path), "--local", "--jobs", "2")
    report = json.loads(_launch("status", str(tmp_path / "runs"), "--json"))
    assert [run["overrides"]["train.lr"] for run in report["runs"]] == [5e-3, 1e-7]
    assert [run["state"] for run in report["runs"]] == ["finished", "finished"]
    best, other = (run["value"] for run in report["runs"])
    assert best == 1.0
    assert other < 0.6
    body = json.loads((Path(report["runs"][0]["run_dir"]) / "result.json").read_text())
    assert (body["test"]["accuracy"], body["task"]) == (best, "my-classify")
    assert _launch("submit", "--sweep", str(path), "--local", "--jobs", "2").count("finished") >= 2


def test_run_that_cannot_start_is_told_before(tmp_path: Path, processes: Processes) -> None:
    path = write_sweep(tmp_path)
    (tmp_path / "classify.jsonl").write_text('{"text": "a", "label": "x"}\n{"text": "b"}\n')
    said = _launch("submit", "--sweep", str(path), "--local", code=2)
    assert "classify.jsonl:2: no 'label'" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_benchmark_takes_what_its_sweep_has_trained(tmp_path: Path, processes: Processes) -> None:
    write_task(tmp_path, "classify", train={"epochs": 1})
    write_task(tmp_path, "pair", train={"epochs": 1}, search={"lr": [1e-3, 3e-3]})
    (tmp_path / "mine.yaml").write_text("tasks: [my-classify.yaml, my-pair.yaml]\n")
    model, path = write_tiny_model(tmp_path / "model"), tmp_path / "sweep.yaml"
    submit = ("submit", "--sweep", str(path), "--local", "--jobs", "2", "--json")

    def benchmark(name: str, *words: str) -> Path:
        given = ("benchmark", str(tmp_path / "mine.yaml"), "--from", str(model), "--seeds", "1,2")
        overrides = ("train.batch=16", "data.train_rows=32")
        out = tmp_path / name
        _launch(*given, "--out", str(out), *words, *overrides)
        return out

    out = benchmark("swept", "--write-sweep", str(path))
    assert not out.exists()
    names = json.loads(_launch(*submit).splitlines()[0])["runs"]
    assert len(names) == 6  # of the task with a search, the seeds are one run
    status = json.loads(_launch("status", str(out), "--json"))["runs"]
    assert {run["name"]: run["state"] for run in status} == dict.fromkeys(names, "finished")
    assert all(run["value"] is not None for run in status)
    before = _times(out)
    benchmark("swept")
    assert _times(out) == before
    assert _tasks(out) == _tasks(benchmark("alone"))
    # What the benchmark has trained itself is finished for its sweep, too.
    benchmark("alone", "--write-sweep", str(path))
    assert json.loads(_launch(*submit).splitlines()[0])["left"] == dict.fromkeys(names, "finished")


def _times(folder: Path) -> dict[Path, int]:
    """When each file of a run was written."""
    files = [*folder.rglob("seed-*/**/*"), *folder.rglob("search/**/*")]
    assert sum(path.name == "metrics.jsonl" for path in files) == 12
    return {path: path.stat().st_mtime_ns for path in files}


def _tasks(folder: Path) -> list[dict[str, Any]]:
    """Lines of a table, without the minutes."""
    lines: list[dict[str, Any]] = json.loads((folder / "table.json").read_text())["tasks"]
    for line in lines:
        assert len(line["columns"]) == 3
        for cell in line["columns"].values():
            assert cell.pop("minutes") >= 0
    return lines
