"""The end of an attempt, by the job script itself: bash runs it, with stand-ins for SLURM."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from launch.cluster import ClusterConfig, PreflightConfig
from launch.records import excluded_nodes
from launch.script import render
from launch.submit import Origin, checkout_job
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from tests.support.fake_slurm import FakeSlurm
from tests.support.processes import write_program

pytestmark = pytest.mark.usefixtures("processes")

ROOT = Path(__file__).parents[2]
START = ROOT / "pipeline/runtime/start.py"


class Attempts:
    """Starts of one job, whose ranks all fail without leaving an exit code."""

    def __init__(self, folder: Path, start: Path = START, **profile: object) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        self.slurm = FakeSlurm(folder / "slurm")
        self.slurm.add("srun", "exit ${SRUN_CODE:-143}")
        (folder / "text").mkdir()
        words = ["run_dir=run", "data.dir=text"]
        config = load(PretrainConfig, ROOT / "configs/demo.yaml", words).config
        job = checkout_job(config, Origin("train.yaml", (), None, str(folder)))
        fields: dict[str, object] = {"gpus_per_node": 0, "ranks_per_node": 4, **profile}
        fields = {"python": sys.executable, "storage_patience_s": 30, **fields}
        cluster = ClusterConfig(preflight=PreflightConfig(enabled=False), **fields)  # type: ignore[arg-type]
        self.script = folder / "job.sh"
        self.script.write_text(render(replace(job, start=(str(start),)), cluster))

    def start(self, restart: int = 0, **variables: str) -> "subprocess.CompletedProcess[str]":
        slurm = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restart),
                 "SLURM_JOB_NODELIST": "n1", "SLURM_CPUS_PER_TASK": "1"}  # fmt: skip
        return subprocess.run(["bash", str(self.script)], text=True, timeout=240,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              env={**self.slurm.environment, **slurm, **variables})  # fmt: skip

    def last(self, restart: int = 0, **variables: str) -> tuple[int, str]:
        """Exit code and last line of a start."""
        done = self.start(restart, **variables)
        return done.returncode, done.stdout.splitlines()[-1]


def test_attempts_without_a_verdict_are_counted_by_the_script(tmp_path: Path) -> None:
    python = write_program(tmp_path / "python", "#!/bin/bash\nexit 1\n")
    attempts = Attempts(tmp_path, python=str(python), max_attempts_without_progress=3)
    for restart in (0, 1):
        code, _ = attempts.last(restart)
        assert code == 0
        assert len(attempts.slurm.lines("requeued")) == restart + 1
    code, line = attempts.last(2)
    assert code == 1
    assert line.startswith("end: 3 attempts")
    assert len(attempts.slurm.lines("requeued")) == 2
    # A job that a person submits again starts from nothing.
    assert attempts.last(0, SLURM_JOB_ID="8")[0] == 0


@pytest.mark.parametrize(("mode", "expected"), [(None, 127), (0o644, 126)])
def test_interpreter_that_cannot_be_started_ends_the_job_and_is_named(
    tmp_path: Path, mode: int | None, expected: int
) -> None:
    python = tmp_path / "my python"
    if mode:
        write_program(python, "#!/bin/bash\n").chmod(mode)
    attempts = Attempts(tmp_path, python=str(python))
    code, line = attempts.last()
    assert code == expected
    assert line.startswith("end: the launcher cannot be started")
    assert str(python) in line
    assert attempts.slurm.lines("requeued") == []


@pytest.mark.parametrize("when", ["at the start", "after the ranks"])
@pytest.mark.parametrize("what", ["interpreter", "code"])
def test_what_starts_a_command_may_be_gone_a_while(tmp_path: Path, what: str, when: str) -> None:
    mount, away = tmp_path / "mount", tmp_path / "away"
    away.mkdir()
    python, start = away / "python", away / "start"
    write_program(python, f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    # As a file of its own it would not find the packages.
    start.write_text(f"import runpy\nrunpy.run_path({str(START)!r}, run_name='__main__')\n")
    if what == "interpreter":
        attempts = Attempts(tmp_path, python=str(mount / "python"))
    else:
        attempts = Attempts(tmp_path, start=mount / "start")
    if when == "after the ranks":
        away.rename(mount)
        attempts.slurm.add("srun", f"[ ! -e {away} ] && mv {mount} {away}; exit 143")
    attempts.slurm.add("sleep", f"[ ! -e {away} ] || mv {away} {mount}")
    done = attempts.start()
    assert f"ls: cannot access '{mount}/'" in done.stdout
    assert done.returncode == 0, done.stdout
    assert len(attempts.slurm.lines("requeued")) == 1
    assert done.stdout.count("storage fails") == 1


def test_interpreter_whose_mount_stays_away_is_named(tmp_path: Path) -> None:
    code, line = Attempts(tmp_path, python=str(tmp_path / "mount" / "python")).last()
    assert code == 1
    assert line.startswith("end: storage failed for 30 s (storage_patience_s)")
    assert line.endswith(f"{tmp_path}/mount/python cannot be read")


@pytest.mark.parametrize("reached", [True, False])
def test_node_that_alone_lacks_the_storage_is_excluded(tmp_path: Path, reached: bool) -> None:
    attempts = Attempts(tmp_path, nodes=2, exclude="n9")
    attempts.run_dir.mkdir()
    (attempts.slurm.folder / "config").write_text("n1\nn2\n")  # what `show hostnames` says
    attempts.slurm.add("mkdir", "echo 'mkdir: Stale file handle'; exit 1")
    # The other node has another mkdir.
    there = (
        f'while [ "$1" != {sys.executable} ]; do shift; done\n'
        f'cd {tmp_path}; PATH=/usr/bin:/bin SLURMD_NODENAME=n2 exec "$@"'
    )
    attempts.slurm.add("srun", there if reached else "exit 1")
    code, line = attempts.last()
    if not reached:
        assert code == 1
        assert line.startswith("end: storage failed for 30 s (storage_patience_s)")
        assert line.endswith("mkdir: Stale file handle")
        return
    assert code == 0
    assert line.startswith("requeue: bad node n1: node n2 ")
    assert excluded_nodes(attempts.run_dir) == ["n1"]
    assert attempts.slurm.lines("updated") == ["update jobid=7 excnodelist=n9,n1"]


@pytest.mark.parametrize("part", ["start", "verdict"])
def test_no_wait_for_storage_passes_the_time_limit(tmp_path: Path, part: str) -> None:
    attempts = Attempts(tmp_path, storage_patience_s=600)
    if part == "start":
        attempts.run_dir.touch()  # where the folder has to be
    else:
        spoil = f"mkdir {attempts.run_dir}/launch/history.jsonl; exit 143"
        attempts.slurm.add("srun", spoil)
    done = attempts.start(SLURM_JOB_END_TIME=str(int(time.time()) + 15))
    assert done.returncode == 0, done.stdout
    [line] = [line for line in done.stdout.splitlines() if line.startswith("requeue:")]
    assert "the time limit is near" in line
    assert len(attempts.slurm.lines("requeued")) == 1


@pytest.mark.parametrize("file", ["unjudged", "starts.jsonl"])
def test_full_disk_ends_the_job_with_a_code_of_its_own(tmp_path: Path, file: str) -> None:
    """The disk is found full by bash, where Python fails, or by Python."""
    failing = write_program(tmp_path / "python", "#!/bin/bash\nexit 1\n")
    attempts = Attempts(tmp_path, python=str(failing) if file == "unjudged" else sys.executable)
    (attempts.run_dir / "launch").mkdir(parents=True)
    (attempts.run_dir / "launch" / file).symlink_to("/dev/full")
    code, line = attempts.last()
    assert code == 28, line
    assert line.startswith("end: ")
    assert "run/launch" in line
    assert "No space left on device" in line
    assert attempts.slurm.lines("requeued") == []


def test_storage_is_waited_for_and_named_if_it_stays_away(tmp_path: Path) -> None:
    attempts = Attempts(tmp_path)
    attempts.run_dir.touch()  # where the folder has to be
    code, line = attempts.last()
    assert code == 1
    assert line.startswith("end: storage failed for 30 s (storage_patience_s)")
    assert "mkdir: cannot create directory 'run'" in line
    attempts.slurm.add("sleep", f"rm -f {attempts.run_dir}")
    assert attempts.start().returncode == 0
    assert len(attempts.slurm.lines("requeued")) == 1
