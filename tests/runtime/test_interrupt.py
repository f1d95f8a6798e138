"""Ctrl-C in a terminal, which interrupts all processes of a command: one line, and its exit code.

Also what stands on stderr and what on stdout.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.data.format import DatasetIndex
from tests.support.processes import Processes, wait_until
from tests.support.ranks import CONFIG, records

ROOT = Path(__file__).parents[2]
Program = subprocess.Popen[str]


@pytest.fixture
def programs(processes: None) -> Iterator[Processes]:
    started = Processes()
    yield started
    started.end()


def _start(programs: Processes, *words: object) -> Program:
    """Starts `postnorm` as a shell would, in a process group of its own."""
    return programs.start([sys.executable, "-m", "postnorm", *map(str, words)], cwd=ROOT,
                          process_group=0, stdin=subprocess.PIPE, stderr=subprocess.PIPE,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip


def _interrupt(program: Program) -> tuple[int, str]:
    os.killpg(program.pid, signal.SIGINT)
    error = program.communicate(timeout=60)[1]
    assert "Traceback" not in error
    return program.returncode, error


@pytest.mark.smoke
def test_while_modules_are_imported(programs: Processes) -> None:
    program = """
import sys
class Interrupted:
    def find_spec(self, name, *_):
        if name == "pipeline.runtime.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
sys.argv[:] = ["postnorm", "config", "configs/demo.yaml"]
from postnorm.__main__ import main
main()
"""
    started = programs.start([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE)
    assert started.communicate(timeout=60) == ("", "interrupted\n")
    assert started.returncode == 130


@pytest.mark.smoke
def test_data_preparation_says_how_to_continue(programs: Processes, tmp_path: Path) -> None:
    sources = []
    for name in "ab":
        line = json.dumps({"text": f"{name} and other words"})
        (tmp_path / f"{name}.jsonl").write_text(f"{line}\n" * 300_000)
        sources.append({"name": name, "inputs": [str(tmp_path / f"{name}.jsonl")]})
    config = tmp_path / "prep.yaml"
    config.write_text(json.dumps({"output_dir": str(tmp_path / "data"), "sources": sources}))
    program = _start(programs, "prep", "run", config, "workers=2")
    work = tmp_path / "data" / "work" / "ingest"
    wait_until(lambda: len(list(work.glob("*.running.json"))) == 2, program)
    code, error = _interrupt(program)
    assert code == 130
    assert error.count("interrupted") == 1
    assert "the same command continues" in error.splitlines()[-1]


def test_a_program_that_reads(programs: Processes, straight_run: Path) -> None:
    program = _start(programs, "encode", straight_run, "--batch-size", 1)
    program.stdin.write("one text\n")
    program.stdin.flush()
    program.stdin.write("another text\n" * 40)  # vectors come for 32 texts at a time
    program.stdin.flush()
    assert len(json.loads(program.stdout.readline())) == 32
    code, said = _interrupt(program)
    assert code == 130
    assert said.startswith("interrupted: ")
    assert said.count("\n") == 1


def test_a_local_run_saves(programs: Processes, tmp_path: Path, dataset: DatasetIndex) -> None:
    config, run_dir = tmp_path / "train.yaml", tmp_path / "run"
    config.write_text(CONFIG)
    program = _start(programs, "submit", config, f"run_dir={run_dir}", f"data.dir={dataset.folder}",
                     "train.num_steps=10_000", "data.workers=1", "--local", "--ranks",
                     2)  # fmt: skip
    wait_until(lambda: any(line["step"] >= 3 for line in records(run_dir)), program)
    code, error = _interrupt(program)
    assert code == 75
    assert error.count("by SIGINT; saved, start again to continue") == 1
    assert int((run_dir / "checkpoints" / "latest").read_text()[5:]) >= 3


@pytest.mark.smoke
def test_errors_leave_the_output_empty(programs: Processes) -> None:
    program = _start(programs, "encode", "nosuch")
    out, error = program.communicate(timeout=60)
    assert (program.returncode, out) == (2, "")
    assert error.startswith("error: nosuch does not exist.")
    assert len(error.splitlines()) == 1
