"""A run handed to SLURM: code and configs as they are now, copied beside its checkpoints.

`RUN/launch/NNNN` holds one submission: the resolved config, the resolved profile, the script and
the record of the job. Editing the checkout or a config afterwards changes nothing for a job that
waits, or that starts again in a week.
"""

import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launch.cluster import ClusterConfig
from launch.queue import still_queued
from launch.records import (
    CLUSTER_FILE,
    CODE_FOLDER,
    CONFIG_FILE,
    EVALUATE,
    FOLDER,
    PRETRAIN,
    PROGRAM,
    SCRIPT_FILE,
    SUBMISSION_FILE,
    next_number,
    submission_folder,
    submissions,
)
from launch.render import Job, render
from launch.slurm import run_command
from launch.snapshot import snapshot_for, start_file
from pipeline.config.load import git_revision, resolved_text, to_yaml
from pipeline.config.runs import PretrainConfig
from pipeline.errors import BusyError, ConfigError
from pipeline.runtime.files import STOP_FILE, write_atomic, write_json_atomic


@dataclass(frozen=True)
class Source:
    """What a person asked for, for the record."""

    config: str
    overrides: tuple[str, ...]
    cluster: str | None
    work_dir: str
    """Absolute; relative paths of the config start there."""


@dataclass(frozen=True)
class Draft:
    """All that `submit` writes and does; making one changes nothing."""

    number: int
    run_dir: Path
    """Absolute."""
    job: Job
    config: Any
    """Resolved, of training; None for what has none."""
    cluster: ClusterConfig
    source: Source

    @property
    def folder(self) -> Path:
        """In the run's folder."""
        return submission_folder(self.run_dir, self.number)

    @property
    def script(self) -> str:
        """For sbatch."""
        return render(self.job, self.cluster)


def prepare_training(config: PretrainConfig, cluster: ClusterConfig, source: Source) -> Draft:
    """A run's training; decides names and changes nothing.

    Args:
        config: resolved.
        cluster: where it is to run.
        source: what a person asked for.
    """
    run_dir = Path(source.work_dir, config.run_dir)
    number = next_number(run_dir)
    file = submission_folder(run_dir, number) / CONFIG_FILE
    words = ("pipeline", PRETRAIN, str(file))
    job = _job(PRETRAIN, run_dir, number, words, source, [config.data.dir])
    return Draft(number, run_dir, job, config, cluster, source)


def prepare_evaluation(
    run_dir: Path, options: Sequence[str], inputs: Sequence[str], cluster: ClusterConfig,
    source: Source,
) -> Draft:  # fmt: skip
    """An evaluation of a run's checkpoints; decides names and changes nothing.

    Args:
        run_dir: folder of the run, absolute.
        options: of `python -m pipeline evaluate`.
        inputs: folders that it reads beside the run's.
        cluster: where it is to run.
        source: what a person asked for.
    """
    number = next_number(run_dir)
    words = ("pipeline", EVALUATE, str(run_dir), *options)
    job = _job(EVALUATE, run_dir, number, words, source, inputs)
    return Draft(number, run_dir, job, None, cluster, source)


def prepare_program(
    run_dir: Path, words: Sequence[str], cluster: ClusterConfig, source: Source
) -> Draft:
    """A program of the user, such as a fine-tuning of an exported model; changes nothing.

    Args:
        run_dir: folder for its log and its ranks' exit codes, absolute.
        words: the program and its arguments.
        cluster: where it is to run.
        source: what a person asked for.
    """
    number = next_number(run_dir)
    start = ("launch", "rank", "--", *words)
    job = _job(PROGRAM, run_dir, number, start, source, [])
    return Draft(number, run_dir, job, None, cluster, source)


def _job(
    kind: str, run_dir: Path, number: int, words: tuple[str, ...], source: Source,
    inputs: Sequence[str],
) -> Job:  # fmt: skip
    """A job that runs a copy of the code."""
    return Job(
        kind=kind,
        name=run_dir.name if kind == PRETRAIN else f"{run_dir.name}-{kind}",
        run_dir=str(run_dir),
        words=words,
        work_dir=source.work_dir,
        start=(str(start_file(run_dir / FOLDER / CODE_FOLDER)),),
        log_dir=str(run_dir / "logs"),
        mounts=_mounts(source.work_dir, str(run_dir), *inputs),
        profile=str(submission_folder(run_dir, number) / CLUSTER_FILE),
    )


