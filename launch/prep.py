"""Data preparation on SLURM: a chain of job arrays, one stage after the other.

An array task runs `postnorm prep run --stage NAME --rank R --world W`, which does its share
of the stage's tasks, skips those that are done, and refuses to start before all earlier stages are
complete. Dependencies between arrays only decide when SLURM starts what; results do not depend on
them.

SIGTERM (preemption, the time limit, scancel) needs no handler: a data-preparation task is written
completely or not at all, so there is nothing to save, and the next start redoes unfinished tasks.

`OUTPUT/work/launch/NNNN` holds the resolved config and profile of a submission, and `code` beside
it the code, so that editing a checkout changes nothing for tasks that wait.
"""

import json
import logging
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

from launch import records, script_parts
from launch.cluster import ClusterConfig, PrepJobsConfig
from launch.pending_submission import PendingSubmission, options_of, submitting
from launch.queue import Quota, alive_of, still_queued
from launch.slurm import TooManyJobsError, withheld_line
from pipeline import errors
from pipeline.config import strict_yaml
from pipeline.config.load import to_yaml
from pipeline.runtime.env import module_command
from pipeline.runtime.files import write_atomic, write_json_atomic
from pipeline.runtime.summary import table

logger = logging.getLogger(__name__)

ARRAYS_FILE = "arrays.json"
"""In the folder of a submission: its arrays in order, with the job ids of those in the queue."""
_PARENT_GB = 1
"""Memory of the parent process and of the script."""


@dataclass(frozen=True)
class StagePlan:
    """A stage as `postnorm prep plan --json` describes it."""

    name: str
    max_tasks: int
    """Largest number of tasks that can run at the same time."""
    core_hours: float
    memory_gb: float
    """Peak memory of one task."""
    todo: Sequence[int] | None = None
    """Tasks that are not done yet; None if that is known only when earlier stages are done."""


@dataclass(frozen=True)
class PrepStage:
    """A stage as it is handed to SLURM."""

    name: str
    world: int
    """Parts that the stage is divided into."""
    num_parts: int
    """Parts with something left to do, an array task each."""
    hours: float
    """Expected time of an array task."""
    scripts: tuple[str, ...]
    """One for each array; the next stage waits for all of them."""


@dataclass(frozen=True, kw_only=True)
class PrepJob:
    """The names and folders of a preparation's job arrays."""

    name: str
    """Name in the queue."""
    config_path: str
    """Resolved YAML file of the preparation."""
    start: tuple[str, ...]
    """Words between the interpreter and a module's name, as in `launch.script.Job`."""
    output_dir: str
    """The dataset folder, as the config has it."""
    work_dir: str
    """Absolute path; relative paths start there."""

    @property
    def folder(self) -> Path:
        """The dataset folder as an absolute path."""
        return Path(self.work_dir, self.output_dir)

    @property
    def logs(self) -> Path:
        """Folder for the logs of all array tasks; it must exist when SLURM starts them."""
        return (self.folder / records.PREP_RECORD).parent

    @property
    def marks(self) -> Path:
        """Folder of the config, where a stage that failed leaves a mark for those after it."""
        return Path(self.work_dir, self.config_path).parent

    @property
    def mounts(self) -> list[str]:
        """Folders that a container needs; input folders elsewhere are for the profile to mount."""
        return [str(Path(self.work_dir)), str(self.marks), str(self.folder)]

    def queue_name(self, stage: str) -> str:
        """Name a stage in the queue."""
        return f"{self.name}-{stage}"


def render_prep(
    plans: Sequence[StagePlan], cluster: ClusterConfig, job: PrepJob
) -> list[PrepStage]:
    """Render the scripts of all stages with something left to do, in order. Pure."""
    stages: list[PrepStage] = []
    for plan in plans:
        prep = cluster.prep
        # An array task with fewer tasks than cores would leave cores idle.
        world = min(prep.array_tasks, ceil(plan.max_tasks / prep.cores))
        ranks = range(world) if plan.todo is None else sorted({i % world for i in plan.todo})
        if not ranks:
            continue
        processes = min(prep.cores, ceil(plan.max_tasks / world))
        hours = _hours(plan, prep, world, processes)
        options = _options(plan, cluster, job, processes)
        earlier = [stage.name for stage in stages]
        body = _body(plan, cluster, job, (world, processes), earlier)
        scripts = []
        for first_rank, indexes in _arrays(world, ranks, cluster):
            lines = script_parts.sbatch_lines(
                {"array": indexes, **options}, requeue=cluster.requeue
            )
            scripts.append("\n".join(["#!/bin/bash", *lines, "", f"first_rank={first_rank}", body]))
        stages.append(PrepStage(plan.name, world, len(ranks), hours, tuple(scripts)))
    return stages


