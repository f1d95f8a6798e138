"""The verb of multi-task training. Nothing here imports torch early."""

import argparse
from pathlib import Path

from pipeline.runtime import cli
from pipeline.runtime.cli import Verb


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="YAML file of the run, or the name of a shipped one")
    cli.add_overrides(parser, "such as balance.method=equal train.num_steps=5000")


def _multitask(arguments: argparse.Namespace) -> int:
    from pipeline.multitask.config import load_mix
    from pipeline.runtime import env
    from pipeline.runtime.rank import Rank, run_as_rank

    def work(rank: Rank) -> int:
        mix = load_mix(arguments.config, tuple(arguments.overrides))
        rank.run_dir = Path(mix.config.run_dir)
        from pipeline.multitask.run import multitask

        return multitask(mix, rank)

    return run_as_rank(work, env.process_info_or_alone(), env.launched_run_dir())


MULTITASK = Verb(
    "multitask",
    "train one model on many tasks together",
    _arguments,
    _multitask,
    "multitask mix.yaml balance.method=gradient_norm train.num_steps=2000",
    "The same command continues it.",
)
