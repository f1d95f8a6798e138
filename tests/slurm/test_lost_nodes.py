"""Training through what takes SLURM its time: lost nodes and networks, preemption."""

from pathlib import Path

import pytest

from pipeline.data.format import DatasetIndex
from tests.support.slurm import SlurmCluster
from tests.support.slurm_faults import suffer
from tests.support.slurm_runs import SlurmRun, assert_same, run_locally

pytestmark = pytest.mark.slow


def test_run_survives_all(cluster: SlurmCluster, dataset: DatasetIndex, tmp_path: Path) -> None:
    steps = ("train.num_steps=420", "checkpoint.every_steps=20", "monitor.eval_every_steps=200")
    run_locally(tmp_path / "straight", dataset, *steps)
    run = SlurmRun(cluster, tmp_path / "run", dataset, *steps)
    faults = ["requeued by an administrator", "preempted", "power of a worker node",
              "power of the batch node"]  # fmt: skip
    if cluster.can_cut_network:
        faults.append("network of the batch node")
    for number, name in enumerate(faults, 1):
        run.wait_for_step(60 * number)
        suffer(run, name)
    assert run.wait_for_end(timeout_s=300) == "COMPLETED"
    assert len(run.starts()) == len(faults) + 1
    assert_same(run.run_dir, tmp_path / "straight")
