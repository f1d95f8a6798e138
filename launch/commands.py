"""The verbs of `python -m launch`."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launch import control, logs, prep, submit
from launch.cluster import ClusterConfig, cluster_of
from launch.decide import JobAttempt, Limits, StorageRetry
from launch.local import run_local, run_program
from launch.plan import mix_text, plan, plan_json, plan_mix, plan_text
from launch.preflight.check import check_node
from launch.queue import room_of
from launch.records import (
    EVALUATE,
    FINETUNE,
    MULTITASK,
    PRETRAIN,
    PROGRAM,
    is_run,
    measured_save_s,
    measured_tflops,
    read_prep,
    require_run,
)
from launch.script import render
from launch.site import ask_sbatch, check, preemption, preemption_remarks, profile_here, within_site
from launch.status import (
    PrepReport,
    prep_report,
    prep_summary,
    queue_reports,
    queue_text,
    run_report,
    run_summary,
)
from launch.supervise import STEPS, JobStart, next_order
from pipeline.config.load import warn_of_unusual
from pipeline.config.runs import PretrainConfig, load_run
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, EXIT_FINISHED, ConfigError, PostnormError
from pipeline.multitask.config import MultiTaskConfig, TaskMix, is_mix, load_mix, require_split
from pipeline.runtime import cli, env
from pipeline.runtime.checkpoints import FOLDER, asked_step, published
from pipeline.runtime.cli import CONFIG, OVERRIDES, RUN, Verb, argument, at_least, option, verb
from pipeline.runtime.run_folder import RunFolder
from pipeline.runtime.summary import FolderSummary

logger = logging.getLogger(__name__)
_CLUSTER: Any = option("YAML file of the cluster; default: one GPU")


def _config(path: str, overrides: list[str]) -> PretrainConfig:
    return load_run(path, overrides).config


def _training(path: str, overrides: list[str]) -> PretrainConfig | MultiTaskConfig:
    if is_mix(path):
        return load_mix(path, tuple(overrides)).config
    return _config(path, overrides)


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


@verb("plan train.yaml --cluster configs/cluster/example.yaml train.micro_batch=64")
def _plan(
    config: str = CONFIG,
    overrides: list[str] = OVERRIDES,
    cluster: str | None = _CLUSTER,
    as_json: bool = option("one JSON object, for programs", flag="--json"),
) -> int:
    """Estimate days, jobs, memory, checkpoints and disk of a run; needs no SLURM."""
    profile = cluster_of(cluster)
    if is_mix(config):
        mix = load_mix(config, overrides)
        profile = _with_speed(profile, mix.config.folder.path)
        found = plan_mix(mix, profile)
        _say([plan_json(found)] if as_json else mix_text(found, mix, profile))
        return EXIT_FINISHED
    loaded = _config(config, overrides)
    warn_of_unusual(loaded)
    profile = _with_speed(profile, loaded.folder.path)
    result = plan(loaded, profile)
    _say([plan_json(result)] if as_json else plan_text(result, loaded, profile))
    return EXIT_FAILED_DO_NOT_RETRY if result.problems else EXIT_FINISHED


def _with_speed(profile: ClusterConfig, run_dir: Path) -> ClusterConfig:
    """Take the speed that a run has measured, where the profile names none."""
    reached = None if profile.hardware.flops_per_rank else measured_tflops(run_dir)
    if not reached:
        return profile
    logger.info("%s reached %.2g TFLOP/s a rank: the time is for that speed", run_dir, reached)
    return replace(profile, hardware=replace(profile.hardware, tflops=reached, utilisation=1.0))


@dataclass(frozen=True)
class SubmitArguments:
    """The command line of `submit`."""

    prep: bool = option(
        "CONFIG is a config of `data_prep`: submit a job array for each stage", one_of="what"
    )
    evaluate: bool = option("CONFIG is RUN or RUN@STEP: compute its held-out losses", one_of="what")
    program: bool = option(
        "CONFIG is a new folder, and `-- WORDS` a program to run on all ranks, such as your "
        "fine-tuning of an exported model",
        one_of="what",
    )
    words: list[str] = cli.PROGRAM
    config: str = CONFIG
    overrides: list[str] = OVERRIDES
    cluster: str | None = _CLUSTER
    local: bool = option(
        "run here and now, without SLURM; restart from the newest checkpoint if a rank dies"
    )
    ranks: int = option("processes of --local (default 1)", default=1)
    wait_room: int | None = option(
        "for --prep and --sweep: hand over arrays as they fit below your limit on jobs, with a "
        "look every so many seconds (60); the same call goes on where one was ended",
        type=at_least(1),
        nargs="?",
        const=60,
    )
    step: int | None = option(
        "for --evaluate: this checkpoint; default: the newest good one", one_of="which"
    )
    all: bool = option("for --evaluate: every kept checkpoint", one_of="which")
    data: str | None = option("for --evaluate: another dataset of the same tokenizer")
    dry_run: bool = option("print everything as a script; needs no SLURM and changes nothing")

    def origin(self, config: str) -> submit.Origin:
        """Name what a job is made of."""
        return submit.Origin(config, tuple(self.overrides), self.cluster, os.getcwd())

    def profile(self) -> ClusterConfig:
        """Read the profile; without `--local`, as this site supports it."""
        return (cluster_of if self.local else profile_here)(self.cluster)


@verb("submit train.yaml --cluster configs/cluster/example.yaml --dry-run")
def _submit(arguments: SubmitArguments) -> int:
    """Submit a run or a data preparation to SLURM; or run it here."""
    return submit_one(arguments)


def submit_one(arguments: SubmitArguments) -> int:
    """Submit or run what is not a sweep."""
    if arguments.program:
        return _submit_program(arguments)
    if arguments.words:
        raise ConfigError(f"`-- {' '.join(arguments.words)}`: only --program takes words after --")
    if arguments.prep:
        return _submit_prep(arguments)
    if arguments.wait_room:
        raise ConfigError("--wait-room is for --prep and --sweep: leave it out")
    if arguments.evaluate:
        return _submit_evaluation(arguments)
    if arguments.all or arguments.step is not None or arguments.data:
        raise ConfigError("--step, --all and --data are for --evaluate: leave them out")
    if arguments.ranks != 1 and not arguments.local:
        raise ConfigError("--ranks is for --local: the cluster's profile says how many there are")
    cluster = arguments.profile()
    if is_mix(arguments.config):
        return _submit_mix(arguments, cluster)
    config = _config(arguments.config, arguments.overrides)
    if arguments.local:
        config.batches.require_split(max(1, arguments.ranks))
        words = ["pipeline", PRETRAIN, arguments.config, *arguments.overrides]
        return _run_here(arguments, words, PRETRAIN, config.folder.path, cluster)
    warn_of_unusual(config)
    draft = submit.prepare_training(config, cluster, arguments.origin(arguments.config))
    return _hand_over(draft, dry_run=arguments.dry_run)


def _submit_mix(arguments: SubmitArguments, cluster: ClusterConfig) -> int:
    mix = load_mix(arguments.config, arguments.overrides)
    if arguments.local:
        require_split(mix, max(1, arguments.ranks))
        words = ["pipeline", MULTITASK, arguments.config, *arguments.overrides]
        return _run_here(arguments, words, PRETRAIN, mix.config.folder.path, cluster)
    draft = submit.prepare_mix(mix, cluster, arguments.origin(arguments.config))
    return _hand_over(draft, dry_run=arguments.dry_run)


def _submit_evaluation(arguments: SubmitArguments) -> int:
    run, step = asked_step(arguments.config, arguments.step, arguments.all)
    run_dir = run.absolute()
    config_path = RunFolder(run_dir).resolved
    if not config_path.is_file() or not published(run_dir / FOLDER):
        raise ConfigError(
            f"{run_dir} has no checkpoint to evaluate. Pass the run_dir of a run that has saved"
        )
    config = load_run(config_path).config
    options = [
        *([] if step is None else ["--step", str(step)]),
        *(["--all"] if arguments.all else []),
        *(["--data", arguments.data] if arguments.data else []),
        *arguments.overrides,
    ]
    cluster = arguments.profile()
    if arguments.local:
        words = ["pipeline", EVALUATE, str(run_dir), *options]
        return _run_here(arguments, words, EVALUATE, run_dir, cluster)
    inputs = [arguments.data or config.data.dir]
    source = arguments.origin(str(config_path))
    draft = submit.prepare_evaluation(run_dir, options, inputs, cluster, source)
    return _hand_over(draft, dry_run=arguments.dry_run)


def _submit_program(arguments: SubmitArguments) -> int:
    run_dir, words = Path(arguments.config).absolute(), arguments.words
    if not words or arguments.overrides:
        raise ConfigError(
            "--program needs a folder for its log, then `--` and the program: "
            "postnorm submit --program runs/tuned --cluster C -- python finetune.py ..."
        )
    cluster = arguments.profile()
    if arguments.local:
        own = env.module_command("pipeline")
        place = len(own)  # of the verb: a sweep here starts runs so, which are no programs
        if words[:place] == own and words[place : place + 1] in ([PRETRAIN], [FINETUNE]):
            return _run_here(arguments, words[place - 1 :], words[place], run_dir, cluster)
        return _run_here(arguments, ["launch", "rank", "--", *words], PROGRAM, run_dir, cluster)
    source = submit.Origin(words[0], tuple(words[1:]), arguments.cluster, os.getcwd())
    draft = submit.prepare_program(run_dir, words, cluster, source)
    return _hand_over(draft, dry_run=arguments.dry_run)


def _submit_prep(arguments: SubmitArguments) -> int:
    if arguments.local:
        raise ConfigError("--prep --local is `postnorm prep run CONFIG`, which needs no SLURM")
    work_dir, cluster = os.getcwd(), within_site(cluster_of(arguments.cluster))
    room = room_of(cluster, prep=True, every_s=arguments.wait_room)
    cluster = replace(cluster, max_submit_jobs=room.limit)
    checked = check(cluster, "prep", work_dir=work_dir, optional=arguments.dry_run)
    draft = prep.prepare(arguments.config, arguments.overrides, cluster, work_dir)
    if not draft.stages:
        print(f"nothing is left to do: {draft.job.folder} holds the dataset")
    elif arguments.dry_run:
        print(f"{prep.dry_run_text(draft)}# {checked}")
    else:
        print(f"{checked}\n{prep.summary_text(draft, prep.submit(draft, room))}")
    return EXIT_FINISHED


def refuse_dry_run(arguments: SubmitArguments) -> None:
    """Refuse --dry-run where runs start here (ConfigError)."""
    if arguments.dry_run or arguments.ranks < 1:
        raise ConfigError("--local runs at once: leave out --dry-run, and give --ranks N >= 1")


def _run_here(
    arguments: SubmitArguments, words: list[str], kind: str, run_dir: Path, cluster: ClusterConfig
) -> int:
    refuse_dry_run(arguments)
    limits = Limits(cluster.max_restarts, cluster.max_attempts_without_progress)
    return run_local(words, kind, run_dir, arguments.ranks, limits)


def _hand_over(draft: submit.SubmissionPlan, *, dry_run: bool, remove_stop: bool = False) -> int:
    """Check the site and call sbatch; remove a STOP file that must not stop this job."""
    checked = check(draft.cluster, draft.job.kind, work_dir=draft.job.work_dir, optional=dry_run)
    for remark in preemption_remarks(
        preemption(draft.cluster), measured_save_s(draft.run_dir), draft.cluster
    ):
        logger.warning("%s", remark)
    if dry_run:
        print(f"# {checked}\n{submit.dry_run_text(draft)}", end="")
        return EXIT_FINISHED
    print(f"{checked}; {ask_sbatch(draft.script)}")
    stop = RunFolder(draft.run_dir).stop
    is_removed = remove_stop and stop.exists()
    text = submit.summary_text(draft, submit.submit(draft, remove_stop=remove_stop))
    if is_removed:
        print(f"removed {stop}")
    _say(text)
    return EXIT_FINISHED


@verb("resume runs/mine train.num_steps=200_000")
def _resume(
    run_dir: Path = RUN,
    overrides: list[str] = cli.overrides("such as train.num_steps=200_000"),
    cluster: str | None = option("YAML file of the cluster; default: that of the last submission"),
    dry_run: bool = option("print the script; change nothing"),
) -> int:
    """Submit a run again with the config of its last submission."""
    run_dir = run_dir.absolute()
    source = submit.source_of_resume(run_dir, overrides, cluster)
    config, profile = submit.config_of_resume(run_dir, source), profile_here(source.cluster)
    os.chdir(source.work_dir)  # relative paths of the config start there
    if isinstance(config, TaskMix):
        draft = submit.prepare_mix(config, profile, source)
    else:
        draft = submit.prepare_training(config, profile, source)
    return _hand_over(draft, dry_run=dry_run, remove_stop=True)


@verb("render configs/demo.yaml train.lr=1e-3 > job.sh && sbatch job.sh")
def _render(
    config: str = CONFIG, overrides: list[str] = OVERRIDES, cluster: str | None = _CLUSTER
) -> None:
    """Print the sbatch script of a run; needs no SLURM."""
    loaded, profile = _config(config, overrides), cluster_of(cluster)
    loaded.batches.require_split(profile.num_ranks)
    source = submit.Origin(config, tuple(overrides), cluster, os.getcwd())
    print(render(submit.checkout_job(loaded, source), profile), end="")


@verb(
    "supervise runs/mine train.yaml --cluster c.yaml --kind pretrain --ranks 4 --job 7 \\",
    "    --restart 0 --nodes 'n1 n2' --after start \\",
    "    --max-restarts 50 --max-attempts 2",
)
def _supervise(
    run_dir: Path = RUN,
    config: str | None = argument("of the run, to judge its nodes by", "CONFIG", nargs="?"),
    overrides: list[str] = OVERRIDES,
    cluster: str | None = _CLUSTER,
    after: str = option("what the script has done", choices=STEPS, required=True),
    kind: str = option("of the job", required=True),
    ranks: int = option("processes of the job", required=True),
    job: str = option("SLURM's id", required=True),
    restart: int = option("times that SLURM has put the job back", required=True),
    jobs_before: int = option("of a chain", default=0),
    nodes: str = option("names of all nodes of the job", "'A B'", required=True),
    asked_to_stop: int = option("1: time is nearly up; 2: before that", default=0),
    step_code: int = option("exit code of srun", default=0),
    max_restarts: int = option("restarts of a job", required=True),
    max_attempts: int = option("attempts in a row without a checkpoint", required=True),
    max_excluded: int = option("nodes that the job may do without", default=0),
    time_limit: str = option("of the job, as the profile has it", default=""),
    patience: float = option("seconds that storage may fail", default=0.0),
    job_ends: float | None = option("end of the job's time, in Unix seconds"),
) -> None:
    """For job scripts: print what follows a step.

    The last line is `check`, `measure`, `ranks`, `requeue [NODES]`, or `exit CODE` where the job
    ends.
    """
    attempt = JobAttempt(
        job=job,
        restart=restart,
        nodes=tuple(nodes.split()),
        before=None,
        ranks=ranks,
        at_limit=asked_to_stop == 1,
        step_code=step_code,
        jobs_before=jobs_before,
    )
    start = JobStart(
        attempt,
        kind,
        Limits(max_restarts, max_attempts, time_limit),
        run_dir,
        StorageRetry(patience, job_ends),
        max_excluded,
        (lambda: (_training(config, overrides), cluster_of(cluster))) if config else None,
        is_asked=bool(asked_to_stop),
    )
    print(next_order(after, start), flush=True)


@verb("rank -- python finetune.py models/mine")
def _rank(words: list[str] = cli.PROGRAM) -> int:
    """For job scripts: run the program `-- WORDS` as one rank."""
    return run_program(words)


@verb("check train.yaml --cluster c.yaml --records runs/mine/launch/preflight/7.0")
def _check(
    config: str = CONFIG,
    overrides: list[str] = OVERRIDES,
    cluster: str | None = _CLUSTER,
    records: Path = option("folder of the nodes' records", "DIR", required=True),
) -> None:
    """For job scripts: check this node and write DIR/NODE.json."""
    loaded, profile = _training(config, overrides), cluster_of(cluster)
    record = check_node(loaded, profile, records, env.node_name())
    for finding in record.findings:
        print(f"{record.node}: {finding.text}", flush=True)
    # A thread that hangs in a driver or a file system would hold back Python's own exit.
    os._exit(EXIT_FINISHED)


Look = Callable[[Path], tuple[FolderSummary, dict[str, Any]] | None]
"""Looks at a folder of a kind: what is shown, and plain values; None for a folder of another kind.

