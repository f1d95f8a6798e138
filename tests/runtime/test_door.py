"""The verbs of `postnorm` and of `pipeline`: examples, groups, nearest words, what loads torch."""

import errno
import inspect
import json
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from pipeline.commands import GROUPS
from pipeline.errors import explained
from pipeline.runtime import cli, stop
from pipeline.runtime.cli import Parser
from postnorm.__main__ import groups
from tests.support.processes import python
from tests.support.run_folder import RunFolder

PARSERS = {
    "postnorm": cli.parser_of("postnorm", "", groups()),
    "pipeline": cli.parser_of("python -m pipeline", "", GROUPS),
}


def _help(parser: Parser, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.parse(parser, [*words, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def _examples(text: str) -> list[str]:
    """Command lines of a help text, continuation lines joined."""
    lines = text.partition("\nexample:\n")[2].rstrip().replace("\\\n", " ").splitlines()
    assert all(line.startswith("  ") for line in lines)
    return [line.strip() for line in lines]


def _words(line: str, program: str) -> list[str]:
    """What the program gets of a line that a shell reads, with pipes and redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = list(lexer)
    ends = [words.index(sign) for sign in ("|", "<", ">", "&&") if sign in words]
    words = words[: min(ends, default=None)]
    if words[0] == "torchrun":
        return words[words.index("postnorm") + 1 :]
    typed = program.split()
    assert words[: len(typed)] == typed, line
    return words[len(typed) :]


@pytest.mark.parametrize("name", PARSERS)
def test_verbs_show_an_example_that_parses(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = PARSERS[name]
    assert len(parser.verbs) >= 15
    for verb in parser.verbs:
        lines = _examples(_help(parser, [verb], capsys))
        assert lines, verb
        for line in lines:
            words = _words(line, parser.prog)
            assert words[0] == verb, line
            assert callable(cli.parse(parser, words).run), line


def test_help_lists_every_verb_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    text = _help(PARSERS["postnorm"], [], capsys)
    headings = [
        text.index(f"\n{heading}:\n") for heading in ("prepare", "train", "tasks", "use", "in jobs")
    ]
    assert headings == sorted(headings)
    assert headings[1] < text.index("\n  pretrain ") < headings[2] < text.index("\n  evaluate ")
    for verb in PARSERS["postnorm"].verbs:
        assert f"\n  {verb} " in text


def _refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.parse(PARSERS["postnorm"], words)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("pretrian c.yaml", "'pretrian' is not known; did you mean `pretrain`?"),
        ("checkpoint verfy", "did you mean `verify`?"),
        ("export a b --format HF", "one of postnorm, hf, onnx, sentence-transformers"),
        ("quux", "'quux' is not known (expected one of"),
        ("export a b --fromat=hf", "--fromat=hf"),
        # A file in the place of a verb.
        ("prep p.yaml", "did you mean `run p.yaml`?"),
        ("t.yaml", "did you mean `pretrain t.yaml`?"),
    ],
)
def test_an_unknown_word_names_the_nearest(
    words: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error in _refusal(words.split(), capsys)


@cli.verb("plain c")
def _plain(
    config: str = cli.CONFIG, overrides: list[str] = cli.OVERRIDES, ranks: int | None = cli.option()
) -> None:
    """Do nothing."""


@cli.verb("run c")
def _run(
    config: str = cli.CONFIG,
    words: list[str] = cli.PROGRAM,
    overrides: list[str] = cli.OVERRIDES,
    ranks: int | None = cli.option(),
) -> None:
    """Do nothing."""


def test_words_behind_dashes_are_the_programs() -> None:
    parser = cli.parser_of("test", "", {"train": [_plain, _run]})
    found = cli.parse(parser, ["run", "c.yaml", "--ranks", "2", "a.b=1", "--", "python", "--ranks"])
    assert (found.overrides, found.ranks, found.words) == (["a.b=1"], 2, ["python", "--ranks"])
    assert list(cli.parse(parser, ["run", "c.yaml"]).words) == []
    assert cli.parse(parser, ["plain", "c.yaml", "--", "-a=b"]).overrides == ["-a=b"]


@dataclass(frozen=True)
class _Arguments:
    first: Path = cli.argument()
    form: Literal["a", "b"] | None = cli.option("form", one_of="which", required=True)
    as_json: bool = cli.option(flag="--json", one_of="which")
    most: int = cli.option(type=cli.at_least(2), default=5)
    only: list[str] = cli.option(action="append", default=[])


@cli.verb("look runs/mine --form a", if_interrupted="nothing")
def _look(arguments: _Arguments) -> int:
    """Look at a run.

    All that
    is seen.
    """
    _SEEN.append(arguments)
    return 3


_SEEN: list[_Arguments] = []


def test_arguments_are_those_that_a_function_declares(capsys: pytest.CaptureFixture[str]) -> None:
    parser = cli.parser_of("test", "", {"use": [_look]})
    assert "\n  look  look at a run\n" in _help(parser, [], capsys)
    assert "\n\nAll that\nis seen.\n\npositional" in _help(parser, ["look"], capsys)
    for words, seen in (
        (["x", "--form", "b"], _Arguments(Path("x"), "b", False, 5, [])),
        (["x", "--json", "--only=1", "--only=2"], _Arguments(Path("x"), None, True, 5, ["1", "2"])),
    ):
        parsed = cli.parse(parser, ["look", *words])
        assert (parsed.run(parsed), parsed.if_interrupted) == (3, "nothing")
        assert _SEEN.pop() == seen
    for words, error in (
        (["x"], "one of the arguments --form --json is required"),
        (["x", "--form", "a", "--json"], "not allowed with argument --form"),
        (["x", "--json", "--most", "1"], "1 must be a whole number from 2 on"),
    ):
        with pytest.raises(SystemExit):
            cli.parse(parser, ["look", *words])
        assert error in capsys.readouterr().err


_WITHOUT_TORCH = """
import contextlib, io, json, runpy, sys
sys.modules.update(dict.fromkeys(["torch", "deepspeed"]))
module, *commands = json.loads(sys.argv[1])
told = []
for words in commands:
    sys.argv[1:] = words
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        runpy.run_module(module, run_name="__main__")
    told.append(out.getvalue())
print(json.dumps(told))
"""


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("module", ["postnorm", "pipeline"])
def test_light_verbs_load_no_torch(module: str, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.started("local", 1.0)
    run.saved(10, 1.0)
    status = f"status {run.folder}"
    expected = {"--help": "pretrain", "pretrain --help": "example:",
                "config configs/demo.yaml": "run_dir: ",
                "model configs/model/roformer_v2-base.yaml": "parameters"}  # fmt: skip
    if module == "postnorm":
        expected[status] = str(run.folder)
    asked = json.dumps([module, *(command.split() for command in expected)])
    said = json.loads(python("-c", _WITHOUT_TORCH, asked))
    for text, (command, words) in zip(said, expected.items(), strict=True):
        assert words in text, command


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("module", ["postnorm", "pipeline"])
@pytest.mark.parametrize("verb", ["pretrain", "finetune", "multitask", "evaluate", "export"])
def test_signals_are_asked_for_before_other_imports(module: str, verb: str) -> None:
    program = f"""
import signal, sys
sys.modules["argparse"] = None
sys.argv[:] = ["{module}", "{verb}"]
from {module}.__main__ import main
try:
    main()
except ImportError:
    print([signal.getsignal(s) is signal.SIG_DFL for s in (signal.SIGTERM, signal.SIGUSR1)])
"""
    assert python("-c", program) == f"{[verb == 'export'] * 2}\n"


def test_an_output_that_cannot_be_written_is_told_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for words, said in (
        (["encode", "m", "--out", f"{tmp_path}/none/v.npy"], f"{tmp_path}/none does not exist"),
        (["encode", "m", "--out", f"{tmp_path}/file/v.npy"], f"{tmp_path}/file is a file"),
        (["export", "m", f"{tmp_path}/file/new/out"], f"{tmp_path}/file is a file"),
    ):
        assert said in _refusal(words, capsys)
    assert cli.parse(PARSERS["postnorm"], ["export", "m", f"{tmp_path}/new/out"]).out.name == "out"


def test_errors_of_the_system_have_their_code_and_remedy() -> None:
    for number, code, remedy in (
        (errno.ENOSPC, 2, "free space"), (errno.EDQUOT, 2, "quota"), (errno.EROFS, 2, "writable"),
        (errno.ENOENT, 2, "correct the path"), (errno.ENOTDIR, 2, "correct the path"),
        (errno.EACCES, 2, "for you"), (errno.ESTALE, 1, "the same command continues"),
        (errno.EMFILE, 1, "the same command continues"),
    ):  # fmt: skip
        told = explained(OSError(number, os.strerror(number), "/some/path"))
        assert told.exit_code == code
        assert remedy in str(told)
        assert "/some/path" in str(told)
    # Where no other try helps, nothing says that one does.
    assert "the same command" not in str(explained(OSError(errno.ENOENT, "none", "/p")))


def test_verbs_that_train_hear_signals_from_their_first_moment() -> None:
    """A signal of the first seconds would kill them; each verb that looks at one is listed."""
    every = {verb.name: verb for verbs in groups().values() for verb in verbs}
    looking = {
        name
        for name, verb in every.items()
        if name not in ("profile", "bandwidth")  # which save nothing
        if "_as_rank(" in inspect.getsource(_function(verb.function))
    }
    assert looking == set(stop.EARLY)


def _function(function: Callable[..., object]) -> Callable[..., object]:
    return function.args[0] if isinstance(function, partial) else function
