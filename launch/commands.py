"""The verbs of `python -m launch`: their arguments, and what each calls."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from launch import control, logs, prep, sweep
from launch.cluster import ClusterConfig, cluster_of
from launch.decide import JobAttempt, Limits, StorageRetry, verdict
from launch.local import combined_exit_code, run_local, run_program
from launch.notify import notify_end
from launch.plan import mix_text, plan, plan_json, plan_mix, plan_text
from launch.preflight.check import check_node
from launch.preflight.judge import gather, judge_nodes
from launch.queue import room_of
from launch.records import (
    EVALUATE,
    MULTITASK,
    PRETRAIN,
    PROGRAM,
    is_run,
    is_sweep,
    read_prep,
    require_run,
)
from launch.script import render
from launch.site import ask_sbatch, check, profile_here, within_site
from launch.status import (
    PrepReport,
    prep_report,
    prep_summary,
    queue_reports,
    queue_text,
    run_report,
    run_summary,
)
from launch.submit import (
    Origin,
    SubmissionPlan,
    checkout_job,
    config_of_resume,
    dry_run_text,
    prepare_evaluation,
    prepare_mix,
    prepare_program,
    prepare_training,
    source_of_resume,
    submit,
    summary_text,
)
from launch.sweep_status import cancel_sweep, sweep_report, sweep_summary
from pipeline.checkpoints.manifest import FOLDER, published
from pipeline.config.load import load, warn_of_unusual
from pipeline.config.runs import PretrainConfig
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, EXIT_FINISHED, ConfigError, PostnormError
from pipeline.multitask.config import MultiTaskConfig, TaskMix, is_mix, load_mix, require_split
from pipeline.runtime import cli, env
from pipeline.runtime.cli import Verb
from pipeline.runtime.run_folder import RunFolder
from pipeline.runtime.summary import FolderSummary


def _add_cluster(parser: argparse.ArgumentParser, default: str = "one GPU") -> None:
    parser.add_argument("--cluster", help=f"YAML file of the cluster; default: {default}")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN", help="run folder")


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} must be at least {least}")
        return int(text)

    return number


def _config(arguments: argparse.Namespace) -> PretrainConfig:
    return load(PretrainConfig, arguments.config, arguments.overrides).config


def _training(arguments: argparse.Namespace) -> PretrainConfig | MultiTaskConfig:
    if is_mix(arguments.config):
        return load_mix(arguments.config, tuple(arguments.overrides)).config
    return _config(arguments)


def _source(arguments: argparse.Namespace, config: str) -> Origin:
    return Origin(config, tuple(arguments.overrides), arguments.cluster, os.getcwd())


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    cli.add_config_arguments(parser)
    _add_cluster(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")


def _plan(arguments: argparse.Namespace) -> int:
    cluster = cluster_of(arguments.cluster)
    if is_mix(arguments.config):
        mix = load_mix(arguments.config, arguments.overrides)
        found = plan_mix(mix, cluster)
        _say([plan_json(found)] if arguments.json else mix_text(found, mix, cluster))
        return EXIT_FINISHED
    config = _config(arguments)
    result = plan(config, cluster)
    _say([plan_json(result)] if arguments.json else plan_text(result, config, cluster))
    return EXIT_FAILED_DO_NOT_RETRY if result.problems else EXIT_FINISHED


def _add_submit(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--prep",
        action="store_true",
        help="CONFIG is a config of `data_prep`: submit a job array for each stage",
    )
    what.add_argument(
        "--evaluate",
        action="store_true",
        help="CONFIG is a run folder: compute its held-out losses",
    )
    what.add_argument(
        "--program",
        action="store_true",
        help="CONFIG is a new folder, and `-- WORDS` a program to run on all ranks, such as your "
        "fine-tuning of an exported model",
    )
    what.add_argument(
        "--sweep",
        action="store_true",
        help="CONFIG is a sweep: submit its runs as a job array; with --local, run them here",
    )
    cli.take_program(parser)
    cli.add_config_arguments(parser)
    _add_cluster(parser)
    parser.add_argument(
        "--local",
        action="store_true",
        help="run here and now, without SLURM; restart from the newest checkpoint if a rank dies",
    )
    parser.add_argument("--ranks", type=int, default=1, help="processes of --local (default 1)")
    parser.add_argument(
        "--jobs", type=_at_least(1), metavar="N", help="for --sweep: runs at the same time"
    )
    parser.add_argument("--json", action="store_true", help="for --sweep: one JSON object")
    text = (
        "for --prep and --sweep: hand over arrays as they fit below your limit on jobs, with a "
        "look every so many seconds (60); the same call goes on where one was ended"
    )
    parser.add_argument("--wait-room", type=_at_least(1), nargs="?", const=60, help=text)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--step", help="for --evaluate: this checkpoint; default: the newest good one"
    )
    which.add_argument("--all", action="store_true", help="for --evaluate: every kept checkpoint")
    parser.add_argument("--data", help="for --evaluate: another dataset of the same tokenizer")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print everything as a script; needs no SLURM and changes nothing",
    )


def _submit(arguments: argparse.Namespace) -> int:
    if arguments.program:
        return _submit_program(arguments)
    if arguments.words:
        raise ConfigError(f"`-- {' '.join(arguments.words)}`: only --program takes words after --")
    if arguments.sweep:
        return _submit_sweep(arguments)
    if arguments.jobs or arguments.json:
        raise ConfigError("--jobs and --json are for --sweep: leave them out")
    if arguments.prep:
        return _submit_prep(arguments)
    if arguments.wait_room:
        raise ConfigError("--wait-room is for --prep and --sweep: leave it out")
    if arguments.evaluate:
        return _submit_evaluation(arguments)
    cluster = (cluster_of if arguments.local else profile_here)(arguments.cluster)
    if is_mix(arguments.config):
        return _submit_mix(arguments, cluster)
    config = _config(arguments)
    if arguments.local:
        config.batches.require_split(max(1, arguments.ranks))
        words = ["pipeline", PRETRAIN, arguments.config, *arguments.overrides]
        return _run_here(arguments, words, PRETRAIN, Path(config.run_dir), cluster)
    warn_of_unusual(config)
    draft = prepare_training(config, cluster, _source(arguments, arguments.config))
    return _hand_over(draft, dry_run=arguments.dry_run)


def _submit_mix(arguments: argparse.Namespace, cluster: ClusterConfig) -> int:
    mix = load_mix(arguments.config, arguments.overrides)
    if arguments.local:
        require_split(mix, max(1, arguments.ranks))
        words = ["pipeline", MULTITASK, arguments.config, *arguments.overrides]
        return _run_here(arguments, words, PRETRAIN, Path(mix.config.run_dir), cluster)
    draft = prepare_mix(mix, cluster, _source(arguments, arguments.config))
    return _hand_over(draft, dry_run=arguments.dry_run)


def _submit_evaluation(arguments: argparse.Namespace) -> int:
    run_dir = Path(arguments.config).absolute()
    config_path = RunFolder(run_dir).resolved
    if not config_path.is_file() or not published(run_dir / FOLDER):
        raise ConfigError(
            f"{run_dir} has no checkpoint to evaluate. Pass the run_dir of a run that has saved"
        )
    config = load(PretrainConfig, config_path).config
    options = [
        *(["--step", arguments.step] if arguments.step else []),
        *(["--all"] if arguments.all else []),
        *(["--data", arguments.data] if arguments.data else []),
        *arguments.overrides,
    ]
    cluster = (cluster_of if arguments.local else profile_here)(arguments.cluster)
    if arguments.local:
        words = ["pipeline", EVALUATE, str(run_dir), *options]
        return _run_here(arguments, words, EVALUATE, run_dir, cluster)
    inputs = [arguments.data or config.data.dir]
    source = _source(arguments, str(config_path))
    draft = prepare_evaluation(run_dir, options, inputs, cluster, source)
    return _hand_over(draft, dry_run=arguments.dry_run)


def _submit_program(arguments: argparse.Namespace) -> int:
    run_dir, words = Path(arguments.config).absolute(), arguments.words
    if not words or arguments.overrides:
        raise ConfigError(
            "--program needs a folder for its log, then `--` and the program: "
            "python -m launch submit --program runs/tuned --cluster C -- python finetune.py ..."
        )
    cluster = (cluster_of if arguments.local else profile_here)(arguments.cluster)
    if arguments.local:
        return _run_here(arguments, ["launch", "rank", "--", *words], PROGRAM, run_dir, cluster)
    source = Origin(words[0], tuple(words[1:]), arguments.cluster, os.getcwd())
    draft = prepare_program(run_dir, words, cluster, source)
    return _hand_over(draft, dry_run=arguments.dry_run)


def _submit_prep(arguments: argparse.Namespace) -> int:
    if arguments.local:
        raise ConfigError(
            "--prep --local is `python -m data_prep run CONFIG`, which needs no SLURM"
        )
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


def _submit_sweep(arguments: argparse.Namespace) -> int:
    work_dir = os.getcwd()
    config, runs = sweep.read_sweep(arguments.config, arguments.overrides, work_dir)
    what, jobs = sweep.todo(runs, config.kind), arguments.jobs or config.jobs
    said: dict[str, Any] = {
        "dir": str(Path(work_dir, config.dir)),
        "runs": [run.name for run in what.runs],
        "left": what.left,
    }
    code, text = EXIT_FINISHED, ""
    if not arguments.json:
        _say(sweep.left_lines(what))
    if what.runs and arguments.local:
        _refuse_dry_run(arguments)
        codes = sweep.run_here(config, what, jobs, arguments.ranks, arguments.cluster, work_dir)
        said["exit_codes"], code = codes, combined_exit_code(codes.values())
    elif what.runs:
        cluster, source = profile_here(arguments.cluster), _source(arguments, arguments.config)
        text = check(cluster, config.verb, work_dir=work_dir, optional=arguments.dry_run)
        room = room_of(cluster, prep=False, every_s=arguments.wait_room)
        if arguments.dry_run:
            drafts = sweep.drafts(config, what, cluster, source, jobs, room)
            said["script"] = drafts[0].script
            text = "\n".join([f"# {text}", *map(sweep.dry_run_text, drafts)])
        else:
            for job, draft in sweep.submit_all(config, what, cluster, source, jobs, room):
                said.setdefault("jobs", []).append(job)
                text += f"\njob {job}: {len(draft.runs)} runs, {draft.job.at_once} at once"
            said["job"] = next(iter(said.get("jobs", [])), None)
            text += "\n"
    elif not arguments.dry_run:
        sweep.record(config, Path(said["dir"]), what.every)
    if arguments.json:
        print(json.dumps(said))
    else:
        print(text + ("" if arguments.dry_run else _sweep_text(Path(said["dir"]))))
    return code


def _sweep_text(folder: Path) -> str:
    return sweep_summary(sweep_report(folder.resolve())).text()


def _refuse_dry_run(arguments: argparse.Namespace) -> None:
    if arguments.dry_run or arguments.ranks < 1:
        raise ConfigError("--local runs at once: leave out --dry-run, and give --ranks N >= 1")


def _run_here(
    arguments: argparse.Namespace,
    words: list[str],
    kind: str,
    run_dir: Path,
    cluster: ClusterConfig,
) -> int:
    _refuse_dry_run(arguments)
    limits = Limits(cluster.max_restarts, cluster.max_attempts_without_progress)
    return run_local(words, kind, run_dir, arguments.ranks, limits)


def _hand_over(draft: SubmissionPlan, *, dry_run: bool, stop_file: Path | None = None) -> int:
    """Check the site and call sbatch; remove a STOP file that must not stop this job."""
    checked = check(draft.cluster, draft.job.kind, work_dir=draft.job.work_dir, optional=dry_run)
    if dry_run:
        print(f"# {checked}\n{dry_run_text(draft)}", end="")
        return EXIT_FINISHED
    print(f"{checked}; {ask_sbatch(draft.script)}")
    if stop_file and stop_file.exists():
        stop_file.unlink()
        print(f"removed {stop_file}")
    _say(summary_text(draft, submit(draft)))
    return EXIT_FINISHED


def _add_resume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="run folder")
    cli.add_overrides(parser, "such as train.num_steps=200_000")
    _add_cluster(parser, "that of the last submission")
    parser.add_argument("--dry-run", action="store_true", help="print the script; change nothing")


def _resume(arguments: argparse.Namespace) -> int:
    run_dir: Path = arguments.run_dir.absolute()
    source = source_of_resume(run_dir, arguments.overrides, arguments.cluster)
    config, cluster = config_of_resume(run_dir, source), profile_here(source.cluster)
    os.chdir(source.work_dir)  # relative paths of the config start there
    if isinstance(config, TaskMix):
        draft = prepare_mix(config, cluster, source)
    else:
        draft = prepare_training(config, cluster, source)
    return _hand_over(draft, dry_run=arguments.dry_run, stop_file=RunFolder(run_dir).stop)


def _add_render(parser: argparse.ArgumentParser) -> None:
    cli.add_config_arguments(parser)
    _add_cluster(parser)


def _render(arguments: argparse.Namespace) -> None:
    config, cluster = _config(arguments), cluster_of(arguments.cluster)
    config.batches.require_split(cluster.num_ranks)
    job = checkout_job(config, _source(arguments, arguments.config))
    print(render(job, cluster), end="")


def _add_decide(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="run folder")
    parser.add_argument("--kind", required=True)
    parser.add_argument("--job", required=True, help="SLURM's id")
    parser.add_argument("--restart", required=True, type=int)
    parser.add_argument("--jobs-before", default=0, type=int, help="of a chain")
    parser.add_argument("--nodes", required=True, help="names, separated by spaces")
    parser.add_argument("--ranks", required=True, type=int)
    parser.add_argument("--before", required=True, help="newest checkpoint at the start, or ''")
    parser.add_argument("--asked-to-stop", required=True, type=int, help="1: time is nearly up")
    parser.add_argument("--step-code", required=True, type=int, help="exit code of srun")
    parser.add_argument("--max-restarts", required=True, type=int)
    parser.add_argument("--max-attempts", required=True, type=int)
    parser.add_argument("--time-limit", default="", help="of the job, as the profile has it")
    parser.add_argument("--patience", type=float, default=0.0, help="seconds that storage may fail")
    parser.add_argument("--job-ends", type=float, help="end of the job's time, in Unix seconds")


def _decide(arguments: argparse.Namespace) -> int:
    begun = JobAttempt(
        job=arguments.job,
        restart=arguments.restart,
        nodes=tuple(arguments.nodes.split()),
        before=arguments.before or None,
        ranks=arguments.ranks,
        at_limit=bool(arguments.asked_to_stop),
        step_code=arguments.step_code,
        jobs_before=arguments.jobs_before,
    )
    limits = Limits(arguments.max_restarts, arguments.max_attempts, arguments.time_limit)
    patience = StorageRetry(arguments.patience, arguments.job_ends)
    decision = verdict(begun, arguments.kind, limits, arguments.run_dir, patience)
    print(f"{'requeue' if decision.word == 'requeue' else 'end'}: {decision.reason}", flush=True)
    notify_end(arguments.run_dir, f"{arguments.job}.{arguments.restart}", decision)
    return decision.exit_code


def _rank(arguments: argparse.Namespace) -> int:
    return run_program(arguments.words)


def _add_preflight(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(required=True)
    node = parts.add_parser("check", help="check this node and write DIR/NODE.json")
    node.set_defaults(part=_preflight_check)
    judge = parts.add_parser(
        "judge",
        help="read all records; exit code 0: go, 75: bad nodes were added to RUN/launch/excluded, "
        "2: stop, no other node helps",
    )
    judge.set_defaults(part=_preflight_judge)
    judge.add_argument(
        "--nodes", required=True, metavar="'A B'", help="names of all nodes of the job"
    )
    judge.add_argument("--job", required=True, help="SLURM's id")
    judge.add_argument("--restart", required=True, type=int, metavar="N")
    judge.add_argument(
        "--bandwidth",
        action="store_true",
        help="also judge the measurements of `python -m pipeline bandwidth`",
    )
    for part in (node, judge):
        cli.add_config_arguments(part)
        _add_cluster(part)
        part.add_argument(
            "--records", type=Path, required=True, metavar="DIR", help="folder of the records"
        )


def _preflight_check(arguments: argparse.Namespace) -> None:
    config, cluster = _training(arguments), cluster_of(arguments.cluster)
    record = check_node(config, cluster, arguments.records, env.node_name())
    for finding in record.findings:
        print(f"{record.node}: {finding.text}", flush=True)
    # A thread that hangs in a driver or a file system would hold back Python's own exit.
    os._exit(EXIT_FINISHED)


def _preflight_judge(arguments: argparse.Namespace) -> int:
    config, cluster = _training(arguments), cluster_of(arguments.cluster)
    nodes, measured = arguments.nodes.split(), arguments.bandwidth
    evidence = gather(arguments.records, nodes, config, with_bandwidth=measured)
    job, restart = arguments.job, arguments.restart
    judged = judge_nodes(config, cluster, evidence, job=job, restart=restart)
    _say(f"preflight: {line}" for line in judged.text(evidence))
    return judged.exit_code


def _preflight(arguments: argparse.Namespace) -> int | None:
    code: int | None = arguments.part(arguments)
    return code


def _add_status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", nargs="?", type=Path, metavar="RUN", help="folder of a run, sweep or dataset"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, or a list of them")
    parser.add_argument("--watch", type=_at_least(0), metavar="SECONDS", help="repeat forever")


DatasetLook = Callable[[Path], tuple[FolderSummary, dict[str, Any]] | None]
"""Looks at the folder of a dataset: what is shown, and plain values; None for another folder."""
_STATUS_OF = "a run_dir, the folder of a sweep or dataset, or nothing for the queue"


def status_verb(look: DatasetLook | None = None) -> Verb:
    """Make the verb that shows runs, preparations' jobs and, by a way to look at it, a dataset."""
    return Verb(
        "status",
        "show the state of a run, sweep or dataset; without one, of all in the queue",
        _add_status,
        partial(_status, look or (lambda _: None)),
        "status\nstatus runs/mine --watch 30",
    )


