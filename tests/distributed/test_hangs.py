"""A rank that is frozen with SIGSTOP ends no run in a hang: watchdog, and collectives' timeouts."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.data.shards import DatasetIndex
from pipeline.inspect.status import run_status
from tests.support.ranks import Ranks

FROZEN = ("-m", "tests.distributed.frozen_main")


@pytest.mark.dist
def test_watchdog_leaves_the_stacks_of_the_rank_that_waits(
    dataset: DatasetIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIMEOUTS", str(tmp_path / "timeouts"))
    run_dir = tmp_path / "run"
    ranks = Ranks(run_dir, dataset, "train.hang_timeout_s=12", module=FROZEN)
    try:
        assert ranks.processes[0].wait(120) == 1, ranks.output
        assert ranks.processes[1].poll() is None
        [path] = (run_dir / "hangs").glob("rank-00000-*.txt")
        text = path.read_text()
        assert re.match(
            r"rank 0 of 2 \(process \d+ on .*\) has not got on for 1[2-9]\.\d s, ", text
        )
        assert "in phase 'gradient collectives and update' of step 3; " in text
        main = text.split(f"Thread {re.search('main thread: (0x[0-9a-f]+)', text)[1]} ")[1]  # type: ignore[index]
        assert "in all_reduce" in main
        assert "engine.py" in main
        assert (run_dir / "exit/local/rank-00000").read_text() == "1\n"
        assert "error: rank 0 of 2" in ranks.output
        assert any("has not got on" in text for text in run_status(run_dir).warnings)
        ranks.signal(signal.SIGCONT, 1)
        assert ranks.processes[1].wait(60) == 1, ranks.output
    finally:
        ranks.kill()


@pytest.mark.dist
def test_collective_timeout_reaches_the_groups_that_deepspeed_makes(
    dataset: DatasetIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIMEOUTS", str(tmp_path / "timeouts"))
    ranks = Ranks(tmp_path / "run", dataset, "train.collective_timeout_s=15", module=FROZEN)
    try:
        assert ranks.processes[0].wait(120) == 1, ranks.output
        timeouts = json.loads((tmp_path / "timeouts0").read_text())
        assert len(timeouts) > 1, "DeepSpeed made no group of its own"
        assert set(timeouts) == {15.0}
        assert "error: rank 0 lost another rank" in ranks.output
        assert "Timed out waiting 15000ms" in ranks.output
        assert "Traceback" not in ranks.output
        log = (tmp_path / "run/logs/rank-00000.log").read_text()
        assert "in train_step" in log, "where it was is not in the log"
        ranks.signal(signal.SIGCONT, 1)
        assert ranks.processes[1].wait(60) == 1, ranks.output
    finally:
        ranks.kill()


_WATCHED = """
import sys, time, ctypes
from pathlib import Path
from pipeline.runtime import log, watchdog
from pipeline.runtime.env import ProcessInfo
run_dir, how = Path(sys.argv[1]), sys.argv[2]
log.to_run(run_dir, 0)
with watchdog.watching(run_dir, ProcessInfo(0, 0, 1, "here", "local"), 1.0):
    for _ in range(15):
        watchdog.beat("working", step=7)
        time.sleep(0.1)
    watchdog.beat("asleep")
    # PyDLL keeps the interpreter's lock, CDLL gives it back.
    (ctypes.PyDLL if how == "locked" else ctypes.CDLL)(None).sleep(100)
"""


@pytest.mark.parametrize("how", ["free", "locked"])
def test_watchdog_ends_a_process_that_sleeps_in_c(tmp_path: Path, how: str) -> None:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _WATCHED, str(tmp_path), how], capture_output=True, text=True,
        timeout=60, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert time.monotonic() - started > 2.5, "it was ended although it got on"
    found = list(tmp_path.glob("hangs/*.txt"))
    if how == "free":
        assert "in phase 'asleep' of step 7" in found[0].read_text()
    else:
        assert not found
        log = (tmp_path / "logs/rank-00000.log").read_text()
        assert "Timeout (0:00:01)!" in log
        assert 'File "<string>", line' in log
