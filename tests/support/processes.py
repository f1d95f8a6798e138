"""Processes that a test starts and that end with it, however it ends."""

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest


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
        """Kill what still runs."""
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
