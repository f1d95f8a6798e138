"""The runs of a grid as job arrays of SLURM, an element a run.

`DIR/sweep/launch` holds the profile, the script and the code of each submission.
"""

import json
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.grid import (
    CANCELLED_MARK,
    HOME,
    SweepConfig,
    SweepRun,
    Todo,
    record,
    refuse,
    todo,
    write_run,
)
from launch import records
from launch.cluster import ClusterConfig
from launch.pending_submission import PendingSubmission, submitting
from launch.prep import SubmitError
from launch.queue import Quota
from launch.script import RUN, Job, render
from launch.site import ask_sbatch, max_array_size
from launch.slurm import SlurmError, TooManyJobsError, run_command, withheld_line
from launch.submit import Origin, SubmissionPlan, mounts_of, record_of
from pipeline.config.load import to_yaml
from pipeline.errors import BusyError, PostnormError
from pipeline.runtime.files import write_atomic, write_json_atomic

logger = logging.getLogger(__name__)

ELEMENTS_FILE = "elements.json"
"""In the folder of a submission, before sbatch is called: the records of its elements."""


@dataclass(frozen=True)
class SweepDraft:
    """Everything that `submit` writes and does; making one changes nothing."""

    sweep: SweepConfig
    folder: Path
    """Absolute path of the sweep's folder."""
    every: list[SweepRun]
    runs: list[SweepRun]
    """Runs to submit, in the order of the array's elements."""
    drafts: list[SubmissionPlan]
    """Drafts of the same runs."""
    job: Job
    cluster: ClusterConfig
    options: list[str]
    """Options of sbatch."""

    @property
    def home(self) -> Path:
        """Folder of this submission."""
        return Path(self.job.profile or "").parent

    @property
    def script(self) -> str:
        """Text for sbatch."""
        return render(self.job, self.cluster)


def prepare(
    sweep: SweepConfig, what: Todo, cluster: ClusterConfig, source: Origin, jobs: int
) -> SweepDraft:
    """Draft the array of the runs that have something left to do; change nothing.

    Raises:
        ConfigError: some runs cannot start as configured.
    """
    # The verbs of sweeps are postnorm's alone.
    source = replace(source, command=shlex.join(["postnorm", *sys.argv[1:]]))
    drafts: list[SubmissionPlan] = []
    mistakes: list[str] = []
    for run in what.runs:
        try:
            drafts.append(sweep.kind.prepare(run.config, cluster, source))
        except PostnormError as error:
            mistakes.append(f"{run.name}: {error}")
    refuse(mistakes)
    folder = Path(source.work_dir, sweep.dir)
    base = folder / HOME
    # Together with what an earlier array still runs there are never more than `jobs`.
    room = jobs - len(what.alive)
    before = ":".join(sorted({one.array for one in what.alive}))
    start = (str(records.start_file(base / records.FOLDER / records.CODE_FOLDER)),)
    job = Job(
        kind=sweep.verb,
        name=folder.name,
        run_dir=str(folder),
        words=("pipeline", sweep.verb, f"{RUN}{records.CONFIG_FILE}", *sweep.kind.options(folder)),
        work_dir=source.work_dir,
        start=start,
        log_dir=str(folder / "logs"),
        mounts=mounts_of(
            source.work_dir, str(folder), *(mount for draft in drafts for mount in draft.job.mounts)
        ),
        profile=str(
            records.submission_folder(base, records.next_number(base)) / records.CLUSTER_FILE
        ),
        runs=tuple(str(run.folder) for run in what.runs),
        at_once=room if room > 0 else jobs,
    )
    drafts = [replace(draft, job=replace(draft.job, start=start)) for draft in drafts]
    options = [] if room > 0 else [f"--dependency=afterany:{before}"]
    return SweepDraft(sweep, folder, what.every, what.runs, drafts, job, cluster, options)


