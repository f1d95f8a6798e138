"""Every command of README.md, CONTRIBUTING.md and docs/ is accepted, and run if it can be.

`make test` parses all of them. `make test-all` runs those without a comment `<!-- needs: ... -->`,
page by page, in a folder with a small corpus, a dataset and a run.
"""

import argparse
import os
import pydoc_data.topics
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from pipeline.runtime import cli
from tests.support.pages import NEEDS, PAGES, ROOT, Block, blocks, commands_in_sentences
from tests.support.processes import write_program

_OF_OTHERS = re.compile(
    "apptainer|cd|diff|docker|echo|git|head|pip|source|ssh|tail|tensorboard|touch|zstdcat"
)
_KINDS = ("bash", "python", "text", "toml", "yaml")
_SMALLER = {
    "vocab_size: 8_000": "vocab_size: 600",
    "roformer_v2-small": "roformer_v2-small, num_layers: 2, hidden_size: 32, num_heads: 2",
    "num_steps: 20_000": "num_steps: 12",
    "warmup_steps: 1_000": "warmup_steps: 2",
    "global_batch: 128": "global_batch: 8",
    "micro_batch: 32": "micro_batch: 4",
    "seq_len: 128": "seq_len: 64",
    "eval_every_steps: 500": "eval_every_steps: 12, eval_sequences: 8",
}
"""What the examples of README.md have, and what is quick."""
_STAGED = ("staged.yaml", "decay.yaml", "decays.yaml")
_SMALLER_STAGES = {
    "seq_len: 128": "seq_len: 64",
    "seq_len: 1024": "seq_len: 128",
    "steps: 16_000": "steps: 8",
    "steps: 2_000": "steps: 4",
    "@18000": "@12",
    "global_batch: 128, micro_batch: 32": "global_batch: 8, micro_batch: 4",
    "global_batch: 16, micro_batch: 4": "global_batch: 4, micro_batch: 2",
    "data/good": "data/mine",
}
"""The same of docs/stages.md, whose files are `_STAGED`; with those of README.md's it also has."""
_SCRIPTS = ("api",)
"""Pages whose Python is a program; `test_formats` runs that of formats.md."""

_ALL = [block for page in PAGES for block in blocks(page)]
_COMMANDS = [block for block in _ALL if block.kind == "bash"]
_RUN = {
    page.name: [
        block
        for block in _ALL
        if block.page == page.name and not block.needs
        if block.kind == "bash" or (block.kind == "python" and page.stem in _SCRIPTS)
    ]
    for page in PAGES
}


@cache
def _parser(package: str) -> cli.Parser:
    from pipeline.commands import GROUPS
    from postnorm.__main__ import groups

    return cli.parser_of(package, "", GROUPS if package == "pipeline" else groups())


