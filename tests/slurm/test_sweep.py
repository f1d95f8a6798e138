"""A sweep as one job array on a real cluster: the cap, a requeued element, more runs, the end."""

import json
from pathlib import Path
from typing import Any

import pytest

from launch.records import history
from pipeline.data.format import DatasetIndex
from tests.experiments.test_grid_tasks import write_sweep
from tests.support.processes import python
from tests.support.ranks import CONFIG, losses
from tests.support.slurm import SlurmCluster
from tests.support.slurm_runs import PROFILE


def postnorm(cluster: SlurmCluster, *words: object) -> str:
    return python("-m", "postnorm", *words, env=cluster.environment)


class Sweep:
    """A sweep over seeds, submitted with `postnorm submit --sweep`."""

    def __init__(self, cluster: SlurmCluster, folder: Path, dataset: DatasetIndex) -> None:
        self.cluster, self.dir = cluster, folder / "runs"
        self._file, self._profile = folder / "sweep.yaml", folder / "cluster.yaml"
        text = CONFIG.replace("run_dir: unset", "").replace("dir: unset", f"dir: {dataset.folder}")
        (folder / "train.yaml").write_text(text)
        self._profile.write_text(json.dumps({**PROFILE, "nodes": 1, "ranks_per_node": 1}))

    def submit(self, *seeds: int, steps: int = 12) -> dict[str, Any]:
        values = {"verb": "pretrain", "config": "train.yaml", "dir": str(self.dir), "jobs": 2,
                  "runs": [{"seed": seed, "train.num_steps": steps} for seed in seeds],
                  "metric": {"name": "held_out_loss", "best": "min"}}  # fmt: skip
        self._file.write_text(json.dumps(values))
        words = ("submit", "--sweep", self._file, "--cluster", self._profile, "--json")
        return json.loads(self.launch(*words).splitlines()[-1])

    def launch(self, *words: object) -> str:
        return postnorm(self.cluster, *words)

    def states(self) -> dict[str, str]:
        runs = json.loads(self.launch("status", self.dir, "--json"))["runs"]
        return {run["name"]: run["state"] for run in runs}

    def folder(self, seed: int, steps: int = 12) -> Path:
        return self.dir / f"seed={seed}+train.num_steps={steps}"


@pytest.mark.slow
def test_elements_are_runs_that_are_requeued_and_joined_by_others(
    cluster: SlurmCluster, dataset: DatasetIndex, tmp_path: Path
) -> None:
    sweep = Sweep(cluster, tmp_path, dataset)
    job = sweep.submit(1, 2, 3, steps=4000)["job"]
    first = sweep.folder(1, 4000)
    cluster.wait_until(lambda: (first / "checkpoints/latest").exists(), "a checkpoint", 240)
    names = [sweep.folder(seed, 4000).name for seed in (1, 2, 3)]
    assert sweep.states() == dict(zip(names, ["running", "running", "pending"], strict=True))
    assert f"{job}_0 running" in sweep.launch("status", first)
    cluster.run("scancel", "--batch", "--signal=USR1", f"{job}_0")
    cluster.wait_until(lambda: history(first), "a decision", 120)
    assert [line["decision"] for line in history(first)] == ["requeue"]
    assert "requeue: " in (first / "logs" / f"slurm-{job}_0.log").read_text()
    # The place of the first one is free, and the third run takes it.
    cluster.wait_for(f"{job}_2", "RUNNING", timeout_s=120)
    assert sweep.submit(1, 2, 3, steps=4000)["runs"] == []
    sweep.launch("cancel", sweep.folder(2, 4000))
    assert cluster.state(f"{job}_1") == "CANCELLED"
    cluster.wait_until(
        lambda: len((first / "attempts.jsonl").read_text().splitlines()) == 2, "a restart", 240
    )
    [_, again] = map(json.loads, (first / "attempts.jsonl").read_text().splitlines())
    assert again["job"] == f"{job}_0.1"
    assert again["resumed_from_step"] > 0
    sweep.launch("cancel", sweep.dir)
    assert {cluster.state(f"{job}_{index}") for index in range(3)} == {"CANCELLED"}


def test_array_ends_and_more_can_follow(
    cluster: SlurmCluster, dataset: DatasetIndex, tmp_path: Path
) -> None:
    sweep = Sweep(cluster, tmp_path, dataset)
    job = sweep.submit(1, 2)["job"]
    for index in range(2):
        cluster.wait_for(f"{job}_{index}", "COMPLETED", timeout_s=240)
        assert len(losses(sweep.folder(index + 1))) == 12
    assert set(sweep.states().values()) == {"finished"}
    said = sweep.submit(3, 2, 1)
    assert said["runs"] == [sweep.folder(3).name]
    assert set(said["left"].values()) == {"finished"}
    cluster.wait_for(f"{said['job']}_0", "COMPLETED", timeout_s=120)
    assert list(sweep.states().values()) == ["finished"] * 3


@pytest.mark.slow
def test_fine_tunings_are_elements(cluster: SlurmCluster, tmp_path: Path) -> None:
    path, profile = write_sweep(tmp_path), tmp_path / "cluster.yaml"
    profile.write_text(json.dumps({**PROFILE, "nodes": 1, "ranks_per_node": 1}))
    said = postnorm(cluster, "submit", "--sweep", path, "--cluster", profile, "--json")
    job = json.loads(said.splitlines()[-1])["job"]
    for element in range(2):
        cluster.wait_for(f"{job}_{element}", "COMPLETED", timeout_s=240)
    runs = json.loads(postnorm(cluster, "status", tmp_path / "runs", "--json"))["runs"]
    assert [run["state"] for run in runs] == ["finished", "finished"]
    assert runs[0]["value"] == 1.0
