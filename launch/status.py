"""The status of runs, data preparations and the queue: SLURM's answer and the run's own files."""

import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launch import queue
from launch.cluster import cluster_of
from launch.records import (
    CLUSTER_FILE,
    EVALUATE,
    FOLDER,
    LAST_DECISIONS,
    PREP_RECORD,
    Submission,
    excluded_nodes,
    failed_stages,
    history,
    last_folder,
    measured_save_s,
    newest,
    prep_jobs,
    read_prep,
    submissions,
)
from launch.site import preemption, preemption_remarks
from launch.slurm import SlurmError
from pipeline.data.format import INDEX_FILE
from pipeline.errors import ConfigError, PostnormError
from pipeline.inspect.status import RunStatus, begin_text, progress_lines, run_status
from pipeline.model.architecture import TASK_FILE
from pipeline.runtime import summary
from pipeline.runtime.files import read_json_lines
from pipeline.runtime.run_folder import RunFolder

_MAX_STARTS = 5


@dataclass(frozen=True)
class RunReport:
    """Everything that is known of a run. The keys of `status RUN --json`."""

    run_dir: str
    jobs: list[queue.JobFacts]
    """The training first, then the last evaluation, then other jobs of this run in the queue."""
    queue_problem: str
    """Why SLURM could not be asked, or empty."""
    submissions: list[Submission]
    history: list[dict[str, Any]]
    """Ends of attempts, oldest first."""
    excluded: list[str]
    """Nodes that the run must not get again."""
    run: RunStatus | None
    """The run's own status, as `postnorm status` shows it; None before the first
    start."""
    run_problem: str
    """Why there is no such status, or empty."""
    remarks: list[str] = field(default_factory=list)
    """What the site's preemption would cost the run while its job is in the queue."""

    @property
    def job(self) -> queue.JobFacts | None:
        """The job of the newest submission of its kind, training first."""
        return self.jobs[0] if self.jobs else None

    @property
    def is_done(self) -> bool:
        """Whether the run folder has its done.json, and that of a fine-tuning its result."""
        folder = RunFolder(Path(self.run_dir))
        is_tuned = (folder.path / TASK_FILE).is_file()
        return folder.done.exists() and (not is_tuned or folder.result.exists())


@dataclass(frozen=True)
class PrepReport:
    """The jobs of a data preparation. The keys of `status DATASET --json`."""

    output_dir: str
    stages: dict[str, list[str]]
    """Ids of the arrays of each stage."""
    elements: list[queue.JobFacts]
    """Elements of the arrays that the queue knows."""
    queue_problem: str
    """Why SLURM could not be asked, or empty."""
    is_complete: bool = False
    """Whether the dataset has its index, which is written last."""
    failed: dict[str, str] = field(default_factory=dict)
    """Stages of which a part failed for good, and which one."""
    cancelled_unix_s: float | None = None
    """When `launch cancel` ended its jobs; None if it did not."""
    waiting: int = 0
    """Arrays that are not submitted yet, for want of room in the queue."""
    dataset: dict[str, Any] | None = None
    """How far it is, by its own files; None where only jobs are looked at."""


def run_report(run_dir: Path) -> RunReport:
    """Ask SLURM about a run, an absolute folder, and read the run's files."""
    jobs: list[queue.JobFacts] = []
    problem = ""
    try:
        jobs = _jobs_of_run(run_dir)
    except (SlurmError, ConfigError) as error:
        problem = str(error)
    report = report_of(run_dir, jobs, problem)
    return replace(report, remarks=_remarks(run_dir)) if any(j.is_alive for j in jobs) else report


def _remarks(run_dir: Path) -> list[str]:
    """Compare a run's saves with the site's preemption, by the profile of its last submission."""
    try:
        cluster = cluster_of(str(last_folder(run_dir) / CLUSTER_FILE))
    except (PostnormError, OSError):
        return []  # a foreign job, or a damaged record, which others tell of
    return preemption_remarks(preemption(cluster), measured_save_s(run_dir), cluster)


