"""Command line of the launcher."""

import argparse
import os
import sys

from launch import job_commands, run_commands, submit_prep
from launch.cluster import cluster_of
from launch.fit import check
from launch.preflight.commands import add_preflight
from launch.run_commands import add_cluster
from launch.site import within_site
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, EXIT_FINISHED, ConfigError
from pipeline.runtime import cli

_EXAMPLES = """\
  python -m launch plan train.yaml --cluster configs/cluster/example.yaml train.micro_batch=64
  python -m launch submit train.yaml --cluster configs/cluster/example.yaml --dry-run
  python -m launch submit train.yaml --cluster configs/cluster/example.yaml
  python -m launch submit train.yaml --local --ranks 2
  python -m launch submit --prep configs/prep/web.yaml --cluster configs/cluster/example.yaml
  python -m launch submit --evaluate runs/mine --all --cluster configs/cluster/example.yaml
  python -m launch submit --program runs/tuned --cluster c.yaml -- python finetune.py models/mine
  python -m launch resume runs/mine train.num_steps=200_000
  python -m launch status
  python -m launch status runs/mine --watch 30
  python -m launch logs runs/mine --rank 3 --follow
  python -m launch cancel runs/mine --save
  python -m launch requeue runs/mine
  python -m launch render configs/demo.yaml train.lr=1e-3 > job.sh && sbatch job.sh
  python -m launch demo --out runs/demo
"""


def _plan(arguments: argparse.Namespace) -> int:
    from launch.plan import plan, plan_json, plan_text

    config = load(PretrainConfig, arguments.config, arguments.overrides).config
    cluster = cluster_of(arguments.cluster)
    found = plan(config, cluster)
    print(plan_json(found) if arguments.json else "\n".join(plan_text(found, config, cluster)))
    return EXIT_FAILED_DO_NOT_RETRY if found.problems else EXIT_FINISHED


def _submit(arguments: argparse.Namespace) -> int:
    if arguments.program:
        return run_commands.submit_program(arguments)
    if arguments.words:
        raise ConfigError(f"`-- {' '.join(arguments.words)}`: words behind -- are for --program")
    if arguments.evaluate:
        return run_commands.submit_evaluation(arguments)
    if not arguments.prep:
        return run_commands.submit_run(arguments)
    if arguments.local:
        raise ConfigError(
            "--prep --local is `python -m data_prep run CONFIG`, which needs no SLURM"
        )
    work_dir, cluster = os.getcwd(), within_site(cluster_of(arguments.cluster))
    said = check(cluster, "prep", work_dir=work_dir, optional=arguments.dry_run)
    draft = submit_prep.prepare(arguments.config, arguments.overrides, cluster, work_dir)
    if not draft.stages:
        print(f"nothing is left to do: {draft.output_dir} holds the dataset")
    elif arguments.dry_run:
        print(f"{submit_prep.dry_run_text(draft)}# {said}")
    else:
        print(f"{said}\n{submit_prep.summary_text(draft, submit_prep.submit(draft))}")
    return EXIT_FINISHED


def _demo(arguments: argparse.Namespace) -> int:
    from launch.demo import demo

    return demo(arguments.out, corpus=arguments.corpus)


def _parser() -> argparse.ArgumentParser:
    parser = cli.make_parser("launch", "Starts runs, on SLURM or on this machine.", _EXAMPLES)
    commands = parser.add_subparsers(required=True)
    plan_ = commands.add_parser(
        "plan", help="what a run will take: days, jobs, memory, checkpoints, disk; needs no SLURM"
    )
    cli.add_config_arguments(plan_)
    add_cluster(plan_)
    plan_.add_argument("--json", action="store_true", help="for programs")
    plan_.set_defaults(run=_plan)
    submit_ = commands.add_parser(
        "submit", help="hand a run, or a data preparation, to SLURM; or run it here"
    )
    what = submit_.add_mutually_exclusive_group()
    what.add_argument(
        "--prep", action="store_true", help="CONFIG is one of `data_prep`: a job array a stage"
    )
    what.add_argument(
        "--evaluate", action="store_true", help="CONFIG is a run folder: its held-out losses"
    )
    what.add_argument(
        "--program", action="store_true",
        help="CONFIG is a new folder; `-- WORDS` is a program to run on all ranks, such as your "
        "fine-tuning of an exported model",
    )  # fmt: skip
    cli.add_config_arguments(submit_)
    add_cluster(submit_)
    run_commands.add_run_options(submit_)
    submit_.add_argument(
        "--dry-run", action="store_true",
        help="print it all as a script; needs no SLURM and changes nothing",
    )  # fmt: skip
    submit_.set_defaults(run=_submit)
    run_commands.add_resume(
        commands.add_parser("resume", help="submit a run again, as it was submitted last")
    )
    run_commands.add_render(
        commands.add_parser("render", help="print the sbatch script of a run; needs no SLURM")
    )
    run_commands.add_decide(
        commands.add_parser(
            "decide", help="for job scripts: what becomes of a job after an attempt"
        )
    )
    run_commands.add_rank(
        commands.add_parser("rank", help="for job scripts: run `-- WORDS` as one rank")
    )
    add_preflight(commands)
    job_commands.add_commands(commands)
    demo_ = commands.add_parser(
        "demo", help="the whole line on this machine, with a rank killed half-way"
    )
    demo_.add_argument("--out", default="runs/demo", help="folder, replaced (default runs/demo)")
    demo_.add_argument("--corpus", help="your text: file, folder or glob; default: embedded corpus")
    demo_.set_defaults(run=_demo)
    return parser


def _words_of_program() -> list[str]:
    """What stands behind `--`, taken off the command line: its options are not ours."""
    if "--" not in sys.argv:
        return []
    place = sys.argv.index("--")
    words = sys.argv[place + 1 :]
    del sys.argv[place:]
    return words


if __name__ == "__main__":
    _words = _words_of_program()
    _launcher = _parser()
    _launcher.set_defaults(words=_words)
    sys.exit(cli.run(_launcher))
