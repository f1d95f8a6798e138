"""What the command lines share: verbs, overrides among options, errors as exit codes.

A verb is a function:

    @verb("grow runs/demo/train models/wide --width 2")
    def grow(
        source: Path = argument("run folder, or model folder", "SRC"),
        out: Path = argument("folder to write", "OUT"),
        width: int = option("factor, a power of 2", default=1),
    ) -> None:
        '''A wider or deeper model that starts from this one.'''

`python -m PACKAGE` has the verbs of one package, and `postnorm` those of all.
"""

import argparse
import atexit
import inspect
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin

from pipeline.errors import (
    EXIT_FAILED_RETRY,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    PostnormError,
    explained,
    missing_extra,
)
from pipeline.runtime import log, stop

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Argument:
    is_option: bool
    flag: str
    one_of: str
    words: dict[str, Any]


def argument(text: str | None = None, metavar: str | None = None, **words: Any) -> Any:
    """Declare a positional argument of a verb; `words` are those of argparse's `add_argument`."""
    return _Argument(False, "", "", {"help": text, "metavar": metavar, **words})


def option(
    text: str | None = None,
    metavar: str | tuple[str, ...] | None = None,
    *,
    flag: str = "",
    one_of: str = "",
    **words: Any,
) -> Any:
    """Declare an option of a verb.

    Args:
        text: its help.
        metavar: what stands for its value there.
        flag: its name, such as `--json`; the parameter's by default.
        one_of: options with the same word exclude each other; if they are `required`, one must be
            given.
        **words: those of `add_argument`; type, choices and `store_true` follow from the annotation.
    """
    return _Argument(True, flag, one_of, {"help": text, "metavar": metavar, **words})


def overrides(text: str, metavar: str = "section.key=value") -> Any:
    """Declare overrides of single values, which may also stand behind options."""
    return argument(text, metavar, nargs="*")


CONFIG: Any = argument("YAML file")
OVERRIDES: Any = overrides("such as train.lr=1e-4")
RUN: Any = argument("run folder", "RUN")
MODEL: Any = argument(
    "run (newest good checkpoint), RUN@STEP, RUN@best, model or Hugging Face folder", "MODEL"
)
JSON: Any = option("one JSON object", flag="--json")
PROGRAM: Any = argument()
"""A program behind `--`, whose options are not the verb's; the parameter's name is `words`."""


def new_path(text: str) -> Path:
    """Return a file or folder to write; the folders above it are made, if need be."""
    path = Path(text)
    above = next(folder for folder in path.absolute().parents if folder.exists())
    _require_writable(path, above)
    return path


def new_file(text: str) -> Path:
    """Return a file to write, whose folder must be there: to learn that after hours is too late."""
    path = Path(text)
    _require_writable(path, path.absolute().parent)
    return path


def _require_writable(path: Path, folder: Path) -> None:
    if not folder.is_dir():
        what = "is a file:" if folder.exists() else "does not exist: make it, or"
        raise argparse.ArgumentTypeError(f"{path}: {folder} {what} correct the path")
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise argparse.ArgumentTypeError(
            f"{path}: {folder} cannot be written; choose another folder, or make it writable"
        )


def at_least(least: int) -> Callable[[str], int]:
    """Make the type of a whole number from `least` on."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} must be a whole number from {least} on")
        return int(text)

    return number


@dataclass(frozen=True)
class Verb:
    """One command, such as `export`."""

    name: str
    summary: str
    """One line of the list of verbs."""
    description: str
    example: str
    """Command lines that work, from the verb on: `export runs/mine out`.

    One a line; an indented line continues the one before, and a line that does not begin with the
    verb is shown as it is.
    """
    function: Callable[..., int | None]
    """Does the work and gives the exit code; None is 0. It imports what takes time."""
    parameters: Mapping[str, inspect.Parameter]
    """Its parameters by name, whose defaults declare them as arguments."""
    if_interrupted: str = ""
    """What Ctrl-C leaves behind, for the line that it ends in."""
    verbs: Sequence["Verb"] = ()
    """Verbs of a family, which stand behind its name."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add what the function's parameters declare."""
        parser.description = self.description
        if self.verbs:
            parser.usage = f"{parser.prog} VERB ..."
            _add_verbs(parser, self.verbs)
        groups: dict[str, argparse._ActionsContainer] = {}
        for name, parameter in self.parameters.items():
            declared: _Argument = parameter.default
            if declared is PROGRAM:
                parser.set_defaults(words=_NO_WORDS)
                continue
            given = {key: value for key, value in declared.words.items() if value is not None}
            words = _typed_words(parameter.annotation) | given
            to: argparse._ActionsContainer = parser
            if declared.one_of:
                required = words.pop("required", False)
                if declared.one_of not in groups:
                    groups[declared.one_of] = parser.add_mutually_exclusive_group(required=required)
                to = groups[declared.one_of]
            if declared.is_option:
                to.add_argument(declared.flag or f"--{name.replace('_', '-')}", dest=name, **words)
            else:
                to.add_argument(name, **words)

    def run(self, arguments: argparse.Namespace) -> int | None:
        """Call the function with parsed arguments."""
        return self.function(**{name: getattr(arguments, name) for name in self.parameters})


_NO_WORDS: tuple[str, ...] = ()


