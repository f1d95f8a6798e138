"""Processes that tests started and did not end: how they are found, and that they end.

Each child of pytest inherits `RUN_VARIABLE`, and PYTEST_CURRENT_TEST, in which pytest names the
test that runs. So a process tells its run and its test, also when its parent is gone. What is
forked without a new program has no such variables; it is found as a descendant.

`python -m tests.support.leftovers RUN` ends what is left of a run once its standard input ends. So
nothing outlives a pytest that is killed.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.support import warm

RUN_VARIABLE = "POSTNORM_TEST_RUN"
"""Names a run of pytest; one inside another adds to the outer one's name."""

ROOT = Path(__file__).parents[2]
_TEST_VARIABLE = "PYTEST_CURRENT_TEST"
# Of Python and torch: they live as long as pytest does, and end by themselves.
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver",
            "torch/_inductor/compile_worker")  # fmt: skip
_ENDING_TAKES_S = 5.0


class Left:
    def __init__(self, process: psutil.Process) -> None:
        self.process = process
        self.variables = environment_of(process)
        self.command = " ".join(process.cmdline())

    @property
    def test(self) -> str:
        """The test that started it, with its phase, such as `tests/test_x.py::test_y (call)`."""
        return self.variables.get(_TEST_VARIABLE, "no test")

    def __str__(self) -> str:
        return f"process {self.process.pid} of {self.test}: {self.command[:200]}"


def name_run() -> None:
    """Gives this process's children the name of this run."""
    outer = os.environ.get(RUN_VARIABLE, "")
    os.environ[RUN_VARIABLE] = f"{outer}/{os.getpid()}-{time.time():.0f}"


def keep() -> "subprocess.Popen[bytes]":
    """Starts the process that ends what is left when this one is gone."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.leftovers", os.environ[RUN_VARIABLE]],
        cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def left_by(test: str) -> list[Left]:
    """Processes that the body of a test started, but those of a cluster, which tests share."""
    wanted = (f"{test} (call)", f"{test} (teardown)")

    def look() -> list[Left]:
        forks = warm.running()  # their variables in /proc are their server's
        return [left for left in _of_run(os.environ[RUN_VARIABLE])
                if left.process.pid in forks
                or (left.test in wanted and "SLURM_CONF" not in left.variables)]  # fmt: skip

    return _settled(look)


def left_in_run(*spared: int) -> list[Left]:
    """Processes of this run, and all that this process started, but some."""

    def look() -> list[Left]:
        found = {left.process.pid: left for left in _of_run(os.environ[RUN_VARIABLE])}
        for process in psutil.Process().children(recursive=True):
            if left := _look_at(process):
                found.setdefault(process.pid, left)
        return [left for pid, left in found.items() if pid not in spared]

    return _settled(look)


def end(found: list[Left]) -> None:
    for left in found:
        try:
            left.process.kill()  # psutil looks whether the number is still this process's
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs([left.process for left in found], _ENDING_TAKES_S)


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Environment of a process.

    slurmstepd writes its title over the first of its variables, where psutil stops to read.
    """
    texts = Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


def _settled(look: Callable[[], list[Left]]) -> list[Left]:
    """What is found again and again: a process whose parent was killed takes a moment to end."""
    deadline = time.monotonic() + _ENDING_TAKES_S
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _of_run(run: str) -> list[Left]:
    """Processes that inherited a run's name, but this one and those that it came from."""
    here = psutil.Process()
    mine = {here.pid, *(parent.pid for parent in here.parents())}
    found = [_look_at(process) for process in psutil.process_iter() if process.pid not in mine]
    return [
        left for left in found
        if left and f"{left.variables.get(RUN_VARIABLE, '')}/".startswith(f"{run}/")
    ]  # fmt: skip


def _look_at(process: psutil.Process) -> Left | None:
    try:
        left = Left(process)
        is_gone = process.status() == psutil.STATUS_ZOMBIE
    except (OSError, psutil.Error):
        return None
    return None if is_gone or any(name in left.command for name in _HELPERS) else left


def _wait_and_end(run: str) -> None:
    sys.stdin.read()
    while found := _of_run(run):  # one may just be starting another
        end(found)


if __name__ == "__main__":
    _wait_and_end(sys.argv[1])
