"""The verdict on a job after an attempt: finished, once more, or stopped with a reason.

Files of the attempt decide, never srun's exit code: if a rank exits with 4 srun's code is 143, and
if a node dies it may be 0 (SLURM 22.05).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from launch.records import PRETRAIN, append_history, history
from pipeline.errors import (
    EXIT_FAILED_DO_NOT_RETRY,
    EXIT_FAILED_RETRY,
    EXIT_FINISHED,
    EXIT_PREEMPTED,
    EXIT_STOPPED,
)
from pipeline.runtime.run_folder import RunFolder


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks, after its end."""

    job: str
    """SLURM's job id; `local-NUMBER` on this machine."""
    restart: int
    nodes: tuple[str, ...]
    before: str | None
    """Newest checkpoint when the attempt began."""
    after: str | None
    """Newest checkpoint when it ended."""
    codes: tuple[int, ...]
    """Exit codes that ranks left behind; a rank that was killed left none."""
    ranks: int
    """Number of ranks that were started."""
    is_done: bool
    """Whether the run is complete."""
    at_limit: bool = False
    """Whether SLURM announced the end of the job's time."""
    step_code: int | None = None
    """Exit code of srun, for the record only."""


@dataclass(frozen=True)
class Limits:
    """When to give up."""

    restarts: int
    """Largest number of restarts of one job."""
    without_progress: int
    """Largest number of attempts in a row without a new checkpoint."""


@dataclass(frozen=True)
class Decision:
    """The verdict, and the reason in words."""

    word: str
    """`finished`, `requeue`, `stopped` or `failed`."""
    exit_code: int
    reason: str


def exit_codes(run_dir: Path, job: str) -> tuple[int, ...]:
    """Read the exit codes that the ranks of `JOB.RESTART` left, in their order."""
    texts = [
        path.read_text(encoding="utf-8").strip()
        for path in sorted(RunFolder(run_dir).exits(job).glob("rank-*"))
    ]
    # A full disk leaves an empty file.
    return tuple(int(text) if text else EXIT_FAILED_RETRY for text in texts)


def is_done(kind: str, run_dir: Path, codes: Sequence[int], ranks: int) -> bool:
    """Say whether the work is complete: by the trainer's mark, or because all ranks say so."""
    if kind == PRETRAIN:
        return RunFolder(run_dir).done.exists()
    return list(codes) == [EXIT_FINISHED] * ranks


def decide(attempt: Attempt, misses_before: int, limits: Limits, run_dir: Path) -> Decision:
    """Decide what follows an attempt, after some without progress in a row. Pure."""
    newest = f"checkpoint {attempt.after or 'none'}"
    # done.json alone may be left from an earlier, shorter run.
    if attempt.is_done and attempt.codes[:1] == (EXIT_FINISHED,):
        return Decision("finished", EXIT_FINISHED, f"done; {newest}")
    if EXIT_FAILED_DO_NOT_RETRY in attempt.codes:
        return _give_up(
            f"rank {attempt.codes.index(EXIT_FAILED_DO_NOT_RETRY)} failed permanently (exit code "
            f"{EXIT_FAILED_DO_NOT_RETRY}); see its message above and in {run_dir}/logs; {newest}"
        )
    if EXIT_STOPPED in attempt.codes:
        how = f"stopped by {RunFolder(run_dir).stop}; `python -m launch resume` continues"
        return Decision("stopped", EXIT_STOPPED, f"{how}; {newest}")
    how = _how_it_ended(attempt)
    if attempt.restart >= limits.restarts:
        return _give_up(
            f"not done after {attempt.restart} restarts (max_restarts={limits.restarts}); the last "
            f"attempt {how}; {newest}"
        )
    misses = misses_before + 1 if is_miss(attempt) else 0
    if misses >= limits.without_progress:
        return _give_up(
            f"{misses} attempts in a row without a new checkpoint (max_attempts_without_progress="
            f"{limits.without_progress}); the last {how}; {newest}; see {run_dir}/logs"
        )
    return Decision("requeue", EXIT_PREEMPTED, f"the attempt {how}; {newest}")


def is_miss(attempt: Attempt) -> bool:
    """Say whether an attempt counts as one without progress: it made no new checkpoint.

    An attempt that was preempted before it had anything to save does not count; an attempt that
    the time limit ended there does, since the next one would end there, too.
    """
    if attempt.after != attempt.before:
        return False
    return attempt.at_limit or not _has_saved(attempt)


def end_attempt(attempt: Attempt, limits: Limits, run_dir: Path) -> Decision:
    """Decide, and append the decision to the run's history."""
    misses = 0
    for line in reversed(history(run_dir)):
        # Where preflight ended the attempt, the ranks did not start.
        if line["job"] != attempt.job or line["miss"] is None:
            continue
        if not line["miss"]:
            break
        misses += 1
    decision = decide(attempt, misses, limits, run_dir)
    verdict = {"decision": decision.word, "reason": decision.reason}
    append_history(run_dir, {**asdict(attempt), "miss": is_miss(attempt), **verdict})
    return decision


def _give_up(reason: str) -> Decision:
    return Decision("failed", EXIT_FAILED_DO_NOT_RETRY, reason)


def _has_saved(attempt: Attempt) -> bool:
    return attempt.codes == (EXIT_PREEMPTED,) * attempt.ranks


def _how_it_ended(attempt: Attempt) -> str:
    if _has_saved(attempt):
        return "saved and stopped, as asked"
    return f"ended with {_codes_text(attempt.codes, attempt.ranks)}" + (
        f" (srun: {attempt.step_code})" if attempt.step_code is not None else ""
    )


def _codes_text(codes: Sequence[int], ranks: int) -> str:
    """Count exit codes, such as `exit codes 1 of 3 ranks, none of 1 rank`."""
    parts = [f"{code} of {_ranks(codes.count(code))}" for code in sorted(set(codes))]
    if ranks > len(codes):
        parts.append(f"none of {_ranks(ranks - len(codes))}")
    return f"exit codes {', '.join(parts)}"


def _ranks(number: int) -> str:
    return f"{number} rank" + ("" if number == 1 else "s")