def report_of(run_dir: Path, jobs: list[queue.JobFacts], queue_problem: str) -> RunReport:
    """Read the files of a run whose jobs are known."""
    run, problem = own_status(run_dir)
    return RunReport(
        run_dir=str(run_dir),
        jobs=jobs,
        queue_problem=queue_problem,
        submissions=submissions(run_dir),
        history=history(run_dir),
        excluded=excluded_nodes(run_dir),
        run=run,
        run_problem=problem,
    )


def _jobs_of_run(run_dir: Path) -> list[queue.JobFacts]:
    every = submissions(run_dir)
    arrays: dict[str, list[queue.JobFacts]] = {}
    for facts in queue.my_jobs():
        if facts.is_of(run_dir):
            arrays.setdefault(facts.array, []).append(facts)
    chains = {one.job for one in every if one.job in arrays}
    queued = {
        name if name in chains else facts.job: facts
        for name, jobs in arrays.items()
        for facts in ([queue.current(jobs)] if name in chains else jobs)
    }
    submitted = [
        queued.pop(last.job)
        if last.job in queued
        else queue.job_facts(last.job, run_dir, last.submitted_unix_s)
        for last in newest(every)
    ]
    return [*submitted, *(facts for facts in queued.values() if facts.is_alive)]


def own_status(run_dir: Path) -> tuple[RunStatus | None, str]:
    """Read a run's status from its files; None and the reason if there is none."""
    if not run_dir.exists():
        return None, "the folder is gone"
    if not RunFolder(run_dir).attempts.exists():
        refused = read_json_lines(RunFolder(run_dir).refused)
        told = f"the last start failed: {refused[-1].get('error')}" if refused else ""
        return None, told or "training has not started yet"
    try:
        return run_status(run_dir), ""
    except Exception as error:  # noqa: BLE001 - a damaged folder must not hide jobs or other runs
        return None, str(error) or type(error).__name__


def prep_report(output_dir: Path) -> PrepReport | None:
    """Read the marks of a data preparation, and ask SLURM for its jobs; None if it has none."""
    record = read_prep(output_dir)
    if record is None:
        return None
    elements: list[queue.JobFacts] = []
    problem = ""
    try:
        elements = prep_elements(output_dir, record.jobs)
    except (SlurmError, ConfigError) as error:
        problem = str(error)
    else:
        known = {facts.array for facts in elements}
        gone = [job for jobs in record.jobs.values() for job in jobs if job not in known]
        # The queue forgets jobs some minutes after their end; accounting is not everywhere.
        with suppress(SlurmError, ConfigError):
            ended = queue.accounted(gone, record.submitted_unix_s) if gone else []
            elements += [facts for facts in ended if facts.is_ended]
    return PrepReport(
        output_dir=str(output_dir),
        stages=record.jobs,
        elements=elements,
        queue_problem=problem,
        is_complete=(output_dir / INDEX_FILE).is_file(),
        failed=failed_stages(last_folder(output_dir / "work")),
        cancelled_unix_s=record.cancelled_unix_s,
        waiting=record.waiting,
    )


def prep_elements(output_dir: Path, stages: dict[str, list[str]]) -> list[queue.JobFacts]:
    """List the elements of a preparation's arrays, without other jobs that have the same ids."""
    queued = queue.jobs_of([job for jobs in stages.values() for job in jobs])
    return [facts for facts in queued if not facts.comment or facts.is_of(output_dir)]


def queue_reports() -> list[RunReport | PrepReport]:
    """Report all runs and preparations of this user that have jobs in the queue."""
    folders: dict[str, list[queue.JobFacts]] = {}
    for facts in queue.my_jobs():
        if facts.is_alive and facts.comment.startswith("/"):
            folders.setdefault(facts.comment, []).append(facts)
    reports = [_queue_report(Path(folder), jobs) for folder, jobs in folders.items()]
    return [report for report in reports if report is not None]


