"""`postnorm profile | bandwidth`: where the time of a step goes, and how fast nodes exchange."""

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.errors import EXIT_FINISHED, ConfigError
from pipeline.runtime import cli, env
from pipeline.runtime.cli import Verb
from pipeline.runtime.files import write_atomic
from pipeline.runtime.rank import Rank, run_as_rank

_DESCRIPTION = """\
Where the time of a run's training steps goes on this machine: real steps with the run's own data,
from random weights. Times are means over the steps and ranks and add up to the step. Nothing is
read from or written to run_dir. As many steps are taken before without the profiler, which slows
the host down: what it adds is in "idle or host". Of the roofline: the least time in which the
device, by its data sheet, could do the products of the linear layers, or compute and move what
attention must (pipeline/profile/roofline.py), over the time taken."""


def _profile_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = _DESCRIPTION
    cli.add_config_arguments(parser)
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="default 20")
    parser.add_argument(
        "--warm-up",
        type=int,
        default=5,
        metavar="N",
        help="steps before, that compile kernels (default 5)",
    )
    parser.add_argument(
        "--json", type=Path, dest="json_file", metavar="FILE", help="the numbers as JSON"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="rank 0's trace for ui.perfetto.dev; .gz packs it",
    )


def _profile(arguments: argparse.Namespace) -> int:
    for name in ("steps", "warm_up"):
        number = getattr(arguments, name)
        if number < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {number}: expected 1 or more")
    return run_as_rank(partial(_profile_on, arguments), env.process_info_or_alone())


def _profile_on(arguments: argparse.Namespace, rank: Rank) -> int:
    config = load(PretrainConfig, arguments.config, arguments.overrides).config
    # Importing torch takes seconds.
    from pipeline.profile.step import profile_run, profile_text

    found = profile_run(
        config,
        rank.process,
        steps=arguments.steps,
        warm_up=arguments.warm_up,
        trace_file=arguments.trace,
    )
    if rank.process.is_first:
        print(profile_text(found))
        if arguments.json_file:
            write_atomic(arguments.json_file, (json.dumps(asdict(found)) + "\n").encode())
    return EXIT_FINISHED


def _bandwidth_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--records",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder to write NODE.bandwidth.json to",
    )
    parser.add_argument(
        "--nodes",
        default="",
        metavar="'A B'",
        help="names of all nodes in order, to name missing ones",
    )
    parser.add_argument(
        "--megabytes", type=float, default=256.0, help="that each rank has (default 256)"
    )
    parser.add_argument(
        "--timeout", type=float, default=180.0, metavar="S", help="for all of it (default 180)"
    )


def _bandwidth(arguments: argparse.Namespace) -> int:
    # It measures between ranks, so one process alone is a mistake. Its codes are no attempt's.
    return run_as_rank(partial(_bandwidth_on, arguments), env.process_info())


def _bandwidth_on(arguments: argparse.Namespace, rank: Rank) -> int:
    from pipeline.profile.bandwidth import measure_bandwidth

    rank.if_lost = f"The records in {arguments.records} say more"
    return measure_bandwidth(
        rank.process,
        arguments.records,
        nodes=arguments.nodes.split(),
        megabytes=arguments.megabytes,
        timeout_s=arguments.timeout,
    )


PROFILE = Verb(
    "profile",
    "where the time of a run's training steps goes",
    _profile_arguments,
    _profile,
    """\
profile configs/demo.yaml --steps 20
profile run.yaml kernels.attention=reference --json profile.json
torchrun --standalone --nproc-per-node 8 -m postnorm profile run.yaml --trace t.json.gz""",
)
BANDWIDTH = Verb(
    "bandwidth",
    "speed of all-reduce between nodes, for preflight (one rank)",
    _bandwidth_arguments,
    _bandwidth,
    "torchrun --standalone --nproc-per-node 8 -m postnorm bandwidth --records /tmp/records",
)
