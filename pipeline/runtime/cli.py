"""What the command lines share: tables of verbs, overrides among options, errors as exit codes.

A package registers its verbs in one table, a tuple of `Verb`. `python -m PACKAGE` is that table,
and `postnorm` all of them together.
"""

import argparse
import atexit
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn

from pipeline.errors import (
    EXIT_FAILED_RETRY,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    PostnormError,
    missing_extra,
)
from pipeline.runtime import log, stop

logger = logging.getLogger(__name__)

_NO_WORDS: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verb:
    """One command, such as `export`."""

    name: str
    summary: str
    """One line of the list of verbs."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    """Adds its arguments; it may set the parser's description. Nothing heavy is imported."""
    run: Callable[[argparse.Namespace], int | None]
    """Does the work and gives the exit code; None is 0. It imports what takes time."""
    example: str
    """Command lines that work, from the verb on: `export runs/mine out`.

    One a line; an indented line continues the one before, and a line that does not begin with the
    verb is shown as it is.
    """
    if_interrupted: str = ""
    """What Ctrl-C leaves behind, for the line that it ends in."""
    verbs: Sequence["Verb"] = ()
    """Verbs of a family, which stand behind its name."""


class Parser(argparse.ArgumentParser):
    """A parser that names the nearest word to one that it does not know."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Keep line breaks of descriptions and examples."""
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **options)
        self.verbs: dict[str, argparse.ArgumentParser] = {}

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # argparse has no public place for this; its own text lists 30 verbs and does not choose.
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        near = get_close_matches(str(value), known, n=1)
        meant = f"; did you mean `{near[0]}`?" if near else ""
        raise argparse.ArgumentError(
            action, f"{value!r} is not known{meant} (expected one of {', '.join(known)})"
        )


def parser_of(program: str, description: str, groups: Mapping[str, Sequence[Verb]]) -> Parser:
    """Make the parser of a table of verbs."""
    lists = [f"{heading}:\n{_listed(verbs)}" for heading, verbs in groups.items()]
    parser = Parser(
        prog=program,
        usage=f"{program} VERB ...",
        description="\n\n".join([description, *lists]),
        epilog=f"`{program} VERB --help` shows a verb's arguments and a worked example.",
    )
    _add_verbs(parser, (verb for verbs in groups.values() for verb in verbs))
    return parser


def family(name: str, summary: str, verbs: Sequence[Verb]) -> Verb:
    """Make one verb of several, such as `checkpoint list` and `checkpoint verify`."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.usage = f"{parser.prog} VERB ..."
        parser.description = f"{summary}\n\n{_listed(verbs)}"
        _add_verbs(parser, verbs)

    def run(_: argparse.Namespace) -> int:
        raise AssertionError(f"argparse asks for a verb behind {name}")

    lines = [line for verb in verbs for line in verb.example.splitlines()]
    example = "\n".join(line if line[0] == " " else f"{name} {line}" for line in lines)
    return Verb(name, summary, add, run, example, verbs=verbs)


def _listed(verbs: Iterable[Verb]) -> str:
    lines = [line for verb in verbs for line in _lines_of(verb)]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"  {name:<{width}}  {summary}" for name, summary in lines)


def _lines_of(verb: Verb) -> list[tuple[str, str]]:
    if not verb.verbs:
        return [(verb.name, verb.summary)]
    return [(f"{verb.name} {one.name}", one.summary) for one in verb.verbs]


def _add_verbs(parser: argparse.ArgumentParser, verbs: Iterable[Verb]) -> None:
    # The list in the description says what argparse would say again.
    known = parser.add_subparsers(
        required=True, metavar="VERB", help=argparse.SUPPRESS, prog=parser.prog
    )
    for verb in verbs:
        one = known.add_parser(verb.name, description=verb.summary, help=verb.summary)
        verb.add_arguments(one)
        if isinstance(one, Parser) and not one.verbs:
            _add_level(one)
        one.epilog = f"example:\n{_typed(verb, parser.prog)}"
        # argparse prefers what a family's own verbs set.
        one.set_defaults(run=verb.run, if_interrupted=verb.if_interrupted)
        if isinstance(parser, Parser):
            parser.verbs[verb.name] = one


def _add_level(parser: argparse.ArgumentParser) -> None:
    add = parser.add_mutually_exclusive_group().add_argument
    levels: dict[str, Any] = {"action": "store_const", "dest": "level", "default": logging.INFO}
    add("-q", "--quiet", **levels, const=logging.WARNING, help="only results and warnings")
    add("-v", "--verbose", **levels, const=logging.DEBUG, help="also where an error comes from")


def _typed(verb: Verb, program: str) -> str:
    lines = verb.example.splitlines()
    return "\n".join(
        f"  {program} {line}" if line.split()[0] == verb.name and line[0] != " " else f"  {line}"
        for line in lines
    )


def add_config_arguments(command: argparse.ArgumentParser) -> None:
    """Add the config file and its overrides."""
    command.add_argument("config", help="YAML file")
    add_overrides(command, "such as train.lr=1e-4")


def add_overrides(
    command: argparse.ArgumentParser, text: str, metavar: str = "section.key=value"
) -> None:
    """Add overrides of single values; `text` is their help."""
    command.add_argument("overrides", nargs="*", metavar=metavar, help=text)


def config_verb(kind: type[Any], example: str) -> Verb:
    """Make the verb that checks a config of a kind and prints it."""
    from pipeline.config.load import explain, load, to_yaml, warn_of_unusual

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--explain", action="store_true", help="with units, meanings and origins"
        )
        add_config_arguments(parser)

    def run(arguments: argparse.Namespace) -> None:
        loaded = load(kind, arguments.config, arguments.overrides)
        warn_of_unusual(loaded.config)
        print(explain(loaded) if arguments.explain else to_yaml(loaded.config))

    return Verb("config", "check a config and print it in full", add, run, example)


def completion_verb(program: str, make: Callable[[], argparse.ArgumentParser]) -> Verb:
    """Make the verb that prints the script by which a shell completes a program's words."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("shell", choices=("bash", "zsh"), help="the shell that reads it")

    def run(arguments: argparse.Namespace) -> None:
        import shtab

        whole = make()
        _let_complete(whole)
        print(shtab.complete(whole, arguments.shell))

    bash = f"completion bash > ~/.local/share/bash-completion/completions/{program}"
    example = f"{bash}\ncompletion zsh > ~/.zfunc/_{program}"
    return Verb("completion", "print a script that completes words in a shell", add, run, example)


