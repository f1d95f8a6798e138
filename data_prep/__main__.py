"""Command line of data preparation: `python -m data_prep VERB`."""

import argparse
import sys

from data_prep.commands import VERBS
from pipeline.runtime import cli

_PROGRAM = "python -m data_prep"


def _examples(text: str) -> str:
    """Put the program before each command line; indented lines continue the one before."""
    lines = text.splitlines()
    return "\n".join(f"  {'' if line[0] == ' ' else _PROGRAM + ' '}{line}" for line in lines)


def _parser() -> argparse.ArgumentParser:
    examples = "\n".join(_examples(verb.example) for verb in VERBS)
    parser = cli.make_parser("data_prep", "Raw text to tokenised webdataset shards.", examples)
    commands = parser.add_subparsers(required=True)
    for verb in VERBS:
        command = commands.add_parser(
            verb.name,
            help=verb.summary,
            description=f"{verb.summary[0].upper()}{verb.summary[1:]}.",
            epilog=f"examples:\n{_examples(verb.example)}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb.add_arguments(command)
        command.set_defaults(run=lambda arguments, verb=verb: verb.run(arguments) or 0)
    return parser


if __name__ == "__main__":
    sys.exit(cli.run(_parser()))
