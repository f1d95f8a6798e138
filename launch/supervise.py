"""What a job's script does next: the orders of `launch supervise`.

The script asks at its start and after each step. An order is a step (CHECK the nodes, MEASURE their
bandwidth, RANKS), REQUEUE, or the exit code of the job. What one call knows and a later one needs
stands in files of the run: a call may be on a node that is gone by the next.
"""

import contextlib
import logging
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from launch import decide
from launch.cluster import ClusterConfig
from launch.preflight.check import CheckedConfig, read_record
from launch.preflight.judge import gather, judge_nodes
from launch.records import (
    EVALUATE,
    EXCLUDED_FILE,
    FOLDER,
    UNJUDGED_FILE,
    append_history,
    append_start,
    exclude_nodes,
    excluded_nodes,
    progress,
    script_starts,
)
from pipeline.errors import EXIT_FAILED_RETRY, PostnormError
from pipeline.runtime import env
from pipeline.runtime.notify import notify_end

logger = logging.getLogger(__name__)

START, STORAGE = "start", "storage"
CHECK, MEASURE, RANKS, REQUEUE = "check", "measure", "ranks", "requeue"
STEPS = (START, STORAGE, CHECK, MEASURE, RANKS)
"""What an order may follow. STORAGE: the first node waited for it in vain, and asks another one."""

_TERMINATED = 128 + signal.SIGTERM
Inputs = Callable[[], tuple[CheckedConfig, ClusterConfig]]
"""Loads the config of a run and its cluster profile."""


@dataclass(frozen=True)
class JobStart:
    """One start of a job's script, as the script describes it."""

    attempt: decide.JobAttempt
    """What is known of it so far."""
    kind: str
    """PRETRAIN, EVALUATE or PROGRAM."""
    limits: decide.Limits
    run_dir: Path
    patience: decide.StorageRetry
    max_excluded: int = 0
    """Largest number of nodes that the job may do without."""
    preflight: Inputs | None = None
    """What the nodes are judged by; None where they are not checked."""
    is_asked: bool = False
    """Whether the job was asked to stop: at the end of its time, or before."""

    @property
    def name(self) -> str:
        """Name of the start, such as `7.0`, in the files of its run."""
        return f"{self.attempt.job}.{self.attempt.restart}"

    @property
    def records(self) -> Path:
        """Folder for the reports of its nodes."""
        return self.run_dir / FOLDER / "preflight" / self.name


def next_order(after: str, start: JobStart) -> str:
    """Return the order that follows a step, and write to standard error why.

    Args:
        after: of STEPS.
        start: what the script says of itself.

    Returns:
        CHECK, MEASURE, RANKS, REQUEUE, with the nodes to leave out after STORAGE, or `exit CODE`.
    """
    if after == STORAGE:
        return _accuse(start)
    if after == START:
        return _begin(start)
    if after == RANKS:
        return _end(start)
    return _judge(start, after)


def _begin(start: JobStart) -> str:
    attempt = start.attempt
    try:
        before = decide.patiently(lambda: _record_start(start), start.patience)
    except OSError as error:
        return _order(start, _no_storage(start, error))
    _say(
        f"start: job {attempt.job}, restart {attempt.restart}, nodes {' '.join(attempt.nodes)}, "
        f"{replace(attempt, after=before, kind=start.kind).newest}"
    )
    # Time is nearly up: the ranks end at once, and that is judged as their end.
    return RANKS if start.preflight is None or start.is_asked else CHECK


def _record_start(start: JobStart) -> str | None:
    """Write down what this start found, and return how far it was."""
    attempt, run_dir = start.attempt, start.run_dir
    if attempt.starts_before == 0:
        _forget_nodes(start)
    before = progress(start.kind, run_dir)
    if start.preflight is not None:
        start.records.mkdir(parents=True, exist_ok=True)
    known = {"job": attempt.job, "restart": attempt.restart, "nodes": list(attempt.nodes)}
    append_start(run_dir, {**known, "before": before})
    return before


def _accuse(start: JobStart) -> str:
    """Blame the first node, as this one reaches what that one does not."""
    first, run_dir = start.attempt.nodes[0], start.run_dir
    if start.attempt.starts_before == 0:
        _forget_nodes(start)
    bad = {*excluded_nodes(run_dir), first}
    if len(bad) > start.max_excluded or start.attempt.starts_before >= start.limits.restarts:
        return f"exit {EXIT_FAILED_RETRY}"  # the script ends the job, and says why
    exclude_nodes(run_dir, [first])
    _say(f"requeue: bad node {first}: node {env.node_name()} reaches the storage that it does not")
    return f"{REQUEUE} {','.join(excluded_nodes(run_dir))}"


