"""The status of a sweep, its runs side by side and the best first, and how to cancel it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.grid import KINDS, queued_job, queued_jobs, sweep_record
from launch import control
from launch.queue import UNKNOWN, JobFacts
from launch.slurm import SlurmError
from launch.status import RunReport, headline, report_of
from pipeline.errors import ConfigError
from pipeline.runtime.run_folder import RunFolder
from pipeline.runtime.summary import FolderSummary, number, table


@dataclass(frozen=True)
class SweepReport:
    """The runs of a sweep, best first. The keys of `status SWEEP --json`."""

    dir: str
    verb: str
    metric: dict[str, Any]
    queue_problem: str
    """Why SLURM could not be asked, or empty."""
    runs: list[dict[str, Any]]
    """`name`, `run_dir`, `overrides`, `state`, `job`, `step`, `num_steps` and `value`, that of the
    metric; None: not known, or not yet."""


def sweep_report(folder: Path) -> SweepReport:
    """Look at all runs of a sweep, an absolute folder."""
    found = sweep_record(folder)
    kind, metric, problem = KINDS[found["verb"]], found["metric"], ""
    jobs = {name: queued_job(folder / name) for name in found["runs"]}
    try:
        facts = queued_jobs([folder / name for name in jobs])
    except (SlurmError, ConfigError) as error:
        facts, problem = {}, str(error)
    runs = []
    for name, point in found["runs"].items():
        unknown = JobFacts(jobs[name], jobs[name].partition("_")[0], UNKNOWN, "")
        job = facts.get(folder / name, unknown)
        report = report_of(folder / name, [job] if jobs[name] else [], "")
        value = kind.value(folder / name, report, metric["name"]) if metric["name"] else None
        runs.append(
            {
                "name": name,
                "run_dir": str(folder / name),
                "overrides": point,
                "state": _state(report, kind.finished),
                "job": jobs[name] or None,
                "step": report.run.step if report.run else None,
                "num_steps": report.run.num_steps if report.run else None,
                "value": value,
            }
        )
    sign = {"min": 1, "max": -1}.get(metric["best"], 0)
    if sign:
        runs.sort(key=lambda run: (run["value"] is None, sign * (run["value"] or 0)))
    return SweepReport(str(folder), found["verb"], metric, problem, runs)


def _state(report: RunReport, finished: str) -> str:
    """Give the state in a word; a run that goes on without SLURM is running."""
    folder = Path(report.run_dir)
    if report.job is None or not report.job.is_alive:
        if RunFolder(folder).is_locked():
            return "running"
        if (folder / finished).is_file():
            return "finished"
    return headline(report)


def sweep_summary(report: SweepReport) -> FolderSummary:
    """Summarise a sweep, a run a line."""
    states = [run["state"] for run in report.runs]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    name = report.metric["name"]
    rows = [("run", "state", "step", name or "-", "job")]
    for run in report.runs:
        step = "-" if run["step"] is None else f"{run['step']:,}/{run['num_steps']:,}"
        value = "-" if run["value"] is None else number(run["value"], ".6g")
        rows.append((run["name"], run["state"], step, value, run["job"] or "-"))
    problem = [("queue", report.queue_problem)] if report.queue_problem else []
    return FolderSummary(report.dir, counted, [*problem, *table(rows, right=(2, 3))])


def cancel_sweep(folder: Path, *, save: bool, save_s: float) -> Iterator[str]:
    """Cancel all jobs of a sweep, an absolute folder; yield what was done.

    With `save`, runs that train may first save and end, one after the other.
    """
    jobs = queued_jobs([folder / name for name in sweep_record(folder)["runs"]])
    alive = {run: job for run, job in jobs.items() if job.is_alive}
    if not alive:
        yield f"no job of {folder} is in the queue"
        return
    if save:
        waiting = {run: job for run, job in alive.items() if job.is_waiting}
        yield from control.cancel_jobs([job.job for job in waiting.values()])
        for run, job in alive.items():
            if run in waiting:
                control.note_cancelled(run, job)
            else:
                yield f"{run.relative_to(folder)}:"
                yield from control.cancel(run, save=True, save_s=save_s)
    else:
        yield from control.cancel_jobs(sorted({job.array for job in alive.values()}, key=int))
        for run, job in alive.items():
            control.note_cancelled(run, job)
    yield "submit the same sweep again to continue"
