"""Logging: rank 0 to the console, every rank to its own file in the run folder."""

import logging
import sys
from pathlib import Path
from typing import TextIO

from pipeline.runtime.run_folder import RunFolder

_OURS = ("pipeline", "data_prep", "launch", "__main__")
_FORMAT = "%(asctime)s rank %(rank)s %(levelname)s %(name)s: %(message)s"


def to_console(level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send this process's records to a stream, by default stdout, short.

    For commands that run as one process.
    """
    handler = logging.StreamHandler(stream or sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.addFilter(_ours_or_warning)
    logging.basicConfig(level=level, handlers=[handler], force=True)


def to_run(run_dir: Path, rank: int) -> None:
    """Send records to `run_dir/logs/rank-NNNNN.log`, and on rank 0 to stdout too.

    Files are appended to, so that the attempts of a requeued job follow each other.
    """
    path = RunFolder(run_dir).log(rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    file_handler = logging.FileHandler(path, encoding="utf-8")
    file_handler.setFormatter(logging.Formatter(_FORMAT, defaults={"rank": rank}))
    handlers: list[logging.Handler] = [file_handler]
    if rank == 0:
        console = logging.StreamHandler(sys.stdout)
        console.setFormatter(logging.Formatter("%(message)s"))
        console.addFilter(_ours_or_warning)
        handlers.append(console)
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)


def _ours_or_warning(record: logging.LogRecord) -> bool:
    """Keep libraries' chatter out of the console; it is in the files."""
    return record.name.startswith(_OURS) or record.levelno >= logging.WARNING
