"""A rank that is frozen with SIGSTOP ends no run in a hang: watchdog, and collectives' timeouts."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.inspect.status import run_status
from tests.distributed.conftest import Train
from tests.support.ranks import Ranks


def test_no_rank_waits_for_ever_for_one_that_is_frozen(tmp_path: Path, train: Train) -> None:
    # Both at once: most of the time goes by waiting. Groups time out in a slow start, too.
    watched = train.start("watched", "train.hang_timeout_s=10", fault="frozen")
    timed = train.start("timed", "train.collective_timeout_s=20", fault="frozen")
    try:
        for ranks in (watched, timed):
            assert ranks.processes[0].wait(180) == 1, ranks.output
            assert ranks.processes[1].poll() is None
            ranks.signal(signal.SIGCONT, 1)
            assert ranks.processes[1].wait(60) == 1, ranks.output
            assert (ranks.run_dir / "exit/local-1/rank-00000").read_text() == "1\n"
    finally:
        watched.kill()
        timed.kill()
    _check_stacks(watched)
    assert "error: rank 0 lost another rank" in timed.output
    assert "Timed out waiting 20000ms" in timed.output
    assert "Traceback" not in timed.output
    log = (timed.run_dir / "logs/rank-00000.log").read_text()
    assert "in train_step" in log, "where it was is not in the log"
    timeouts = json.loads((tmp_path / "timeouts-timed-0").read_text())
    assert len(timeouts) > 1, "DeepSpeed made no group of its own"
    assert set(timeouts) == {20.0}


def _check_stacks(ranks: Ranks) -> None:
    [path] = (ranks.run_dir / "hangs").glob("rank-00000-*.txt")
    text = path.read_text()
    assert re.match(r"rank 0 of 2 \(process \d+ on .*\) has not got on for [0-9.]+ s, ", text)
    assert "in phase 'gradient collectives and update' of step 3; " in text
    thread = re.search("main thread: (0x[0-9a-f]+)", text)
    assert thread
    main = text.split(f"hread {thread[1]} ")[1]
    assert "in all_reduce" in main
    assert "engine.py" in main
    assert any("has not got on" in text for text in run_status(ranks.run_dir).warnings)


_WATCHED = """
import sys, time, ctypes
from pathlib import Path
from pipeline.runtime import log, watchdog
from pipeline.runtime.env import ProcessInfo
from pipeline.runtime.rank import Rank
run_dir, how = Path(sys.argv[1]), sys.argv[2]
log.to_run(run_dir, 0)
with watchdog.watching(run_dir, lambda: ProcessInfo(0, 0, 1, "here", "local"), 3.0):
    for step in range(35):
        watchdog.heartbeat("working", step)
        time.sleep(0.1)
    print("longer than the limit, beat by beat", flush=True)
    watchdog.heartbeat("asleep")
    # PyDLL keeps the interpreter's lock, CDLL gives it back.
    (ctypes.PyDLL if how == "locked" else ctypes.CDLL)(None).sleep(100)
"""


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("how", ["free", "locked"])
def test_watchdog_ends_a_process_that_sleeps_in_c(tmp_path: Path, how: str) -> None:
    done = subprocess.run([sys.executable, "-c", _WATCHED, str(tmp_path), how], capture_output=True,
                          text=True, timeout=60, cwd=Path(__file__).parents[2])  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "beat by beat" in done.stdout, "it was ended although it got on"
    found = list(tmp_path.glob("hangs/*.txt"))
    if how == "free":
        assert "in phase 'asleep' of step 34" in found[0].read_text()
    else:
        assert not found
        log = (tmp_path / "logs/rank-00000.log").read_text()
        assert "Timeout (0:00:03)!" in log
        assert 'File "<string>", line' in log
