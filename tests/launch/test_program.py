"""Programs of the user as ranks of a job."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.test_submit_run import ROOT

START = [sys.executable, str(ROOT / "pipeline/runtime/start.py"), "launch"]


def _rank(run_dir: Path, *words: str) -> subprocess.Popen[str]:
    variables = {
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1", "SLURM_JOB_ID": "7", "POSTNORM_RUN_DIR": str(run_dir),
    }  # fmt: skip
    return subprocess.Popen(
        [*START, "rank", "--", *words], env={**os.environ, **variables}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def _record(run_dir: Path) -> str:
    return (run_dir / "exit" / "7.0" / "rank-00001").read_text().strip()


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 75", 75), ("exit 9", 9), ("kill -9 $$", 137)]
)
def test_exit_code_is_the_programs_and_is_left_behind(
    tmp_path: Path, script: str, code: int
) -> None:
    assert _rank(tmp_path, "bash", "-c", script).wait(30) == code
    assert _record(tmp_path) == str(code)


@pytest.mark.usefixtures("processes")
def test_options_of_the_program_are_its_own(tmp_path: Path) -> None:
    rank = _rank(
        tmp_path, "bash", "-c", 'echo "$RANK of $WORLD_SIZE: $*"', "x", "--lr", "a b", "--"
    )
    assert rank.communicate(timeout=30)[0] == "1 of 2: --lr a b --\n"


@pytest.mark.usefixtures("processes")
def test_program_that_is_not_there_is_not_tried_again(tmp_path: Path) -> None:
    rank = _rank(tmp_path, "no-such-program")
    assert "no-such-program cannot be started" in rank.communicate(timeout=30)[0]
    assert rank.returncode == 2
    assert _record(tmp_path) == "2"


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_signals_reach_the_program(tmp_path: Path, number: signal.Signals) -> None:
    script = f"trap 'exit 75' {number.name}; touch {tmp_path}/ready; while :; do sleep 0.1; done"
    rank = _rank(tmp_path, "bash", "-c", script)
    deadline = time.monotonic() + 30
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    rank.send_signal(number)
    assert rank.wait(30) == 75
    assert _record(tmp_path) == "75"
