"""`python -m launch logs`: the log of a run's job or of one rank, followed until the job ends."""

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
from pipeline.runtime.files import DONE_FILE, is_locked
from pipeline.runtime.log import log_path

logger = logging.getLogger(__name__)

_BLOCK = 1 << 16
_LOOK_EVERY_S = 0.5
_ASK_EVERY_S = 10.0
"""SLURM's controller serves everyone."""


def job_log(run_dir: Path, job: str) -> Path:
    """The log of a job, appended to over its restarts."""
    return run_dir / "logs" / f"slurm-{job}.log"


def newest_job(run_dir: Path) -> str | None:
    """Id of the newest submission's job; None if the run was not submitted."""
    found = submissions(run_dir)
    return found[-1].job if found else None


def find_log(run_dir: Path, job: str | None, rank: int | None) -> Path:
    """The log that is meant; by default that of the newest job, of a local run rank 0's.

    Raises:
        DataError: the run has no such job or rank.
    """
    if rank is not None:
        path = log_path(run_dir, rank)
        others = sorted(path.parent.glob("rank-*.log"))
        if others and not path.exists():
            raise DataError(f"{path} is not there; there are {len(others)}, up to {others[-1]}")
        return path
    newest = newest_job(run_dir)
    if job is None:
        return job_log(run_dir, newest) if newest else log_path(run_dir, 0)
    path = job_log(run_dir, job)
    known = {found.job for found in submissions(run_dir)}
    if job not in known and not path.exists():
        raise DataError(
            f"job {job} is none of {run_dir}; expected one of {', '.join(sorted(known)) or 'none'}"
        )
    return path


def show(path: Path, num_lines: int) -> None:
    """Prints the last lines of a log.

    Raises:
        DataError: it is not there yet.
    """
    if not path.exists():
        raise DataError(
            f"{path} is not there yet; --follow waits for it, and `python -m launch status` says "
            "whether its job has started"
        )
    sys.stdout.buffer.write(tail(path, num_lines)[0])
    sys.stdout.buffer.flush()


def tail(path: Path, num_lines: int) -> tuple[bytes, int]:
    """The last lines of a file, and its size then; only what is needed is read."""
    with path.open("rb") as file:
        size = position = file.seek(0, os.SEEK_END)
        text = b""
        # One line break more: the one that ends the line before.
        while position > 0 and text.count(b"\n") <= num_lines:
            position = max(0, position - _BLOCK)
            file.seek(position)
            text = file.read(size - position)
    return b"".join(text.splitlines(keepends=True)[-num_lines:] if num_lines else []), size


def follow(path: Path, num_lines: int, why_over: Callable[[], str]) -> str:
    """Prints a log's last lines and what is added to it, until it is over.

    Args:
        path: the log; need not be there yet.
        num_lines: of what is there.
        why_over: asked now and then; says why nothing more will come, or is empty.

    Returns:
        Why it is over.
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
                continue  # what was written until then
        time.sleep(_LOOK_EVERY_S)


def why_job_is_over(run_dir: Path, job: str) -> str:
    """Why nothing more will come of a job, or empty: it waits, runs, or nothing is known of it."""
    submitted = [found.submitted_unix_s for found in submissions(run_dir) if found.job == job]
    try:
        facts = job_facts(job, run_dir, submitted[0] if submitted else None)
    except SlurmError as error:
        logger.warning("%s", error)
        return ""
    if facts.is_ended:
        return f"job {job} has ended: {facts.state}"
    if facts.state == UNKNOWN:
        own = [line for line in history(run_dir) if str(line.get("job")) == job]
        if own and own[-1]["decision"] != "requeue":
            return f"job {job} has ended, {own[-1]['decision']}: {own[-1]['reason']}"
    return ""


def why_local_run_is_over(run_dir: Path) -> str:
    """The same for a run without a job: it is over when no process has its lock."""
    if (run_dir / DONE_FILE).exists():
        return "the run is finished"
    return "" if is_locked(run_dir) else "no process of this machine trains the run"
