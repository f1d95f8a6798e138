"""The commands that start runs: render, submit, resume, and decide, which job scripts call."""

import argparse
import os
from pathlib import Path

from launch.cluster import ClusterConfig, cluster_of
from launch.decide import Attempt, Limits, end_attempt, exit_codes, is_done, newest_checkpoint
from launch.fit import check
from launch.local import run_local
from launch.plan import plan
from launch.program import run_program
from launch.records import (
    CLUSTER_FILE,
    CONFIG_FILE,
    EVALUATE,
    PRETRAIN,
    PROGRAM,
    submission_folder,
    submissions,
)
from launch.render import render
from launch.site import ask_sbatch
from launch.submit_run import (
    Draft,
    Source,
    checkout_job,
    dry_run_text,
    prepare_evaluation,
    prepare_program,
    prepare_training,
    submit,
    summary_text,
)
from pipeline.checkpoints.manifest import FOLDER, published
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.data.format import INDEX_FILE, read_index
from pipeline.errors import EXIT_FINISHED, ConfigError
from pipeline.runtime import cli
from pipeline.runtime.files import RESOLVED_FILE, STOP_FILE


def add_render(parser: argparse.ArgumentParser) -> None:
    """Arguments of `render`."""
    cli.add_config_arguments(parser)
    add_cluster(parser)
    parser.set_defaults(run=_render)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Arguments of `submit` for a run."""
    parser.add_argument(
        "--local", action="store_true",
        help="run here and now, without SLURM; starts again from the newest checkpoint if a rank "
        "dies",
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, default=1, help="processes of --local (default 1)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--step", help="of --evaluate: this checkpoint; default: the newest good one"
    )
    which.add_argument("--all", action="store_true", help="of --evaluate: every kept checkpoint")
    parser.add_argument("--data", help="of --evaluate: other data of the same tokenizer")


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Arguments of `resume`."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="run folder")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="such as train.num_steps=200_000"
    )
    add_cluster(parser, "that of the last submission")
    parser.add_argument("--dry-run", action="store_true", help="print the script; change nothing")
    parser.set_defaults(run=_resume)


def add_decide(parser: argparse.ArgumentParser) -> None:
    """Arguments of `decide`."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="run folder")
    parser.add_argument("--kind", required=True)
    parser.add_argument("--job", required=True, help="SLURM's id")
    parser.add_argument("--restart", required=True, type=int)
    parser.add_argument("--nodes", required=True, help="with spaces between them")
    parser.add_argument("--ranks", required=True, type=int)
    parser.add_argument("--before", required=True, help="newest checkpoint at the start, or ''")
    parser.add_argument(
        "--asked-to-stop", required=True, type=int, help="1: the time limit is near"
    )
    parser.add_argument("--step-code", required=True, type=int, help="of srun")
    parser.add_argument("--max-restarts", required=True, type=int)
    parser.add_argument("--max-attempts", required=True, type=int)
    parser.set_defaults(run=_decide)


def add_rank(parser: argparse.ArgumentParser) -> None:
    """Arguments of `rank`."""
    parser.set_defaults(run=_rank)


def add_cluster(parser: argparse.ArgumentParser, default: str = "one GPU") -> None:
    """The option that names a cluster profile."""
    parser.add_argument("--cluster", help=f"YAML file of the cluster; default: {default}")


def submit_run(arguments: argparse.Namespace) -> int:
    """`submit CONFIG`, with `--local` or not."""
    config = load(PretrainConfig, arguments.config, arguments.overrides).config
    cluster = cluster_of(arguments.cluster)
    if arguments.local:
        config.batches.require_split(max(1, arguments.ranks))
        words = ["pipeline", PRETRAIN, arguments.config, *arguments.overrides]
        return _run_here(arguments, words, PRETRAIN, Path(config.run_dir), cluster)
    source = Source(arguments.config, tuple(arguments.overrides), arguments.cluster, os.getcwd())
    return _hand_over(_checked(config, cluster, source), dry_run=arguments.dry_run)


def submit_evaluation(arguments: argparse.Namespace) -> int:
    """`submit --evaluate RUN`, with `--local` or not."""
    run_dir = Path(arguments.config).absolute()
    config_path = run_dir / RESOLVED_FILE
    if not config_path.is_file() or not published(run_dir / FOLDER):
        raise ConfigError(
            f"{run_dir} has no checkpoint to evaluate; expected the run_dir of a run that has saved"
        )
    config = load(PretrainConfig, config_path).config
    options = [
        *(["--step", arguments.step] if arguments.step else []),
        *(["--all"] if arguments.all else []),
        *(["--data", arguments.data] if arguments.data else []),
        *arguments.overrides,
    ]
    cluster = cluster_of(arguments.cluster)
    if arguments.local:
        words = ["pipeline", EVALUATE, str(run_dir), *options]
        return _run_here(arguments, words, EVALUATE, run_dir, cluster)
    source = Source(str(config_path), tuple(arguments.overrides), arguments.cluster, os.getcwd())
    inputs = [arguments.data or config.data.dir]
    draft = prepare_evaluation(run_dir, options, inputs, cluster, source)
    return _hand_over(draft, dry_run=arguments.dry_run)