Datasets and sweeps are known to packages that launch does not import; `postnorm` hands them in.
"""
_STATUS_OF = "a run_dir, the folder of a sweep or dataset, or nothing for the queue"


def status_verb(dataset: Look = lambda _: None, sweep: Look = lambda _: None) -> Verb:
    """Make the verb that shows runs, jobs of preparations and, by ways to look, other folders."""

    @verb("status", "status runs/mine --watch 30")
    def status(
        folder: Path | None = argument("folder of a run, sweep or dataset", "RUN", nargs="?"),
        as_json: bool = option("one JSON object, or a list of them", flag="--json"),
        watch: int | None = option("repeat forever", "SECONDS", type=at_least(0)),
    ) -> None:
        """Show the state of a run, sweep or dataset; without one, of all in the queue."""
        tell = _status_json if as_json else _status_text
        clear = "\x1b[H\x1b[2J" if sys.stdout.isatty() and not as_json else ""
        while watch is not None:
            print(f"{clear}{tell(dataset, sweep, folder)}", flush=True)
            time.sleep(watch)
        print(tell(dataset, sweep, folder))

    return status


def _status_text(dataset: Look, sweep: Look, folder: Path | None) -> str:
    if folder is None:
        return queue_text(queue_reports())
    many = sweep(folder)
    if many is not None:
        return many[0].text()
    if is_run(folder):
        return run_summary(run_report(folder.resolve())).text()
    seen, jobs = _dataset(dataset, folder)
    shown = [*([prep_summary(jobs)] if jobs else []), *([seen[0]] if seen else [])]
    return "\n".join(summary.text() for summary in shown)


def _status_json(dataset: Look, sweep: Look, folder: Path | None) -> str:
    if folder is None:
        return json.dumps([asdict(report) for report in queue_reports()])
    many = sweep(folder)
    if many is not None:
        return json.dumps(many[1])
    if is_run(folder):
        return json.dumps(asdict(run_report(folder.resolve())))
    seen, jobs = _dataset(dataset, folder)
    report = jobs or PrepReport(str(folder.resolve()), {}, [], "")
    return json.dumps(asdict(replace(report, dataset=seen and seen[1])))


def _dataset(
    look: Look, folder: Path
) -> tuple[tuple[FolderSummary, dict[str, Any]] | None, PrepReport | None]:
    """Look at a dataset and at its jobs; one of them may be None."""
    seen, jobs = None, prep_report(folder.resolve())
    try:
        seen = look(folder)
    except PostnormError:
        if jobs is None:
            raise  # else the jobs are known, though perhaps only their nodes see the inputs
    if seen is None and jobs is None:
        raise RunFolder(folder).refusal(_STATUS_OF)
    return seen, jobs


@verb("logs runs/mine --rank 3 --follow")
def _logs(
    folder: Path = RUN,
    job: str | None = option("id; default: the newest", one_of="which"),
    rank: int | None = option("the log of rank N, of all its starts", "N", one_of="which"),
    lines: int = option("last lines (default 50)", type=at_least(0), default=50),
    follow: bool = option("continue until the job has ended"),
) -> None:
    """Show the log of a run's job, or of one rank."""
    run_dir = require_run(folder)
    path = logs.find_log(run_dir, job, rank)
    if not follow:
        logs.show(path, lines)
        return
    of = job or logs.newest_job(run_dir)

    def why_over() -> str:
        return logs.why_job_is_over(run_dir, of) if of else logs.why_local_run_is_over(run_dir)

    print(logs.follow(path, lines, why_over), file=sys.stderr)