def _segments(command: str) -> list[list[str]]:
    """Split a line into the programs that it starts, each with its arguments."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|<>&;")
    lexer.whitespace_split = True
    segments: list[list[str]] = [[]]
    is_file = False
    for word in lexer:
        if set(word) <= set("|&;"):
            segments.append([])
        elif set(word) <= set("<>"):
            is_file = True
        elif is_file:
            is_file = False
        else:
            segments[-1].append(word)
    return segments


def _check(words: Sequence[str]) -> None:
    """Fail if a command would not be accepted, as far as can be said without running it."""
    words = list(words)
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    program, rest = Path(words[0]).name, words[1:]
    if program.endswith(".sh"):
        assert (ROOT / words[0]).is_file(), words[0]
    elif program == "make":
        targets = [word for word in rest if "=" not in word]
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets), rest
    elif program in ("python", "torchrun"):
        place = rest.index("-m")
        _check_module(rest[place + 1], rest[place + 2 :])
    elif program in ("postnorm", "pytest"):
        _check_module(program, rest)
    else:
        assert _OF_OTHERS.fullmatch(program), f"{program} is not a program that the pages use"


def _check_module(name: str, arguments: Sequence[str]) -> None:
    if list(arguments) == ["--version"]:
        return  # of the door itself; the pages run it
    if name in ("pipeline", "postnorm"):
        try:
            cli.parse(_parser(name), arguments)
        except SystemExit as error:
            if error.code != 0:
                pytest.fail(f"{name} {shlex.join(arguments)}")
    elif name == "pytest":
        paths = [word for word in arguments if word.startswith("tests")]
        assert all((ROOT / path).exists() for path in paths), arguments
    else:
        file = ROOT / f"{name.replace('.', '/')}.py"
        assert file.is_file(), name
        text = file.read_text(encoding="utf-8")
        options = [word for word in arguments if word.startswith("--") and word != "--help"]
        assert all(f'"{option}"' in text for option in options), arguments


@pytest.mark.parametrize("block", _ALL, ids=lambda block: block.name)
def test_blocks_say_what_they_are(block: Block) -> None:
    assert block.kind in _KINDS, "name the language behind the three backticks"
    assert set(block.needs) <= set(NEEDS)


@pytest.mark.parametrize("block", _COMMANDS, ids=lambda block: block.name)
def test_commands_are_accepted(block: Block) -> None:
    assert block.commands
    for command in block.commands:
        for words in _segments(command):
            _check(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_sentences_exist(page: Path) -> None:
    """A sentence may leave out arguments, but verbs and options are those of the parser."""
    for command in commands_in_sentences(page):
        for words in _segments(command):
            if words[0] != "postnorm":
                _check(words)
            else:
                _check_mention(words[1:], command)


def _check_mention(words: Sequence[str], command: str) -> None:
    parser: argparse.ArgumentParser = _parser("postnorm")
    for number, word in enumerate(words):
        verbs = parser.verbs if isinstance(parser, cli.Parser) else {}
        if verbs and not word.startswith("-") and word != "VERB":
            assert word in verbs, command
            parser = verbs[word]
        elif word == "--":
            break
        elif word.startswith("--") and "VERB" not in words[:number]:
            assert word in parser.format_help(), command


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory, processes: None) -> Path:
    """A folder with texts, and the dataset and the run of README.md's examples, made smaller."""
    folder = tmp_path_factory.mktemp("workshop")
    (folder / "texts").mkdir()
    for name, text in sorted(pydoc_data.topics.topics.items()):
        (folder / "texts" / f"{name}.txt").write_text(text, encoding="utf-8")
    (folder / "texts.txt").write_text("a text\nanother\n")
    (folder / "pairs.tsv").write_text("a text\tanother\t0\na text\ta text\t1\n")
    prep, train = (block.text for block in blocks(ROOT / "README.md") if block.kind == "yaml")
    for long, short in _SMALLER.items():
        assert (long in prep) + (long in train) == 1, long
        prep, train = prep.replace(long, short), train.replace(long, short)
    (folder / "prep.yaml").write_text(prep)
    (folder / "train.yaml").write_text(train)
    staged = (block.text for block in blocks(ROOT / "docs/stages.md") if block.kind == "yaml")
    for name, text in zip(_STAGED, staged, strict=True):
        for long, short in (_SMALLER_STAGES | _SMALLER).items():
            text = text.replace(long, short)
        (folder / name).write_text(text)
    (folder / "bin").mkdir()
    program = f'#!/bin/sh\nexec {sys.executable} -m postnorm "$@"\n'
    write_program(folder / "bin" / "postnorm", program)
    _run("postnorm prep run prep.yaml && postnorm pretrain train.yaml", folder)
    shutil.copytree(folder / "runs" / "mine", folder / "runs" / "other")
    shutil.copytree(folder, folder.with_suffix(".kept"))
    return folder


def _run(command: str, folder: Path) -> None:
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=folder, env=environment,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, found in _RUN.items() if found])
def test_commands_run(page: str, workshop: Path) -> None:
    # At the same place: a dataset knows its inputs by their paths.
    shutil.rmtree(workshop)
    shutil.copytree(workshop.with_suffix(".kept"), workshop)
    for block in _RUN[page]:
        if block.kind == "python":
            (workshop / "script.py").write_text(block.text)
        commands = ["python script.py"] if block.kind == "python" else block.commands
        for command in commands:
            _run(command, workshop)