def submit_program(arguments: argparse.Namespace) -> int:
    """`submit --program RUN -- WORDS`, with `--local` or not."""
    run_dir, words = Path(arguments.config).absolute(), arguments.words
    if not words or arguments.overrides:
        raise ConfigError(
            "--program wants a folder for its log, then `--` and the program: "
            "python -m launch submit --program runs/tuned --cluster C -- python finetune.py ..."
        )
    cluster = cluster_of(arguments.cluster)
    if arguments.local:
        return _run_here(arguments, ["launch", "rank", "--", *words], PROGRAM, run_dir, cluster)
    source = Source(words[0], tuple(words[1:]), arguments.cluster, os.getcwd())
    return _hand_over(prepare_program(run_dir, words, cluster, source), dry_run=arguments.dry_run)


def _rank(arguments: argparse.Namespace) -> int:
    return run_program(arguments.words)


def _run_here(
    arguments: argparse.Namespace, words: list[str], kind: str, run_dir: Path,
    cluster: ClusterConfig,
) -> int:  # fmt: skip
    if arguments.dry_run or arguments.ranks < 1:
        raise ConfigError("--local runs at once: leave out --dry-run, and give --ranks N >= 1")
    limits = Limits(cluster.max_restarts, cluster.max_attempts_without_progress)
    return run_local(words, kind, run_dir, arguments.ranks, limits)


def _render(arguments: argparse.Namespace) -> int:
    config = load(PretrainConfig, arguments.config, arguments.overrides).config
    cluster = cluster_of(arguments.cluster)
    config.batches.require_split(cluster.nodes * cluster.num_ranks_per_node)
    job = checkout_job(
        config, arguments.config, arguments.overrides, os.getcwd(), arguments.cluster
    )
    print(render(job, cluster), end="")
    return EXIT_FINISHED


def _resume(arguments: argparse.Namespace) -> int:
    run_dir: Path = arguments.run_dir.absolute()
    earlier = [one for one in submissions(run_dir) if one.kind == PRETRAIN]
    if earlier:
        folder = submission_folder(run_dir, earlier[-1].number)
        config_path, work_dir = folder / CONFIG_FILE, earlier[-1].work_dir
        cluster_path = arguments.cluster or str(folder / CLUSTER_FILE)
    else:
        config_path, work_dir = run_dir / RESOLVED_FILE, os.getcwd()
        cluster_path = arguments.cluster
        if not config_path.is_file() or cluster_path is None:
            raise ConfigError(
                f"{run_dir} has no job that was submitted; submit its config, or, if the run was "
                "started otherwise, name the cluster with --cluster"
            )
    config = load(PretrainConfig, config_path, arguments.overrides).config
    if (Path(work_dir) / config.run_dir).resolve() != run_dir.resolve():
        raise ConfigError(
            f"{config_path} is of run_dir={config.run_dir} in {work_dir}, which is not {run_dir}: "
            "the folder was moved; submit its config from where it is now"
        )
    source = Source(str(config_path), tuple(arguments.overrides), cluster_path, work_dir)
    cluster = cluster_of(cluster_path)
    os.chdir(work_dir)  # where relative paths of the config start
    draft = _checked(config, cluster, source)
    return _hand_over(draft, dry_run=arguments.dry_run, stop_file=run_dir / STOP_FILE)


def _checked(config: PretrainConfig, cluster: ClusterConfig, source: Source) -> Draft:
    """Refuses what cannot run before it waits in a queue."""
    data = Path(source.work_dir) / config.data.dir
    if not (data / INDEX_FILE).is_file():
        raise ConfigError(
            f"data.dir={config.data.dir}: {data} has no {INDEX_FILE}; prepare the dataset first "
            "(`python -m data_prep status CONFIG` says what is missing), or mend the path"
        )
    read_index(data)
    problems = plan(config, cluster).problems
    if problems:
        raise ConfigError("the plan cannot work:\n" + "\n".join(f"  {line}" for line in problems))
    return prepare_training(config, cluster, source)


def _hand_over(draft: Draft, *, dry_run: bool, stop_file: Path | None = None) -> int:
    """The last checks, then sbatch; a STOP file that must not stop this job is removed before."""
    said = check(draft.cluster, draft.job.kind, work_dir=draft.job.work_dir, optional=dry_run)
    if dry_run:
        print(f"# {said}\n{dry_run_text(draft)}", end="")
        return EXIT_FINISHED
    print(f"{said}; {ask_sbatch(draft.script)}")
    if stop_file and stop_file.exists():
        stop_file.unlink()
        print(f"removed {stop_file}")
    for line in summary_text(draft, submit(draft)):
        print(line)
    return EXIT_FINISHED


def _decide(arguments: argparse.Namespace) -> int:
    run_dir: Path = arguments.run_dir
    codes = exit_codes(run_dir, f"{arguments.job}.{arguments.restart}")
    attempt = Attempt(
        job=arguments.job, restart=arguments.restart, nodes=tuple(arguments.nodes.split()),
        before=arguments.before or None, after=newest_checkpoint(run_dir), codes=codes,
        ranks=arguments.ranks,
        is_done=is_done(arguments.kind, run_dir, codes, arguments.ranks),
        at_limit=bool(arguments.asked_to_stop), step_code=arguments.step_code,
    )  # fmt: skip
    limits = Limits(arguments.max_restarts, arguments.max_attempts)
    decision = end_attempt(attempt, limits, run_dir)
    print(f"{'requeue' if decision.word == 'requeue' else 'end'}: {decision.reason}", flush=True)
    return decision.exit_code