def _body(
    plan: StagePlan,
    cluster: ClusterConfig,
    job: PrepJob,
    size: tuple[int, int],
    earlier: Sequence[str],
) -> str:
    """Write the part that all arrays of a stage of so many parts and processes share."""
    world, processes = size
    words = ["data_prep", "run", job.config_path, f"workers={processes}", "--stage", plan.name]
    command = [cluster.python, *job.start, *words, "--world", str(world), "--rank"]
    names = ",".join(map(job.queue_name, earlier))
    folder = shlex.quote(str(job.folder))
    after = _AFTER.format(
        stages=" ".join(earlier),
        stage=plan.name,
        world=world,
        mark=records.FAILED_MARK,
        do_not_retry=errors.EXIT_FAILED_DO_NOT_RETRY,
    )
    wait = _WAIT.format(names=shlex.quote(names), folder=folder)
    body = _BODY.format(
        after=after if earlier else "",
        wait=wait if earlier else "",
        mark=records.FAILED_MARK,
        stage=plan.name,
        world=world,
        command=_in_container(cluster, command, job),
        max_failures=cluster.prep.max_failures,
        max_restarts=cluster.max_restarts,
        finished=errors.EXIT_FINISHED,
        do_not_retry=errors.EXIT_FAILED_DO_NOT_RETRY,
    )
    lines = [
        script_parts.CLOCK.format(time_limit=cluster.prep.time_limit_s),
        *script_parts.setup_lines(cluster),
        f"logs={shlex.quote(str(job.logs))} marks={shlex.quote(str(job.marks))}",
        *script_parts.function_lines(
            cluster, job.start, job.work_dir, folder="$logs", end="give_up 1"
        ),
        "ready",
        body,
    ]
    return "\n".join(lines)


def _hours(plan: StagePlan, prep: PrepJobsConfig, world: int, processes: int) -> float:
    """Compute the expected time of an array task, which must be within its limit."""
    hours = plan.core_hours / world / processes
    if hours * 3600 > prep.time_limit_s:
        raise errors.ConfigError(
            f"stage {plan.name}: {plan.core_hours:,.1f} core-hours for {world} array tasks of "
            f"{processes} processes are {hours:.1f} hours each, more than prep.time_limit="
            f"{prep.time_limit!r}; raise prep.time_limit, or array_tasks={prep.array_tasks} "
            f"where the stage can use more ({plan.max_tasks} processes)"
        )
    return hours


def _options(
    plan: StagePlan, cluster: ClusterConfig, job: PrepJob, processes: int
) -> dict[str, object]:
    prep = cluster.prep
    return {
        "job-name": shlex.quote(job.queue_name(plan.name)),
        "comment": shlex.quote(str(job.folder)),
        "output": f"{script_parts.slurm_path(str(job.logs))}/%x-%A_%a.log",
        "nodes": 1,
        "ntasks": 1,
        "cpus-per-task": prep.cores,
        "mem": prep.mem or f"{ceil(plan.memory_gb * processes) + _PARENT_GB}G",
        "time": prep.time_limit,
        "partition": prep.partition or cluster.partition,
        "account": prep.account or cluster.account,
        "qos": prep.qos or cluster.qos,
        **script_parts.prep_resources(cluster),
    }


def _in_container(cluster: ClusterConfig, command: Sequence[str], job: PrepJob) -> str:
    """Write a command as shell text; the script appends the number of the rank."""
    words = [shlex.quote(word) for word in command]
    words = script_parts.wrapped(cluster, job.mounts, words, work_dir=job.work_dir, gpus=False)
    options = script_parts.srun_words(cluster, job.mounts, work_dir=job.work_dir)
    if options:  # only srun can start a pyxis container
        words = ["srun", "--ntasks=1", '--cpus-per-task="$SLURM_CPUS_PER_TASK"', *options, *words]
    return " ".join(words)