def slices(runs: Sequence[SweepRun], room: Quota) -> list[list[SweepRun]]:
    """Divide runs into those of one array each, below the site's MaxArraySize and the room."""
    size = room.array_size(max_array_size() or len(runs))
    return [list(runs[at : at + size]) for at in range(0, len(runs), size)]


def drafts(
    sweep: SweepConfig, what: Todo, cluster: ClusterConfig, source: Origin, jobs: int, room: Quota
) -> list[SweepDraft]:
    """Draft all arrays as they are now; change nothing."""
    parts = [replace(what, runs=part) for part in slices(what.runs, room)]
    return [prepare(sweep, part, cluster, source, jobs) for part in parts]


def submit_all(
    sweep: SweepConfig, what: Todo, cluster: ClusterConfig, source: Origin, jobs: int, room: Quota
) -> Iterator[tuple[str, SweepDraft]]:
    """Submit what is left to do, an array after the other; yield the job and draft of each.

    Raises:
        TooManyJobsError: the runs do not fit below the limit on jobs, and `room` does not wait.
    """
    cancelled = Path(source.work_dir, sweep.dir) / CANCELLED_MARK
    cancelled.unlink(missing_ok=True)

    def stop() -> None:
        if cancelled.exists():
            raise SubmitError(f"{cancelled.parent} was cancelled: nothing more is submitted")

    pending = slices(what.runs, room)
    if not room.waits and (why := room.lacks(len(what.runs))):
        raise TooManyJobsError(f"{why}; {_needs_text(len(what.runs))}")
    number = 0
    while number < len(pending):
        which = f"array {number + 1} of {len(pending)}"
        room.wait(len(pending[number]), which, stop)
        now = todo(what.every, sweep.kind)
        names = {run.name for run in pending[number]}
        now = replace(now, runs=[run for run in now.runs if run.name in names])
        if now.runs:
            draft = prepare(sweep, now, cluster, source, jobs)
            ask_sbatch(draft.script)
            try:
                job = submit(draft)
            except TooManyJobsError as error:
                if not room.waits:
                    raise
                logger.info("%s: waiting for room: %s", which, error)
                room.pause()
                continue
            if job is None:  # one of an earlier call was recorded: look again
                continue
            yield job, draft
        number += 1


def submit(draft: SweepDraft) -> str | None:
    """Copy code and configs, hand the array to sbatch, and return the job's id.

    If sbatch refuses or the copy fails, everything written is removed again. None: an array that an
    earlier call had submitted was recorded instead, and the draft may be of the same runs.

    Raises:
        BusyError: the sweep is being submitted at this moment.
    """
    base = draft.home.parent.parent
    adopted: list[str] = []

    def adopt(job: str) -> bool:
        adopted.extend(_adopt(draft, job))
        return bool(adopted)

    # A submission that was killed between sbatch and its record is adopted, so that no run starts
    # twice.
    with submitting(base, draft.folder, lambda: _recorded(draft), adopt) as intent:
        return None if adopted else _submit(draft, intent)


def _adopt(draft: SweepDraft, job: str) -> list[str]:
    """Record an array of the last submission, which was ended before it could; return its jobs."""
    elements = _last_elements(draft)
    if len(_records_of(elements)) == len(elements):
        return []
    jobs = [f"{job}_{index}" for index in range(len(elements))]
    for element, name in zip(elements, jobs, strict=True):
        _record_element(element, draft.job.log_dir, name)
    record(draft.sweep, draft.folder, draft.every)
    _name_elements([str(element["run_dir"]) for element in elements], job)
    return jobs


def _submission_of(element: Mapping[str, Any]) -> Path:
    return (
        records.submission_folder(Path(element["run_dir"]), element["number"])
        / records.SUBMISSION_FILE
    )


def _recorded(draft: SweepDraft) -> list[str]:
    """List the jobs on record, without an array of which only some elements are."""
    jobs = [one.job for run in draft.every for one in records.submissions(run.folder)]
    elements = _last_elements(draft)
    half = {json.loads(path.read_bytes())["job"] for path in _records_of(elements)}
    return jobs if len(half) == len(elements) else [job for job in jobs if job not in half]


