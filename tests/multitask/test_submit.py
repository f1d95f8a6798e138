"""A mix is handed over as a pre-training is."""

from pathlib import Path

import yaml

from pipeline.multitask.config import load_mix
from tests.multitask.test_run import furthest, run, weights, write_mix
from tests.support import warm
from tests.support.processes import Processes


def submit(*words: str, code: int = 0) -> str:
    done = warm.run("postnorm", "submit", *words)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_script_trains_the_mix(tmp_path: Path, tiny_model: Path, processes: Processes) -> None:
    path = write_mix(tmp_path, tiny_model)
    profile = tmp_path / "cluster.yaml"
    profile.write_text(yaml.safe_dump({"nodes": 1, "gpus_per_node": 2, "time_limit": "01:00:00"}))
    text = submit(str(path), "--cluster", str(profile), "--dry-run")
    assert f"multitask {tmp_path}/run/launch/0001/config.yaml" in text
    assert not (tmp_path / "run").exists()
    refused = submit(str(path), "train.micro_batch=7", "--cluster", str(profile), "--dry-run",
                     code=2)  # fmt: skip
    assert "a draw of 7 examples must be a multiple" in refused
    (tmp_path / "tag.jsonl").write_text('{"text": "a"}\n')
    refused = submit(str(path), "--cluster", str(profile), "--dry-run", code=2)
    assert "tag.jsonl:1: no 'label'" in refused


def test_local_ranks_train_the_mix(tmp_path: Path, tiny_model: Path, processes: Processes) -> None:
    path = write_mix(tmp_path, tiny_model)
    submit(str(path), "--local", "--ranks", "2")
    alone = run(path, f"run_dir={tmp_path / 'alone'}")
    assert furthest(weights(tmp_path / "run"), weights(alone)) < 2e-4
    assert load_mix(str(tmp_path / "run/multitask.yaml")).config.seed == 1
