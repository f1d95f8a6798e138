"""`python -m launch submit`: asks data preparation for its plan and hands the chain to SLURM."""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.render_prep import PrepStage, StagePlan
from pipeline.config import strict_yaml
from pipeline.errors import BusyError, ConfigError, PostnormError
from pipeline.runtime.files import write_json_atomic

_RECORD = "submitted.json"
"""In the log folder: ids of the jobs of the last submission."""


class SubmitError(PostnormError):
    """SLURM or data preparation refused what was asked of it."""


def ask_output_dir(config_path: str, overrides: Sequence[str]) -> str:
    """The dataset folder that a preparation's config names.

    Raises:
        SubmitError: the config is wrong.
    """
    text = _ask_data_prep("config", config_path, overrides)
    return str(strict_yaml.parse(text, config_path).plain()["output_dir"])


def ask_plan(config_path: str, overrides: Sequence[str]) -> list[StagePlan]:
    """What the stages of a preparation need.

    Raises:
        SubmitError: the config is wrong or an input is missing.
    """
    # Warnings may stand before it.
    line = _ask_data_prep("plan", config_path, [*overrides, "--json"]).splitlines()[-1]
    plan: dict[str, Any] = json.loads(line)
    return [
        StagePlan(
            stage["name"],
            stage["max_tasks"],
            stage["core_hours"],
            stage["memory_gb"],
            stage["todo"],
        )
        for stage in plan["stages"]
    ]


def submit(stages: Sequence[PrepStage], logs: Path) -> dict[str, list[str]]:
    """Hands all arrays to sbatch, each stage waiting for all arrays of the one before.

    Args:
        stages: what `render_prep` made.
        logs: folder of the logs, made here.

    Returns:
        Job ids of each stage.

    Raises:
        BusyError: jobs of an earlier submission are still there.
        SubmitError: sbatch failed; jobs submitted until then are cancelled.
    """
    _refuse_twice(logs)
    logs.mkdir(parents=True, exist_ok=True)
    jobs: dict[str, list[str]] = {}
    before: list[str] = []
    try:
        for stage in stages:
            jobs[stage.name] = []
            for script in stage.scripts:
                jobs[stage.name].append(_sbatch(script, before))
            before = jobs[stage.name]
        write_json_atomic(logs / _RECORD, {"jobs": jobs})
    except BaseException as error:
        raise SubmitError(f"{error or type(error).__name__}; {_cancel(_all(jobs))}") from error
    return jobs


def dry_run_text(stages: Sequence[PrepStage], logs: Path) -> str:
    """What `submit` does, as a shell script."""
    lines = ["#!/bin/bash", "set -e", f"mkdir -p {shlex.quote(str(logs))}"]
    before: list[str] = []
    number = 0
    for stage in stages:
        names = []
        for script in stage.scripts:
            number += 1
            names.append(f"$job{number}")
            command = shlex.join(["sbatch", "--parsable"])
            if before:
                command += f' "{_dependency(before)}"'
            lines.append(f"job{number}=$({command} <<'END_OF_SCRIPT'\n{script}END_OF_SCRIPT\n)")
        before = names
    return "\n".join([*lines, ""])


def summary_text(
    stages: Sequence[PrepStage], jobs: dict[str, list[str]], config: Sequence[str], logs: Path
) -> str:
    """What was submitted, and how to look at it.

    Args:
        stages: the chain.
        jobs: ids of each stage.
        config: YAML file and overrides of the preparation.
        logs: folder of the logs.
    """
    lines = [f"{'stage':<12}{'array tasks':>12}{'hours each':>12}  job"]
    for stage in stages:
        ids = " ".join(jobs[stage.name])
        lines.append(f"{stage.name:<12}{stage.num_parts:>12,}{stage.hours:>12.2f}  {ids}")
    return "\n".join([
        *lines,
        "",
        f"queue:    squeue -j {','.join(_all(jobs))}",
        f"progress: {shlex.join(['python', '-m', 'data_prep', 'status', *config])}",
        f"logs:     {logs}",
        f"cancel:   scancel {' '.join(_all(jobs))}",
        "If a part fails, mend the cause and submit again: what is done stays.",
    ])  # fmt: skip


def _ask_data_prep(command: str, config_path: str, arguments: Sequence[str]) -> str:
    """Output of a command of `data_prep`, which `launch` does not import."""
    words = [sys.executable, "-m", "data_prep", command, config_path, *arguments]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SubmitError(
            f"`{shlex.join(words[1:])}` failed with exit code {done.returncode}: "
            f"{done.stdout.strip().removeprefix('error: ') or 'see above'}"
        )
    return done.stdout


def _refuse_twice(logs: Path) -> None:
    """Two chains at once would redo each other's tasks under each other's feet."""
    try:
        record: dict[str, Any] = json.loads((logs / _RECORD).read_bytes())
    except FileNotFoundError:
        return
    earlier = _all(record["jobs"])
    there = _slurm(["squeue", "--me", "--noheader", "--format=%F"]).split()
    left = [job for job in earlier if job in there]
    if left:
        raise BusyError(
            f"jobs of an earlier submission are still in the queue: {' '.join(left)}; wait for "
            f"them, or cancel them: scancel {' '.join(left)}"
        )


def _sbatch(script: str, before: Sequence[str]) -> str:
    """Submits one array and returns its job id."""
    dependency = [_dependency(before)] if before else []
    output = _slurm(["sbatch", "--parsable", *dependency], script)
    return output.strip().partition(";")[0]  # with several clusters: id;cluster


def _dependency(jobs: Sequence[str]) -> str:
    return f"--dependency=afterok:{':'.join(jobs)}"


def _cancel(jobs: list[str]) -> str:
    """Cancels jobs and says what became of them."""
    if not jobs:
        return "nothing was submitted"
    try:
        _slurm(["scancel", *jobs])
    except PostnormError as error:
        return f"cancelling failed, do it by hand: scancel {' '.join(jobs)} ({error})"
    return f"the jobs submitted before it were cancelled: {' '.join(jobs)}"


def _slurm(command: list[str], stdin: str = "") -> str:
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(
            f"{command[0]} is not there: submit from a machine with SLURM, look at the scripts "
            "with --dry-run, or prepare on this machine alone with `python -m data_prep run`"
        ) from None
    if done.returncode:
        message = (done.stderr or done.stdout).strip()
        raise SubmitError(f"{shlex.join(command)} failed ({done.returncode}): {message}")
    return done.stdout


def _all(jobs: dict[str, list[str]]) -> list[str]:
    return [job for ids in jobs.values() for job in ids]
