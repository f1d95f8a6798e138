"""Submission of a data preparation: a chain of job arrays, one stage after the other.

`OUTPUT/work/launch/NNNN` holds the resolved config and profile of a submission, and `code` beside
it the code, so that editing a checkout changes nothing for tasks that wait.
"""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.cluster import ClusterConfig
from launch.prep_script import PrepJob, PrepStage, StagePlan, render_prep
from launch.queue import still_queued
from launch.records import (
    CLUSTER_FILE,
    CODE_FOLDER,
    CONFIG_FILE,
    PREP_RECORD,
    next_number,
    prep_jobs,
    submission_folder,
)
from launch.slurm import run_command
from launch.snapshot import snapshot, start_file
from launch.summary import table
from pipeline.config import strict_yaml
from pipeline.config.load import to_yaml
from pipeline.errors import BusyError, PostnormError
from pipeline.runtime.files import write_atomic, write_json_atomic


class SubmitError(PostnormError):
    """SLURM or data preparation refused what was asked of it."""


def ask_plan(config_path: str, overrides: Sequence[str]) -> list[StagePlan]:
    """Ask data preparation what its stages need.

    Raises:
        SubmitError: the config is wrong or an input is missing.
    """
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
    output_dir: Path
    """Absolute path."""
    folder: Path
    """Folder of the submission."""
    config: str
    """Resolved YAML text."""
    cluster: ClusterConfig

    @property
    def logs(self) -> Path:
        """Folder of the logs of all array tasks."""
        return (self.output_dir / PREP_RECORD).parent


def prepare(
    config_path: str, overrides: Sequence[str], cluster: ClusterConfig, work_dir: str
) -> PrepDraft:
    """Ask data preparation what is left to do, and render it; change nothing.

    Args:
        config_path: YAML file of the preparation.
        overrides: `section.key=value` texts for it.
        cluster: the profile.
        work_dir: folder that relative paths start at, the current one.

    Raises:
        ConfigError: see `render_prep`.
        SubmitError: the config is wrong or an input is missing.
    """
    text = _ask_data_prep("config", config_path, overrides)
    output_dir = str(strict_yaml.parse(text, config_path).plain()["output_dir"])
    absolute = Path(work_dir, output_dir)
    work = absolute / "work"
    folder = submission_folder(work, next_number(work))
    job = PrepJob(
        name=Path(config_path).stem,
        config_path=str(folder / CONFIG_FILE),
        start=(str(start_file(_code_folder(folder))),),
        output_dir=output_dir,
        work_dir=work_dir,
    )
    stages = render_prep(ask_plan(config_path, overrides), cluster, job)
    return PrepDraft(stages, absolute, folder, text, cluster)


def submit(draft: PrepDraft) -> dict[str, list[str]]:
    """Hand all arrays to sbatch, each stage waiting for all arrays of the one before.

    Returns:
        Job ids of each stage.

    Raises:
        BusyError: jobs of an earlier submission are still in the queue.
        SubmitError: sbatch failed; jobs submitted until then are cancelled.
    """
    _refuse_twice(draft)
    draft.logs.mkdir(parents=True, exist_ok=True)
    draft.folder.mkdir(parents=True)
    jobs: dict[str, list[str]] = {}
    before: list[str] = []
    try:
        snapshot(_code_folder(draft.folder))
        write_atomic(draft.folder / CONFIG_FILE, draft.config.encode())
        write_atomic(draft.folder / CLUSTER_FILE, to_yaml(draft.cluster).encode())
        for stage in draft.stages:
            jobs[stage.name] = []
            for script in stage.scripts:
                jobs[stage.name].append(_sbatch(script, before))
            before = jobs[stage.name]
        write_json_atomic(draft.output_dir / PREP_RECORD, {"jobs": jobs})
    except BaseException as error:
        shutil.rmtree(draft.folder, ignore_errors=True)
        raise SubmitError(f"{error or type(error).__name__}; {_cancel(_all(jobs))}") from error
    return jobs


def dry_run_text(draft: PrepDraft) -> str:
    """Show what `submit` does, as a shell script with comments."""
    lines = [
        "#!/bin/bash",
        "set -e",
        f"# would write {draft.folder} ({CONFIG_FILE}, {CLUSTER_FILE}) and the code beside it",
        f"mkdir -p {shlex.quote(str(draft.logs))}",
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
    """Say what was submitted, and how to look at it."""
    rows = [("stage", "array tasks", "hours each", "job")]
    for stage in draft.stages:
        ids = " ".join(jobs[stage.name])
        rows.append((stage.name, f"{stage.num_parts:,}", f"{stage.hours:.2f}", ids))
    config = shlex.quote(str(draft.folder / CONFIG_FILE))
    folder = shlex.quote(str(draft.output_dir))
    lines = [
        *table(rows, right=(1, 2)),
        "",
        f"queue:    python -m launch status {folder}",
        f"progress: python -m data_prep status {config}",
        f"logs:     {draft.logs}",
        f"cancel:   python -m launch cancel {folder}",
        "If a part fails: fix the cause and resubmit; only unfinished parts run.",
    ]
    return "\n".join(lines)


def _ask_data_prep(command: str, config_path: str, arguments: Sequence[str]) -> str:
    """Run a command of `data_prep`, which `launch` does not import, and return its output."""
    words = [sys.executable, "-m", "data_prep", command, config_path, *arguments]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SubmitError(
            f"`{shlex.join(words[1:])}` failed with exit code {done.returncode}: "
            f"{done.stdout.strip().removeprefix('error: ') or 'see above'}"
        )
    return done.stdout


def _refuse_twice(draft: PrepDraft) -> None:
    """Refuse a second chain: two would redo and overwrite each other's tasks."""
    left = still_queued(_all(prep_jobs(draft.output_dir) or {}))
    if left:
        raise BusyError(
            f"jobs of an earlier submission are still in the queue: {' '.join(left)}; wait for "
            f"them, or cancel them: scancel {' '.join(left)}"
        )


def _sbatch(script: str, before: Sequence[str]) -> str:
    """Submit one array and return its job id."""
    dependency = [_dependency(before)] if before else []
    output = run_command(["sbatch", "--parsable", *dependency], script, repeatable=False)
    # On a site of several clusters sbatch prints id;cluster.
    return output.strip().partition(";")[0]


def _code_folder(folder: Path) -> Path:
    """Name the folder of code that all submissions of a preparation share."""
    return folder.parent / CODE_FOLDER


def _dependency(jobs: Sequence[str]) -> str:
    return f"--dependency=afterok:{':'.join(jobs)}"


def _cancel(jobs: list[str]) -> str:
    """Cancel jobs and say what became of them."""
    if not jobs:
        return "nothing was submitted"
    try:
        run_command(["scancel", *jobs])
    except PostnormError as error:
        return f"cancelling failed, do it by hand: scancel {' '.join(jobs)} ({error})"
    return f"the jobs submitted before it were cancelled: {' '.join(jobs)}"


def _all(jobs: dict[str, list[str]]) -> list[str]:
    return [job for ids in jobs.values() for job in ids]
