"""A run that ends with its time: learning rates from rank 0's clock, across a stop."""

import json
import re
import signal
from pathlib import Path

from pipeline.config import schedule
from pipeline.config.train import TrainConfig
from pipeline.errors import EXIT_PREEMPTED
from pipeline.runtime.checkpoints import read_manifest
from tests.distributed.conftest import Train
from tests.support.ranks import records

_MANY_STEPS = 1_000_000
_LONG_S = 3600.0
_OVERRIDES = (f"train.num_steps={_MANY_STEPS}", "train.schedule=time_budget",
              "train.min_lr_ratio=0.1", "checkpoint.every_steps=1000000",
              "monitor.log_every_steps=2", "monitor.eval_every_steps=1000000")  # fmt: skip


def _logged_rates(run_dir: Path, rank: int) -> list[str]:
    return re.findall(r" lr (\S+) ", (run_dir / f"logs/rank-{rank:05d}.log").read_text())


def test_stopped_run_ends_within_its_budget(tmp_path: Path, train: Train) -> None:
    run_dir = tmp_path / "run"
    ranks = train.start("run", *_OVERRIDES, f"train.budget_hours={_LONG_S / 3600}", fault="clock")
    ranks.wait_for_step(6)
    ranks.signal(signal.SIGTERM)
    ranks.ended(EXIT_PREEMPTED)
    stopped = records(run_dir)[-1]
    manifest = read_manifest(run_dir / f"checkpoints/step-{stopped['step']:08d}")
    assert manifest.elapsed_s == stopped["elapsed_s"] > 0

    budget_s = manifest.elapsed_s + 30
    train("run", *_OVERRIDES, f"train.budget_hours={budget_s / 3600}", fault="clock")
    lines = records(run_dir)
    last = lines[-1]
    assert last["step"] < _MANY_STEPS
    # It ends with the first line after the budget is used, evaluated and saved.
    assert lines[-2]["elapsed_s"] < budget_s <= last["elapsed_s"] + 1e-6
    assert records(run_dir, "eval")[-1]["step"] == last["step"]
    assert json.loads((run_dir / "done.json").read_text())["step"] == last["step"]
    assert (run_dir / "checkpoints/latest").read_text() == f"step-{last['step']:08d}\n"

    # A line's rate is that of its step, by the time of the line before it; also after the stop.
    elapsed_s = 0.0
    for record in lines:
        config = TrainConfig(
            num_steps=_MANY_STEPS, lr=3e-3, warmup_steps=5, schedule="time_budget",
            min_lr_ratio=0.1, budget_hours=(_LONG_S, budget_s)[record["attempt"] - 1] / 3600,
        )  # fmt: skip
        assert record["lr"] == schedule.learning_rate(record["step"] - 1, config, elapsed_s)
        elapsed_s = record["elapsed_s"]
    assert last["lr"] < 0.2 * 3e-3
    # The two processes' own clocks do not agree.
    assert _logged_rates(run_dir, 0) == _logged_rates(run_dir, 1)
    assert len(set(_logged_rates(run_dir, 0))) > 5
