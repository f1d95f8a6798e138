"""What every run of the tests keeps to, as a plugin of pytest; `tests/conftest.py` loads it.

- A test's markers follow from the fixtures that it asks for; `make test` goes by them.
- A test that asks for none of those fixtures starts no Python.
- A phase of a test ends after `_LIMIT_S`.
- A test leaves no process behind, and neither does a run that fails or is interrupted.
- `--summary` writes seconds a folder, failures, skips and what did not run, for
  .ci/check_tests.py.
"""

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.support import leftovers, warm

MARKERS = {"processes": "process", "start_ranks": "dist", "start_command": "dist",
           "cluster": "cluster", "browser": "browser", "interpreter": "interpreter"}  # fmt: skip
"""By fixture: what it starts."""

_LIMIT_S, _SLOW_LIMIT_S = 600, 1800
"""A phase (set-up, the test itself, clean-up) takes much less on a machine that has other work."""

_running: list[pytest.Item] = []
"""The test that runs in this process; empty between tests."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--summary", metavar="FILE", help="write seconds a folder and more as JSON")


def pytest_configure(config: pytest.Config) -> None:
    for name in sorted(set(MARKERS.values())):
        config.addinivalue_line("markers", f"{name}: follows from a fixture, see {__name__}")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Run(config), "the run as a whole")
    sys.addaudithook(_refuse_python)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # `make test &` of a script
        signal.signal(signal.SIGINT, signal.default_int_handler)  # programs of tests inherit it


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for fixture, marker in MARKERS.items():
            if fixture in getattr(item, "fixturenames", ()):
                item.add_marker(marker)
    # SLURM waits by minutes: last, it would keep one worker busy and the others idle.
    items.sort(key=lambda item: item.get_closest_marker("cluster") is None)


def _refuse_python(event: str, arguments: tuple[Any, ...]) -> None:
    """Fails a test that starts Python without a fixture that says so."""
    if event != "subprocess.Popen" or not _running:
        return
    program = str(arguments[0] or arguments[1][0])
    if Path(program).name.startswith("python") and not any(
        _running[0].get_closest_marker(name) for name in MARKERS.values()
    ):
        pytest.fail(f"this starts {program}: the test must ask for the fixture `processes`")


@contextmanager
def _limited(item: pytest.Item) -> Iterator[None]:
    limit_s = _SLOW_LIMIT_S if item.get_closest_marker("slow") else _LIMIT_S
    if asked := item.get_closest_marker("limit_s"):
        limit_s = asked.args[0]

    def stop(_number: int, _frame: FrameType | None) -> None:
        pytest.fail(f"took longer than {limit_s} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    _running[:] = [item]
    with _limited(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with _limited(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    try:
        with _limited(item):
            return (yield)
    finally:
        _running.clear()
        if any(item.get_closest_marker(name) for name in MARKERS.values()):
            _end_what_is_left(item)


def _end_what_is_left(item: pytest.Item) -> None:
    found = leftovers.left_by(item.nodeid)
    if found:
        leftovers.end(found)
        pytest.fail("left behind and killed:\n" + "\n".join(map(str, found)), pytrace=False)


def pytest_sessionfinish() -> None:
    warm.close()


class _Run:
    """The run as a whole, in the process that the user started."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._collected: set[str] = set()
        self._done: set[str] = set()
        self._failed: set[str] = set()
        self._skipped: dict[str, str] = {}
        self._seconds: Counter[str] = Counter()
        self._left: list[leftovers.Left] = []
        is_outermost = leftovers.RUN_VARIABLE not in os.environ
        leftovers.name_run()
        self._keeper = leftovers.keep() if is_outermost else None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected |= {item.nodeid for item in session.items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._collected |= set(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[_folder(report.nodeid)] += report.duration
        if report.when == "teardown":
            self._done.add(report.nodeid)
        if report.failed:
            self._failed.add(report.nodeid)
        if report.skipped and isinstance(report.longrepr, tuple):
            self._skipped[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")

    @property
    def _left_out(self) -> dict[str, int]:
        """Tests a folder that were to run and did not."""
        return dict(sorted(Counter(_folder(test) for test in self._collected - self._done).items()))

    @pytest.hookimpl(trylast=True)  # xdist's workers have ended
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._left = leftovers.left_in_run(*([self._keeper.pid] if self._keeper else []))
        leftovers.end(self._left)
        if self._left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        path = self._config.getoption("--summary")
        if path and self._keeper:
            summary = {
                "seconds": {folder: round(s, 1) for folder, s in sorted(self._seconds.items())},
                "failed": sorted(self._failed) + [str(left) for left in self._left],
                "skipped": self._skipped,
                "left_out": self._left_out,
            }
            Path(path).write_text(json.dumps(summary, indent=1) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        say = terminalreporter.write_line
        if self._left:
            terminalreporter.section("processes that were left behind, and killed", red=True)
            for left in self._left:
                say(str(left))
        if self._left_out and not self._config.option.collectonly:
            terminalreporter.section("tests that did not run to their end")
            for folder, number in self._left_out.items():
                say(f"{folder}: {number}")

    def pytest_unconfigure(self) -> None:
        if self._keeper and self._keeper.stdin:
            self._keeper.stdin.close()
            self._keeper.wait()


def _folder(test: str) -> str:
    """`tests/data` of `tests/data/test_order.py::test_one`."""
    return "/".join(test.split("::")[0].split("/")[:-1][:2])
