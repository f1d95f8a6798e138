"""What a test leaves running is killed and named, however the test or the whole run ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support import leftovers
from tests.support.grids import first_in_ci
from tests.support.processes import wait_until

pytestmark = pytest.mark.usefixtures("processes")

_TESTS = """
import os, signal, subprocess, sys, time
from pathlib import Path
import pytest

def leave():
    # Of another session, and of a parent that is gone: nothing but its variables tells whose it is.
    command = [sys.executable, "-c", "import time; time.sleep(300)"]
    options = "start_new_session=True, stdout=-3, stderr=-3"
    code = f"import subprocess; print(subprocess.Popen({command}, {options}).pid)"
    pid = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout
    Path(os.environ["LEFT"]).write_bytes(pid)

@pytest.fixture
def processes():
    pass

@pytest.fixture(scope="session")
def left_by_a_fixture():
    leave()

def test_passes(processes):
    leave()

def test_fails(processes):
    leave()
    assert False, "this is wrong"

def test_takes_long(processes):
    leave()
    time.sleep(100)
test_takes_long = pytest.mark.limit_s(1)(test_takes_long)

def test_waits(processes):
    leave()
    Path(os.environ["LEFT"] + ".there").touch()
    time.sleep(100)

def test_has_a_fixture(processes, left_by_a_fixture):
    pass

def test_asks_for_nothing():
    subprocess.run([sys.executable, "-c", ""])
"""


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """The file in which a test writes the number of the process that it leaves."""
    (tmp_path / "test_it.py").write_text(_TESTS)
    return tmp_path / "left"


def _start(left: Path, test: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.plugin", "-p",
               "no:cacheprovider", f"--rootdir={left.parent}",
               f"{left.parent}/test_it.py::{test}"]  # fmt: skip
    # A run of its own, not a part of this one.
    variables = {k: v for k, v in os.environ.items() if k != leftovers.RUN_VARIABLE}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            cwd=leftovers.ROOT, env={**variables, "LEFT": str(left)})  # fmt: skip


def _is_gone(left: Path) -> bool:
    try:
        return psutil.Process(int(left.read_text())).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    ("test", "said"),
    first_in_ci(
        [
            ("test_fails", "ERROR at teardown of test_fails"),
            ("test_has_a_fixture", "processes that were left behind, and killed"),
            ("test_passes", "ERROR at teardown of test_passes"),
            ("test_takes_long", "took longer than 1 s"),
        ],
        2,
    ),
)
def test_what_is_left_is_killed_and_named(left: Path, test: str, said: str) -> None:
    process = _start(left, test)
    output = process.communicate()[0]
    assert process.returncode == 1, output
    assert said in output
    assert f"process {left.read_text().strip()} of test_it.py::{test} (" in output
    assert "time.sleep(300)" in output
    assert _is_gone(left)


@pytest.mark.parametrize("number", first_in_ci([signal.SIGKILL, signal.SIGINT, signal.SIGTERM], 2))
def test_an_interrupted_run_leaves_nothing(left: Path, number: signal.Signals) -> None:
    process = _start(left, "test_waits")
    wait_until(left.with_suffix(".there").exists, process)
    process.send_signal(number)
    output = process.communicate()[0]  # ends once the last process that writes to it does
    assert process.returncode == (2 if number == signal.SIGINT else -number), output
    if number == signal.SIGINT:
        assert "tests that did not run to their end" in output
    wait_until(lambda: _is_gone(left))


def test_a_test_that_starts_python_must_say_so(left: Path) -> None:
    process = _start(left, "test_asks_for_nothing")
    output = process.communicate()[0]
    assert process.returncode == 1, output
    assert "the test must ask for the fixture `processes`" in output
