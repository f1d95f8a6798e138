"""Preflight on a real cluster: a bad node is left out, and what every node has stops the job."""

import sys
from pathlib import Path

import pytest

from launch.records import excluded_nodes
from pipeline.data.format import DatasetIndex
from pipeline.runtime.env import RUN_DIR_VARIABLE
from tests.support.processes import write_program
from tests.support.slurm import SlurmCluster
from tests.support.slurm_runs import PROFILE, SlurmRun

# The second node of the first start stays bad: it lets processes open few files. Ranks do nothing
# but end well.
PYTHON = f"""#!/bin/bash
start=$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}
case $3 in
  preflight)
    [ "$4 $SLURM_NODEID ${{start#*.}}" != "check 1 0" ] || echo "$SLURMD_NODENAME" >"$0.bad"
    [ "$SLURMD_NODENAME" != "$(cat "$0.bad" 2>/dev/null)" ] || ulimit -n 100 ;;
  pretrain)
    mkdir -p "${RUN_DIR_VARIABLE}/exit/$start"
    echo 0 >"${RUN_DIR_VARIABLE}/exit/$start/rank-0000$SLURM_PROCID"
    exec touch "${RUN_DIR_VARIABLE}/done.json" ;;
esac
exec {sys.executable} "$@"
"""


def test_job_restarts_without_a_bad_node_and_a_problem_of_all_nodes_stops_it(
    cluster: SlurmCluster, dataset: DatasetIndex, tmp_path: Path
) -> None:
    python = write_program(tmp_path / "python", PYTHON)
    run = SlurmRun(cluster, tmp_path / "run", dataset, python=str(python))
    want_more = {**PROFILE["preflight"], "min_open_files": 2**30}
    hopeless = SlurmRun(cluster, tmp_path / "hopeless", dataset, preflight=want_more)

    assert run.wait_for_end() == "COMPLETED"
    bad = (tmp_path / "python.bad").read_text().strip()
    first, second = run.decisions()
    assert [first["decision"], second["decision"]] == ["requeue", "finished"]
    assert first["job"] == second["job"] == run.job
    assert first["nodes"][1] == bad
    assert f"preflight: without {bad}: " in first["reason"]
    assert "`ulimit -n` is 100, expected" in first["reason"]
    assert excluded_nodes(run.run_dir) == [bad]
    assert bad not in second["nodes"]
    assert len(second["nodes"]) == 2
    assert run.restarts == 1
    assert cluster.job(run.job)["ExcNodeList"] == bad

    assert (hopeless.wait_for_end(), hopeless.restarts) == ("FAILED", 0)
    assert hopeless.log.endswith("end: no other node cures what preflight found\n")
    assert [line["decision"] for line in hopeless.decisions()] == ["failed"]
    assert not hopeless.starts()


@pytest.mark.slow
def test_first_node_that_alone_does_not_reach_the_storage_is_excluded(
    cluster: SlurmCluster, dataset: DatasetIndex, tmp_path: Path
) -> None:
    python, bad = write_program(tmp_path / "python", PYTHON), tmp_path / "bad"
    # Only the script has this mkdir, not what it starts on another node.
    stale = "mkdir() { echo mkdir: Stale file handle; return 1; }"
    setup = [f'[ -e {bad} ] || echo "$SLURMD_NODENAME" >{bad}',
             f'[ "$SLURMD_NODENAME" != "$(cat {bad})" ] || {stale}']  # fmt: skip
    run = SlurmRun(
        cluster, tmp_path / "run", dataset, python=str(python), setup=setup, storage_patience_s=10
    )
    assert run.wait_for_end() == "COMPLETED"
    node = bad.read_text().strip()
    assert "mkdir: Stale file handle" in run.log
    assert f"bad node {node}: node " in run.log
    assert excluded_nodes(run.run_dir) == [node]
    assert run.restarts == 1
    assert cluster.job(run.job)["ExcNodeList"] == node
    [last] = run.decisions()
    assert node not in last["nodes"]
