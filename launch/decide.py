"""What becomes of a job after an attempt: done, once more, or stopped with a reason.

Files of the attempt decide, never srun's exit code: of a job whose rank exits with 4 it is 143, and
of one whose node died it may be 0 (SLURM 22.05).
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
from pipeline.runtime.files import DONE_FILE, EXIT_FOLDER, STOP_FILE

_LATEST = Path("checkpoints") / "latest"


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks, after its end."""

    job: str
    """SLURM's job id; `local` on this machine."""
    restart: int
    nodes: tuple[str, ...]
    before: str | None
    """Newest checkpoint when it began."""
    after: str | None
    codes: tuple[int, ...]
    """Exit codes that ranks left behind; a rank that was killed left none."""
    ranks: int
    """Ranks that there were."""
    is_done: bool
    """Whether the run is complete."""
    at_limit: bool = False
    """Whether SLURM announced the end of the job's time."""
    step_code: int | None = None
    """Exit code of srun, for the record."""


@dataclass(frozen=True)
class Limits:
    """When to give up."""

    restarts: int
    """Of one job."""
    without_progress: int
    """Attempts in a row without a new checkpoint."""


@dataclass(frozen=True)
class Decision:
    """What to do, and why in words."""

    word: str
    """`finished`, `requeue`, `stopped` or `failed`."""
    exit_code: int
    reason: str


def newest_checkpoint(run_dir: Path) -> str | None:
    """Name of the newest published checkpoint."""
    path = run_dir / _LATEST
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def exit_codes(run_dir: Path, job: str) -> tuple[int, ...]:
    """Exit codes that the ranks of an attempt left, by rank.

    Args:
        run_dir: folder of the run.
        job: `JOB.RESTART`, or `local`.
    """
    found = []
    for path in sorted((run_dir / EXIT_FOLDER / job).glob("rank-*")):
        text = path.read_text(encoding="utf-8").strip()
        # A disk that is full leaves an empty file.
        found.append(int(text) if text else EXIT_FAILED_RETRY)
    return tuple(found)


def is_done(kind: str, run_dir: Path, codes: Sequence[int], ranks: int) -> bool:
    """Whether the work is complete: by the trainer's mark, or because all ranks say so.

    Args:
        kind: of the job.
        run_dir: folder of the run.
        codes: that the ranks left.
        ranks: that there were.
    """
    if kind == PRETRAIN:
        return (run_dir / DONE_FILE).exists()
    return list(codes) == [EXIT_FINISHED] * ranks


def decide(attempt: Attempt, misses_before: int, limits: Limits, run_dir: Path) -> Decision:
    """Pure.

    Args:
        attempt: that has ended.
        misses_before: attempts without progress in a row before it.
        limits: of the cluster profile.
        run_dir: for messages.
    """
    newest = f"checkpoint {attempt.after or 'none'}"
    # The mark alone may be of an earlier, shorter run.
    if attempt.is_done and attempt.codes[:1] == (EXIT_FINISHED,):
        return Decision("finished", EXIT_FINISHED, f"done; {newest}")
    if EXIT_FAILED_DO_NOT_RETRY in attempt.codes:
        return _give_up(
            f"rank {attempt.codes.index(EXIT_FAILED_DO_NOT_RETRY)} says that trying again is no "
            f"use: see its message above and in {run_dir}/logs; {newest}"
        )
    if EXIT_STOPPED in attempt.codes:
        return Decision(
            "stopped", EXIT_STOPPED,
            f"stopped by {run_dir / STOP_FILE}; `python -m launch resume` continues; {newest}",
        )  # fmt: skip
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
    """Whether an attempt shows that another may be in vain: it failed without a new checkpoint.

    One that was preempted before it had anything to save does not; one that the time limit ended
    there does.
    """
    if attempt.after != attempt.before:
        return False
    return attempt.at_limit or not _has_saved(attempt)


def end_attempt(attempt: Attempt, limits: Limits, run_dir: Path) -> Decision:
    """Decides, and writes it down in the run's history."""
    misses = 0
    for line in reversed(history(run_dir)):
        # What preflight ended was no attempt of the ranks.
        if line["job"] != attempt.job or line["miss"] is None:
            continue
        if not line["miss"]:
            break
        misses += 1
    decision = decide(attempt, misses, limits, run_dir)
    append_history(run_dir, {
        **asdict(attempt), "miss": is_miss(attempt), "decision": decision.word,
        "reason": decision.reason,
    })  # fmt: skip
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
    """Such as `exit codes 1 of 3 ranks, none of 1 rank`."""
    parts = [f"{code} of {_ranks(codes.count(code))}" for code in sorted(set(codes))]
    if ranks > len(codes):
        parts.append(f"none of {_ranks(ranks - len(codes))}")
    return f"exit codes {', '.join(parts)}"


def _ranks(number: int) -> str:
    return f"{number} rank" + ("" if number == 1 else "s")