def _typed_words(kind: Any) -> dict[str, Any]:
    """Return what argparse must know of a type."""
    if NoneType in get_args(kind):
        kind = get_args(kind)[0]
    if get_origin(kind) in (list, tuple):
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    return {"action": "store_true"} if kind is bool else {} if kind is str else {"type": kind}


def verb(*example: str, if_interrupted: str = "") -> Callable[[Callable[..., int | None]], Verb]:
    """Make a verb of a function, by its name; the summary is its docstring's first line.

    What follows that line is shown by `--help` in its place. A function of many parameters may
    take them as one dataclass.
    """

    def made(function: Callable[..., int | None]) -> Verb:
        name = function.__name__.strip("_").replace("_", "-")
        first, _, rest = (inspect.getdoc(function) or "").partition("\n\n")
        summary = f"{first[:1].lower()}{first[1:].removesuffix('.')}"
        parameters, call = inspect.signature(function).parameters, function
        for kind in [each.annotation for each in parameters.values()]:
            if isinstance(kind, type) and is_dataclass(kind):
                parameters = inspect.signature(kind).parameters
                call = partial(lambda of, kind, **values: of(kind(**values)), function, kind)
        shown = "\n".join(example)
        return Verb(name, summary, rest or summary, shown, call, parameters, if_interrupted)

    return made


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
        if str(value).endswith((".yaml", ".yml")):  # a file in the place of the verb
            near = [f"{verb} {value}" for verb in ("run", "pretrain") if verb in known]
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

    def run() -> int:
        raise AssertionError(f"argparse asks for a verb behind {name}")

    lines = [line for verb in verbs for line in verb.example.splitlines()]
    example = "\n".join(line if line[0] == " " else f"{name} {line}" for line in lines)
    return Verb(name, summary, f"{summary}\n\n{_listed(verbs)}", example, run, {}, verbs=verbs)


def _listed(verbs: Iterable[Verb]) -> str:
    lines = [
        (f"{verb.name} {one.name}" if verb.verbs else one.name, one.summary)
        for verb in verbs
        for one in verb.verbs or (verb,)
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"  {name:<{width}}  {summary}" for name, summary in lines)


def _add_verbs(parser: argparse.ArgumentParser, verbs: Iterable[Verb]) -> None:
    # The list in the description says what argparse would say again.
    known = parser.add_subparsers(
        required=True, metavar="VERB", help=argparse.SUPPRESS, prog=parser.prog
    )
    for verb in verbs:
        one = known.add_parser(verb.name, help=verb.summary)
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
    add(
        "-v",
        "--verbose",
        **levels,
        const=logging.DEBUG,
        help="also asides, and where an error comes from",
    )


def _typed(verb: Verb, program: str) -> str:
    return "\n".join(
        f"  {program} {line}" if line.split(" ")[0] == verb.name else f"  {line}"
        for line in verb.example.splitlines()
    )


def config_verb(kind: type[Any], example: str) -> Verb:
    """Make the verb that checks a config of a kind and prints it."""
    from pipeline.config.load import explain as explained
    from pipeline.config.load import load, to_yaml, warn_of_unusual

    @verb(example)
    def config(
        explain: bool = option("with units, meanings and origins"),
        config: str = CONFIG,
        overrides: list[str] = OVERRIDES,
    ) -> None:
        """Check a config and print it in full."""
        loaded = load(kind, config, overrides)
        warn_of_unusual(loaded.config)
        print(explained(loaded) if explain else to_yaml(loaded.config))

    return config


_OF_A_STEP = ("--revision", "--checkpoint", "--ckpt", "--ckpt-path", "--ckpt_path", "--step")
"""What other tools call the choice of a checkpoint."""


def parse(parser: argparse.ArgumentParser, line: Sequence[str]) -> argparse.Namespace:
    """Read a command line; a mistake in it ends the process with exit code 2."""
    words: Sequence[str] = ()
    verb = parser.verbs.get(line[0]) if isinstance(parser, Parser) and line else None
    if verb is not None and verb.get_default("words") is not None and "--" in line:
        place = list(line).index("--")
        line, words = line[:place], line[place + 1 :]
    # argparse fills a `*` positional once: `config FILE --explain a=b` fails with it, so overrides
    # behind options are collected from the rest.
    arguments, rest = parser.parse_known_args(line)
    strangers = [text for text in rest if text.startswith("-") or "=" not in text]
    if strangers or (rest and not hasattr(arguments, "overrides")):
        strangers = strangers or rest
        advice = ""
        if any(text.partition("=")[0] in _OF_A_STEP for text in strangers):
            advice = "; a checkpoint is named MODEL@STEP, such as runs/mine@40000 or runs/mine@best"
        parser.error(f"unrecognized arguments: {' '.join(strangers)}{advice}")
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
        told = explained(error)
        logger.error("error: %s", told)
        logger.debug("where it was:", exc_info=error)
        return told.exit_code


def main(parser: argparse.ArgumentParser) -> NoReturn:
    """Run a command line and end the process, at once if it failed within its process group."""
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
    # Python's way out would run into gloo's threads, which abort it with another exit code now and
    # then. After Ctrl-C it waits for threads at work, and gives another exit code if the interrupt
    # came while C code called Python.
    if in_group or code == EXIT_INTERRUPTED:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
