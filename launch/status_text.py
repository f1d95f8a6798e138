"""Reports of runs and data preparations as lines for a terminal."""

import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from launch.queue import RUNNING, UNKNOWN, JobFacts
from launch.reasons import in_words
from launch.records import PREP_RECORD
from launch.status import PrepReport, RunReport, decision, headline
from pipeline.runtime.files import RESOLVED_FILE, STOP_FILE
from pipeline.runtime.log import duration_text

_BAR = 40
_MAX_STARTS = 5


def report_text(report: RunReport, now_s: float | None = None) -> Iterator[str]:
    """Lines of one run, the most important first.

    Args:
        report: of the run.
        now_s: Unix time that ages are counted from; by default this moment.
    """
    now_s = time.time() if now_s is None else now_s
    yield f"{_short(report.run_dir)}: {headline(report)}"
    yield from _queue_lines(report, now_s)
    if report.excluded:
        yield f"excluded    {' '.join(report.excluded)}"
    yield from _run_lines(report)
    yield from _starts(report)
    for warning in (report.run or {}).get("warnings", []):
        yield f"warning: {warning}"


def prep_text(report: PrepReport) -> Iterator[str]:
    """Lines of one data preparation, a stage each."""
    folder = Path(report.output_dir)
    yield f"{_short(report.output_dir)}: data preparation"
    if report.queue_problem:
        yield f"queue       {report.queue_problem}"
    rows = [("stage", "waiting", "running", "done", "failed", "reason")]
    for stage, jobs in report.stages.items():
        of_stage = [facts for facts in report.elements if facts.array in jobs]
        rows.append((stage, *_counts(of_stage), _prep_reason(of_stage, jobs)))
    yield from table(rows, right=(1, 2, 3, 4))
    config = folder / RESOLVED_FILE
    shown = shlex.quote(_short(str(config))) if config.exists() else "CONFIG"
    yield f"progress: python -m data_prep status {shown}"
    yield f"logs:     {_short(str((folder / PREP_RECORD).parent))}"


def queue_text(
    reports: Sequence[RunReport | PrepReport], now_s: float | None = None
) -> Iterator[str]:
    """A table, a line for each run or preparation in the queue.

    Args:
        reports: of `launch.status.queue_reports`.
        now_s: Unix time that ages are counted from; by default this moment.
    """
    if not reports:
        yield "no run or data preparation of yours is in the queue"
        return
    header = ("run", "job", "state", "reason", "step", "ETA", "restarts", "checkpoint")
    rows = [
        _prep_row(report) if isinstance(report, PrepReport) else _run_row(report)
        for report in reports
    ]
    yield from table([header, *rows], right=(5, 6, 7))


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Iterator[str]:
    """Rows with aligned columns.

    Args:
        rows: the header first.
        right: columns that end in line.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _queue_lines(report: RunReport, now_s: float) -> Iterator[str]:
    if report.queue_problem and report.submissions:
        yield f"queue       {report.queue_problem}"
    if not report.submissions and not report.jobs:
        yield "job         none: the run was not submitted to SLURM from here"
    for facts in report.jobs:
        first, *rest = _job_lines(report, facts, now_s)
        yield f"job         {first}"
        yield from (f"            {line}" for line in rest)


def _job_lines(report: RunReport, facts: JobFacts, now_s: float) -> list[str]:
    where = f" on {facts.nodes}" if facts.nodes else ""
    restarts = f", {_restarts(facts)}" if facts.restarts else ""
    if facts.state == UNKNOWN:
        return [f"{facts.job}: {facts.reason}", _evidence(report, facts)]
    if facts.is_ended:
        ended = f", {_ago(facts.end_unix_s, now_s)}" if facts.end_unix_s else ""
        exit_code = f", exit code {facts.exit_code}" if facts.exit_code not in ("", "0:0") else ""
        reason = f" ({facts.reason})" if facts.reason else ""
        last = decision(report, facts)
        said = [f"{last['decision']}: {last['reason']}"] if last else []
        return [f"{facts.job} {facts.state}{reason}{where}{ended}{exit_code}{restarts}", *said]
    if facts.is_waiting:
        words = in_words(facts.reason, facts.job)
        start = ""
        if facts.started_unix_s and facts.started_unix_s > now_s:
            start = f"; start expected in {duration_text(facts.started_unix_s - now_s)}"
        since = f" for {_since(facts.submitted_unix_s, now_s)}" if facts.submitted_unix_s else ""
        lines = [f"{facts.job} waits in partition {facts.partition}{since}{restarts}"]
        reason = facts.reason or "no reason given yet"
        return [*lines, f"{reason}{': ' if words else ''}{words}{start}"]
    since = f" for {_since(facts.started_unix_s, now_s)}" if facts.started_unix_s else ""
    left = ""
    if facts.state == RUNNING and facts.end_unix_s:
        left = f", {_since(now_s, facts.end_unix_s)} left of {facts.time_limit}"
    return [f"{facts.job} {facts.state.lower()}{where}{since}{left}{restarts}"]


def _evidence(report: RunReport, facts: JobFacts) -> str:
    """What the run's own files say of a job that SLURM does not know."""
    last = decision(report, facts)
    if report.is_done:
        return "the run is finished: it has its done.json"
    if last:
        return f"its script ended, {last['decision']}: {last['reason']}"
    if report.run and report.run["state"] == "running":
        return (
            f"its ranks gave a sign of life {_duration(report.run['idle_s'])} ago and may run on "
            f"without SLURM: `touch {_short(report.run_dir)}/{STOP_FILE}` lets them save and end"
        )
    return "nothing in the run folder says that it has ended or that it runs"


