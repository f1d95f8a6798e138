"""A partition whose jobs are cancelled when others need their nodes."""

from pathlib import Path

import pytest

from launch.cluster import ClusterConfig
from launch.records import measured_save_s
from launch.site import preemption
from pipeline.data.format import DatasetIndex
from tests.support.slurm import SlurmCluster
from tests.support.slurm_runs import SlurmRun

STEPS = ("train.num_steps=100000", "checkpoint.every_steps=20", "monitor.eval_every_steps=50000")


@pytest.mark.slow
def test_a_cancelled_run_that_saves_in_time_comes_back(
    cluster: SlurmCluster, dataset: DatasetIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    [found] = preemption(ClusterConfig(partition="scrap"))
    assert (found.where, found.mode, found.grace_s) == ("partition scrap", "CANCEL", 60)
    # The highest one has nothing above it; the default one is preempted, too, in another way.
    assert preemption(ClusterConfig(partition="high")) == []
    assert [each.mode for each in preemption(ClusterConfig())] == ["REQUEUE"]

    run = SlurmRun(cluster, tmp_path / "run", dataset, *STEPS, partition="scrap")
    # Before a save was measured, what the profile says of it counts.
    said = run.launch("status", str(run.run_dir))
    assert "nothing starts it again but `postnorm resume`" in said
    run.wait_for_step(45)
    assert measured_save_s(run.run_dir)
    assert "PreemptMode" not in run.launch("status", str(run.run_dir))
    with cluster.preempting():
        run.wait_until(lambda: run.decisions(), "a verdict", timeout_s=120)
    run.wait_for_start(2)
    [decision] = run.decisions()
    assert decision["decision"] == "requeue"
    assert decision["after"] == f"step-{run.starts()[-1]['resumed_from_step']:08d}"
    run.cancel_with_save()
