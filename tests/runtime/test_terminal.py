"""Tables, bars and progress on a terminal of 60 columns, and without a terminal."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import unicodedata
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest

from pipeline.runtime.summary import FolderSummary, progress_bar, table

ROOT = Path(__file__).parents[2]
COLUMNS = 60
_CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_COLOUR = re.compile(r"\x1b\[[0-9;]*\b[34][0-7]m")


def _on_terminal(words: list[str], stdout: IO[str] | None = None, **variables: str) -> str:
    """What a program writes to a terminal: stderr, and stdout unless that is a file."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    removed = ("COLUMNS", "LINES", "NO_COLOR")
    clean = {name: value for name, value in os.environ.items() if name not in removed}
    environment = {**clean, "TERM": "xterm-256color", **variables}
    program = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdin=theirs,
                               stdout=stdout or theirs, stderr=theirs, env=environment)  # fmt: skip
    os.close(theirs)
    parts = []
    with suppress(OSError):  # the program has ended
        while part := os.read(ours, 4096):
            parts.append(part)
    os.close(ours)
    assert program.wait() == 0, b"".join(parts)
    return b"".join(parts).decode()


@pytest.mark.smoke
@pytest.mark.usefixtures("processes")
def test_nothing_is_wider_than_the_terminal() -> None:
    program = """
import time
from pipeline.runtime import log
from pipeline.runtime.summary import FolderSummary, progress, progress_bar, table
log.to_console()
rows = [("name", "number", "reason"), ("a" * 30, "1,234,567", "because of many words " * 3)]
lines = [progress_bar(1_000_000, 2_000_000, "optimizer step"), ("job", "word " * 30),
         *(("start", line) for line in table(rows, (1,), label_width=12)), *table(rows, (1,)),
         "中文" * 40]
folder = "/a/folder/of/some/length/with/a/run"
print(FolderSummary(folder, "finished", lines, ["careful " * 12]).text())
with progress("a stage of a long name", 3, "task", stays=True) as advance:
    for _ in range(3):
        advance(1)
        time.sleep(0.2)
"""
    text = _on_terminal(["-c", program])
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", _CODE.sub("", text))]
    for line in lines:
        wide = sum(unicodedata.east_asian_width(character) in "FW" for character in line)
        assert len(line) + wide <= COLUMNS, line
    assert lines[0] == "/a/folder/of/some/length/with/a/run: finished"
    assert any(re.fullmatch(r"\[#+-+\] 50\.0%  optimizer step 1,000,000 of 2,000,000", line)
               for line in lines)  # fmt: skip
    assert sum("1,234,567" in line for line in lines) == 2
    assert any("3/3" in line for line in lines)
    assert _COLOUR.search(text)
    assert not _COLOUR.search(_on_terminal(["-c", program], NO_COLOR="1"))


@pytest.mark.smoke
@pytest.mark.usefixtures("processes")
def test_a_bar_leaves_results_in_their_file(tmp_path: Path) -> None:
    program = """
from pipeline.runtime import log
from pipeline.runtime.summary import progress
log.to_console()
with progress("verify", 2, "B") as advance:
    advance(2)
    print("a result")
"""
    with (tmp_path / "out").open("w") as file:
        assert "verify" in _on_terminal(["-c", program], file)
    assert (tmp_path / "out").read_text() == "a result\n"


@pytest.mark.smoke
@pytest.mark.usefixtures("processes")
def test_loops_within_loops_and_what_is_told_with_v_alone(tmp_path: Path) -> None:
    program = """
import logging, sys
from pipeline.runtime import log
from pipeline.runtime.summary import progress
mine = logging.getLogger("pipeline.mine")
for level in (logging.INFO, logging.DEBUG, logging.WARNING):
    log.set_level(level)
    log.to_console()
    mine.info("an aside at %d", level, extra=log.ASIDE)
    with progress("outer", 7, "part", logs=False) as outer:
        with progress("inner", 3000, "step", logs=False) as inner:
            inner.show(1200, "loss 2.5000", 3661.0)
            mine.info("a line at %d", level)
        outer(5)
    with progress("a rank", 3, "part", logs=False) as row:
        log.to_console(logging.WARNING, is_first=False)
        with progress("another rank", 3, "part", logs=False) as row:
            row.show(1, "drawn: no", 0.0)
"""
    text = _CODE.sub("", _on_terminal(["-c", program]))
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", text)]
    assert [line for line in lines if "an aside" in line] == ["an aside at 10"]
    assert [line for line in lines if "a line" in line] == ["a line at 20", "a line at 10"]
    inner = [line for line in lines if line.startswith("inner")]
    assert any(
        re.fullmatch("inner .* 1,200/3,000 loss 2.5000 ETA 01:01:01", line) for line in inner
    )
    assert any(re.fullmatch("outer .* 5/7 .*", line) for line in lines)
    assert "drawn" not in text
    plain = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    told = [f"{what} at {level}" for level in (20, 10) for what in ("an aside", "a line")]
    assert plain.stderr.splitlines() == told


@pytest.mark.smoke
@pytest.mark.usefixtures("processes")
def test_without_a_terminal_lines_are_plain(tmp_path: Path) -> None:
    rows = [{"text": f"{n} words of text, {n * n} more"} for n in range(9)]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = {"output_dir": str(tmp_path / "data"), "workers": 1,
                "sources": [{"name": "a", "inputs": [str(tmp_path / "a.jsonl")]}],
                "tokenizer": {"vocab_size": 60_000}}  # fmt: skip
    (tmp_path / "c.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "postnorm", "prep", "run", str(tmp_path / "c.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "\r" not in done.stderr
    assert "ingest: 1 of 1 tasks\n" in done.stderr
    quiet = subprocess.run([*command, "-q"], cwd=ROOT, capture_output=True, text=True)
    assert quiet.stderr.startswith("error: ")
    assert done.stdout == quiet.stdout == ""


def test_plain_lines() -> None:
    assert list(table([("name", "count"), ("a", "10")], (1,))) == ["name  count", "a        10"]
    assert progress_bar(1, 2, "step") == f"[{'#' * 20}{'-' * 20}] 50.0%  step 1 of 2"
    summary = FolderSummary("x", "failed", ["a line", ("label", "text"), ("", "more")], ["look"])
    assert summary.text().splitlines() == ["x: failed", "a line", "label       text",
                                           "            more", "warning: look"]  # fmt: skip
