"""`launch status`, `logs`, `cancel` and `requeue` on jobs of a real SLURM.

The jobs sleep; their script does what the one of a run does on SIGUSR1, on SIGTERM and for STOP.
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import Processes, python
from tests.support.run_folder import ROOT, RunFolder
from tests.support.slurm import ENDED, SlurmCluster

# Requeues on SIGTERM too: what `cancel` must not be undone by.
SCRIPT = """\
#!/bin/bash
trap 'echo asked; scontrol requeue $SLURM_JOB_ID; sleep 2; exit 1' USR1 TERM
echo "start, restart ${{SLURM_RESTART_COUNT:-0}}"
while [ ! -e {folder}/STOP ]; do sleep 0.2; done
echo "end: stopped"; exit 3
"""
# As `python -m launch`, less patient than for a person and a cluster of thousands.
PROGRAM = """\
import runpy
from launch import control, logs
control._DEAF_S, logs._ASK_EVERY_S = 1.0, 0.5
runpy.run_module("launch", run_name="__main__", alter_sys=True)
"""
Command = Callable[..., str]


@pytest.fixture
def command(cluster: SlurmCluster) -> Command:
    return partial(python, "-c", PROGRAM, timeout=120, env=cluster.environment)


@pytest.fixture(autouse=True)
def _no_requeues(cluster: SlurmCluster) -> Iterator[None]:
    """Lets the jobs of a test be cancelled: their script requeues them on SIGTERM."""
    yield
    for job, state in cluster.jobs().items():
        if state not in ENDED and "_" not in job:
            with contextlib.suppress(AssertionError):  # it has just ended
                cluster.run("scontrol", "update", f"jobid={job}", "requeue=0")


def _submit(cluster: SlurmCluster, run: RunFolder, *options: str) -> str:
    job = cluster.sbatch(SCRIPT.format(folder=run.folder), "--requeue", "--open-mode=append",
                         f"--comment={run.folder}", f"--output={run.folder}/logs/slurm-%j.log",
                         *options)  # fmt: skip
    run.submitted(job)
    return job


def _wait_for_line(cluster: SlurmCluster, run: RunFolder, job: str, line: str) -> None:
    log = run.folder / "logs" / f"slurm-{job}.log"
    cluster.wait_until(lambda: log.exists() and line in log.read_text(), f"{line!r} in {log}")


def _status(command: Command, run: RunFolder) -> dict[str, Any]:
    return json.loads(command("status", run.folder, "--json"))


def test_a_run_is_looked_at_requeued_and_cancelled(
    cluster: SlurmCluster, command: Command, processes: Processes, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    job = _submit(cluster, run, "--nodes=2")
    _wait_for_line(cluster, run, job, "restart 0")
    run.started(f"{job}.0", time.time())
    run.trained(10, time.time())
    run.saved(10, time.time())
    facts = _status(command, run)["jobs"][0]
    assert (facts["job"], facts["state"], facts["restarts"]) == (job, "RUNNING", 0)
    assert facts["end_unix_s"] - facts["started_unix_s"] == 600  # DefaultTime=10
    listed = command("status")
    assert str(run.folder) in listed
    assert "10/1,000" in listed

    words = ["logs", str(run.folder), "--follow"]
    log = processes.start([sys.executable, "-c", PROGRAM, *words], cwd=ROOT,
                          env=cluster.environment, stderr=subprocess.PIPE)  # fmt: skip
    time.sleep(1)
    assert f"asked job {job} to save" in command("requeue", run.folder)
    _wait_for_line(cluster, run, job, "asked")
    cluster.wait_for(job, "PENDING")
    # Held, so that it still waits however long the commands take.
    cluster.run("scontrol", "uhold", job)
    assert "JobHeldUser" in command("status", run.folder)
    assert "nothing to requeue" in command("requeue", run.folder)
    cluster.run("scontrol", "release", job)
    cluster.wait_for(job, "RUNNING")
    _wait_for_line(cluster, run, job, "restart 1")
    assert _status(command, run)["jobs"][0]["restarts"] == 1

    # Its script requeues on SIGTERM, and is not let.
    said = command("cancel", run.folder)
    assert f"cancelled job {job}" in said
    assert "newest checkpoint: step 10" in said
    assert cluster.state(job) == "CANCELLED"
    out, err = log.communicate(timeout=60)
    assert "restart 0" in out
    assert "restart 1" in out, "the log was not followed over the requeue"
    assert f"job {job} has ended: CANCELLED" in err
    assert "postnorm resume" in command("requeue", run.folder, code=2)


def test_cancel_lets_it_save_first(cluster: SlurmCluster, command: Command, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    job = _submit(cluster, run)
    other = RunFolder(tmp_path / "other")
    others_job = _submit(cluster, other, "--hold")
    _wait_for_line(cluster, run, job, "restart 0")
    command("cancel", run.folder, "--save", "--timeout", 30)
    assert cluster.job(job)["ExitCode"] == "3:0"  # by itself, not by scancel
    assert not (run.folder / "STOP").exists()
    assert cluster.state(others_job) == "PENDING"
    assert "there is no checkpoint" in command("cancel", other.folder)


@pytest.mark.slow
def test_controllers_forget_a_job(cluster: SlurmCluster, command: Command, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.submitted("999999")
    assert _status(command, run)["jobs"][0]["state"] == "UNKNOWN"
    assert f"`touch {run.folder}/STOP`" in command("cancel", run.folder, "--save", code=2)
    # Its id is that of a stranger: not to be touched.
    stranger = cluster.sbatch("#!/bin/bash\nsleep 100\n", "--output=/dev/null")
    run.submitted(stranger)
    assert "another (no comment)" in _status(command, run)["jobs"][0]["reason"]
    command("cancel", run.folder, code=2)
    assert cluster.state(stranger) in ("PENDING", "RUNNING")


@pytest.mark.slow
def test_controller_is_awaited(cluster: SlurmCluster, processes: Processes, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    _wait_for_line(cluster, run, _submit(cluster, run), "restart 0")
    cluster.kill_controller()
    waiting = processes.start([sys.executable, "-m", "launch", "status", str(run.folder), "--json"],
                              cwd=ROOT, env=cluster.environment,
                              stderr=subprocess.PIPE)  # fmt: skip
    time.sleep(2)
    assert waiting.poll() is None
    cluster.start_controller()
    out, err = waiting.communicate(timeout=100)
    assert waiting.returncode == 0, err
    states = [facts["state"] for facts in json.loads(out)["jobs"]]
    # Killed with SIGKILL, it may have lost the job, or only that it has started.
    assert states in (["RUNNING"], ["UNKNOWN"], ["PENDING"])


@pytest.mark.slow
def test_arrays_of_a_preparation(cluster: SlurmCluster, command: Command, tmp_path: Path) -> None:
    logs = tmp_path / "data" / "work" / "logs"
    logs.mkdir(parents=True)
    options = [f"--comment={tmp_path / 'data'}", "--output=/dev/null"]
    script = "#!/bin/bash\nsleep 100\n"
    first = cluster.sbatch(script, "--array=0-3%2", *options)
    second = cluster.sbatch(script, "--array=0-1", f"--dependency=afterok:{first}", *options)
    jobs = {"ingest": [first], "shards": [second]}
    (logs / "submitted.json").write_text(json.dumps({"jobs": jobs}))
    cluster.wait_for(f"{first}_1", "RUNNING")
    rows = command("status", tmp_path / "data").splitlines()
    cells = {row.split()[0]: row.split()[1:] for row in rows if row.strip()}
    assert cells["ingest"][:5] == ["2", "2", "0", "0", "JobArrayTaskLimit:"]
    assert cells["shards"][:5] == ["2", "0", "0", "0", "Dependency:"]
    assert "2 run, 4 wait" in command("status")
    assert f"cancelled job {first} {second}" in command("cancel", tmp_path / "data")
    assert not [job for job, state in cluster.jobs().items()
                if job.startswith((first, second)) and state != "CANCELLED"]  # fmt: skip