def _queue_report(folder: Path, jobs: list[queue.JobFacts]) -> RunReport | PrepReport | None:
    """Report one folder with jobs in the queue; None if it does not belong to this project."""
    if (folder / PREP_RECORD).exists():
        return PrepReport(str(folder), prep_jobs(folder), jobs, "")
    if not (folder / FOLDER).exists() and folder.exists():
        return None
    newest_first = sorted(jobs, key=lambda facts: facts.submitted_unix_s or 0, reverse=True)
    arrays = [one.job.partition("_")[0] for one in newest(submissions(folder))]
    there = [array for array in arrays if array in {facts.array for facts in jobs}]
    array = (there or [newest_first[0].array])[0]
    first = queue.current([facts for facts in jobs if facts.array == array])
    return report_of(folder, [first, *(facts for facts in newest_first if facts is not first)], "")


def headline(report: RunReport) -> str:
    """Give the state in a word or two: the queue's while the job is alive, then the run's."""
    job = report.job
    if job and job.is_alive:
        return "pending" if job.is_waiting else job.state.lower()
    if report.is_done:
        return "finished"
    # Where SLURM cannot be asked, what the job's script decided is known all the same.
    trained = [one.job for one in newest(report.submissions)[:1] if one.kind != EVALUATE]
    ids = [job.job] if job else trained
    last = decision(report, ids[0]) if ids else None
    if last:
        return str(last["decision"])
    if job and job.state != queue.UNKNOWN:
        return job.state.lower()
    if report.submissions:
        return "unknown"
    return report.run.state if report.run else "not started"


def decision(report: RunReport, job: str) -> dict[str, Any] | None:
    """Find what a job's script decided at its end; None if it did not come to that."""
    # Of a chain that SLURM has forgotten, only the id of its array is known.
    own = [line for line in report.history if f"{line.get('job')}_".startswith(f"{job}_")]
    if own and own[-1].get("decision") in LAST_DECISIONS:
        return own[-1]
    return None


def run_summary(report: RunReport, now_s: float | None = None) -> summary.FolderSummary:
    """Summarise one run, by default at this moment."""
    lines = list(_queue_lines(report, time.time() if now_s is None else now_s))
    if report.excluded:
        lines.append(("excluded", " ".join(report.excluded)))
    lines += progress_lines(report.run) if report.run else [("run", report.run_problem)]
    lines += _start_lines(report)
    warnings = [*(report.run.warnings if report.run else []), *report.remarks]
    return summary.FolderSummary(report.run_dir, headline(report), lines, warnings)


def prep_summary(report: PrepReport) -> summary.FolderSummary:
    """Summarise the jobs of one data preparation, a stage a line."""
    folder = Path(report.output_dir)
    lines: list[summary.Line] = []
    if report.queue_problem:
        lines.append(("queue", report.queue_problem))
    rows = [("stage", "waiting", "running", "done", "failed", "reason")]
    is_alive = any(facts.is_alive for facts in report.elements)
    for stage, jobs in report.stages.items():
        of_stage = [facts for facts in report.elements if facts.array in jobs]
        if of_stage and (is_alive or not report.is_complete):
            rows.append((stage, *_counts(of_stage), _prep_reason(of_stage)))
        else:
            rows.append((stage, "-", "-", "-", "-", _prep_mark(report, stage, jobs)))
    if report.waiting and not (report.is_complete or report.failed or report.cancelled_unix_s):
        number = "1 array is" if report.waiting == 1 else f"{report.waiting} arrays are"
        row = f"{number} not submitted yet: `submit --prep CONFIG --wait-room` goes on with them"
        lines.append(("room", row))
    config = RunFolder(folder).resolved
    shown = shlex.quote(summary.short_path(str(config))) if config.exists() else "CONFIG"
    lines += [
        *summary.table(rows, right=(1, 2, 3, 4)),
        f"progress: postnorm prep status {shown}",
        f"logs:     {summary.short_path(str((folder / PREP_RECORD).parent))}",
    ]
    state = "complete" if report.is_complete else ""
    if not state and not is_alive:
        state = "failed" if report.failed else "cancelled" if report.cancelled_unix_s else ""
    return summary.FolderSummary(
        report.output_dir, ", ".join(filter(None, ["data preparation", state])), lines
    )


