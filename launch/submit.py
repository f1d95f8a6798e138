"""Submission of a run: code and configs as they are now, copied beside its checkpoints.

`RUN/launch/NNNN` holds one submission: the resolved config, the resolved profile, the script and
the record of the job. Editing the checkout or a config afterwards changes nothing for a job that
waits, or that starts again in a week.
"""

import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launch.cluster import ClusterConfig
from launch.pending_submission import PendingSubmission, submitting
from launch.plan import plan
from launch.queue import alive_of
from launch.records import (
    CLUSTER_FILE,
    CODE_FOLDER,
    CONFIG_FILE,
    EVALUATE,
    FINETUNE,
    FOLDER,
    MULTITASK,
    PRETRAIN,
    PROGRAM,
    SCRIPT_FILE,
    SUBMISSION_FILE,
    next_number,
    snapshot_for,
    start_file,
    submission_folder,
    submissions,
)
from launch.script import Job, render
from launch.slurm import withheld_line
from pipeline.checkpoints.manifest import newest_readable
from pipeline.config.load import git_revision, resolved_text, to_yaml
from pipeline.config.runs import PretrainConfig, load_run
from pipeline.data.format import INDEX_FILE
from pipeline.data.objects import find_index
from pipeline.errors import BusyError, ConfigError
from pipeline.multitask.config import (
    MIX_FILE,
    MultiTaskConfig,
    TaskMix,
    is_mix,
    load_mix,
    mix_text,
    require_split,
)
from pipeline.runtime.checkpoints import split_step
from pipeline.runtime.files import write_atomic, write_json_atomic
from pipeline.runtime.remote import is_address
from pipeline.runtime.run_folder import RunFolder
from pipeline.tasks.readers import read_task
from pipeline.tasks.task import RANDOM, TaskConfig, probe_tasks


@dataclass(frozen=True)
class Origin:
    """The files and overrides that a person named, for the record."""

    config: str
    overrides: tuple[str, ...]
    cluster: str | None
    work_dir: str
    """Absolute path; relative paths of the config start there."""
    command: str = ""
    """What a person or program called; by default the words of this process."""


@dataclass(frozen=True)
class SubmissionPlan:
    """Everything that `submit` writes and does; making one changes nothing."""

    number: int
    run_dir: Path
    """Absolute path."""
    job: Job
    config: str | None
    """The resolved config of a training, as YAML; None for other kinds of jobs."""
    cluster: ClusterConfig
    source: Origin

    @property
    def folder(self) -> Path:
        """Folder of this submission in the run folder."""
        return submission_folder(self.run_dir, self.number)

    @property
    def code(self) -> Path:
        """Folder of the copy of the code."""
        return Path(self.job.start[0]).parents[2]

    @property
    def script(self) -> str:
        """Text for sbatch."""
        return render(self.job, self.cluster)


def prepare_training(
    config: PretrainConfig, cluster: ClusterConfig, source: Origin
) -> SubmissionPlan:
    """Draft the training of a run; change nothing.

    A run that could not start or not end is an error: it should not wait in a queue first.
    """
    require_data(config, source.work_dir)
    has_begun = newest_readable(RunFolder(Path(source.work_dir, config.run_dir)).checkpoints)
    start = "" if has_begun else _start_of(config)  # it is read once
    for path in (start, *_tables_of(config), config.train.deepspeed_config):
        if path and not Path(source.work_dir, path).exists():
            raise ConfigError(
                f"{path} does not exist; correct init_from, data.similar or train.deepspeed_config"
            )
    # Counting activations takes seconds, and finds nothing where the size of the GPU is not known.
    knows_memory = cluster.hardware.memory_bytes is not None
    problems = plan(config, cluster, counts_activations=knows_memory).problems
    if problems:
        lines = "".join(f"\n  {line}" for line in problems)
        raise ConfigError(f"this run cannot start as configured:{lines}")
    roots = [task.data.root or "" for task in probe_tasks(config.monitor, source.work_dir).values()]
    run_dir = Path(source.work_dir, config.run_dir)
    RunFolder(run_dir).refuse_foreign()
    file = submission_folder(run_dir, next_number(run_dir)) / CONFIG_FILE
    words = ("pipeline", PRETRAIN, str(file))
    draft = _draft(
        PRETRAIN, run_dir, words, cluster, source, [*_inputs_of(config, source.work_dir), *roots]
    )
    return replace(draft, config=resolved_text(config))


