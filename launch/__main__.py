"""Command line of the launcher."""

import argparse
import os
import sys
from pathlib import Path

from launch.array_size import within_site
from launch.cluster import ClusterConfig
from launch.local import run_local
from launch.render import render
from launch.render_prep import log_folder, render_prep
from pipeline.config import schema
from pipeline.config.load import load
from pipeline.config.run import PretrainConfig
from pipeline.config.strict_yaml import Node
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, EXIT_FINISHED
from pipeline.runtime import cli

_EXAMPLES = """\
  python -m launch plan train.yaml --cluster configs/cluster/example.yaml train.micro_batch=64
  python -m launch render configs/train/roformer_v2-base.yaml --cluster configs/cluster/example.yaml
  python -m launch render configs/demo.yaml train.lr=1e-3 > job.sh && sbatch job.sh
  python -m launch submit --prep configs/prep/web.yaml --cluster configs/cluster/example.yaml
  python -m launch submit --prep configs/prep/web.yaml output_dir=runs/mine/data --dry-run
  python -m launch local configs/demo.yaml --ranks 2
  python -m launch demo --out runs/demo
"""


def _render(arguments: argparse.Namespace) -> int:
    config = load(PretrainConfig, arguments.config, arguments.overrides).config
    text = render(
        config,
        _cluster(arguments),
        config_path=arguments.config,
        overrides=arguments.overrides,
        work_dir=os.getcwd(),
    )
    print(text, end="")
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    from launch.plan import plan, plan_json, plan_text

    config = load(PretrainConfig, arguments.config, arguments.overrides).config
    cluster = _cluster(arguments)
    found = plan(config, cluster)
    print(plan_json(found) if arguments.json else "\n".join(plan_text(found, config, cluster)))
    return EXIT_FAILED_DO_NOT_RETRY if found.problems else EXIT_FINISHED


def _submit(arguments: argparse.Namespace) -> int:
    from launch import submit

    config, overrides, work_dir = arguments.config, arguments.overrides, os.getcwd()
    output_dir = submit.ask_output_dir(config, overrides)
    stages = render_prep(
        submit.ask_plan(config, overrides), within_site(_cluster(arguments)), config_path=config,
        overrides=overrides, output_dir=output_dir, work_dir=work_dir,
    )  # fmt: skip
    logs = log_folder(output_dir, work_dir)
    if not stages:
        print(f"nothing is left to do: {output_dir} holds the dataset")
    elif arguments.dry_run:
        print(submit.dry_run_text(stages, logs), end="")
    else:
        jobs = submit.submit(stages, logs)
        print(submit.summary_text(stages, jobs, [config, *overrides], logs))
    return 0


def _cluster(arguments: argparse.Namespace) -> ClusterConfig:
    if arguments.cluster:
        return load(ClusterConfig, arguments.cluster).config
    return schema.build(ClusterConfig, Node({}, "defaults"))


def _local(arguments: argparse.Namespace) -> int:
    config = load(PretrainConfig, arguments.config, arguments.overrides).config
    config.batches.require_split(arguments.ranks)
    return run_local(arguments.config, arguments.overrides, Path(config.run_dir), arguments.ranks)


def _demo(arguments: argparse.Namespace) -> int:
    from launch.demo import demo

    return demo(arguments.out, corpus=arguments.corpus)


def _parser() -> argparse.ArgumentParser:
    parser = cli.make_parser("launch", "Starts runs, on SLURM or on this machine.", _EXAMPLES)
    commands = parser.add_subparsers(required=True)
    render_ = commands.add_parser("render", help="print the sbatch script of a run; needs no SLURM")
    cli.add_config_arguments(render_)
    render_.add_argument("--cluster", help="YAML file of the cluster; default: one GPU")
    render_.set_defaults(run=_render)
    plan_ = commands.add_parser(
        "plan", help="what a run will take: days, jobs, memory, checkpoints, disk; needs no SLURM"
    )
    cli.add_config_arguments(plan_)
    plan_.add_argument("--cluster", help="YAML file of the cluster; default: one GPU")
    plan_.add_argument("--json", action="store_true", help="for programs")
    plan_.set_defaults(run=_plan)
    submit_ = commands.add_parser(
        "submit", help="hand a data preparation to SLURM, a job array for each stage"
    )
    submit_.add_argument(
        "--prep", action="store_true", required=True, help="CONFIG is one of `data_prep`"
    )
    cli.add_config_arguments(submit_)
    submit_.add_argument("--cluster", help="YAML file of the cluster; default: see its `prep`")
    submit_.add_argument(
        "--dry-run", action="store_true",
        help="print it all as a shell script; needs no SLURM and changes nothing",
    )  # fmt: skip
    submit_.set_defaults(run=_submit)
    local_ = commands.add_parser(
        "local", help="run on this machine; starts again from the newest checkpoint if a rank dies"
    )
    cli.add_config_arguments(local_)
    local_.add_argument("--ranks", type=int, default=1, help="processes (default 1)")
    local_.set_defaults(run=_local)
    demo_ = commands.add_parser(
        "demo", help="the whole line on this machine, with a rank killed half-way"
    )
    demo_.add_argument("--out", default="runs/demo", help="folder, replaced (default runs/demo)")
    demo_.add_argument("--corpus", help="your text: file, folder or glob; default: embedded corpus")
    demo_.set_defaults(run=_demo)
    return parser


if __name__ == "__main__":
    sys.exit(cli.run(_parser()))
