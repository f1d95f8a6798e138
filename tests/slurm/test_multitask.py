"""A multi-task run on a real cluster of two nodes: asked to save, requeued, and done."""

import json
from pathlib import Path

import pytest

from launch.records import history
from tests.multitask.test_run import write_mix
from tests.support.slurm import SlurmCluster
from tests.support.slurm_runs import PROFILE, launch
from tests.support.tiny_tasks import write_tiny_model


@pytest.mark.slow
def test_a_mix_is_requeued_and_ends(cluster: SlurmCluster, tmp_path: Path) -> None:
    path = write_mix(tmp_path, write_tiny_model(tmp_path / "model"), train={"num_steps": 200})
    profile = tmp_path / "cluster.yaml"
    profile.write_text(json.dumps({**PROFILE, "nodes": 2, "ranks_per_node": 1}))
    folder = tmp_path / "run"

    job = launch(cluster, "submit", path, "--cluster", profile).split("\njob ")[-1].split(":")[0]
    cluster.wait_until(lambda: (folder / "checkpoints/latest").exists(), "a checkpoint", 240)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    cluster.wait_until(lambda: history(folder), "a decision", 120)
    assert history(folder)[0]["decision"] == "requeue"
    cluster.wait_for(job, "COMPLETED", timeout_s=300)
    starts = [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]
    assert [start["world_size"] for start in starts] == [2, 2]
    assert starts[1]["resumed_from_step"] > 0
    assert json.loads((folder / "done.json").read_text())["step"] == 200
    launch(cluster, "submit", path, "--cluster", profile, "--dry-run")
    assert "finished" in launch(cluster, "status", folder)