def prepare_mix(mix: TaskMix, cluster: ClusterConfig, source: Origin) -> SubmissionPlan:
    """Draft the training of a multi-task run, as `prepare_training` does."""
    config = mix.config
    start = Path(source.work_dir, _model_folder(config.init_from))
    if not start.is_dir():
        raise ConfigError(f"init_from={config.init_from}: {start} does not exist; correct the path")
    require_split(mix, cluster.num_ranks)
    if config.data is not None:
        require_index(config.data.dir, source.work_dir)
    for task in mix.tasks.values():
        read_task(replace(task, data=replace(task.data, root=_root(task, source.work_dir))))
    run_dir = Path(source.work_dir, config.run_dir)
    file = submission_folder(run_dir, next_number(run_dir)) / CONFIG_FILE
    inputs = [str(start), *(task.data.root or "" for task in mix.tasks.values())]
    inputs += [config.data.dir] if config.data else []
    draft = _draft(PRETRAIN, run_dir, ("pipeline", MULTITASK, str(file)), cluster, source, inputs)
    return replace(draft, config=mix_text(mix, source.work_dir))


def prepare_finetuning(
    config: TaskConfig, cluster: ClusterConfig, source: Origin
) -> SubmissionPlan:
    """Draft a fine-tuning whose config names its model and folder; change nothing."""
    require_task(config, source.work_dir)
    run_dir = Path(source.work_dir, str(config.run_dir))
    file = submission_folder(run_dir, next_number(run_dir)) / CONFIG_FILE
    words = ("pipeline", FINETUNE, str(file))
    inputs = [_model_folder(str(config.model)), str(config.data.root)]
    return _draft(FINETUNE, run_dir, words, cluster, source, inputs)


def require_task(config: TaskConfig, work_dir: str) -> None:
    """Refuse a fine-tuning without a model, or whose files are missing or do not fit."""
    if config.model is None:
        raise ConfigError("model is not set: say what the run starts from, a run or model folder")
    model = Path(work_dir, _model_folder(config.model))
    if not model.is_dir():
        raise ConfigError(f"model={config.model}: {model} does not exist; correct the path")
    read_task(replace(config, data=replace(config.data, root=_root(config, work_dir))))


def _model_folder(model: str) -> str:
    """Name the folder of a model, without `random:` and the step of a run."""
    return str(split_step(model.removeprefix(RANDOM))[0])


def _root(config: TaskConfig, work_dir: str) -> str:
    return str(Path(work_dir, config.data.root or "."))


def require_data(config: PretrainConfig, work_dir: str) -> None:
    """Refuse a run whose dataset is missing or damaged, or whose probes cannot be read."""
    for folder in _data_of(config, work_dir):
        require_index(folder, work_dir)
    probe_tasks(config.monitor, work_dir)


def _data_of(config: PretrainConfig, work_dir: str) -> list[str]:
    """Name the datasets that are read from here on: those of stages that are over may be gone."""
    newest = newest_readable(RunFolder(Path(work_dir, config.run_dir)).checkpoints)
    line = config.timeline
    now = line.at(newest[1].cursor).number if newest and line.has_stages else 0
    while now and line.continues(now):
        now -= 1
    return list(dict.fromkeys(each.data.dir for each in line.stages[now:] if not each.of))


def _inputs_of(config: PretrainConfig, work_dir: str) -> list[str]:
    """Name what a run reads: the data of its stages, what it begins from, and other files.

    A file, and the folder of copies, which need not be there yet, stand for the folder above. What
    is not there is left out: a container does not start with it.
    """
    files = (*_tables_of(config), config.train.deepspeed_config, config.checkpoint.copy_to)
    more = [_start_of(config), *(str(Path(file).parent) for file in files if file)]
    there = [path for path in more if path and Path(work_dir, path).exists()]
    origin = [str(config.origin)] if config.origin else []
    return [*_data_of(config, work_dir), *origin, *there]


def _tables_of(config: PretrainConfig) -> list[str]:
    """Name the tables of similar tokens of all stages."""
    tables = (stage.data.similar for stage in config.timeline.stages if not stage.of)
    return list(dict.fromkeys(table for table in tables if table))


def _start_of(config: PretrainConfig) -> str:
    return str(split_step(config.init_from)[0]) if config.init_from else ""


def require_index(folder: str, work_dir: str) -> None:
    """Refuse a dataset that is missing or damaged."""
    data = folder if is_address(folder) else Path(work_dir, folder)
    if find_index(data) is None:
        raise ConfigError(
            f"data.dir={folder}: {data} has no {INDEX_FILE}; prepare the dataset first "
            "(`postnorm prep status CONFIG` says what is missing) and, for a store, send it "
            "with `postnorm prep publish`; or correct the path"
        )


