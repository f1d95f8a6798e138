"""The verdict on a job after an attempt: finished, once more, or stopped with a reason.

Files of the attempt decide, never srun's exit code: if a rank exits with 4 srun's code is 143, and
if a node dies it may be 0 (SLURM 22.05).
"""

import errno
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from launch import records
from pipeline import errors
from pipeline.runtime.run_folder import RunFolder
from pipeline.runtime.summary import counted

_T = TypeVar("_T")
logger = logging.getLogger(__name__)

EXIT_FULL = errno.ENOSPC
"""Exit code of a job that ends because the disk of its run is full, or a quota is used up."""
TO_REQUEUE_S = 20
"""Time before a job's end that is kept to requeue it: no wait for storage goes on longer."""
_NOT_STARTED = (126, 127)
"""What a shell says of a command that may not be run, or is not there."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_WAIT_S = 10.0


@dataclass(frozen=True)
class JobAttempt:
    """One start of all ranks, after its end."""

    job: str
    """SLURM's job id; `local-NUMBER` on this machine."""
    restart: int
    nodes: tuple[str, ...]
    before: str | None
    """`records.progress` when the attempt began, such as the newest checkpoint."""
    ranks: int
    """Number of ranks that were started."""
    after: str | None = None
    """The same when it ended."""
    codes: tuple[int, ...] = ()
    """Exit codes that ranks left behind; a rank that was killed left none."""
    left_by: tuple[int, ...] = ()
    """The ranks that left them, in the same order; empty stands for the first ones."""
    is_done: bool = False
    """Whether the run is complete."""
    at_limit: bool = False
    """Whether SLURM announced the end of the job's time."""
    step_code: int | None = None
    """Exit code of srun, for the record only."""
    jobs_before: int = 0
    """Jobs of its chain that came before, where jobs are not requeued."""
    kind: str = records.PRETRAIN
    """Kind of the job, of `launch.records`."""

    @property
    def starts_before(self) -> int:
        """Number of starts before this one, by requeues or by jobs of a chain."""
        return self.restart + self.jobs_before

    @property
    def newest(self) -> str:
        """How far it is, in words."""
        if self.kind == records.PROGRAM:
            return "the program's own files say how far it is"
        what = "progress" if self.kind in (records.EVALUATE, records.FINETUNE) else "checkpoint"
        return f"{what} {self.after or 'none'}"


@dataclass(frozen=True)
class Limits:
    """When to give up."""

    restarts: int
    """Largest number of restarts of one job."""
    without_progress: int
    """Largest number of attempts in a row without a new checkpoint."""
    time: str = ""
    """The time limit of the job, as the profile has it."""


class StorageRetry:
    """The time for which storage may fail before a verdict is given without it."""

    def __init__(self, patience_s: float = 0.0, job_ends_unix_s: float | None = None) -> None:
        """Begin now; a job that ends before that has its last seconds left to be requeued."""
        left_s = patience_s
        if job_ends_unix_s is not None:
            left_s = min(patience_s, max(0.0, job_ends_unix_s - time.time() - TO_REQUEUE_S))
        self.patience_s = patience_s
        self.is_cut = left_s < patience_s
        """Whether the end of the job's time cuts it short."""
        self._end_s = time.monotonic() + left_s

    @property
    def left_s(self) -> float:
        """What is left of it; 0 or below once it has ended."""
        return self._end_s - time.monotonic()


@dataclass(frozen=True)
class Decision:
    """The verdict, and the reason in words."""

    word: str
    """`finished`, `requeue`, `stopped` or `failed`."""
    exit_code: int
    reason: str


def exit_codes(run_dir: Path, job: str) -> dict[int, int]:
    """Read the exit codes that the ranks of `JOB.RESTART` left, by rank, in their order."""
    codes = {}
    for path in sorted(RunFolder(run_dir).exits(job).glob("rank-*")):
        text = path.read_text(encoding="utf-8").strip()
        # A full disk leaves an empty file.
        code = int(text) if text.isdecimal() else errors.EXIT_FAILED_RETRY
        codes[int(path.name.removeprefix("rank-"))] = code
    return codes


