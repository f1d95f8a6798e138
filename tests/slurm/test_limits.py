"""A real time limit, and a controller that restarts."""

from pathlib import Path

import pytest

from pipeline.data.format import DatasetIndex
from tests.support.ranks import records
from tests.support.slurm import SlurmCluster
from tests.support.slurm_runs import SlurmRun

LONG = ("train.num_steps=20_000", "checkpoint.every_steps=20", "monitor.eval_every_steps=20_000")


@pytest.mark.slow
def test_time_limit_is_announced_and_no_step_is_lost(
    cluster: SlurmCluster, dataset: DatasetIndex, tmp_path: Path
) -> None:
    run = SlurmRun(cluster, tmp_path / "run", dataset, *LONG, time_limit="3", stop_before_end_s=60)
    run.wait_for_start(1)
    # The controller restarts under it, and the run goes on.
    step = run.step
    cluster.restart_controller()
    run.wait_for_step(step + 20)
    assert len(run.starts()) == 1
    run.wait_for_start(2)
    last = max(record["step"] for record in records(run.run_dir) if record["attempt"] == 1)
    assert run.starts()[1]["resumed_from_step"] == last
    [decision] = run.decisions()
    assert decision["at_limit"]
    assert "saved and stopped, as asked" in decision["reason"]
    run.launch("cancel", str(run.run_dir))
