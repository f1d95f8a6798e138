"""Logging: what a command says goes to stderr, a rank's to its own file in the run folder.

stdout is for results. Training's result are rank 0's step lines, so they stand there.
"""

import logging
import sys
from pathlib import Path

from pipeline.runtime.run_folder import RunFolder

_OURS = ("pipeline", "data_prep", "launch", "__main__")
_FORMAT = "%(asctime)s rank %(rank)s %(levelname)s %(name)s: %(message)s"
# A process has one console, so one level, which `-q` and `-v` set.
_level = logging.INFO


def set_level(level: int) -> None:
    """Let the console show records of this level and above."""
    global _level
    _level = level


def to_console(least: int = logging.NOTSET) -> None:
    """Send this process's records of at least a level to stderr, short."""
    level = max(_level, least)
    logging.basicConfig(level=level, handlers=[_console(_Stderr())], force=True)


def to_run(run_dir: Path, rank: int) -> None:
    """Send records to `run_dir/logs/rank-NNNNN.log`, and on rank 0 to the console too.

    On the console warnings and errors go to stderr, the others to stdout.
    """
    path = RunFolder(run_dir).log(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Appended to, so that the attempts of a requeued job follow each other.
    file_handler = _RankFile(path, encoding="utf-8")
    file_handler.setFormatter(logging.Formatter(_FORMAT, defaults={"rank": rank}))
    handlers: list[logging.Handler] = [file_handler]
    if rank == 0:
        steps, trouble = _console(logging.StreamHandler(sys.stdout)), _console(_Stderr())
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


class _Stderr(logging.Handler):
    """Writes to what stderr is at that moment: a progress bar on a terminal puts itself below."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except OSError:
            self.handleError(record)


def _console(handler: logging.Handler) -> logging.Handler:
    handler.setFormatter(logging.Formatter("%(message)s"))
    # Libraries' chatter stays out of the console; it is in the files.
    handler.addFilter(
        lambda record: record.name.startswith(_OURS) or record.levelno >= logging.WARNING
    )
    return handler
