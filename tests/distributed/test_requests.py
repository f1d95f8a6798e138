"""Signals at any moment, STOP and SAVE files, and what a run does when its metrics cannot be
written or a rank is slow."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.checkpoints.manifest import newest_good, read_manifest
from pipeline.data.format import DatasetIndex
from pipeline.errors import EXIT_PREEMPTED, EXIT_STOPPED
from pipeline.inspect.status import run_status
from tests.distributed.slow_main import FAST_S, SLOW_S
from tests.support.ranks import Ranks, losses, records

# Nothing is logged, evaluated or saved by itself.
_QUIET = (
    "train.num_steps=1000000", "monitor.log_every_steps=1000000",
    "monitor.eval_every_steps=1000000", "checkpoint.every_steps=1000000",
)  # fmt: skip


def _wait(what: Callable[[], bool], ranks: Ranks) -> None:
    deadline = time.monotonic() + 120
    while not what():
        assert all(process.poll() is None for process in ranks.processes), ranks.output
        assert time.monotonic() < deadline, ranks.output
        time.sleep(0.002)


def _catches(process: subprocess.Popen[bytes], number: signal.Signals) -> bool:
    [line] = [
        line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
        if line.startswith("SigCgt:")
    ]  # fmt: skip
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def _has_torch(process: subprocess.Popen[bytes]) -> bool:
    return "libtorch_cpu" in Path(f"/proc/{process.pid}/maps").read_text()


@pytest.mark.parametrize("in_import", [False, True])
def test_signal_in_the_start_of_one_rank_ends_all(
    dataset: DatasetIndex, tmp_path: Path, in_import: bool, start_ranks: type[Ranks]
) -> None:
    ranks = start_ranks(tmp_path / "run", dataset, *_QUIET)
    first = ranks.processes[0]
    if in_import:
        _wait(lambda: _has_torch(first), ranks)
    else:
        _wait(lambda: _catches(first, signal.SIGTERM), ranks)
        assert not _has_torch(first)
    ranks.signal(signal.SIGTERM, 0)
    assert ranks.wait() == [EXIT_PREEMPTED, EXIT_PREEMPTED], ranks.output
    assert "stopped by SIGTERM before the first step; there is nothing to save" in ranks.output
    assert (tmp_path / "run/exit/local-1/rank-00001").read_text() == f"{EXIT_PREEMPTED}\n"


def test_signals_until_the_end_do_no_harm(
    dataset: DatasetIndex, tmp_path: Path, start_ranks: type[Ranks]
) -> None:
    run_dir = tmp_path / "run"
    ranks = start_ranks(run_dir, dataset, *_QUIET)
    log = run_dir / "logs/rank-00001.log"
    _wait(lambda: log.exists() and "held-out loss" in log.read_text(), ranks)
    while any(process.poll() is None for process in ranks.processes):
        ranks.signal(signal.SIGUSR2, 1)
        ranks.signal(signal.SIGTERM, 1)
        time.sleep(0.003)
    assert ranks.wait() == [EXIT_PREEMPTED, EXIT_PREEMPTED], ranks.output
    path, _ = newest_good(run_dir / "checkpoints")
    assert path is not None
    [line] = records(run_dir)
    assert line["step"] == read_manifest(path).step < 1000


def test_files_that_ask_and_metrics_that_cannot_be_written(
    dataset: DatasetIndex, tmp_path: Path, start_ranks: type[Ranks]
) -> None:
    run_dir = tmp_path / "run"
    slow = ("-m", "tests.distributed.slow_main")
    ranks = start_ranks(run_dir, dataset, *_QUIET, "monitor.log_every_steps=2", module=slow)
    ranks.wait_for_step(8)
    assert "straggler: rank 1 on " in ranks.output
    assert "most of it computing" in ranks.output
    [line] = records(run_dir, "straggler")
    assert line["rank"] == 1
    assert any("rank 1 needed" in text for text in run_status(run_dir).warnings)
    train = records(run_dir)[-1]
    assert train["slowest_rank"] == 1
    # Of two steps, by what the ranks say of themselves, but for what they waited for data.
    assert train["own_s_max"] == pytest.approx(SLOW_S / 2, rel=1e-2)
    assert train["own_s_median"] == pytest.approx((SLOW_S + FAST_S) / 4, rel=1e-2)
    # The disk of the metrics is full, and TensorBoard's folder is gone.
    metrics, events = run_dir / "metrics.jsonl", run_dir / "tensorboard"
    metrics.rename(run_dir / "aside.jsonl")
    events.rename(run_dir / "aside")
    metrics.symlink_to("/dev/full")
    events.write_text("no folder")
    _wait(lambda: ranks.output.count("cannot be written: ") == 2, ranks)
    metrics.unlink()
    events.unlink()
    (run_dir / "aside.jsonl").rename(metrics)
    (run_dir / "aside").rename(events)
    _wait(lambda: ranks.output.count("works again; ") == 2, ranks)
    assert "No space left on device" in ranks.output
    (run_dir / "SAVE").touch()
    _wait(lambda: not (run_dir / "SAVE").exists(), ranks)
    saved, _ = newest_good(run_dir / "checkpoints")
    assert saved is not None
    (run_dir / "STOP").touch()
    assert ranks.wait() == [EXIT_STOPPED, EXIT_STOPPED], ranks.output
    stopped, _ = newest_good(run_dir / "checkpoints")
    assert stopped is not None
    assert stopped > saved
    assert all(json.loads(line) for line in metrics.read_text().splitlines())
    steps = sorted(losses(run_dir))
    assert steps[-1] == read_manifest(stopped).step
    assert set(range(2, steps[-1], 2)) - set(steps), "nothing was lost"
    found = EventAccumulator(str(events), size_guidance={"scalars": 0})
    found.Reload()
    assert {event.step for event in found.Scalars("quality/loss")} >= {2, 4, 6, 8, steps[-1]}

    again = start_ranks(run_dir, dataset, *_QUIET)
    assert again.wait() == [EXIT_STOPPED, EXIT_STOPPED]
    assert f"{run_dir}/STOP exists, so the run does not train" in again.output
    assert run_status(run_dir).starts[-1].end == "stopped by the STOP file"
