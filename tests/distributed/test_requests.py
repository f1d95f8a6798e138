"""Signals at any moment, STOP and SAVE files, and what a run does when its metrics cannot be
written or a rank is slow."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from pipeline.checkpoints.manifest import newest_good
from pipeline.errors import EXIT_PREEMPTED, EXIT_STOPPED
from pipeline.inspect.status import run_status
from pipeline.runtime.checkpoints import read_manifest
from tests.distributed.conftest import Train, tensorboard
from tests.distributed.faulty_main import FAST_S, SLOW_S
from tests.support.processes import wait_until
from tests.support.ranks import losses, records

# Nothing is logged, evaluated or saved by itself.
_QUIET = ("train.num_steps=1000000", "monitor.log_every_steps=1000000",
          "monitor.eval_every_steps=1000000", "checkpoint.every_steps=1000000")  # fmt: skip


def _catches(process: subprocess.Popen[bytes], number: signal.Signals) -> bool:
    [line] = [line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
              if line.startswith("SigCgt:")]  # fmt: skip
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def _has_torch(process: subprocess.Popen[bytes]) -> bool:
    return "libtorch_cpu" in Path(f"/proc/{process.pid}/maps").read_text()


@pytest.mark.parametrize("in_import", [False, True])
def test_signal_in_a_rank_s_start_ends_all(tmp_path: Path, in_import: bool, train: Train) -> None:
    ranks = train.start("run", *_QUIET, is_cold=True)  # a fork has its imports done
    first = ranks.processes[0]
    if in_import:
        wait_until(lambda: _has_torch(first), *ranks.processes)
    else:
        wait_until(lambda: _catches(first, signal.SIGTERM), *ranks.processes)
        assert not _has_torch(first)
    ranks.signal(signal.SIGTERM, 0)
    ranks.ended(EXIT_PREEMPTED)
    assert "stopped by SIGTERM before the first step; there is nothing to save" in ranks.output
    assert (tmp_path / "run/exit/local-1/rank-00001").read_text() == f"{EXIT_PREEMPTED}\n"


def test_signals_until_the_end_do_no_harm(tmp_path: Path, train: Train) -> None:
    run_dir = tmp_path / "run"
    ranks = train.start("run", *_QUIET)
    log = run_dir / "logs/rank-00001.log"
    wait_until(lambda: log.exists() and "held-out loss" in log.read_text(), *ranks.processes)
    while any(process.poll() is None for process in ranks.processes):
        ranks.signal(signal.SIGUSR2, 1)
        ranks.signal(signal.SIGTERM, 1)
        time.sleep(0.003)
    ranks.ended(EXIT_PREEMPTED)
    path, _ = newest_good(run_dir / "checkpoints")
    assert path is not None
    [line] = records(run_dir)
    assert line["step"] == read_manifest(path).step < 1000


def test_files_that_ask_and_metrics_that_cannot_be_written(tmp_path: Path, train: Train) -> None:
    run_dir = tmp_path / "run"
    ranks = train.start("run", *_QUIET, "monitor.log_every_steps=2", fault="slow")
    ranks.wait_for_step(8)
    assert "straggler: rank 1 on " in ranks.output
    [line] = records(run_dir, "straggler")
    assert line["rank"] == 1
    assert any("rank 1 needed" in text for text in run_status(run_dir).warnings)
    last = records(run_dir)[-1]
    assert last["slowest_rank"] == 1
    # Of two steps, by what the ranks say of themselves, but for what they waited for data.
    assert last["own_s_max"] == pytest.approx(SLOW_S / 2, rel=1e-2)
    assert last["own_s_median"] == pytest.approx((SLOW_S + FAST_S) / 4, rel=1e-2)
    # The disk of the metrics is full, and TensorBoard's folder is gone.
    metrics, events = run_dir / "metrics.jsonl", run_dir / "tensorboard"
    metrics.rename(run_dir / "aside.jsonl")
    events.rename(run_dir / "aside")
    metrics.symlink_to("/dev/full")
    events.write_text("no folder")
    wait_until(lambda: ranks.output.count("cannot be written: ") == 2, *ranks.processes)
    metrics.unlink()
    events.unlink()
    (run_dir / "aside.jsonl").rename(metrics)
    (run_dir / "aside").rename(events)
    wait_until(lambda: ranks.output.count("works again; ") == 2, *ranks.processes)
    assert "No space left on device" in ranks.output
    (run_dir / "SAVE").touch()
    wait_until(lambda: not (run_dir / "SAVE").exists(), *ranks.processes)
    saved, _ = newest_good(run_dir / "checkpoints")
    assert saved is not None
    (run_dir / "STOP").touch()
    ranks.ended(EXIT_STOPPED)
    stopped, _ = newest_good(run_dir / "checkpoints")
    assert stopped is not None
    assert stopped > saved
    assert all(json.loads(line) for line in metrics.read_text().splitlines())
    steps = sorted(losses(run_dir))
    assert steps[-1] == read_manifest(stopped).step
    assert set(range(2, steps[-1], 2)) - set(steps), "nothing was lost"
    found = tensorboard(run_dir).Scalars("quality/loss")
    assert {event.step for event in found} >= {2, 4, 6, 8, steps[-1]}

    again = train("run", *_QUIET, code=EXIT_STOPPED)
    assert f"{run_dir}/STOP exists, so the run does not train" in again.output
    assert run_status(run_dir).starts[-1].end == "stopped by the STOP file"
