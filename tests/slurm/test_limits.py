"""A real time limit, a controller that restarts, and runs that cannot make progress."""

import shutil
import sys
from pathlib import Path

import pytest

from pipeline.data.format import DatasetIndex, read_index
from tests.support.damage import flip
from tests.support.processes import write_program
from tests.support.ranks import records
from tests.support.slurm import SlurmCluster
from tests.support.slurm_runs import PROFILE, SlurmRun

LONG = ("train.num_steps=20_000", "checkpoint.every_steps=20", "monitor.eval_every_steps=20_000")


@pytest.mark.slow
def test_no_progress_stops_it(cluster: SlurmCluster, dataset: DatasetIndex, tmp_path: Path) -> None:
    # Ranks die before they can say anything; the launcher works.
    program = f'#!/bin/bash\n[ "$3" != pretrain ] || exit 9\nexec {sys.executable} "$@"\n'
    python = write_program(tmp_path / "python", program)
    run = SlurmRun(cluster, tmp_path / "run", dataset, *LONG, python=str(python),
                   max_attempts_without_progress=2)  # fmt: skip
    assert run.wait_for_end(timeout_s=120) == "FAILED"
    last = run.log.splitlines()[-1]
    assert last.startswith("end: 2 attempts in a row without a new checkpoint"), run.log
    assert "none of 2 ranks" in last
    assert [decision["decision"] for decision in run.decisions()] == ["requeue", "failed"]
    assert int(cluster.job(run.job)["Restarts"]) == 1


@pytest.mark.slow
def test_bad_data_stops_it(cluster: SlurmCluster, dataset: DatasetIndex, tmp_path: Path) -> None:
    shutil.copytree(dataset.folder, tmp_path / "data")
    for shard in (tmp_path / "data" / "shards").glob("*.tar"):
        flip(shard, *range(2000, shard.stat().st_size, 4000))
    run = SlurmRun(
        cluster, tmp_path / "run", read_index(tmp_path / "data"), *LONG,
        preflight={**PROFILE["preflight"], "shards": 0},  # which would find it before
    )  # fmt: skip
    assert run.wait_for_end(timeout_s=120) == "FAILED"
    assert "failed permanently (exit code 2)" in run.log.splitlines()[-1], run.log
    assert ".tar" in run.log
    assert int(cluster.job(run.job)["Restarts"]) == 0


@pytest.mark.slow
def test_announced_time_limit_loses_no_step(
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