def is_done(kind: str, run_dir: Path, codes: Sequence[int], ranks: int) -> bool:
    """Return whether the work is complete: by the trainer's mark, or because all ranks say so."""
    if kind == records.PRETRAIN:
        return RunFolder(run_dir).done.exists()
    if kind == records.FINETUNE and not RunFolder(run_dir).result.exists():
        return False  # the codes are those of its steps: dev and test are predicted after them
    return list(codes) == [errors.EXIT_FINISHED] * ranks


def read_end(begun: JobAttempt, kind: str, run_dir: Path) -> JobAttempt:
    """Fill in what the files of an attempt say of its end."""
    left = exit_codes(run_dir, f"{begun.job}.{begun.restart}")
    codes = tuple(left.values())
    done = is_done(kind, run_dir, codes, begun.ranks)
    after = records.progress(kind, run_dir)
    return replace(begun, after=after, codes=codes, left_by=tuple(left), is_done=done, kind=kind)


def decide(attempt: JobAttempt, misses_before: int, limits: Limits, run_dir: Path) -> Decision:
    """Decide what follows an attempt, after some without progress in a row. Pure."""
    newest = attempt.newest
    # done.json alone may be left from an earlier, shorter run.
    if attempt.is_done and attempt.codes[:1] == (errors.EXIT_FINISHED,):
        return Decision("finished", errors.EXIT_FINISHED, f"done; {newest}")
    # One rank is enough: the others were ended by srun because of it, and say less.
    if (code := errors.EXIT_FAILED_DO_NOT_RETRY) in attempt.codes:
        rank = (attempt.left_by or range(attempt.ranks))[attempt.codes.index(code)]
        return give_up(
            f"rank {rank} failed permanently (exit code {code}); see its "
            f"message above and in {run_dir}/logs; {newest}"
        )
    # Of a user's program it is a code as any other.
    if errors.EXIT_STOPPED in attempt.codes and attempt.kind != records.PROGRAM:
        how = f"stopped by {RunFolder(run_dir).stop}; `postnorm resume` continues"
        return Decision("stopped", errors.EXIT_STOPPED, f"{how}; {newest}")
    how = _how_it_ended(attempt)
    if (starts := attempt.starts_before) >= limits.restarts:
        return give_up(
            f"not done after {starts} restarts (max_restarts={limits.restarts}); the last attempt "
            f"{how}; {newest}"
        )
    misses = misses_before + 1 if is_miss(attempt) else 0
    if misses >= limits.without_progress:
        what = "a new checkpoint" if attempt.kind == records.PRETRAIN else "progress"
        return give_up(
            f"{misses} attempts in a row without {what} (max_attempts_without_progress="
            f"{limits.without_progress}); the last {how}{_limit_text(attempt, limits)}; {newest}; "
            f"see {run_dir}/logs"
        )
    return _again(f"the attempt {how}; {newest}")


def is_miss(attempt: JobAttempt) -> bool:
    """Return whether an attempt counts as one without progress: it made no new checkpoint.

    An attempt that was preempted before it had anything to save does not count; an attempt that
    the time limit ended there does, since the next one would end there, too. A program says by its
    exit code that it has saved, whatever ended it: `max_restarts` is its only limit then.
    """
    if attempt.kind == records.PROGRAM:
        return not _has_saved(attempt)
    if attempt.after != attempt.before:
        return False
    return attempt.at_limit or not _has_saved(attempt)


def end_attempt(
    attempt: JobAttempt, limits: Limits, run_dir: Path, patience: StorageRetry | None = None
) -> Decision:
    """Decide, and append the decision to the run's history if storage lets it.

    The verdict comes first. Only an attempt without progress that would be followed by another must
    be recorded: one that is not counted would be repeated forever.
    """
    none = StorageRetry()
    patience = patience or none
    # First without the history, which can only turn a requeue into an end: any other verdict needs
    # no more of storage that may be failing.
    decision = decide(attempt, 0, limits, run_dir)
    try:
        if decision.word == "requeue":
            misses = patiently(lambda: _misses(attempt, run_dir), patience)
            decision = decide(attempt, misses, limits, run_dir)
        record = {**asdict(attempt), "miss": is_miss(attempt)}
        record |= {"decision": decision.word, "reason": decision.reason}
        # The record of a last attempt is for people: the job need not hold its nodes to write it.
        waits = patience if decision.word == "requeue" else none
        patiently(lambda: records.append_history(run_dir, record), waits)
    except OSError as error:
        logger.warning("the end of the attempt could not be recorded: %s", error)
        if decision.word == "requeue" and is_miss(attempt):
            may_again = attempt.starts_before < limits.restarts
            return storage_failed(error, run_dir / records.FOLDER, patience, may_again=may_again)
    return decision


