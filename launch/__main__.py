"""`python -m launch VERB`: start runs, on SLURM or on this machine."""

import argparse
import sys
from collections.abc import Callable

from launch.commands import VERBS, Verb
from pipeline.errors import EXIT_FINISHED
from pipeline.runtime import cli


def _parser() -> argparse.ArgumentParser:
    for_people = [verb for verb in VERBS if not verb.summary.startswith("for job scripts")]
    examples = "".join(_examples(verb) for verb in for_people)
    parser = cli.make_parser("launch", "Start runs, on SLURM or on this machine.", examples)
    commands = parser.add_subparsers(required=True, metavar="VERB")
    for verb in VERBS:
        command = commands.add_parser(
            verb.name,
            help=verb.summary,
            description=verb.summary,
            epilog=f"examples:\n{_examples(verb)}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb.add_arguments(command)
        command.set_defaults(run=_with_code(verb.run))
    return parser


def _examples(verb: Verb) -> str:
    return "".join(f"  python -m launch {line}\n" for line in verb.example.splitlines())


def _with_code(
    run: Callable[[argparse.Namespace], int | None],
) -> Callable[[argparse.Namespace], int]:
    def run_to_code(arguments: argparse.Namespace) -> int:
        code = run(arguments)
        return EXIT_FINISHED if code is None else code

    return run_to_code


def _take_words() -> list[str]:
    """Take the words after `--` off the command line: they are another program's."""
    if "--" not in sys.argv:
        return []
    place = sys.argv.index("--")
    words = sys.argv[place + 1 :]
    del sys.argv[place:]
    return words


if __name__ == "__main__":
    _words = _take_words()
    _launcher = _parser()
    _launcher.set_defaults(words=_words)
    sys.exit(cli.run(_launcher))
