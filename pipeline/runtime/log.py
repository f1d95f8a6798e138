"""Logging: what a command says goes to stderr, a rank's to its own file in the run folder.

stdout is for results. Training's result are rank 0's step lines, so they stand there.
"""

import logging
import sys
from pathlib import Path
from typing import Literal

from pipeline.runtime.run_folder import RunFolder

_OURS = ("pipeline", "data_prep", "launch", "experiments", "__main__")
_FORMAT = "%(asctime)s rank %(rank)s %(levelname)s %(name)s: %(message)s"
ASIDE = {"is_aside": True}
"""`extra` of a record that a person at a terminal sees with `-v` alone; files have it always."""
# A process has one console, so one level, which `-q` and `-v` set.
_level = logging.INFO
_is_first = True
"""Whether this process is the one of its ranks that says how far they are."""


def set_level(level: int) -> None:
    """Let the console show records of this level and above."""
    global _level
    _level = level


def draws_bars() -> bool:
    """Whether this process shows bars: on a terminal, on the first rank, and not with `-q`."""
    return _is_first and _level <= logging.INFO and sys.stderr.isatty()


def to_console(least: int = logging.NOTSET, *, is_first: bool = True) -> None:
    """Send this process's records of at least a level to stderr, short."""
    global _is_first
    _is_first = is_first
    level = max(_level, least)
    logging.basicConfig(level=level, handlers=[_console(_Console("stderr"))], force=True)


def to_run(run_dir: Path, rank: int) -> None:
    """Send records to `run_dir/logs/rank-NNNNN.log`, and on rank 0 to the console too.

    On the console warnings and errors go to stderr, the others to stdout.
    """
    global _is_first
    _is_first = rank == 0
    path = RunFolder(run_dir).log(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Appended to, so that the attempts of a requeued job follow each other.
    file_handler = _RankFile(path, encoding="utf-8")
    file_handler.setFormatter(logging.Formatter(_FORMAT, defaults={"rank": rank}))
    handlers: list[logging.Handler] = [file_handler]
    if rank == 0:
        steps, trouble = _console(_Console("stdout")), _console(_Console("stderr"))
        steps.setLevel(_level)
        steps.addFilter(lambda record: record.levelno < logging.WARNING)
        trouble.setLevel(logging.WARNING)
        handlers += [steps, trouble]
    # Forced: the process has opened the console before, or the log of an earlier seed.
    logging.basicConfig(level=min(_level, logging.INFO), handlers=handlers, force=True)


class _RankFile(logging.FileHandler):
    """A rank's file. What stops it from being written, such as a full disk, is said once."""

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_failed:
            self._has_failed = True
            sys.stderr.write(f"{self.baseFilename} cannot be written for now: {error}\n")


class _Console(logging.Handler):
    """Writes to what stdout or stderr is at that moment: a bar on a terminal puts itself below."""

    def __init__(self, stream: Literal["stdout", "stderr"]) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        stream = getattr(sys, self._stream)
        if getattr(record, "is_aside", False) and _level > logging.DEBUG and stream.isatty():
            return
        try:
            stream.write(f"{self.format(record)}\n")
            stream.flush()
        except Exception:  # noqa: BLE001 - also what stdout's encoding lacks: the work goes on
            self.handleError(record)


def _console(handler: logging.Handler) -> logging.Handler:
    handler.setFormatter(logging.Formatter("%(message)s"))
    # Libraries' chatter stays out of the console; it is in the files.
    handler.addFilter(
        lambda record: record.name.startswith(_OURS) or record.levelno >= logging.WARNING
    )
    return handler
