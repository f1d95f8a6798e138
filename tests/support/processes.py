"""Processes that a test starts and that end with it, however it ends."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def output(*command: object, code: int = 0, **options: Any) -> str:
    """Return what a program prints, or its errors where it must end with a code but 0.

    It runs in the checkout; options are those of `subprocess.run`.
    """
    given: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, **options}
    done = subprocess.run([*map(str, command)], check=False, **given)
    assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return str(done.stderr if code else done.stdout)


def python(*words: object, code: int = 0, **options: Any) -> str:
    """Return the output of this Python, as `output`."""
    return output(sys.executable, *words, code=code, **options)


def without(modules: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a command of `pipeline` that cannot import some modules, such as "torch numpy"."""
    program = f"import sys; sys.modules.update(dict.fromkeys({modules.split()})); import runpy; " \
        "runpy.run_module('pipeline', run_name='__main__')"  # fmt: skip
    command = [sys.executable, "-c", program, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def free_port() -> str:
    """A port of this machine that nothing listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return str(sock.getsockname()[1])


def write_program(path: Path, text: str) -> Path:
    """Write a file that can be run."""
    path.write_text(text)
    path.chmod(0o755)
    return path


def wait_until(condition: Callable[[], object], *alive: Any, timeout_s: float = 120) -> None:
    """Wait until something is so; processes must run until then."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert all(process.poll() is None for process in alive), "a process has ended"
        assert time.monotonic() < deadline, f"not in {timeout_s} s"
        time.sleep(0.01)


class Processes:
    """Starts processes; those that still run when the test ends are killed."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[str]:
        """Start a process whose output is text in pipes; options are those of Popen."""
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, text=True, **{**pipes, **options})
        self._started.append(process)
        return process

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Start processes that end with the test; conftest.py of a folder imports it."""
    started = Processes()
    yield started
    started.end()
