"""Command line of data preparation."""

import argparse
import sys
from pathlib import Path

from data_prep.config import PrepConfig
from pipeline.config.load import explain, load, to_yaml
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY
from pipeline.runtime import cli

_EXAMPLES = """\
  python -m data_prep run configs/prep/demo.yaml
  python -m data_prep run configs/prep/demo.yaml output_dir=runs/mine/data \\
      'sources=[{name: mine, inputs: [/data/text, "/data/more/*.jsonl.zst"]}]'
  python -m data_prep verify runs/mine/data
  python -m data_prep config configs/prep/demo.yaml --explain
"""


def _run(arguments: argparse.Namespace) -> int:
    # Imported here, so that `config` and `--help` answer without sentencepiece and webdataset.
    from data_prep.run import run

    run(load(PrepConfig, arguments.config, arguments.overrides).config, replace=arguments.replace)
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


def _config(arguments: argparse.Namespace) -> int:
    loaded = load(PrepConfig, arguments.config, arguments.overrides)
    print(explain(loaded) if arguments.explain else to_yaml(loaded.config))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = cli.make_parser("data_prep", "Raw text to tokenised webdataset shards.", _EXAMPLES)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="prepare a dataset; continues an interrupted run")
    run.add_argument("--replace", action="store_true", help="replace another finished dataset")
    run.set_defaults(run=_run)
    config = commands.add_parser("config", help="check a config and print it in full")
    config.add_argument("--explain", action="store_true", help="with units, meanings and origins")
    config.set_defaults(run=_config)
    for command in (run, config):
        cli.add_config_arguments(command)
    verify = commands.add_parser(
        "verify", help="read a dataset again and compare it with its index"
    )
    verify.add_argument("folder", type=Path)
    verify.set_defaults(run=_verify)
    return parser


if __name__ == "__main__":
    sys.exit(cli.run(_parser()))
