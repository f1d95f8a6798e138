"""Training on a real pseudo-terminal: a bar below the log, on rank 0 alone."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from pathlib import Path

import pytest

from pipeline.data.format import DatasetIndex
from tests.support.ranks import CONFIG, Starter, records

_CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_BAR = re.compile(r"(\d+)/12 (loss \d\.\d{4})  [\d.]+ (?:steps/s|s a step) ETA 00:\d\d:\d\d")


def test_a_run_on_a_terminal(
    tmp_path: Path, dataset: DatasetIndex, start_command: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "postnorm", "pretrain", str(tmp_path / "config.yaml"),
               f"run_dir={tmp_path}/mine", f"data.dir={dataset.folder}", "train.num_steps=12",
               "checkpoint.every_steps=6", "monitor.log_every_steps=5",
               "monitor.eval_every_steps=6"]  # fmt: skip
    ours, theirs = pty.openpty()
    # So wide that no line is broken.
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 250, 0, 0))
    processes = start_command(command, 2, Path(os.ttyname(theirs)))
    os.close(theirs)
    parts = []
    while True:
        try:
            parts.append(os.read(ours, 1 << 16))
        except OSError:  # all that write to it have ended
            break
    os.close(ours)
    text = b"".join(parts).decode()
    assert [process.wait(60) for process in processes] == [0, 0], text
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", _CODE.sub("", text))]

    bars = [found for line in lines if (found := _BAR.search(line))]
    # From the first step on, before there is a log line; another rank would have another loss.
    assert bars[0][1] == "1"
    assert len({bar[2] for bar in bars if bar[1] == "1"}) == 1
    assert bars[-1][1] == "12"
    assert all(line.startswith("mine ") for line in lines if _BAR.search(line))

    # Each line of the log stands whole; its file also has what is left out here.
    log = (tmp_path / "mine/logs/rank-00000.log").read_text()
    said = re.findall(r"INFO pipeline\.\S+: (.*)", log)
    left_out = [line for line in said if re.match(r"saved |.*PyTorch \(", line)]
    assert len(left_out) == 2 + 3
    assert not set(left_out) & set(lines)
    shown = [line for line in said if line.startswith("step ")]
    assert len(shown) == len(records(tmp_path / "mine")) + len(records(tmp_path / "mine", "eval"))
    assert set(shown) <= set(lines)
