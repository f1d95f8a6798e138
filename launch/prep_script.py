"""The job arrays of a data preparation as pure text: plan in, sbatch scripts out.

An array task runs `python -m data_prep run --stage NAME --rank R --world W`, which does its share
of the stage's tasks, skips those that are done, and refuses to start before all earlier stages are
complete. Dependencies between arrays only decide when SLURM starts what; results do not depend on
them.

SIGTERM (preemption, the time limit, scancel) needs no handler: a data-preparation task is written
completely or not at all, so there is nothing to save, and the next start redoes unfinished tasks.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path

from launch.cluster import ClusterConfig, PrepJobsConfig
from launch.records import PREP_RECORD
from launch.script_parts import (
    REQUEUE,
    prep_resources,
    sbatch_lines,
    setup_lines,
    slurm_path,
    srun_words,
    wrapped,
)
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, EXIT_FINISHED, ConfigError

_PARENT_GB = 1
"""Memory of the parent process and of the script."""


@dataclass(frozen=True)
class StagePlan:
    """A stage as `python -m data_prep plan --json` describes it."""

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
        return (self.folder / PREP_RECORD).parent

    @property
    def mounts(self) -> list[str]:
        """Folders that a container needs; input folders elsewhere are for the profile to mount."""
        config_folder = str(Path(self.work_dir, self.config_path).parent)
        return [str(Path(self.work_dir)), config_folder, str(self.folder)]


def render_prep(
    plans: Sequence[StagePlan], cluster: ClusterConfig, job: PrepJob
) -> list[PrepStage]:
    """Render the scripts of all stages with something left to do, in order.

    Args:
        plans: the stages.
        cluster: the profile.
        job: names and folders.

    Raises:
        ConfigError: an array task is expected to take longer than it may, or SLURM cannot use the
            log folder, or a container one of the folders.
    """
    stages = []
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
        body = _body(plan, cluster, job, world, processes)
        scripts = []
        for first_rank, indexes in _arrays(world, ranks, prep):
            lines = sbatch_lines({"array": indexes, **options})
            scripts.append("\n".join(["#!/bin/bash", *lines, "", f"first_rank={first_rank}", body]))
        stages.append(PrepStage(plan.name, world, len(ranks), hours, tuple(scripts)))
    return stages


def _body(plan: StagePlan, cluster: ClusterConfig, job: PrepJob, world: int, processes: int) -> str:
    """Write the part that all arrays of a stage share."""
    words = ["data_prep", "run", job.config_path, f"workers={processes}", "--stage", plan.name]
    command = [cluster.python, *job.start, *words, "--world", str(world), "--rank"]
    body = _BODY.format(
        stage=plan.name,
        world=world,
        command=_in_container(cluster, command, job),
        max_failures=cluster.prep.max_failures,
        finished=EXIT_FINISHED,
        do_not_retry=EXIT_FAILED_DO_NOT_RETRY,
    )
    lines = [
        *setup_lines(cluster),
        "set -u +e",
        f"cd {shlex.quote(job.work_dir)} || exit 1",
        f"logs={shlex.quote(str(job.logs))}",
        body + REQUEUE,
    ]
    return "\n".join(lines)


def _hours(plan: StagePlan, prep: PrepJobsConfig, world: int, processes: int) -> float:
    """Compute the expected time of an array task, which must be within its limit."""
    hours = plan.core_hours / world / processes
    if hours * 3600 > prep.time_limit_s:
        raise ConfigError(
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
        "job-name": shlex.quote(f"{job.name}-{plan.name}"),
        "comment": shlex.quote(str(job.folder)),
        "output": f"{slurm_path(str(job.logs))}/%x-%A_%a.log",
        "nodes": 1,
        "ntasks": 1,
        "cpus-per-task": prep.cores,
        "mem": prep.mem or f"{ceil(plan.memory_gb * processes) + _PARENT_GB}G",
        "time": prep.time_limit,
        "partition": prep.partition or cluster.partition,
        "account": prep.account or cluster.account,
        "qos": prep.qos or cluster.qos,
        **prep_resources(cluster),
    }


def _in_container(cluster: ClusterConfig, command: Sequence[str], job: PrepJob) -> str:
    """Write a command as shell text; the script appends the number of the rank."""
    words = [shlex.quote(word) for word in command]
    words = wrapped(cluster, job.mounts, words, work_dir=job.work_dir, gpus=False)
    options = srun_words(cluster, job.mounts, work_dir=job.work_dir)
    if options:  # only srun can start a pyxis container
        words = ["srun", "--ntasks=1", '--cpus-per-task="$SLURM_CPUS_PER_TASK"', *options, *words]
    return " ".join(words)


def _arrays(world: int, ranks: Sequence[int], prep: PrepJobsConfig) -> list[tuple[int, str]]:
    """Choose the first rank and the value of `--array` of each array, as even as possible."""
    number = ceil(world / prep.max_array_size)
    first_ranks = [world * i // number for i in range(number + 1)]
    indexes = [
        (first, [rank - first for rank in ranks if first <= rank < end])
        for first, end in pairwise(first_ranks)
    ]
    arrays = [(first, of_array) for first, of_array in indexes if of_array]
    made = []
    for i, (first, of_array) in enumerate(arrays):
        # The arrays of a stage run side by side and share what may run at once.
        share = (prep.max_concurrent + i) // len(arrays)
        limit = f"%{share}" if prep.max_concurrent else ""
        made.append((first, f"{_ranges(of_array)}{limit}"))
    return made


def _ranges(indexes: Sequence[int]) -> str:
    """Write ascending numbers as `--array` reads them, such as 0-3,7-7."""
    known = set(indexes)
    starts = [i for i in indexes if i - 1 not in known]
    ends = [i for i in indexes if i + 1 not in known]
    return ",".join(f"{start}-{end}" for start, end in zip(starts, ends, strict=True))


_BODY = """\
rank=$((first_rank + SLURM_ARRAY_TASK_ID))
# An element of an array is requeued by its own name: the last one's id is the whole array's.
job=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
failures_file=$logs/{stage}-$job.failures
echo "start: stage {stage}, part $rank of {world}, job $job," \\
  "restart ${{SLURM_RESTART_COUNT:-0}}, node $(hostname)"
{command} "$rank"
code=$?
if [ "$code" = {finished} ]; then
  rm -f "$failures_file"
  echo "end: done"; exit 0
elif [ "$code" = {do_not_retry} ]; then
  echo "end: stage {stage}, part $rank of {world}: trying again is no use, see the message" \\
    "above; mend it and submit again"
  exit {do_not_retry}
fi
# scancel, preemption and the time limit end this script too, a moment after what it started.
sleep 5
failures=$(( $(cat "$failures_file" 2>/dev/null || echo 0) + 1 ))
# Where the count cannot be kept, such as on a full disk, the first failure is the last.
echo "$failures" >"$failures_file" || failures={max_failures}
if [ "$failures" -ge {max_failures} ]; then
  echo "end: stage {stage}, part $rank of {world}: exit code $code, failure $failures of" \\
    "{max_failures} (prep.max_failures); what is done stays, submit again to continue"
  exit 1
fi
echo "requeue: exit code $code, failure $failures of {max_failures}"
"""
