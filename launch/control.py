"""Cancelling and requeueing the jobs of a run, and cancelling those of a data preparation."""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from launch.queue import RUNNING, UNKNOWN, JobFacts, current, job_facts, jobs_of, my_jobs
from launch.records import (
    CANCELLED,
    LAST_DECISIONS,
    PrepSubmission,
    append_history,
    history,
    newest,
    newest_checkpoint,
    read_prep,
    submissions,
    write_prep,
)
from launch.slurm import SlurmError, run_command
from launch.status import own_status, prep_elements
from pipeline.errors import BusyError, DataError
from pipeline.runtime.run_folder import RunFolder
from pipeline.runtime.summary import duration

logger = logging.getLogger(__name__)

# Time for a job to end; SLURM's KillWait is 30 s by default.
_END_S = 60.0
# Age from which a job's script hears signals: before it has set its trap, a signal ends it.
_DEAF_S = 10.0


def cancel(run_dir: Path, *, save: bool, save_s: float) -> Iterator[str]:
    """Cancel all jobs of a run; yield what was done, line by line.

    With `save`, ranks that train may first save and end, for at most `save_s`.
    """
    jobs = [facts for facts in my_jobs() if facts.is_alive and facts.is_of(run_dir)]
    if not jobs:
        yield _nothing_to_cancel(run_dir)
        return
    stop = RunFolder(run_dir).stop
    # A STOP file that a person made stays.
    ours = save and not stop.exists()
    before = newest_checkpoint(run_dir)
    training = [facts.job for facts in jobs if not facts.is_waiting]
    if save and training:
        waiting = [facts.job for facts in jobs if facts.is_waiting]
        if waiting:
            _scancel(waiting)
        stop.touch()
        yield f"asked job {' '.join(training)} to save and end; waiting up to {save_s:,.0f} s"
        try:
            left = _wait(training, save_s, lambda facts: not facts.is_alive or facts.is_waiting)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"no job was cancelled, and {stop} stays: the run saves, ends, and does not start "
                "again until the file is removed"
            ) from None
        yield "it has ended" if not left else f"it has not ended in {save_s:,.0f} s"
    yield from cancel_jobs([facts.job for facts in jobs])
    # Of the jobs of a chain only the one that runs, or would have run next.
    for array in dict.fromkeys(facts.array for facts in jobs):
        note_cancelled(run_dir, current([facts for facts in jobs if facts.array == array]))
    # Only now: a job that started in between would have trained on.
    if ours:
        stop.unlink(missing_ok=True)
    if save and newest_checkpoint(run_dir) == before:
        yield "nothing new was saved"
    yield from _checkpoint_line(run_dir, "")
    if stop.exists():
        yield f"first remove {stop}: the run does not start while it exists"
    yield f"continue: postnorm resume {run_dir}"


def cancel_prep(output_dir: Path, stages: dict[str, list[str]]) -> Iterator[str]:
    """Cancel all arrays of a data preparation; yield what was done."""
    alive = {facts.array for facts in prep_elements(output_dir, stages) if facts.is_alive}
    record = read_prep(output_dir) or PrepSubmission(stages)
    if not alive:
        yield f"no job of {output_dir} is in the queue"
        if not record.waiting:
            return
    yield from cancel_jobs(sorted(alive, key=int))
    if record.waiting:
        yield f"{record.waiting} arrays that waited for room are not submitted any more"
    write_prep(output_dir, replace(record, cancelled_unix_s=round(time.time(), 1)))
    yield "finished parts stay; submit the same config again to continue"


def requeue(run_dir: Path, *, now: bool) -> Iterator[str]:
    """Send a running job back into the queue, unless `now` after it has saved; yield what was done.

    Raises:
        DataError: the run has no job, or it has ended.
        BusyError: the job is starting or ending at this moment.
    """
    facts = _newest_job(run_dir)
    if facts.is_ended:
        raise DataError(
            f"job {facts.job} has ended ({facts.state}), so there is nothing to requeue; continue "
            f"with `postnorm resume {run_dir}`"
        )
    if facts.state == UNKNOWN:
        raise SlurmError(
            f"job {facts.job}: {facts.reason}; nothing was done, see `postnorm status`"
        )
    if facts.is_waiting:
        reason = f" ({facts.reason})" if facts.reason else ""
        yield f"job {facts.job} is already waiting in the queue{reason}: nothing to requeue"
        return
    age_s = time.time() - facts.started_unix_s if facts.started_unix_s else 0.0
    if facts.state != RUNNING or age_s < _DEAF_S:
        raise BusyError(
            f"job {facts.job} has been {facts.state} for {age_s:.0f} s; expected RUNNING for at "
            f"least {_DEAF_S:.0f} s, when its script hears signals: try again in a moment"
        )
    if now:
        # Not repeated where no answer came: a second one would send back the start that follows.
        run_command(["scontrol", "requeue", facts.job], repeatable=False)
        yield f"job {facts.job} was requeued without saving"
        yield from _checkpoint_line(run_dir, "; steps after it are trained again")
        return
    # --batch: to the script alone, which tells the ranks and requeues when they have saved.
    run_command(["scancel", "--batch", "--signal=USR1", facts.job])
    yield f"asked job {facts.job} to save and go back into the queue"
    yield f"see: postnorm status {run_dir}"