def prepare_evaluation(
    run_dir: Path,
    options: Sequence[str],
    inputs: Sequence[str],
    cluster: ClusterConfig,
    source: Origin,
) -> SubmissionPlan:
    """Draft an evaluation of a run's checkpoints, which also reads `inputs`; change nothing."""
    words = ("pipeline", EVALUATE, str(run_dir), *options)
    return _draft(EVALUATE, run_dir, words, cluster, source, inputs)


def prepare_program(
    run_dir: Path, words: Sequence[str], cluster: ClusterConfig, source: Origin
) -> SubmissionPlan:
    """Draft a job for the user's own program, such as a fine-tuning; change nothing."""
    return _draft(PROGRAM, run_dir, ("launch", "rank", "--", *words), cluster, source, [])


def _draft(
    kind: str,
    run_dir: Path,
    words: tuple[str, ...],
    cluster: ClusterConfig,
    source: Origin,
    inputs: Sequence[str],
) -> SubmissionPlan:
    """Draft a job that runs a copy of the code."""
    number = next_number(run_dir)
    job = Job(
        kind=kind,
        name=run_dir.name if kind == PRETRAIN else f"{run_dir.name}-{kind}",
        run_dir=str(run_dir),
        words=words,
        work_dir=source.work_dir,
        start=(str(start_file(run_dir / FOLDER / CODE_FOLDER)),),
        log_dir=str(run_dir / "logs"),
        mounts=mounts_of(source.work_dir, str(run_dir), *inputs),
        profile=str(submission_folder(run_dir, number) / CLUSTER_FILE),
    )
    return SubmissionPlan(number, run_dir, job, None, cluster, source)


def checkout_job(config: PretrainConfig, source: Origin) -> Job:
    """Describe a training with the checkout itself, for a script that a person hands to sbatch."""
    return Job(
        kind=PRETRAIN,
        name=Path(config.run_dir).name or PRETRAIN,
        run_dir=config.run_dir,
        words=("pipeline", PRETRAIN, source.config, *source.overrides),
        work_dir=source.work_dir,
        start=("-m",),
        log_dir=source.work_dir,
        mounts=mounts_of(source.work_dir, config.run_dir, *_inputs_of(config, source.work_dir)),
        profile=source.cluster,
    )


def source_of_resume(run_dir: Path, overrides: Sequence[str], cluster: str | None) -> Origin:
    """Find what a run was submitted with last, or what a run started otherwise left."""
    earlier = [one for one in submissions(run_dir) if one.kind == PRETRAIN]
    if earlier:
        folder, work_dir = submission_folder(run_dir, earlier[-1].number), earlier[-1].work_dir
        profile = cluster or str(folder / CLUSTER_FILE)
        return Origin(str(folder / CONFIG_FILE), tuple(overrides), profile, work_dir)
    mix = run_dir / MIX_FILE
    config_path = mix if mix.is_file() else RunFolder(run_dir).resolved
    if not config_path.is_file() or cluster is None:
        raise ConfigError(
            f"{run_dir} was never submitted; submit its config, or, if the run was started "
            "otherwise, name the cluster with --cluster"
        )
    return Origin(str(config_path), tuple(overrides), cluster, str(Path.cwd()))


def config_of_resume(run_dir: Path, source: Origin) -> PretrainConfig | TaskMix:
    """Load the config that a run resumes with, which must name its folder."""
    loaded: PretrainConfig | TaskMix
    if is_mix(source.config):
        loaded = load_mix(source.config, source.overrides)
        config: PretrainConfig | MultiTaskConfig = loaded.config
    else:
        loaded = config = load_run(source.config, source.overrides).config
    if (Path(source.work_dir) / config.run_dir).resolve() != run_dir.resolve():
        raise ConfigError(
            f"{source.config} belongs to run_dir={config.run_dir} in {source.work_dir}, which is "
            f"not {run_dir}: the folder was moved; submit its config from where it is now"
        )
    return loaded


def submit(draft: SubmissionPlan, *, remove_stop: bool = False) -> str:
    """Copy code and configs, hand the script to sbatch, and return the job's id.

    If sbatch refuses or the copy fails, everything written is removed again; it stays where SLURM
    did not say whether it has the job, which needs it then.

    Raises:
        BusyError: an earlier job of the run is in the queue, or another process is submitting it.
    """
    run_dir = draft.run_dir
    with submitting(run_dir, run_dir, lambda: [one.job for one in submissions(run_dir)]) as intent:
        return _submit(draft, intent, remove_stop)


