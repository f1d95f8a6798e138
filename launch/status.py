"""How a run stands: what SLURM says of its jobs, and what the run says of itself."""

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.queue import UNKNOWN, JobFacts, job_facts, jobs_of, my_jobs
from launch.records import (
    FOLDER,
    PREP_RECORD,
    Submission,
    excluded_nodes,
    history,
    newest,
    prep_jobs,
    submissions,
)
from launch.slurm import SlurmError
from pipeline.errors import ConfigError
from pipeline.runtime.files import ATTEMPTS_FILE, DONE_FILE

_LAST_DECISIONS = ("finished", "stopped", "failed")
"""Of `launch decide`: after these the job script ends."""


@dataclass(frozen=True)
class RunReport:
    """What is known of a run."""

    run_dir: str
    jobs: list[JobFacts]
    """That of training first, then of the last evaluation, then others of this run in the queue."""
    queue_problem: str
    """Why SLURM could not be asked, or empty."""
    submissions: list[Submission]
    history: list[dict[str, Any]]
    """Ends of attempts, oldest first."""
    excluded: list[str]
    """Nodes that the run must not get again."""
    run: dict[str, Any] | None
    """What `python -m pipeline status --json` prints; None before the first start."""
    run_problem: str
    """Why the run says nothing, or empty."""

    @property
    def job(self) -> JobFacts | None:
        """That of the newest submission of its kind, training first."""
        return self.jobs[0] if self.jobs else None

    @property
    def is_done(self) -> bool:
        """Whether the run has left its mark of being finished."""
        return (Path(self.run_dir) / DONE_FILE).exists()


@dataclass(frozen=True)
class PrepReport:
    """What is known of the jobs of a data preparation."""

    output_dir: str
    stages: dict[str, list[str]]
    """Ids of the arrays of each stage."""
    elements: list[JobFacts]
    """Those that the queue knows."""
    queue_problem: str


def run_report(run_dir: Path) -> RunReport:
    """Asks SLURM and the run.

    Args:
        run_dir: absolute, a run's folder.

    Raises:
        DataError: a record is damaged.
    """
    found = submissions(run_dir)
    jobs: list[JobFacts] = []
    problem = ""
    try:
        jobs = _jobs(run_dir, found)
    except (SlurmError, ConfigError) as error:
        problem = str(error)
    run, run_problem = ask_run(run_dir)
    return RunReport(
        run_dir=str(run_dir), jobs=jobs, queue_problem=problem, submissions=found,
        history=history(run_dir), excluded=excluded_nodes(run_dir), run=run,
        run_problem=run_problem,
    )  # fmt: skip


def _jobs(run_dir: Path, found: Sequence[Submission]) -> list[JobFacts]:
    queued = {facts.job: facts for facts in my_jobs() if facts.is_of(run_dir)}
    submitted = [
        queued.pop(last.job)
        if last.job in queued
        else job_facts(last.job, run_dir, last.submitted_unix_s)
        for last in newest(found)
    ]
    others = [facts for facts in queued.values() if facts.is_alive]
    return [*submitted, *others]


def ask_run(run_dir: Path) -> tuple[dict[str, Any] | None, str]:
    """What a run says of itself, or why it says nothing."""
    if not (run_dir / ATTEMPTS_FILE).exists():
        return None, "training has not started yet"
    # Not imported: `launch` knows the trainer by its command line and its files.
    words = [sys.executable, "-m", "pipeline", "status", str(run_dir), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        message = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return None, message[-1].removeprefix("error: ")
    return json.loads(done.stdout.splitlines()[-1]), ""


def prep_report(output_dir: Path) -> PrepReport | None:
    """Asks SLURM for the jobs of a data preparation; None if none was submitted from there.

    Raises:
        DataError: the record is damaged.
    """
    stages = prep_jobs(output_dir)
    if stages is None:
        return None
    try:
        return PrepReport(str(output_dir), stages, prep_elements(output_dir, stages), "")
    except (SlurmError, ConfigError) as error:
        return PrepReport(str(output_dir), stages, [], str(error))


def prep_elements(output_dir: Path, stages: dict[str, list[str]]) -> list[JobFacts]:
    """Elements of a preparation's arrays; jobs of others that have the same ids are left out.

    Raises:
        SlurmError: SLURM does not answer.
    """
    found = jobs_of([job for jobs in stages.values() for job in jobs])
    return [facts for facts in found if not facts.comment or facts.is_of(output_dir)]


def queue_reports() -> list[RunReport | PrepReport]:
    """All runs and preparations of this user that have jobs in the queue.

    Raises:
        SlurmError: SLURM is not there or does not answer.
        DataError: a record is damaged.
    """
    folders: dict[str, list[JobFacts]] = {}
    for facts in my_jobs():
        if facts.is_alive and facts.comment.startswith("/"):
            folders.setdefault(facts.comment, []).append(facts)
    with ThreadPoolExecutor(max_workers=4) as pool:
        found = pool.map(lambda item: _queue_report(Path(item[0]), item[1]), folders.items())
        return [report for report in found if report is not None]


def _queue_report(folder: Path, jobs: list[JobFacts]) -> RunReport | PrepReport | None:
    """None for a folder that is not of this project."""
    if (folder / PREP_RECORD).exists():
        return PrepReport(str(folder), prep_jobs(folder) or {}, jobs, "")
    if not (folder / FOLDER).exists() and folder.exists():
        return None
    run, problem = ask_run(folder) if folder.exists() else (None, "the folder is gone")
    newest_first = sorted(jobs, key=lambda facts: facts.submitted_unix_s or 0, reverse=True)
    return RunReport(
        str(folder), newest_first, "", submissions(folder), history(folder),
        excluded_nodes(folder), run, problem,
    )  # fmt: skip


def headline(report: RunReport) -> str:
    """The state in a word or two: the queue's while the job is alive, then the run's."""
    job = report.job
    if job and job.is_alive:
        return "pending" if job.is_waiting else job.state.lower()
    if report.is_done:
        return "finished"
    if job and job.state != UNKNOWN:
        last = decision(report, job)
        return last["decision"] if last else job.state.lower()
    if report.submissions:
        last = decision(report, job) if job else None
        return last["decision"] if last else "unknown"
    return report.run["state"] if report.run else "not started"


def decision(report: RunReport, job: JobFacts) -> dict[str, Any] | None:
    """What its script decided at the job's end; None if it did not come to that."""
    own = [line for line in report.history if str(line.get("job")) == job.job]
    if own and own[-1].get("decision") in _LAST_DECISIONS:
        return own[-1]
    return None