def _status(look: DatasetLook, arguments: argparse.Namespace) -> None:
    tell = _status_json if arguments.json else _status_text
    clear = "\x1b[H\x1b[2J" if sys.stdout.isatty() and not arguments.json else ""
    while arguments.watch is not None:
        print(f"{clear}{tell(look, arguments.folder)}", flush=True)
        time.sleep(arguments.watch)
    print(tell(look, arguments.folder))


def _status_text(look: DatasetLook, folder: Path | None) -> str:
    if folder is None:
        return queue_text(queue_reports())
    if is_sweep(folder):
        return _sweep_text(folder)
    if is_run(folder):
        return run_summary(run_report(folder.resolve())).text()
    seen, jobs = _dataset(look, folder)
    shown = [*([prep_summary(jobs)] if jobs else []), *([seen[0]] if seen else [])]
    return "\n".join(summary.text() for summary in shown)


def _status_json(look: DatasetLook, folder: Path | None) -> str:
    if folder is None:
        return json.dumps([asdict(report) for report in queue_reports()])
    if is_sweep(folder):
        return json.dumps(asdict(sweep_report(folder.resolve())))
    if is_run(folder):
        return json.dumps(asdict(run_report(folder.resolve())))
    seen, jobs = _dataset(look, folder)
    report = jobs or PrepReport(str(folder.resolve()), {}, [], "")
    return json.dumps(asdict(replace(report, dataset=seen and seen[1])))