def _forget_nodes(start: JobStart) -> None:
    """Begin with no excluded nodes: a person submitted the job, and others may be bad by now."""
    if start.kind != EVALUATE:  # beside a job that trains, whose nodes these are
        (start.run_dir / FOLDER / EXCLUDED_FILE).unlink(missing_ok=True)


def _judge(start: JobStart, after: str) -> str:
    attempt = start.attempt
    if start.is_asked or start.preflight is None:
        return RANKS
    if attempt.step_code == _TERMINATED and attempt.starts_before < start.limits.restarts:
        left = [read_record(start.records, node) for node in attempt.nodes]
        # Preempted: SLURM ended the check on all nodes, and this script has a moment more. A node
        # that alone left nothing ended the others' checks.
        if not any(left) or (all(left) and not all(one and one.is_finished for one in left)):
            _note(start, "requeue", "preflight was ended by SIGTERM")
            return _order(start)
    try:
        config, profile = start.preflight()
        evidence = gather(start.records, attempt.nodes, config, with_bandwidth=after == MEASURE)
        verdict = judge_nodes(config, profile, evidence, job=attempt.job, restart=attempt.restart)
    except (PostnormError, OSError) as error:
        logger.warning("preflight came to no verdict, going on without: %s", error)
        return RANKS
    for line in verdict.text(evidence):
        _say(f"preflight: {line}")
    if verdict.problems and verdict.passes:
        logger.warning("storage fails for preflight, going on without: the ranks wait for it")
        return RANKS
    if verdict.problems:
        return _give_up(start, "no other node cures what preflight found")
    if not verdict.bad:
        measures = after == CHECK and profile.preflight.bandwidth_gb_per_s
        return MEASURE if measures else RANKS
    if attempt.starts_before >= start.limits.restarts:
        reason = f"bad nodes after {attempt.starts_before} restarts (max_restarts)"
        return _give_up(start, reason)
    return _order(start)


def _give_up(start: JobStart, reason: str) -> str:
    """End the job before its ranks begin."""
    _note(start, "failed", reason)
    return _order(start, decide.give_up(reason))


def _note(start: JobStart, decision: str, reason: str) -> None:
    """Put on record what is decided before the ranks begin."""
    attempt = {"job": start.attempt.job, "restart": start.attempt.restart}
    attempt |= {"nodes": list(start.attempt.nodes), "miss": None}  # no attempt of the ranks
    with contextlib.suppress(OSError):
        append_history(start.run_dir, {**attempt, "decision": decision, "reason": reason})
    _say(f"preflight: {decision}: {reason}")


def _end(start: JobStart) -> str:
    try:
        attempt = decide.patiently(lambda: _read_end(start), start.patience)
    except OSError as error:
        return _order(start, _no_storage(start, error))
    return _order(start, decide.end_attempt(attempt, start.limits, start.run_dir, start.patience))


def _read_end(start: JobStart) -> decide.JobAttempt:
    """Read what the start found and what the ranks left."""
    attempt = start.attempt
    own = {"job": attempt.job, "restart": attempt.restart}
    for line in reversed(script_starts(start.run_dir)):
        if own.items() <= line.items():
            attempt = replace(attempt, before=line["before"])
            break
    return decide.read_end(attempt, start.kind, start.run_dir)


def _no_storage(start: JobStart, error: OSError) -> decide.Decision:
    may_again = start.attempt.starts_before < start.limits.restarts
    return decide.storage_failed(error, start.run_dir / FOLDER, start.patience, may_again=may_again)


def _order(start: JobStart, decision: decide.Decision | None = None) -> str:
    """Make a decision the job's order; None sends it back without nodes that were reported."""
    with contextlib.suppress(OSError):  # the script's count of calls without one begins anew
        (start.run_dir / FOLDER / UNJUDGED_FILE).unlink(missing_ok=True)
    if decision is None:
        return REQUEUE
    is_again = decision.word == REQUEUE
    _say(f"{REQUEUE if is_again else 'end'}: {decision.reason}")
    if start.kind != EVALUATE:  # the end of an evaluation is not the run's
        notify_end(start.run_dir, start.name, decision.word, decision.reason)
    return REQUEUE if is_again else f"exit {decision.exit_code}"


def _say(line: str) -> None:
    """Write a line of the job's log: standard output is for the order."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