def queue_text(reports: Sequence[RunReport | PrepReport]) -> str:
    """Render a table with a line for each run or preparation in the queue."""
    if not reports:
        return "no run or data preparation of yours is in the queue"
    header = ("run", "job", "state", "reason", "step", "ETA", "restarts", "checkpoint")
    rows = [
        _prep_row(report) if isinstance(report, PrepReport) else _run_row(report)
        for report in reports
    ]
    return "\n".join(summary.table([header, *rows], right=(5, 6, 7)))


def _queue_lines(report: RunReport, now_s: float) -> Iterator[summary.Line]:
    if report.queue_problem and report.submissions:
        yield "queue", report.queue_problem
    if not report.submissions and not report.jobs:
        yield "job", "none: the run was not submitted to SLURM from here"
    for facts in report.jobs:
        first, *rest = _job_lines(report, facts, now_s)
        yield "job", first
        yield from (("", line) for line in rest)


def _job_lines(report: RunReport, facts: queue.JobFacts, now_s: float) -> list[str]:
    where = f" on {facts.nodes}" if facts.nodes else ""
    restarts = ""
    if facts.restarts:
        restarts = ", 1 restart" if facts.restarts == 1 else f", {facts.restarts} restarts"
    if facts.state == queue.UNKNOWN:
        return [f"{facts.job}: {facts.reason}", _evidence(report, facts)]
    if facts.is_ended:
        ended = f", {summary.duration(now_s - facts.end_unix_s)} ago" if facts.end_unix_s else ""
        exit_code = f", exit code {facts.exit_code}" if facts.exit_code not in ("", "0:0") else ""
        reason = f" ({facts.reason})" if facts.reason else ""
        last = decision(report, facts.job)
        why = [f"{last['decision']}: {last['reason']}"] if last else []
        return [f"{facts.job} {facts.state}{reason}{where}{ended}{exit_code}{restarts}", *why]
    if facts.is_waiting:
        start = ""
        if facts.started_unix_s and facts.started_unix_s > now_s:
            start = f"; start expected in {summary.duration(facts.started_unix_s - now_s)}"
        submitted_s = facts.submitted_unix_s
        since = f" for {summary.duration(now_s - submitted_s)}" if submitted_s else ""
        reason = _explained(facts.reason, facts.job) if facts.reason else "no reason given yet"
        waits = f"{facts.job} waits in partition {facts.partition}{since}{restarts}"
        return [waits, f"{reason}{start}"]
    since = f" for {summary.duration(now_s - facts.started_unix_s)}" if facts.started_unix_s else ""
    left = ""
    if facts.state == queue.RUNNING and facts.end_unix_s:
        left = f", {summary.duration(facts.end_unix_s - now_s)} left of {facts.time_limit}"
    return [f"{facts.job} {facts.state.lower()}{where}{since}{left}{restarts}"]


def _explained(reason: str, job: str) -> str:
    words = queue.reason_in_words(reason, job)
    return f"{reason}: {words}" if words else reason


def _evidence(report: RunReport, facts: queue.JobFacts) -> str:
    """Describe what the run's own files tell of a job that SLURM does not know."""
    last = decision(report, facts.job)
    if report.is_done:
        return "the run is finished: it has its done.json"
    if last:
        return f"its script ended, {last['decision']}: {last['reason']}"
    if report.run and report.run.state == "running":
        stop = f"{summary.short_path(report.run_dir)}/{RunFolder(Path()).stop}"
        return (
            f"its ranks gave a sign of life {summary.duration(report.run.idle_s)} ago and may run "
            f"on without SLURM: `touch {stop}` lets them save and end"
        )
    return "nothing in the run folder says whether it has ended or runs"


