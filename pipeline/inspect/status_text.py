"""A run's status as lines for a terminal."""

import time
from collections.abc import Iterator
from pathlib import Path

from pipeline.inspect.status import RUNNING, RunStatus
from pipeline.runtime.log import duration_text

_BAR = 40


def status_text(folder: Path, status: RunStatus) -> Iterator[str]:
    """Lines, the most important first."""
    share = status.step / status.num_steps
    filled = int(share * _BAR)
    yield f"{folder}: {status.state}"
    yield (
        f"[{'#' * filled}{'-' * (_BAR - filled)}] {share:.1%}  step {status.step:,} of "
        f"{status.num_steps:,}"
    )
    held_out = ""
    if status.held_out_loss is not None:
        held_out = f"   held-out {status.held_out_loss:.4f} at step {status.held_out_step:,}"
    yield f"loss        {_number(status.loss, '.4f')}{held_out}"
    speed = _number(status.tokens_per_s, ",.0f")
    yield f"tokens      {_number(status.tokens, ',')} seen, {speed}/s"
    if status.state == RUNNING:
        yield (
            f"ETA         {_duration(status.eta_s)}   last sign of life "
            f"{_duration(status.idle_s)} ago"
        )
    saved = status.checkpoint
    yield "checkpoint  " + (
        f"step {saved.step:,}, {_duration(saved.age_s)} old" if saved else "none yet"
    )
    for start in status.starts:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start.unix_s))
        begin = "from scratch" if start.resumed_from_step is None else (
            f"from step {start.resumed_from_step:,}")  # fmt: skip
        yield (
            f"start {start.attempt:<5} {when}  {begin}, {start.world_size} ranks, job {start.job} "
            f"on {start.host}: {start.end}"
        )
    for warning in status.warnings:
        yield f"warning: {warning}"


def _number(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)


def _duration(seconds: float | None) -> str:
    return "unknown" if seconds is None else duration_text(max(0.0, seconds))
