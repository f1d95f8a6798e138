"""Fine-tunings side by side on this machine: scores compared, and a second call does nothing."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.processes import Processes
from tests.support.tiny_tasks import write_task, write_tiny_model

ROOT = Path(__file__).parents[2]


def _launch(*words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "launch", *words], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def write_sweep(folder: Path) -> Path:
    """Two rates with one seed each, of which the lower learns nothing."""
    write_task(folder, "classify", train={"epochs": 4, "batch": 8, "lr": 1e-3})
    model = write_tiny_model(folder / "model")
    values = {
        "verb": "finetune", "config": "my-classify.yaml", "dir": str(folder / "runs"),
        "grid": {"model": [str(model)], "train.lr": [1e-7, 5e-3]},
        "metric": {"name": "score", "best": "max"},
    }  # fmt: skip
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
    assert body["test"]["accuracy"] == best
    assert body["task"] == "my-classify"
    again = _launch("submit", "--sweep", str(path), "--local", "--jobs", "2")
    assert again.count("finished") >= 2


def test_run_that_cannot_start_is_told_before(tmp_path: Path, processes: Processes) -> None:
    path = write_sweep(tmp_path)
    (tmp_path / "classify.jsonl").write_text('{"text": "a", "label": "x"}\n{"text": "b"}\n')
    said = _launch("submit", "--sweep", str(path), "--local", code=2)
    assert "classify.jsonl:2: no 'label'" in said
    assert not (tmp_path / "runs").exists()