def _arrays(world: int, ranks: Sequence[int], cluster: ClusterConfig) -> list[tuple[int, str]]:
    """Choose the first rank and the value of `--array` of each array, as even as possible."""
    prep = cluster.prep
    size = Quota(cluster.max_submit_jobs).array_size(prep.max_array_size)
    number = ceil(world / size)
    first_ranks = [world * i // number for i in range(number + 1)]
    indexes = [
        (first, [rank - first for rank in ranks if first <= rank < end])
        for first, end in pairwise(first_ranks)
    ]
    arrays = [(first, of_array) for first, of_array in indexes if of_array]
    # The arrays of a stage that are in the queue run side by side and share what may run at once.
    sharing = len(arrays)
    if cluster.max_submit_jobs:
        sharing = min(sharing, max(1, cluster.max_submit_jobs // size))
    made = []
    for i, (first, of_array) in enumerate(arrays):
        share = max(1, (prep.max_concurrent + i % sharing) // sharing)
        limit = f"%{share}" if prep.max_concurrent else ""
        made.append((first, f"{_ranges(of_array)}{limit}"))
    return made


def _ranges(indexes: Sequence[int]) -> str:
    """Write ascending numbers as `--array` reads them, such as 0-3,7-7."""
    known = set(indexes)
    starts = [i for i in indexes if i - 1 not in known]
    ends = [i for i in indexes if i + 1 not in known]
    return ",".join(f"{start}-{end}" for start, end in zip(starts, ends, strict=True))


_AFTER = """\
for before in {stages}; do
  [ -e "$marks/{mark}$before" ] || continue
  echo "end: stage {stage}, part $rank of {world}: not started, since stage $before failed: fix" \\
    "that and submit again"
  give_up {do_not_retry}
done
"""

# Arrays wait for the end of those before (afterany), not for their success: SLURM takes a
# preemption with a GraceTime for a failure, and would cancel the chain. It may also take one for
# the end, so that a stage starts too early; data preparation refuses that.
_WAIT = """\
  if squeue --me --noheader --name={names} --format=%k | grep -qxF -- {folder}; then
    echo "requeue: a stage before is still in the queue"; requeue
  fi
"""

_BODY = """\
rank=$((first_rank + SLURM_ARRAY_TASK_ID))
failures_file=$logs/{stage}-$job.failures
echo "start: stage {stage}, part $rank of {world}, job $job, restart $restarts, node $(hostname)"
give_up() {{
  echo "part $rank of {world}" >"$marks/{mark}{stage}"
  exit "$1"
}}
{after}part() {{
  {command} "$rank"
  code=$?
}}
part
case $code in 126|127) ready; part ;; esac
if [ "$code" = {finished} ]; then
  rm -f "$failures_file"
  echo "end: done"; exit 0
elif [ "$code" = {do_not_retry} ]; then
{wait}  echo "end: stage {stage}, part $rank of {world}: trying again is no use, see the message" \\
    "above; fix it and submit again"
  give_up {do_not_retry}
elif [ "$code" = 126 ] || [ "$code" = 127 ]; then
  echo "end: stage {stage}, part $rank of {world}: exit code $code: the interpreter cannot be" \\
    "started, see above; correct python, container or setup of the profile"
  give_up "$code"
fi
# scancel, preemption and the time limit end this script too, a moment after what it started.
sleep 5
if [ "$code" = 143 ] && [ "$restarts" -lt {max_restarts} ]; then  # of a longer GraceTime
  echo "requeue: ended by SIGTERM"; requeue
fi
failures=$(( $(cat "$failures_file" 2>/dev/null || echo 0) + 1 ))
ready eval 'echo "$failures" >"$failures_file"'
if [ "$failures" -ge {max_failures} ]; then
  echo "end: stage {stage}, part $rank of {world}: exit code $code, failure $failures of" \\
    "{max_failures} (prep.max_failures); what is done stays, submit again to continue"
  give_up 1
fi
echo "requeue: exit code $code, failure $failures of {max_failures}"
requeue
"""


class SubmitError(errors.PostnormError):
    """SLURM or data preparation refused what was asked of it."""


def ask_plan(config_path: str, overrides: Sequence[str]) -> list[StagePlan]:
    """Ask data preparation what its stages need."""
    # The plan is the last line; warnings may come before it.
    line = _ask_data_prep("plan", config_path, [*overrides, "--json"]).splitlines()[-1]
    plan: dict[str, Any] = json.loads(line)
    fields = ("name", "max_tasks", "core_hours", "memory_gb", "todo")
    return [StagePlan(**{name: stage[name] for name in fields}) for stage in plan["stages"]]


@dataclass(frozen=True)
class PrepDraft:
    """Everything that `submit` writes and does; making one changes nothing."""

    stages: list[PrepStage]
    """Stages with something left to do."""
    job: PrepJob
    folder: Path
    """Folder of the submission."""
    config: str
    """Resolved YAML text."""
    cluster: ClusterConfig


def prepare(
    config_path: str, overrides: Sequence[str], cluster: ClusterConfig, work_dir: str
) -> PrepDraft:
    """Ask data preparation what is left to do, and render it; change nothing."""
    text = _ask_data_prep("config", config_path, overrides)
    output_dir = str(strict_yaml.parse(text, config_path).plain()["output_dir"])
    work = Path(work_dir, output_dir) / "work"
    folder = records.submission_folder(work, records.next_number(work))
    job = PrepJob(
        name=Path(config_path).stem,
        config_path=str(folder / records.CONFIG_FILE),
        start=(str(records.start_file(_code_folder(folder))),),
        output_dir=output_dir,
        work_dir=work_dir,
    )
    stages = render_prep(ask_plan(config_path, overrides), cluster, job)
    return PrepDraft(stages, job, folder, text, cluster)


@dataclass
class _Array:
    """An array of a preparation, in the queue or not yet. A line of ARRAYS_FILE."""

    stage: str
    script: str
    job: str = ""

    @property
    def size(self) -> int:
        """Number of its elements."""
        ranges = options_of(self.script)["array"].partition("%")[0].split(",")
        ends = [[int(number) for number in text.split("-")] for text in ranges]
        return sum(end[-1] - end[0] + 1 for end in ends)


def submit(draft: PrepDraft, room: Quota | None = None) -> dict[str, list[str]]:
    """Hand all arrays to sbatch, each stage waiting for the one before; return their job ids.

    With a `room` that waits, arrays are handed over as they fit into the queue, those that an
    earlier call left over first, and stay there if this call is ended.

    Raises:
        BusyError: jobs of an earlier submission are still in the queue, or another process is
            submitting at this moment.
        SlurmError: sbatch failed; jobs submitted until then are cancelled, unless `room` waits.
    """
    room = room or Quota()
    output = draft.job.folder
    last = records.last_folder(output / "work")

    def known() -> list[str]:
        return [*_all(records.prep_jobs(output)), *(one.job for one in _read(last))]

    def adopt(job: str) -> bool:
        arrays = _left_over(draft, last)
        if arrays:
            next(one for one in arrays if not one.job).job = job
            _record(output, last, arrays)
        return bool(arrays)

    with submitting(output / "work", output, known, adopt) as intent:
        arrays = _left_over(draft, last)
        if arrays and not room.waits:
            left = sum(not one.job for one in arrays)
            raise errors.BusyError(
                f"{left} arrays of the submission in {last} are not in the queue yet: go on with "
                f"--wait-room, or cancel it: postnorm cancel {shlex.quote(str(output))}"
            )
        return _roll(draft, last, arrays, intent, room) if arrays else _submit(draft, intent, room)


# Stages after the first incomplete one go in whole: what they depend on is not known yet.
def _left_over(draft: PrepDraft, last: Path) -> list[_Array]:
    """Read the arrays of the last submission if some are not in the queue yet, and still to be."""
    arrays = _read(last)
    record = records.read_prep(draft.job.folder)
    same = arrays and (last / records.CONFIG_FILE).read_text(encoding="utf-8") == draft.config
    if not same or all(one.job for one in arrays) or records.failed_stages(last):
        return []
    return [] if record is not None and record.cancelled_unix_s else arrays


def _read(folder: Path) -> list[_Array]:
    path = folder / ARRAYS_FILE
    try:
        return [_Array(**one) for one in json.loads(path.read_bytes())]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError) as error:
        raise errors.DataError(
            f"{path} is not a list of arrays ({type(error).__name__}: {error}): remove it when "
            "`squeue --me` shows none of the preparation's jobs, and submit again"
        ) from None


def _record(output: Path, folder: Path, arrays: Sequence[_Array], *, is_new: bool = False) -> None:
    """Record which arrays are in the queue; a cancellation meanwhile stays on record."""
    write_json_atomic(folder / ARRAYS_FILE, [asdict(one) for one in arrays])
    jobs: dict[str, list[str]] = {one.stage: [] for one in arrays}
    for one in arrays:
        jobs[one.stage] += [one.job] if one.job else []
    before = records.read_prep(output)
    cancelled = None if is_new or before is None else before.cancelled_unix_s
    began_s = round((folder / records.CONFIG_FILE).stat().st_mtime, 1)
    waiting = sum(not one.job for one in arrays)
    records.write_prep(output, records.PrepSubmission(jobs, began_s, cancelled, waiting))


def _submit(draft: PrepDraft, intent: PendingSubmission, room: Quota) -> dict[str, list[str]]:
    _refuse_twice(draft)
    draft.job.logs.mkdir(parents=True, exist_ok=True)
    try:
        draft.folder.mkdir(parents=True)
    except FileExistsError:
        raise errors.BusyError(
            f"another submission has just made {draft.folder}; try again"
        ) from None
    arrays = [_Array(stage.name, script) for stage in draft.stages for script in stage.scripts]
    try:
        if not room.waits and (why := room.lacks(sum(one.size for one in arrays))):
            raise TooManyJobsError(why)
        records.snapshot(_code_folder(draft.folder))
        write_atomic(draft.folder / records.CONFIG_FILE, draft.config.encode())
        write_atomic(draft.folder / records.CLUSTER_FILE, to_yaml(draft.cluster).encode())
        return _roll(draft, draft.folder, arrays, intent, room)
    except BaseException as error:
        # What waits for room is on record: the same call goes on with it.
        if not any(one.job for one in _read(draft.folder)) and intent.withdraw():
            shutil.rmtree(draft.folder, ignore_errors=True)
        if isinstance(error, TooManyJobsError):
            raise TooManyJobsError(f"{error}; {_needs_text(draft)}") from None
        raise


def _roll(
    draft: PrepDraft, folder: Path, arrays: list[_Array], intent: PendingSubmission, room: Quota
) -> dict[str, list[str]]:
    """Hand over the arrays that are not in the queue yet, one after the other."""
    output, stages = draft.job.folder, list(dict.fromkeys(one.stage for one in arrays))
    if room.waits:
        _record(output, folder, arrays, is_new=True)

    def stop() -> None:
        if failed := list(records.failed_stages(folder)):
            left = sum(not one.job for one in arrays)
            raise SubmitError(
                f"stage {failed[0]} failed, so {left} arrays were not submitted; see "
                f"`postnorm status {shlex.quote(str(output))}`, fix the cause and submit again"
            )
        record = records.read_prep(output)
        if room.waits and record is not None and record.cancelled_unix_s:
            raise SubmitError(f"{output} was cancelled: nothing more is submitted")

    for number, one in enumerate(arrays):
        what = f"array {number + 1} of {len(arrays)}, stage {one.stage}"
        while not one.job:
            if room.waits:
                room.wait(one.size, what, stop)
            place = stages.index(one.stage)
            before = [each.job for each in arrays if each.stage in stages[place - 1 : place]]
            # SLURM does not know jobs that ended some minutes ago.
            before = still_queued(before) if room.waits else before
            try:
                one.job = intent.queue([_dependency(before)] if before else [], one.script)
            except TooManyJobsError as error:
                if not room.waits:
                    raise
                logger.info("%s: waiting for room: %s", what, error)
                room.pause()
        if room.waits:
            _record(output, folder, arrays)
            intent.settle()
            logger.info("%s: job %s", what, one.job)
    _record(output, folder, arrays, is_new=not room.waits)
    return records.prep_jobs(output)


def _needs_text(draft: PrepDraft) -> str:
    """Describe how many jobs a preparation needs, for a site that allows fewer."""
    parts = {stage.name: stage.num_parts for stage in draft.stages}
    listed = ", ".join(f"{name} {number:,}" for name, number in parts.items())
    return (
        f"if the limit is on jobs: the preparation needs {sum(parts.values()):,} in the queue, "
        f"since each array task counts as one ({listed}), beside other jobs of yours: lower "
        f"prep.array_tasks={draft.cluster.prep.array_tasks}, which makes array tasks longer, or "
        "submit with --wait-room, which hands arrays over as others end (max_submit_jobs of the "
        "profile; `sacctmgr show qos format=name,maxsubmitjobsperuser` "
        "and `sacctmgr show assoc user=$USER format=account,maxsubmitjobs` show the limits)"
    )


def dry_run_text(draft: PrepDraft) -> str:
    """Show what `submit` does, as a shell script with comments."""
    lines = [
        "#!/bin/bash",
        "set -e",
        withheld_line(),
        f"# would write {draft.folder} ({records.CONFIG_FILE}, {records.CLUSTER_FILE}) and the "
        "code beside it",
        f"mkdir -p {shlex.quote(str(draft.job.logs))}",
    ]
    before: list[str] = []
    number = 0
    for stage in draft.stages:
        names = []
        for script in stage.scripts:
            number += 1
            names.append(f"$job{number}")
            # In double quotes: bash fills in the ids of the jobs before.
            dependency = f' "{_dependency(before)}"' if before else ""
            command = f"sbatch --parsable{dependency}"
            lines.append(f"job{number}=$({command} <<'END_OF_SCRIPT'\n{script}END_OF_SCRIPT\n)")
        before = names
    return "\n".join([*lines, ""])


def summary_text(draft: PrepDraft, jobs: dict[str, list[str]]) -> str:
    """Describe what was submitted, and how to look at it."""
    rows = [("stage", "array tasks", "hours each", "job")]
    for stage in draft.stages:
        ids = " ".join(jobs.get(stage.name, []))
        rows.append((stage.name, f"{stage.num_parts:,}", f"{stage.hours:.2f}", ids))
    config = shlex.quote(str(records.last_folder(draft.job.folder / "work") / records.CONFIG_FILE))
    folder = shlex.quote(str(draft.job.folder))
    lines = [
        *table(rows, right=(1, 2)),
        "",
        f"queue:    postnorm status {folder}",
        f"progress: postnorm prep status {config}",
        f"logs:     {draft.job.logs}",
        f"cancel:   postnorm cancel {folder}",
        "If a part fails: fix the cause and resubmit; only unfinished parts run.",
    ]
    return "\n".join(lines)


def _ask_data_prep(command: str, config_path: str, arguments: Sequence[str]) -> str:
    """Run a command of `data_prep`, which `launch` does not import, and return its output."""
    words = [command, config_path, *arguments]
    start = module_command("data_prep")
    done = subprocess.run([*start, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SubmitError(
            f"`postnorm prep {shlex.join(words)}` failed with exit code {done.returncode}: "
            f"{done.stderr.strip().removeprefix('error: ')}"
        )
    sys.stderr.write(done.stderr)  # its warnings
    return done.stdout


# Both chains would do the same work.
def _refuse_twice(draft: PrepDraft) -> None:
    """Refuse a second chain: two would redo and overwrite each other's tasks."""
    left = alive_of(draft.job.folder, _all(records.prep_jobs(draft.job.folder)))
    if left:
        raise errors.BusyError(
            f"jobs of an earlier submission are still in the queue: {' '.join(left)}; wait for "
            f"them, or cancel them: scancel {' '.join(left)}"
        )


def _code_folder(folder: Path) -> Path:
    """Name the folder of code that all submissions of a preparation share."""
    return folder.parent / records.CODE_FOLDER


def _dependency(jobs: Sequence[str]) -> str:
    return f"--dependency=afterany:{':'.join(jobs)}"


def _all(jobs: dict[str, list[str]]) -> list[str]:
    return [job for ids in jobs.values() for job in ids]