def checkout_job(
    config: PretrainConfig, config_path: str, overrides: Sequence[str], work_dir: str,
    profile: str | None,
) -> Job:  # fmt: skip
    """Training with the checkout itself, for a script that a person hands to sbatch.

    Args:
        config: resolved.
        config_path: given to the trainer.
        overrides: given to the trainer.
        work_dir: folder that relative paths start at; the log goes there.
        profile: file of the cluster profile, for preflight.
    """
    return Job(
        kind=PRETRAIN, name=Path(config.run_dir).name or PRETRAIN, run_dir=config.run_dir,
        words=("pipeline", PRETRAIN, config_path, *overrides), work_dir=work_dir, start=("-m",),
        log_dir=work_dir, mounts=_mounts(work_dir, config.run_dir, config.data.dir),
        profile=profile,
    )  # fmt: skip


def submit(draft: Draft) -> str:
    """Copies code and configs, and hands the script to sbatch.

    Returns:
        The job's id.

    Raises:
        BusyError: an earlier job of the run is still in the queue.
        ConfigError: a STOP file stands in the run's folder.
        PostnormError: sbatch refused, or the copy failed; what was written is removed again.
    """
    folder, run_dir = draft.folder, draft.run_dir
    refuse_twice(run_dir, draft.job.kind)
    if draft.job.kind == PRETRAIN and (run_dir / STOP_FILE).exists():
        raise ConfigError(
            f"{run_dir / STOP_FILE} is there: the run would end at once; remove it, or continue "
            f"with `python -m launch resume {run_dir}`, which does"
        )
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise BusyError(f"{folder} has just been made by another submission; try again") from None
    job: str | None = None
    try:
        (run_dir / "logs").mkdir(exist_ok=True)
        snapshot_for(Path(draft.job.start[0]), run_dir / FOLDER / CODE_FOLDER)
        if draft.config is not None:
            write_atomic(folder / CONFIG_FILE, resolved_text(draft.config).encode())
        write_atomic(folder / CLUSTER_FILE, to_yaml(draft.cluster).encode())
        write_atomic(folder / SCRIPT_FILE, draft.script.encode())
        # With several clusters: id;cluster.
        command = ["sbatch", "--parsable", str(folder / SCRIPT_FILE)]
        job = run_command(command, repeatable=False).strip().partition(";")[0]
        write_json_atomic(folder / SUBMISSION_FILE, _record(draft, job))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if job is not None:
            run_command(["scancel", job])
        raise
    return job


def refuse_twice(run_dir: Path, kind: str) -> None:
    """Two jobs of a run would wait for each other's lock.

    Raises:
        BusyError: one is in the queue.
    """
    left = still_queued([one.job for one in submissions(run_dir) if one.kind == kind])
    if left:
        raise BusyError(
            f"job {left[-1]} of {run_dir} is in the queue: look at it with `python -m launch "
            f"status {run_dir}`, or end it with `python -m launch cancel {run_dir}`"
        )


def dry_run_text(draft: Draft) -> str:
    """What `submit` would do, as a script with comments."""
    head = [
        f"# would write {draft.folder} ({CONFIG_FILE}, {CLUSTER_FILE}, {SCRIPT_FILE}) and",
        f"# {Path(draft.job.start[0]).parents[2]} (code, {git_revision()}), then",
        f"# sbatch {draft.folder / SCRIPT_FILE}, which is:",
    ]
    return "\n".join([*head, draft.script])


def summary_text(draft: Draft, job: str) -> Iterator[str]:
    """Lines on what was submitted, and how to look at it."""
    cluster, run = draft.cluster, shlex.quote(str(draft.run_dir))
    yield (
        f"job {job}: {draft.job.kind} {run} on {cluster.nodes} x "
        f"{cluster.num_ranks_per_node} ranks, {cluster.time_limit}, code {git_revision()}"
    )
    yield f"status:   python -m launch status {run}"
    yield f"log:      python -m launch logs {run} --follow"
    yield f"cancel:   python -m launch cancel {run}"
    yield f"record:   {draft.folder}"


def _record(draft: Draft, job: str) -> dict[str, Any]:
    cluster, source = draft.cluster, draft.source
    return {
        "number": draft.number,
        "job": job,
        "kind": draft.job.kind,
        "run_dir": str(draft.run_dir),
        **asdict(source),
        "code": str(Path(draft.job.start[0]).parents[2]),
        "revision": git_revision(),
        "submitted_unix_s": round(time.time(), 1),
        "nodes": cluster.nodes,
        "ranks": cluster.nodes * cluster.num_ranks_per_node,
        "command": shlex.join(["python", "-m", "launch", *sys.argv[1:]]),
    }


def _mounts(work_dir: str, *folders: str) -> tuple[str, ...]:
    """Absolute, without those that lie in another."""
    every = [Path(work_dir), *(Path(work_dir, folder) for folder in folders)]
    return tuple(dict.fromkeys(str(path) for path in every if not set(path.parents) & set(every)))
