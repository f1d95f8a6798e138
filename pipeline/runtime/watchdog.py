"""Ends this process, with its stacks on record, when it has not got on for too long.

Whoever works calls `heartbeat` with what it is about to do. A thread looks at the last one; where
it is too old, it writes the stacks of all threads to `RUN/hangs/`, says so in the log and ends the
process with exit code 1. It runs while the main thread waits in a collective, in a file system that
does not answer, or in any other C code that has released the interpreter's lock.
"""

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pipeline.errors import EXIT_FAILED_RETRY
from pipeline.runtime.env import ProcessInfo
from pipeline.runtime.run_folder import RunFolder, record_exit

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
# After which the process ends, even if what hangs is the file system of the run's folder.
_WRITING_TAKES_S = 10.0


# On a loaded machine making the engine took 100 s.
# Until a step is done, a phase may take this long whatever the limit: import, compilation.
_STARTING_TAKES_S = 600.0


@dataclass(frozen=True)
class _Beat:
    phase: str
    step: int | None
    at_s: float
    steps_begun: int
    """Number of steps that this process has begun."""


_last = _Beat("starting", None, time.monotonic(), 0)


def heartbeat(phase: str, step: int | None = None) -> None:
    """Record that this process makes progress; costs an assignment.

    Without a `step` it is that of the last beat.
    """
    # The process has one main thread, so one last beat.
    global _last
    begun = _last.steps_begun + (step is not None)
    _last = _Beat(phase, _last.step if step is None else step, time.monotonic(), begun)


@contextmanager
def watching(run_dir: Path, process: Callable[[], ProcessInfo], timeout_s: float) -> Iterator[None]:
    """Watch this process; the run's log must be open.

    `process` tells what it is at the moment; `timeout_s` is the longest time between two beats,
    once a step is done.
    """
    ended = threading.Event()
    heartbeat("starting")
    with RunFolder(run_dir).log(process().rank).open("ab") as rank_log:
        thread = threading.Thread(
            target=_watch,
            args=(ended, run_dir, process, timeout_s, rank_log),
            name="watchdog",
            daemon=True,
        )
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            faulthandler.cancel_dump_traceback_later()


def _watch(
    ended: threading.Event,
    run_dir: Path,
    process: Callable[[], ProcessInfo],
    timeout_s: float,
    rank_log: IO[bytes],
) -> None:
    while not ended.wait(min(_LOOK_EVERY_S, timeout_s / 4)):
        last = _last
        idle_s = time.monotonic() - last.at_s
        # The beginning of the second step is the first sign that one was done.
        limit_s = timeout_s if last.steps_begun > 1 else max(timeout_s, _STARTING_TAKES_S)
        # Where C code keeps the interpreter's lock, no Python thread runs: then this timer, a
        # thread without Python, writes the stacks to the rank's log and ends the process. Wound up
        # at each look, so it fires only where this thread cannot run.
        faulthandler.dump_traceback_later(limit_s, exit=True, file=rank_log)
        if idle_s > limit_s:
            # What is written to may be what hangs.
            writer = threading.Thread(
                target=_leave_record,
                args=(run_dir, process(), timeout_s, last, idle_s),
                name="record of the hang",
                daemon=True,
            )
            writer.start()
            writer.join(_WRITING_TAKES_S)
            # `sys.exit` would end this thread alone.
            os._exit(EXIT_FAILED_RETRY)


def _leave_record(
    run_dir: Path, process: ProcessInfo, timeout_s: float, last: _Beat, idle_s: float
) -> None:
    where = f"in phase {last.phase!r}" + (f" of step {last.step}" if last.step else "")
    text = (
        f"rank {process.rank} of {process.world_size} (process {os.getpid()} on {process.host}) "
        f"has not got on for {idle_s:.1f} s, {where}; train.hang_timeout_s={timeout_s:g}"
    )
    try:
        where = f"The stacks of its threads are in {_write_stacks(run_dir, process, text)}"
        record_exit(run_dir, process, EXIT_FAILED_RETRY)
    except OSError as error:
        faulthandler.dump_traceback()
        where = f"The stacks of its threads could not be written, they are above ({error})"
    logger.error(
        "error: %s. %s; look at those of the other ranks, too: what all wait for is a rank that "
        "has no file, or one in another phase. The process ends and can be started again",
        text,
        where,
    )


def _write_stacks(run_dir: Path, process: ProcessInfo, text: str) -> Path:
    now = time.gmtime()
    name = f"rank-{process.rank:05d}-{time.strftime('%Y%m%d-%H%M%S', now)}-{os.getpid()}.txt"
    path = RunFolder(run_dir).hangs / name
    path.parent.mkdir(exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.write(
            f"{text}\ntime: {time.strftime('%Y-%m-%d %H:%M:%S', now)} UTC, job {process.job}\n"
            f"main thread: 0x{threading.main_thread().ident:016x}\n\n"
        )
        file.flush()
        faulthandler.dump_traceback(file)
    return path
