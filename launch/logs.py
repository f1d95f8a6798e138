"""Logs of a run's job or of one rank, followed until the job ends."""

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from launch.queue import UNKNOWN, job_facts
from launch.records import history, submissions
from launch.slurm import SlurmError
from pipeline.errors import DataError
from pipeline.runtime.run_folder import RunFolder

logger = logging.getLogger(__name__)

_BLOCK = 1 << 16
_LOOK_EVERY_S = 0.5
# Seldom, since SLURM's controller serves everyone.
_ASK_EVERY_S = 10.0


def job_log(run_dir: Path, job: str) -> Path:
    """Name the log of a job; all its restarts append to it."""
    return run_dir / "logs" / f"slurm-{job}.log"


def newest_job(run_dir: Path) -> str | None:
    """Return the id of the newest submission's job; None if the run was not submitted."""
    every = submissions(run_dir)
    return every[-1].job if every else None


def find_log(run_dir: Path, job: str | None, rank: int | None) -> Path:
    """Choose a log: by default that of the newest job, for a local run that of rank 0."""
    if rank is not None:
        path = RunFolder(run_dir).log(rank)
        others = sorted(path.parent.glob("rank-*.log"))
        if others and not path.exists():
            raise DataError(
                f"{path} does not exist; the run has {len(others)} such logs, up to {others[-1]}"
            )
        return path
    newest = newest_job(run_dir)
    if job is None:
        return job_log(run_dir, newest) if newest else RunFolder(run_dir).log(0)
    known = {submission.job for submission in submissions(run_dir)}
    # Jobs of a chain, such as 413_1, write to one log.
    job = chain if (chain := job.partition("_")[0]) in known else job
    path = job_log(run_dir, job)
    if job not in known and not path.exists():
        names = ", ".join(sorted(known)) or "none"
        raise DataError(f"job {job} does not belong to {run_dir}; expected one of {names}")
    return path


def show(path: Path, num_lines: int) -> None:
    """Print the last lines of a log."""
    if not path.exists():
        raise DataError(
            f"{path} does not exist yet; --follow waits for it, and `postnorm status` says "
            "whether its job has started"
        )
    sys.stdout.buffer.write(tail(path, num_lines)[0])
    sys.stdout.buffer.flush()


def tail(path: Path, num_lines: int) -> tuple[bytes, int]:
    """Return the last lines of a file and its size at that moment, reading no more than needed."""
    with path.open("rb") as file:
        size = position = file.seek(0, os.SEEK_END)
        text = b""
        # One line break more than lines: the one that ends the line before them.
        while position > 0 and text.count(b"\n") <= num_lines:
            position = max(0, position - _BLOCK)
            file.seek(position)
            text = file.read(size - position)
    return b"".join(text.splitlines(keepends=True)[-num_lines:] if num_lines else []), size


def follow(path: Path, num_lines: int, why_over: Callable[[], str]) -> str:
    """Print a log's last lines and everything appended to it; return why nothing more will come.

    The log need not exist yet. `why_over` is asked now and then, and is empty while more may come.
    """
    position: int | None = None
    asked_s = float("-inf")
    over = ""
    while True:
        if path.exists():
            if position is None:
                text, position = tail(path, num_lines)
            else:
                with path.open("rb") as file:
                    file.seek(position)
                    text = file.read()
                position += len(text)
            sys.stdout.buffer.write(text)
            sys.stdout.buffer.flush()
        if over:
            return over
        if time.monotonic() - asked_s > _ASK_EVERY_S:
            over, asked_s = why_over(), time.monotonic()
            if over:
                continue  # print what was written until then
        time.sleep(_LOOK_EVERY_S)


def why_job_is_over(run_dir: Path, job: str) -> str:
    """Return why a job will write nothing more; empty if it waits, runs, or is unknown."""
    submitted = [one.submitted_unix_s for one in submissions(run_dir) if one.job == job]
    try:
        facts = job_facts(job, run_dir, submitted[0] if submitted else None)
    except SlurmError as error:
        logger.warning("%s", error)
        return ""
    if facts.is_ended:
        return f"job {job} has ended: {facts.state}"
    if facts.state == UNKNOWN:
        # Of a chain that SLURM has forgotten, only the id of its array is known.
        own = [one for one in history(run_dir) if f"{one.get('job')}_".startswith(f"{job}_")]
        if own and own[-1]["decision"] != "requeue":
            return f"job {job} has ended, {own[-1]['decision']}: {own[-1]['reason']}"
    return ""


def why_local_run_is_over(run_dir: Path) -> str:
    """Return why a run without a job will write nothing more: no process holds its lock."""
    if RunFolder(run_dir).done.exists():
        return "the run is finished"
    return "" if RunFolder(run_dir).is_locked() else "no process of this machine trains the run"