def _newest_job(run_dir: Path) -> JobFacts:
    every = submissions(run_dir)
    if every:
        last = newest(every)[0]
        return job_facts(last.job, run_dir, last.submitted_unix_s)
    queued = [facts for facts in my_jobs() if facts.is_alive and facts.is_of(run_dir)]
    if not queued:
        raise DataError(
            f"{run_dir} has no job, since it was never submitted; submit its config with "
            "`postnorm submit CONFIG`"
        )
    return queued[-1]


def _nothing_to_cancel(run_dir: Path) -> str:
    every = submissions(run_dir)
    if not every:
        return f"no job of {run_dir} is in the queue; nothing was cancelled"
    last = newest(every)[0]
    facts = job_facts(last.job, run_dir, last.submitted_unix_s)
    if facts.state == UNKNOWN:
        raise SlurmError(
            f"job {facts.job}: {facts.reason}; nothing was cancelled. If its ranks run on without "
            f"SLURM (`postnorm status`), `touch {RunFolder(run_dir).stop}` lets them save and end"
        )
    if facts.is_alive:
        raise SlurmError(f"job {facts.job} is {facts.state} and belongs to another user: ask them")
    return f"job {facts.job} has already ended ({facts.state}); nothing was cancelled"


def note_cancelled(run_dir: Path, facts: JobFacts) -> None:
    """Record a cancelled job in the run's history.

    A job that came to a decision of its own before is left as it is.
    """
    own = [line for line in history(run_dir) if str(line.get("job")) == facts.job]
    if own and own[-1].get("decision") in LAST_DECISIONS:
        return
    newest = newest_checkpoint(run_dir)
    # None: it says nothing of progress, and `decide` must not count it.
    # On record here, since SLURM without accounting forgets the job.
    record = {"job": facts.job, "restart": facts.restarts or 0, "nodes": [], "miss": None}
    record |= {"before": newest, "after": newest, "decision": CANCELLED}
    try:
        append_history(run_dir, {**record, "reason": "by `postnorm cancel`"})
    except OSError as error:
        logger.warning("the cancellation of job %s could not be recorded: %s", facts.job, error)


def cancel_jobs(jobs: Sequence[str]) -> Iterator[str]:
    """Cancel those of `jobs` that are alive, and wait for their end."""
    left = _scancel(jobs)
    if not left:
        return
    yield f"cancelled job {' '.join(left)}"
    still = _wait(left, _END_S, lambda facts: not facts.is_alive)
    if still:
        states = ", ".join(sorted({facts.state for facts in still}))
        names = " ".join(sorted({facts.array for facts in still}))
        raise SlurmError(
            f"job {names} was cancelled and is still {states} after {_END_S:.0f} s: SLURM waits "
            "for a node that does not answer; see `squeue --me`"
        )


def _scancel(jobs: Sequence[str]) -> list[str]:
    """Cancel those of `jobs` that are alive, and return them."""
    queued = [facts for facts in jobs_of(jobs) if facts.is_alive]
    alive = {name for facts in queued for name in (facts.job, facts.array)}
    left = [job for job in jobs if job in alive]
    for job in left:
        try:
            # Before the cancellation, which a script that requeues on SIGTERM would undo.
            run_command(["scontrol", "update", f"jobid={job}", "requeue=0"])
        except SlurmError:
            continue  # it has just ended
    if left:
        run_command(["scancel", *left])
    return left


def _wait(
    jobs: Collection[str], timeout_s: float, is_over: Callable[[JobFacts], bool]
) -> list[JobFacts]:
    """Wait until all jobs are over or the time is up; return those that are not over."""
    end_s, pause_s = time.monotonic() + timeout_s, 0.5
    while True:
        left = [facts for facts in jobs_of(list(jobs)) if not is_over(facts)]
        if not left or time.monotonic() > end_s:
            return left
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 5.0)


def _checkpoint_line(run_dir: Path, then: str) -> Iterator[str]:
    """Describe what the run will continue from."""
    run, _ = own_status(run_dir)
    saved = run.checkpoint if run else None
    if saved:
        yield f"newest checkpoint: step {saved.step:,}, {duration(saved.age_s)} old{then}"
    else:
        yield "there is no checkpoint: the run starts from step 0"
