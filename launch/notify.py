"""Runs `notify.command` when an attempt has ended; its ranks may be dead by then."""

import logging
from pathlib import Path
from typing import Any

from launch.decide import Decision
from launch.records import CONFIG_FILE, FOLDER
from pipeline.config.strict_yaml import read_file
from pipeline.errors import ConfigError
from pipeline.runtime.notify import FAILED, FINISHED, REQUEUED, STOPPED, Notifier
from pipeline.runtime.run_folder import RunFolder

logger = logging.getLogger(__name__)

_EVENTS = {"finished": FINISHED, "requeue": REQUEUED, "stopped": STOPPED, "failed": FAILED}


def notify_end(run_dir: Path, job: str, decision: Decision, *, goes_on: bool = True) -> None:
    """Report a decision to `notify.command` and wait for it, at most ten seconds.

    A requeued run that does not go on by itself is reported as stopped. The decision stands where
    storage fails and nothing can be reported.
    """
    event = _EVENTS[decision.word]
    if event == REQUEUED and not goes_on:
        event = STOPPED
    try:
        notifier = Notifier(_command_of(run_dir), run_dir, job)
        notifier.send(event, decision.reason)
        notifier.finish()
    except OSError as error:
        logger.warning("notify.command was not run: %s", error)


def _command_of(run_dir: Path) -> str:
    """Read it from what the run wrote last, its own config or that of a submission."""
    files = [RunFolder(run_dir).resolved, *run_dir.glob(f"{FOLDER}/*/{CONFIG_FILE}")]
    there = [path for path in files if path.is_file()]
    if not there:
        return ""
    try:
        tree: Any = read_file(max(there, key=lambda path: path.stat().st_mtime)).plain()
        return str(tree["notify"]["command"])
    except (ConfigError, OSError, KeyError, TypeError):
        return ""  # of another kind of job, or an older version