def _run_lines(report: RunReport) -> Iterator[str]:
    run = report.run
    if run is None:
        yield f"run         {report.run_problem}"
        return
    share = run["step"] / run["num_steps"]
    filled = int(share * _BAR)
    bar = "#" * filled + "-" * (_BAR - filled)
    yield f"[{bar}] {share:.1%}  step {run['step']:,} of {run['num_steps']:,}"
    held_out = ""
    if run["held_out_loss"] is not None:
        held_out = f"   held-out {run['held_out_loss']:.4f} at step {run['held_out_step']:,}"
    loss = "unknown" if run["loss"] is None else f"{run['loss']:.4f}"
    yield f"loss        {loss}{held_out}"
    if not report.is_done:
        training = "" if run["state"] == "running" else " of training left"
        life = f"   last sign of life {_duration(run['idle_s'])} ago"
        yield f"ETA         {_duration(run['eta_s'])}{training}{life}"
    saved = run["checkpoint"]
    yield "checkpoint  " + (
        f"step {saved['step']:,}, {_duration(saved['age_s'])} old" if saved else "none yet"
    )


def _starts(report: RunReport) -> Iterator[str]:
    """The last attempts and why they ended: the script's words, else those of the ranks' records.

    SLURM requeues for a preemption or a dead node without asking the script.
    """
    decided = {f"{line.get('job')}.{line.get('restart')}": line for line in report.history}
    found = []
    starts: list[dict[str, Any]] = (report.run or {}).get("starts", [])
    for number, start in enumerate(starts):
        is_last = all(later["job"] != start["job"] for later in starts[number + 1 :])
        line = decided.pop(start["job"], None) if is_last else None
        step = start["resumed_from_step"]
        begin = "from scratch" if step is None else f"from step {step:,}"
        end = f"{line['decision']}: {line['reason']}" if line else start["end"]
        found.append((start["unix_s"], start["job"], begin, end))
    for job, line in decided.items():
        end = f"{line['decision']}: {line['reason']}"
        found.append((line["unix_s"], job, "did not train", end))
    found.sort(key=lambda item: item[0])
    rows = [(job, _when(unix_s), begin, end) for unix_s, job, begin, end in found[-_MAX_STARTS:]]
    if len(found) > _MAX_STARTS:
        yield f"{len(found)} starts, the last {_MAX_STARTS}:"
    if rows:
        yield from (f"start       {line}" for line in table(rows))


def _run_row(report: RunReport) -> tuple[str, ...]:
    facts = report.job
    run = report.run or {}
    saved = run.get("checkpoint")
    return (
        _short(report.run_dir),
        facts.job if facts else "-",
        headline(report),
        (facts.reason if facts else "") or "-",
        f"{run['step']:,}/{run['num_steps']:,}" if run else "-",
        _duration(run["eta_s"]) if run.get("eta_s") is not None else "-",
        str(facts.restarts) if facts and facts.restarts is not None else "-",
        f"{_duration(saved['age_s'])} old" if saved else "-",
    )


def _prep_row(report: PrepReport) -> tuple[str, ...]:
    waiting, running, _, _ = _counts(report.elements)
    arrays = " ".join(sorted({facts.array for facts in report.elements if not facts.is_waiting}))
    arrays = arrays or min(facts.array for facts in report.elements)
    reason = Counter(facts.reason for facts in report.elements if facts.reason).most_common(1)
    state = "running" if running != "0" else "pending"
    tasks = f"{running} run, {waiting} wait"
    reason_text = reason[0][0] if reason and state == "pending" else "-"
    return (_short(report.output_dir), arrays, state, reason_text, tasks, "-", "-", "-")


def _counts(elements: Sequence[JobFacts]) -> tuple[str, str, str, str]:
    """Waiting, on nodes, done and failed."""
    waiting = sum(facts.is_waiting for facts in elements)
    done = sum(facts.state == "COMPLETED" for facts in elements)
    ended = sum(facts.is_ended for facts in elements)
    return str(waiting), str(len(elements) - waiting - ended), str(done), str(ended - done)


def _prep_reason(elements: Sequence[JobFacts], jobs: Sequence[str]) -> str:
    if not elements:
        return f"not in the queue (any more): {' '.join(jobs)}"
    waiting = Counter(facts.reason for facts in elements if facts.is_waiting and facts.reason)
    if not waiting:
        ends = Counter(facts.state for facts in elements if facts.is_ended)
        del ends["COMPLETED"]
        return ", ".join(f"{number} {state}" for state, number in sorted(ends.items()))
    reason = waiting.most_common(1)[0][0]
    words = in_words(reason, elements[0].array)
    return f"{reason}{': ' if words else ''}{words}"


def _restarts(facts: JobFacts) -> str:
    return "1 restart" if facts.restarts == 1 else f"{facts.restarts} restarts"


def _when(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def _ago(unix_s: float, now_s: float) -> str:
    return f"{_since(unix_s, now_s)} ago"


def _since(from_s: float | None, to_s: float | None) -> str:
    return "unknown" if from_s is None or to_s is None else _duration(to_s - from_s)


def _duration(seconds: float | None) -> str:
    return "unknown" if seconds is None else duration_text(max(0.0, seconds))


def _short(path: str) -> str:
    """As seen from the current folder, where it is below it."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path
