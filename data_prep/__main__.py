"""Command line of data preparation."""

import argparse
import json
import sys
from pathlib import Path

from data_prep.config import PrepConfig
from pipeline.config.load import explain, load, to_yaml
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, ConfigError
from pipeline.runtime import cli

_EXAMPLES = """\
  python -m data_prep run configs/prep/demo.yaml
  python -m data_prep run configs/prep/demo.yaml output_dir=runs/mine/data \\
      'sources=[{name: mine, inputs: [/data/text, "/data/more/*.jsonl.zst"]}]'
  python -m data_prep plan configs/prep/web.yaml --cores 64
  python -m data_prep run configs/prep/web.yaml --stage ingest --rank 3 --world 64
  python -m data_prep status configs/prep/web.yaml
  python -m data_prep show configs/prep/web.yaml --rejected 'few words'
  python -m data_prep show configs/prep/web.yaml --id web/part-03.jsonl@81920
  python -m data_prep verify runs/mine/data
  python -m data_prep datasheet runs/mine/data
  python -m data_prep config configs/prep/demo.yaml --explain
"""


def _run(arguments: argparse.Namespace) -> int:
    # Imported here, so that `config` and `--help` answer without sentencepiece and webdataset.
    from data_prep.run import run, run_part

    config = load(PrepConfig, arguments.config, arguments.overrides).config
    if arguments.stage is None:
        if (arguments.rank, arguments.world) != (0, 1):
            raise ConfigError("--rank and --world are for one stage: give --stage too")
        run(config, replace=arguments.replace)
    else:
        run_part(
            config, arguments.stage, rank=arguments.rank, world=arguments.world,
            replace=arguments.replace,
        )  # fmt: skip
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    from data_prep.plan import plan, plan_text

    made = plan(load(PrepConfig, arguments.config, arguments.overrides).config)
    print(json.dumps(made) if arguments.json else plan_text(made, arguments.cores))
    return 0


def _status(arguments: argparse.Namespace) -> int:
    from data_prep.status import status_text

    print(status_text(load(PrepConfig, arguments.config, arguments.overrides).config))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from data_prep.show import document_text, rejected_text

    config = load(PrepConfig, arguments.config, arguments.overrides).config
    if arguments.id is not None:
        print(document_text(config, arguments.id))
    else:
        print(rejected_text(config, arguments.rejected, arguments.limit))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from data_prep.verify import verify

    problems = verify(arguments.folder)
    for problem in problems:
        print(f"error: {problem}")
    if problems:
        print(f"{arguments.folder}: {len(problems)} problems")
        return EXIT_FAILED_DO_NOT_RETRY
    print(f"{arguments.folder}: everything is as it was written")
    return 0


def _datasheet(arguments: argparse.Namespace) -> int:
    from data_prep.datasheet.sheet import write

    for path in write(arguments.folder):
        print(path)
    return 0


def _config(arguments: argparse.Namespace) -> int:
    loaded = load(PrepConfig, arguments.config, arguments.overrides)
    print(explain(loaded) if arguments.explain else to_yaml(loaded.config))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = cli.make_parser("data_prep", "Raw text to tokenised webdataset shards.", _EXAMPLES)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="prepare a dataset; continues an interrupted run")
    run.add_argument("--replace", action="store_true", help="replace another finished dataset")
    run.add_argument(
        "--stage", help="do only this stage, as an array task; the ones before must be complete"
    )
    run.add_argument("--rank", type=int, default=0, help="which part of the stage (default 0)")
    run.add_argument("--world", type=int, default=1, help="parts of the stage (default 1)")
    run.set_defaults(run=_run)
    plan = commands.add_parser("plan", help="stages, tasks, core-hours and disk; reads no text")
    plan.add_argument("--json", action="store_true", help="for programs")
    plan.add_argument("--cores", type=int, default=64, help="to say how long it takes (default 64)")
    plan.set_defaults(run=_plan)
    status = commands.add_parser("status", help="what is done, running, failed and waiting")
    status.set_defaults(run=_status)
    show = commands.add_parser(
        "show", help="a document as it was, as it is, and what became of it; or what was rejected"
    )
    what = show.add_mutually_exclusive_group(required=True)
    what.add_argument("--id", help="document id, such as web/part-03.jsonl@81920")
    what.add_argument("--rejected", metavar="REASON", help="documents rejected for this reason; "
                      "'' for all reasons")  # fmt: skip
    show.add_argument("--limit", type=int, default=5, help="documents a reason (default 5)")
    show.set_defaults(run=_show)
    config = commands.add_parser("config", help="check a config and print it in full")
    config.add_argument("--explain", action="store_true", help="with units, meanings and origins")
    config.set_defaults(run=_config)
    for command in (run, plan, status, show, config):
        cli.add_config_arguments(command)
    verify = commands.add_parser(
        "verify", help="read a dataset again and compare it with its index"
    )
    verify.add_argument("folder", type=Path)
    verify.set_defaults(run=_verify)
    datasheet = commands.add_parser("datasheet", help="make the pages about a dataset again")
    datasheet.add_argument("folder", type=Path)
    datasheet.set_defaults(run=_datasheet)
    return parser


if __name__ == "__main__":
    sys.exit(cli.run(_parser()))
