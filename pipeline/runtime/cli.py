"""What the command lines share: overrides anywhere among options, errors as exit codes."""

import argparse
import logging
import os
import sys

from pipeline.errors import EXIT_FAILED_RETRY, EXIT_FINISHED, PostnormError
from pipeline.runtime.log import to_console

logger = logging.getLogger(__name__)


def make_parser(program: str, description: str, examples: str) -> argparse.ArgumentParser:
    """A parser whose help ends in worked examples."""
    return argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_config_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the config file and its overrides."""
    command.add_argument("config", help="YAML file")
    command.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="such as train.lr=1e-4"
    )


def run(parser: argparse.ArgumentParser) -> int:
    """Parses the command line, runs the chosen command's `run` and returns its exit code."""
    # argparse fills a `*` argument once: overrides behind an option are left over.
    arguments, rest = parser.parse_known_args()
    strangers = [text for text in rest if text.startswith("-") or "=" not in text]
    if strangers or (rest and not hasattr(arguments, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(strangers or rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    # Where a command's output is for programs, nothing else stands in it.
    to_console(stream=sys.stderr if getattr(arguments, "json", False) else None)
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever reads (head, less) has seen enough. What is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FINISHED
    except PostnormError as error:
        logger.error("error: %s", error)
        return error.exit_code
    except OSError as error:
        logger.error(
            "error: %s; what was finished before is untouched, the same command continues", error
        )
        return EXIT_FAILED_RETRY