def _last_elements(draft: SweepDraft) -> list[dict[str, Any]]:
    base = draft.home.parent.parent
    path = records.submission_folder(base, records.next_number(base) - 1) / ELEMENTS_FILE
    try:
        found: list[dict[str, Any]] = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return []
    return found


def _records_of(elements: Sequence[Mapping[str, Any]]) -> list[Path]:
    return [path for one in elements if (path := _submission_of(one)).exists()]


def _submit(draft: SweepDraft, intent: PendingSubmission) -> str:
    try:
        draft.home.mkdir(parents=True)
    except FileExistsError:
        raise BusyError(f"another submission has just made {draft.home}; try again") from None
    new = [run.folder for run in draft.runs if not run.folder.exists()]
    try:
        Path(draft.job.log_dir).mkdir(exist_ok=True)
        records.snapshot_for(Path(draft.job.start[0]), draft.home.parent / records.CODE_FOLDER)
        profile = to_yaml(draft.cluster).encode()
        write_atomic(draft.home / records.CLUSTER_FILE, profile)
        write_atomic(draft.home / records.SCRIPT_FILE, draft.script.encode())
        for run, one in zip(draft.runs, draft.drafts, strict=True):
            write_run(run)
            one.folder.mkdir(parents=True)
            write_atomic(one.folder / records.CONFIG_FILE, run.config_file.read_bytes())
            write_atomic(one.folder / records.CLUSTER_FILE, profile)
        elements = [record_of(one, "") for one in draft.drafts]
        write_json_atomic(draft.home / ELEMENTS_FILE, elements)
        job = intent.queue(draft.options, draft.script, draft.home / records.SCRIPT_FILE)
        for index, element in enumerate(elements):
            _record_element(element, draft.job.log_dir, f"{job}_{index}")
        record(draft.sweep, draft.folder, draft.every)
    except BaseException as error:
        if intent.withdraw():
            for folder in (draft.home, *(one.folder for one in draft.drafts), *new):
                shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, TooManyJobsError):
            raise TooManyJobsError(f"{error}; {_needs_text(len(draft.runs))}") from None
        raise
    _name_elements(draft.job.runs, job)
    return job


def _needs_text(runs: int) -> str:
    return (
        f"if the limit is on jobs: the sweep needs {runs} in the queue, one for each run (`jobs` "
        "limits only how many run at once): submit with --wait-room, which hands arrays over as "
        "others end, or shorten grid or runs for now, and submit the whole file again later"
    )


def _record_element(element: Mapping[str, Any], log_dir: str, job: str) -> None:
    """Record an element as the job of its run, and let the run's folder show its log."""
    write_json_atomic(_submission_of(element), {**element, "job": job})
    log = Path(element["run_dir"], "logs", f"slurm-{job}.log")
    log.parent.mkdir(exist_ok=True)
    log.unlink(missing_ok=True)
    log.symlink_to(os.path.relpath(Path(log_dir, log.name), log.parent))


def _name_elements(run_dirs: Sequence[str], job: str) -> None:
    """Give each element the comment of its run, by which it counts as the run's own job."""
    for index, run_dir in enumerate(run_dirs):
        try:
            run_command(["scontrol", "update", f"jobid={job}_{index}", f"comment={run_dir}"])
        except SlurmError:
            continue  # it has already ended


def dry_run_text(draft: SweepDraft) -> str:
    """Show what `submit` would do: the runs and the script."""
    call = ["sbatch", *draft.options, str(draft.home / records.SCRIPT_FILE)]
    lines = [
        withheld_line(),
        f"# would write {draft.home}, {len(draft.runs)} run folder(s) in {draft.folder}:",
        *(f"#   {index}  {run.name}" for index, run in enumerate(draft.runs)),
        f"# then {' '.join(call)}, which is:",
    ]
    return "\n".join([*lines, draft.script.removesuffix("\n")])