def _let_complete(parser: argparse.ArgumentParser) -> None:
    """Offer verbs, which `--help` lists itself, and files where any word may stand."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            action.help = ""
            for one in set(action.choices.values()):
                _let_complete(one)
        elif action.choices is None and action.nargs != 0:
            # shtab's own way to say it.
            action.complete = shtab.FILE  # type: ignore[attr-defined]


def take_program(command: argparse.ArgumentParser) -> None:
    """Let a verb take a program behind `--`: `arguments.words`, whose options are not ours."""
    command.set_defaults(words=_NO_WORDS)


def parse(parser: argparse.ArgumentParser, line: Sequence[str]) -> argparse.Namespace:
    """Read a command line; a mistake in it ends the process with exit code 2."""
    words: Sequence[str] = ()
    verb = parser.verbs.get(line[0]) if isinstance(parser, Parser) and line else None
    if verb is not None and verb.get_default("words") is not None and "--" in line:
        place = list(line).index("--")
        line, words = line[:place], line[place + 1 :]
    # argparse fills a `*` argument once: overrides behind an option are left over.
    # argparse fills a `*` positional once: `config FILE --explain a=b` fails with it, so overrides
    # behind options are collected from the rest.
    arguments, rest = parser.parse_known_args(line)
    strangers = [text for text in rest if text.startswith("-") or "=" not in text]
    if strangers or (rest and not hasattr(arguments, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(strangers or rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    if words:
        arguments.words = list(words)
    return arguments


def run(parser: argparse.ArgumentParser) -> int:
    """Parse the command line, run the chosen verb and return its exit code."""
    arguments = parse(parser, sys.argv[1:])
    log.set_level(arguments.level)
    log.to_console()
    try:
        code = int(arguments.run(arguments) or EXIT_FINISHED)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever reads (head, less) has seen enough. What is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FINISHED
    except KeyboardInterrupt as error:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one kills
        # What was done knows best what is left behind; else the verb does.
        left = str(error) or arguments.if_interrupted
        logger.error("interrupted%s", left and f": {left}")
        return EXIT_INTERRUPTED
    except PostnormError as error:
        logger.error("error: %s", error)
        logger.debug("where it was:", exc_info=error)
        return error.exit_code
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        logger.error("error: %s", missing)
        return missing.exit_code
    except OSError as error:
        logger.error(
            "error: %s; what was finished before is untouched, the same command continues", error
        )
        return EXIT_FAILED_RETRY


def main(parser: argparse.ArgumentParser) -> NoReturn:
    """Run a command line and end the process, at once if it failed within its process group.

    Python's way out would run into gloo's threads, which abort it with another exit code now and
    then. Children see their pipes closed. After Ctrl-C it waits for threads at work, and gives
    another exit code if the interrupt came while C code called Python.
    """
    try:
        code = run(parser)
    except Exception:  # noqa: BLE001 - Python would print it as well, then end in its own way
        traceback.print_exc()
        code = EXIT_FAILED_RETRY
    stop.ignore_from_now()
    if code == EXIT_INTERRUPTED:
        atexit._run_exitfuncs()  # or semaphores of worker processes are complained about
    distributed = sys.modules.get("torch.distributed")
    in_group = distributed is not None and distributed.is_initialized()
    if in_group or code == EXIT_INTERRUPTED:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