def cancel_verb(sweep: Callable[[Path, bool, float], Iterable[str] | None]) -> Verb:
    """Make the verb that ends jobs; `sweep` ends those of a sweep, and is None elsewhere."""

    @verb("cancel runs/mine --save")
    def cancel(
        folder: Path = RUN,
        save: bool = option("let the run save first"),
        timeout: float = option("for --save (default 600)", "SECONDS", default=600.0),
    ) -> None:
        """End all jobs of a run, sweep or data preparation."""
        many, preparation = sweep(folder, save, timeout), read_prep(folder.resolve())
        if many is not None:
            _say(many)
        elif preparation is not None:
            _say(control.cancel_prep(folder.resolve(), preparation.jobs))
        else:
            _say(control.cancel(require_run(folder), save=save, save_s=timeout))

    return cancel


@verb("requeue runs/mine")
def _requeue(folder: Path = RUN, now: bool = option("do not let it save first")) -> None:
    """Let a running job save and go back into the queue."""
    _say(control.requeue(require_run(folder), now=now))


@verb("demo --out runs/demo")
def _demo(
    out: str = option("folder, replaced (default runs/demo)", default="runs/demo"),
    quick: bool = option("a tenth of the training"),
    corpus: str | None = option("your text: file, folder or glob; default: embedded corpus"),
) -> None:
    """Go from raw text to an exported encoder on this machine, with a rank killed half-way."""
    # Imported here: job scripts on the nodes need no psutil.
    from launch.demo import demo

    demo(out, corpus=corpus, quick=quick)


_PREFLIGHT = "for job scripts: check the nodes of an allocation before training"
_CANCEL = cancel_verb(lambda _folder, _save, _timeout: None)
FOR_PEOPLE = (_plan, _submit, _resume, status_verb(), _logs, _CANCEL, _requeue, _render, _demo)
"""Those that people use most first."""
IN_JOBS = (cli.family("preflight", _PREFLIGHT, (_check,)), _supervise, _rank)
VERBS = (*FOR_PEOPLE, *IN_JOBS)
