"""`postnorm status | inspect | coverage`: how a run stands and what it sees, past and to come."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, EXIT_FINISHED
from pipeline.runtime import cli
from pipeline.runtime.cli import Verb


def _status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def _status(arguments: argparse.Namespace) -> None:
    from pipeline.inspect.status import run_status, status_text

    status = run_status(arguments.run_dir)
    if arguments.json:
        print(json.dumps(asdict(status)))
    else:
        print("\n".join(status_text(arguments.run_dir, status)))


def _coverage_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")
    cli.add_config_arguments(parser)


def _coverage(arguments: argparse.Namespace) -> int:
    from pipeline.inspect.coverage import coverage, coverage_text

    config = load(PretrainConfig, arguments.config, arguments.overrides).config
    report = coverage(config.train_data, config.train.num_steps)
    if arguments.json:
        print(json.dumps(asdict(report)))
    else:
        for line in coverage_text(report):
            print(line)
    return EXIT_FINISHED if report.is_exact else EXIT_FAILED_DO_NOT_RETRY


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run folder")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--step", type=int, metavar="N", help="optimizer step, from 1")
    what.add_argument("--batch", type=int, metavar="N", help="batch, from 0, skipped ones included")
    what.add_argument("--find", metavar="ID", help="the steps in which a document is seen")
    what.add_argument("--skip", action="store_true", help="the batches that were skipped")
    parser.add_argument("--rank", type=int, metavar="R", help="only this rank's part of the step")
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="W",
        help="number of ranks; default: of the run's newest start",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a sequence")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="data.dir=FOLDER",
        help="where the dataset is, if it was moved",
    )


def _inspect(arguments: argparse.Namespace) -> None:
    from pipeline.inspect.run import find_text, open_run, skipped_text
    from pipeline.inspect.step import Ranks, step_text

    run = open_run(arguments.run_dir, arguments.overrides)
    if arguments.find is not None:
        lines = find_text(run, arguments.find)
    elif arguments.skip:
        lines = skipped_text(run)
    else:
        by_step = arguments.step is not None
        place = run.batch_of_step(arguments.step) if by_step else run.batch(arguments.batch)
        ranks = Ranks(arguments.rank, arguments.world_size)
        lines = step_text(run, place, ranks, as_json=arguments.json)
    for line in lines:
        print(line)


STATUS = Verb(
    "status",
    "how a run is doing, from the files in its folder",
    _status_arguments,
    _status,
    "status runs/demo/train",
)
COVERAGE = Verb(
    "coverage",
    "what a run would see: epochs, fill and tokens, each token once",
    _coverage_arguments,
    _coverage,
    "coverage configs/demo.yaml train.num_steps=2000",
)
INSPECT = Verb(
    "inspect",
    "documents, packing and masks of any step of a run, past or to come",
    _inspect_arguments,
    _inspect,
    """\
inspect runs/demo/train --step 12 --rank 1 | less
inspect runs/demo/train --find python/bisect.rst""",
)