def _start_lines(report: RunReport) -> Iterator[summary.Line]:
    """Yield the last attempts and why they ended: the script's reason, else that of the ranks.

    SLURM requeues for a preemption or a dead node without asking the script.
    """
    decided = {f"{line.get('job')}.{line.get('restart')}": line for line in report.history}
    every = []
    starts = report.run.starts if report.run else []
    for number, start in enumerate(starts):
        is_last = all(later.job != start.job for later in starts[number + 1 :])
        line = decided.pop(start.job, None) if is_last else None
        end = f"{line['decision']}: {line['reason']}" if line else start.end
        every.append((start.unix_s, start.job, begin_text(start), end))
    for job, line in decided.items():
        end = f"{line['decision']}: {line['reason']}"
        every.append((line["unix_s"], job, "did not train", end))
    every.sort(key=lambda item: item[0])
    rows = [
        (job, summary.date(unix_s), begin, end) for unix_s, job, begin, end in every[-_MAX_STARTS:]
    ]
    if len(every) > _MAX_STARTS:
        yield f"{len(every)} starts, the last {_MAX_STARTS}:"
    if rows:
        yield from (
            ("start", line) for line in summary.table(rows, label_width=summary.LABEL_WIDTH)
        )


def _run_row(report: RunReport) -> tuple[str, ...]:
    facts, run = report.job, report.run
    saved = run.checkpoint if run else None
    return (
        summary.short_path(report.run_dir),
        facts.job if facts else "-",
        headline(report),
        (facts.reason if facts else "") or "-",
        f"{run.step:,}/{run.num_steps:,}" if run else "-",
        summary.duration(run.eta_s) if run and run.eta_s is not None else "-",
        str(facts.restarts) if facts and facts.restarts is not None else "-",
        f"{summary.duration(saved.age_s)} old" if saved else "-",
    )


def _prep_row(report: PrepReport) -> tuple[str, ...]:
    waiting, running, _, _ = _counts(report.elements)
    arrays = " ".join(sorted({facts.array for facts in report.elements if not facts.is_waiting}))
    arrays = arrays or min(facts.array for facts in report.elements)
    reason = Counter(facts.reason for facts in report.elements if facts.reason).most_common(1)
    state = "running" if running != "0" else "pending"
    tasks = f"{running} run, {waiting} wait"
    reason_text = reason[0][0] if reason and state == "pending" else "-"
    return (summary.short_path(report.output_dir), arrays, state, reason_text, tasks, "-", "-", "-")


def _counts(elements: Sequence[queue.JobFacts]) -> tuple[str, str, str, str]:
    """Count elements that wait, are on nodes, are done and have failed."""
    waiting = sum(facts.is_waiting for facts in elements)
    done = sum(facts.state == "COMPLETED" for facts in elements)
    ended = sum(facts.is_ended for facts in elements)
    return str(waiting), str(len(elements) - waiting - ended), str(done), str(ended - done)


def _prep_mark(report: PrepReport, stage: str, jobs: Sequence[str]) -> str:
    """Describe what files tell of a stage whose jobs have ended, or are not known."""
    if report.is_complete:
        return "done"
    if stage in report.failed:
        return f"failed: {report.failed[stage]}"
    if report.cancelled_unix_s:
        return f"cancelled on {summary.date(report.cancelled_unix_s)}"
    if not jobs:
        return "not submitted yet"
    return f"not known to SLURM (any more): {' '.join(jobs)}"


def _prep_reason(elements: Sequence[queue.JobFacts]) -> str:
    waiting = Counter(facts.reason for facts in elements if facts.is_waiting and facts.reason)
    if not waiting:
        ends = Counter(facts.state for facts in elements if facts.is_ended)
        del ends["COMPLETED"]
        return ", ".join(f"{number} {state}" for state, number in sorted(ends.items()))
    return _explained(waiting.most_common(1)[0][0], elements[0].array)