def _submit(draft: SubmissionPlan, intent: PendingSubmission, remove_stop: bool) -> str:
    folder, run_dir = draft.folder, draft.run_dir
    refuse_twice(run_dir, draft.job.kind)
    # Not before: a job in the queue is to see it.
    if remove_stop:
        RunFolder(run_dir).stop.unlink(missing_ok=True)
    if draft.job.kind == PRETRAIN and RunFolder(run_dir).stop.exists():
        raise ConfigError(
            f"{RunFolder(run_dir).stop} exists, so the run would end at once; remove it, or "
            f"continue with `postnorm resume {run_dir}`, which removes it"
        )
    try:
        # Without `exist_ok`: whoever makes the folder has the number, also where there are no file
        # locks.
        folder.mkdir(parents=True)
    except FileExistsError:
        raise BusyError(f"another submission has just made {folder}; try again") from None
    try:
        (run_dir / "logs").mkdir(exist_ok=True)
        snapshot_for(Path(draft.job.start[0]), run_dir / FOLDER / CODE_FOLDER)
        if draft.config is not None:
            write_atomic(folder / CONFIG_FILE, draft.config.encode())
        write_atomic(folder / CLUSTER_FILE, to_yaml(draft.cluster).encode())
        write_atomic(folder / SCRIPT_FILE, draft.script.encode())
        job = intent.queue([], draft.script, folder / SCRIPT_FILE)
        # Last: a folder with this record counts as a submission.
        write_json_atomic(folder / SUBMISSION_FILE, record_of(draft, job))
    except BaseException:
        if intent.withdraw():
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return job


def refuse_twice(run_dir: Path, kind: str) -> None:
    """Refuse a second job of a run."""
    left = alive_of(run_dir, [one.job for one in submissions(run_dir) if one.kind == kind])
    if left:
        # It would only wait for the lock of the first.
        raise BusyError(
            f"job {left[-1]} of {run_dir} is in the queue: look at it with `postnorm "
            f"status {run_dir}`, or end it with `postnorm cancel {run_dir}`"
        )


def dry_run_text(draft: SubmissionPlan) -> str:
    """Show what `submit` would do, as a script with comments."""
    head = [
        f"# would write {draft.folder} ({CONFIG_FILE}, {CLUSTER_FILE}, {SCRIPT_FILE}) and",
        f"# {draft.code} (code, {git_revision()}), then",
        f"# sbatch {draft.folder / SCRIPT_FILE}, which is:",
    ]
    return "\n".join([withheld_line(), *head, draft.script])


def summary_text(draft: SubmissionPlan, job: str) -> Iterator[str]:
    """Yield lines on what was submitted, and how to look at it."""
    cluster, run = draft.cluster, shlex.quote(str(draft.run_dir))
    yield (
        f"job {job}: {draft.job.kind} {run} on {cluster.nodes} x "
        f"{cluster.num_ranks_per_node} ranks, {cluster.time_limit}, code {git_revision()}"
    )
    if not cluster.requeue:
        yield f"chain:    {cluster.max_restarts + 1} jobs, of which one runs after the other"
    yield f"status:   postnorm status {run}"
    yield f"log:      postnorm logs {run} --follow"
    yield f"cancel:   postnorm cancel {run}"
    yield f"record:   {draft.folder}"


def record_of(draft: SubmissionPlan, job: str) -> dict[str, Any]:
    """Return what `RUN/launch/NNNN/submission.json` holds."""
    cluster, source = draft.cluster, draft.source
    return {
        "number": draft.number,
        "job": job,
        "kind": draft.job.kind,
        "run_dir": str(draft.run_dir),
        **asdict(source),
        "code": str(draft.code),
        "revision": git_revision(),
        "submitted_unix_s": round(time.time(), 1),
        "nodes": cluster.nodes,
        "ranks": cluster.num_ranks,
        "command": source.command or shlex.join(["python", "-m", "launch", *sys.argv[1:]]),
    }


def mounts_of(work_dir: str, *folders: str) -> tuple[str, ...]:
    """Make folders absolute and leave out those that lie in another, and stores."""
    files = [folder for folder in folders if not is_address(folder)]
    every = [Path(work_dir), *(Path(work_dir, folder) for folder in files)]
    return tuple(dict.fromkeys(str(path) for path in every if not set(path.parents) & set(every)))