def patiently(action: Callable[[], _T], patience: StorageRetry) -> _T:
    """Do something with files, and again while storage fails.

    Raises:
        OSError: the disk is full, which waiting does not cure, or patience has ended.
    """
    while True:
        try:
            return action()
        except OSError as error:
            left_s = patience.left_s
            if error.errno in _FULL or left_s <= 0:
                raise
            logger.warning("storage fails, trying again for %.0f s: %s", left_s, error)
            time.sleep(min(_WAIT_S, left_s))


def storage_failed(
    error: OSError, path: Path, patience: StorageRetry, *, may_again: bool
) -> Decision:
    """Return the verdict where storage failed for too long; the path is for errors without one.

    A wait that the end of the job's time cut short goes on in the next start, if the job may have
    one.
    """
    where = f"{error.filename or path}: {error.strerror}"
    if error.errno in _FULL:
        how = f"{where}: free space or inodes there, or raise the quota"
        return Decision("failed", EXIT_FULL, f"{how}; then `postnorm resume` continues")
    if patience.is_cut and may_again:
        return _again(f"{where}: storage fails, and the time limit is near")
    return give_up(
        f"{where}, for {patience.patience_s:.0f} s (storage_patience_s of the cluster profile): "
        "storage fails; when it is back, `postnorm resume` continues"
    )


def _misses(attempt: JobAttempt, run_dir: Path) -> int:
    """Count the attempts in a row, before this one and of its job, that made no progress."""
    misses = 0
    for line in reversed(records.history(run_dir)):
        # Where preflight ended the attempt, the ranks did not start.
        # The jobs of a chain are elements of one array.
        same = str(line.get("job")).partition("_")[0] == attempt.job.partition("_")[0]
        if not same or line.get("miss") is None:
            continue
        if not line["miss"]:
            break
        misses += 1
    return misses


def _limit_text(attempt: JobAttempt, limits: Limits) -> str:
    if not attempt.at_limit:
        return ""
    value = f" ({limits.time})" if limits.time else ""
    return (
        f" because the time limit{value} was near: raise time_limit of the cluster profile, or "
        "save more often (checkpoint.every_steps)"
    )


def _again(reason: str) -> Decision:
    return Decision("requeue", errors.EXIT_PREEMPTED, reason)


def give_up(reason: str) -> Decision:
    """Return the verdict that no other attempt would help."""
    return Decision("failed", errors.EXIT_FAILED_DO_NOT_RETRY, reason)


def _has_saved(attempt: JobAttempt) -> bool:
    return attempt.codes == (errors.EXIT_PREEMPTED,) * attempt.ranks


def _how_it_ended(attempt: JobAttempt) -> str:
    if _has_saved(attempt):
        return "saved and stopped, as asked"
    if attempt.step_code in _NOT_STARTED and not attempt.codes:
        return (
            f"could not start any rank (srun: {attempt.step_code}, which is how shells say that a "
            "program is missing or may not be run; see above, and correct python, container or "
            "setup of the cluster profile)"
        )
    return f"ended with {_codes_text(attempt.codes, attempt.ranks)}" + (
        f" (srun: {attempt.step_code})" if attempt.step_code is not None else ""
    )


def _codes_text(codes: Sequence[int], ranks: int) -> str:
    """Count exit codes, such as `exit codes 1 of 3 ranks, none of 1 rank`."""
    parts = [f"{code} of {counted(codes.count(code), 'rank')}" for code in sorted(set(codes))]
    if ranks > len(codes):
        parts.append(f"none of {counted(ranks - len(codes), 'rank')}")
    return f"exit codes {', '.join(parts)}"