def _dataset(
    look: DatasetLook, folder: Path
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


def _add_logs(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--job", help="id; default: the newest")
    which.add_argument("--rank", type=int, metavar="N", help="the log of rank N, of all its starts")
    parser.add_argument("--lines", type=_at_least(0), default=50, help="last lines (default 50)")
    parser.add_argument("--follow", action="store_true", help="continue until the job has ended")


def _logs(arguments: argparse.Namespace) -> None:
    run_dir = require_run(arguments.folder)
    path = logs.find_log(run_dir, arguments.job, arguments.rank)
    if not arguments.follow:
        logs.show(path, arguments.lines)
        return
    job = arguments.job or logs.newest_job(run_dir)

    def why_over() -> str:
        return logs.why_job_is_over(run_dir, job) if job else logs.why_local_run_is_over(run_dir)

    print(logs.follow(path, arguments.lines, why_over), file=sys.stderr)


def _add_cancel(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--save", action="store_true", help="let the run save first")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="for --save (default 600)"
    )


def _cancel(arguments: argparse.Namespace) -> None:
    folder = arguments.folder.resolve()
    preparation = read_prep(folder)
    if is_sweep(folder):
        _say(cancel_sweep(folder, save=arguments.save, save_s=arguments.timeout))
    elif preparation is not None:
        _say(control.cancel_prep(folder, preparation.jobs))
    else:
        run_dir = require_run(arguments.folder)
        _say(control.cancel(run_dir, save=arguments.save, save_s=arguments.timeout))


def _add_requeue(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--now", action="store_true", help="do not let it save first")


def _requeue(arguments: argparse.Namespace) -> None:
    _say(control.requeue(require_run(arguments.folder), now=arguments.now))


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="runs/demo", help="folder, replaced (default runs/demo)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the training")
    parser.add_argument(
        "--corpus", help="your text: file, folder or glob; default: embedded corpus"
    )


def _demo(arguments: argparse.Namespace) -> None:
    # Imported here: job scripts on the nodes need no psutil.
    from launch.demo import demo

    demo(arguments.out, corpus=arguments.corpus, quick=arguments.quick)


VERBS: tuple[Verb, ...] = (
    Verb(
        "plan",
        "estimate days, jobs, memory, checkpoints and disk of a run; needs no SLURM",
        _add_plan,
        _plan,
        "plan train.yaml --cluster configs/cluster/example.yaml train.micro_batch=64",
    ),
    Verb(
        "submit",
        "submit a run, a sweep of runs or a data preparation to SLURM; or run it here",
        _add_submit,
        _submit,
        "submit train.yaml --cluster configs/cluster/example.yaml --dry-run\n"
        "submit train.yaml --cluster configs/cluster/example.yaml\n"
        "submit train.yaml --local --ranks 2\n"
        "submit --prep configs/prep/web.yaml --cluster configs/cluster/example.yaml --wait-room\n"
        "submit --sweep sweep.yaml --cluster configs/cluster/example.yaml\n"
        "submit --sweep sweep.yaml --local --jobs 2\n"
        "submit --evaluate runs/mine --all --cluster configs/cluster/example.yaml\n"
        "submit --program runs/tuned --cluster c.yaml -- python finetune.py models/mine",
    ),
    Verb(
        "resume",
        "submit a run again with the config of its last submission",
        _add_resume,
        _resume,
        "resume runs/mine train.num_steps=200_000",
    ),
    status_verb(),
    Verb(
        "logs",
        "show the log of a run's job, or of one rank",
        _add_logs,
        _logs,
        "logs runs/mine --rank 3 --follow",
    ),
    Verb(
        "cancel",
        "end all jobs of a run, sweep or data preparation",
        _add_cancel,
        _cancel,
        "cancel runs/mine --save",
    ),
    Verb(
        "requeue",
        "let a running job save and go back into the queue",
        _add_requeue,
        _requeue,
        "requeue runs/mine",
    ),
    Verb(
        "render",
        "print the sbatch script of a run; needs no SLURM",
        _add_render,
        _render,
        "render configs/demo.yaml train.lr=1e-3 > job.sh && sbatch job.sh",
    ),
    Verb(
        "demo",
        "go from raw text to an exported encoder on this machine, with a rank killed half-way",
        _add_demo,
        _demo,
        "demo --out runs/demo",
    ),
    Verb(
        "preflight",
        "for job scripts: check the nodes of an allocation before training",
        _add_preflight,
        _preflight,
        "preflight check train.yaml --cluster c.yaml --records runs/mine/launch/preflight/7.0",
    ),
    Verb(
        "decide",
        "for job scripts: decide what follows an attempt",
        _add_decide,
        _decide,
        "decide runs/mine --kind pretrain --job 7 --restart 0 --nodes 'n1 n2' --ranks 4 "
        "--before '' --asked-to-stop 0 --step-code 0 --max-restarts 50 --max-attempts 2",
    ),
    Verb(
        "rank",
        "for job scripts: run the program `-- WORDS` as one rank",
        cli.take_program,
        _rank,
        "rank -- python finetune.py models/mine",
    ),
)
"""Every verb, those that people use most first."""
