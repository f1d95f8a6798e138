"""The verb of multi-task training. Nothing here imports torch early."""

import argparse
from pathlib import Path

from pipeline.errors import EXIT_FINISHED, ConfigError
from pipeline.runtime import cli
from pipeline.runtime.cli import Verb


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="YAML file of the run, or the name of a shipped one")
    cli.add_overrides(parser, "such as balance.method=equal train.num_steps=5000")


def _multitask(arguments: argparse.Namespace) -> int:
    from pipeline.config.load import warn_of_unusual
    from pipeline.multitask.config import load_mix
    from pipeline.runtime import env
    from pipeline.runtime.rank import Rank, run_as_rank

    def work(rank: Rank) -> int:
        mix = load_mix(arguments.config, tuple(arguments.overrides))
        rank.run_dir = Path(mix.config.run_dir)
        if rank.process.is_first:
            warn_of_unusual(mix.config)
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


def _transfer_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _TRANSFER
    parser.add_argument("config", help="YAML file: run_dir, mix, tasks, seeds")
    cli.add_overrides(parser, "such as seeds=[1,2] run_dir=runs/transfer")


_TRANSFER = """\
Fine-tune each task from the model that a multi-task stage starts from, from that of all tasks, and
from one that never saw the task; write RUN_DIR/transfer.md and transfer.json with the paired
differences. What is finished in RUN_DIR is not run again."""


def _transfer(arguments: argparse.Namespace) -> int:
    from pipeline.runtime import env
    from pipeline.runtime.rank import Rank, run_as_rank

    def work(rank: Rank) -> int:
        if rank.process.world_size > 1:
            raise ConfigError(
                f"transfer runs in one process, not in {rank.process.world_size}; train the "
                "mixes on several ranks first, into RUN_DIR/all and RUN_DIR/without-TASK"
            )
        from pipeline.multitask.transfer import markdown, transfer

        print(markdown(transfer(arguments.config, tuple(arguments.overrides))))
        return EXIT_FINISHED

    return run_as_rank(work, env.process_info_or_alone())


TRANSFER = Verb(
    "transfer",
    "what fine-tuned tasks gain from a multi-task stage",
    _transfer_arguments,
    _transfer,
    "transfer transfer.yaml run_dir=runs/transfer",
    "The same command continues it.",
)
