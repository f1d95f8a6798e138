"""Runs the user's own command, such as one that posts to a chat, when a run's state changes.

The command gets one JSON object on its standard input:

    {"event": "went_back", "text": "mine: went back: to step 9000: the loss jumped ...",
     "run": "mine", "run_dir": "/runs/mine", "host": "node1", "job": "1234.0",
     "unix_s": 1750000000.0}

Nothing waits for it while a run trains, and whatever goes wrong with it is only a warning.
"""

import json
import logging
import os
import queue
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from pipeline.config.strict_yaml import read_file
from pipeline.errors import ConfigError
from pipeline.runtime import env
from pipeline.runtime.run_folder import RunFolder

logger = logging.getLogger(__name__)

STARTED, WENT_BACK, DIVERGED, REQUEUED = "started", "went_back", "diverged", "requeued"
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
# Reported by the launcher, since the ranks may be dead by then.
_ENDS = {"finished": FINISHED, "requeue": REQUEUED, "stopped": STOPPED, "failed": FAILED}
"""Event of each decision of the launcher."""
_LIMIT_S = 10.0
"""After which a command is killed, and for which the end of a run waits."""
_MOST_CHARACTERS = 300


class Notifier:
    """Starts a command for one event after another, on a thread of its own."""

    def __init__(self, command: str, run_dir: Path, job: str) -> None:
        """Take a line for the shell; with '' nothing is ever done."""
        self._command, self._run_dir, self._job = command, run_dir.absolute(), job
        self._events: queue.Queue[bytes] = queue.Queue()
        if command:
            # A daemon: a process that fails does not wait for it.
            threading.Thread(target=self._work, daemon=True).start()

    def send(self, event: str, text: str) -> None:
        """Report an event; returns at once."""
        if not self._command:
            return
        name = self._run_dir.name
        values = {
            "event": event,
            "text": f"{name}: {event.replace('_', ' ')}: {text}",
            "run": name,
            "run_dir": str(self._run_dir),
            "host": env.node_name(),
            "job": self._job,
            "unix_s": round(time.time(), 1),
        }
        self._events.put(f"{json.dumps(values)}\n".encode())

    def finish(self) -> None:
        """Wait for what was sent, but not for long."""
        end_s = time.monotonic() + _LIMIT_S
        # Not `join` of the queue, which has no time limit.
        while self._events.unfinished_tasks and time.monotonic() < end_s:
            time.sleep(0.01)

    def _work(self) -> None:
        while True:
            given = self._events.get()
            try:
                self._run(given)
            except OSError as error:
                logger.warning("notify.command cannot be started: %s", error)
            self._events.task_done()

    def _run(self, given: bytes) -> None:
        # In a session of its own: `killpg` then ends what the shell has started, and Ctrl-C at a
        # terminal does not.
        process = subprocess.Popen(
            ["/bin/sh", "-c", self._command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(given, _LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the shell and what it started
            process.wait()
            logger.warning("notify.command was killed: it took longer than %g s", _LIMIT_S)
            return
        if process.returncode:
            said = output.decode(errors="replace").strip()[-_MOST_CHARACTERS:]
            logger.warning("notify.command ended with code %d: %s", process.returncode, said)


def notify_end(run_dir: Path, job: str, word: str, reason: str, *, goes_on: bool = True) -> None:
    """Report how an attempt ended to `notify.command` and wait for it, at most ten seconds.

    `word` and `reason` are the launcher's decision. A requeued run that does not go on by itself is
    reported as stopped. The decision stands where storage fails and nothing can be reported.
    """
    event = STOPPED if word == "requeue" and not goes_on else _ENDS[word]
    try:
        notifier = Notifier(_command_of(RunFolder(run_dir)), run_dir, job)
        notifier.send(event, reason)
        notifier.finish()
    except OSError as error:
        logger.warning("notify.command was not run: %s", error)


def _command_of(run: RunFolder) -> str:
    """Read it from what the run wrote last, its own config or that of a submission."""
    there = [path for path in (run.resolved, *run.launch.glob("*/config.yaml")) if path.is_file()]
    if not there:
        return ""
    try:
        tree: Any = read_file(max(there, key=lambda path: path.stat().st_mtime)).plain()
        return str(tree["notify"]["command"])
    except (ConfigError, OSError, KeyError, TypeError):
        return ""  # of another kind of job, or an older version
