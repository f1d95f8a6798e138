"""Runs this process as a rank, and what ranks do alike whatever they work on.

`run_as_rank` gives work its place among the ranks and the signals that came, leaves the exit code
where the job script looks for it, and says so where another rank was lost. Ranks follow a signal to
one of them through `agreed_signal` or `AgreedStop`; they agree on an error through `dist.together`.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pipeline import errors
from pipeline.runtime import log, stop
from pipeline.runtime.env import ProcessInfo
from pipeline.runtime.run_folder import RunFolder, record_exit
from pipeline.runtime.stop import StopRequest

T = TypeVar("T")
_LOOK_EVERY_S = 1.0
_MARK = "stop"


@dataclass
class Rank:
    """This process while it works as a rank."""

    process: ProcessInfo
    """A run that was started by hand replaces it: see `train.build.train_run`."""
    run_dir: Path | None = None
    """Where the exit code is left for the job script; None: nowhere. Work may set it."""
    if_lost: str = "Start again"
    """What to look at and do when another rank is gone, for the message. Work may set it."""

    @property
    def stop(self) -> StopRequest:
        """Signals that ask this process to stop; from now on they do not kill it."""
        return stop.listen()

    def leave(self, run_dir: Path, code: int) -> None:
        """Leave an exit code in a folder; if that cannot be written, only a warning says so.

        By hand none is left in a folder of something else; a job's verdict is read from it.
        """
        try:
            if self.process.job == "local":
                RunFolder(run_dir).refuse_foreign()
            record_exit(run_dir, self.process, code)
        except errors.RunFolderError:
            return
        except OSError as error:
            # Raised, it would hide why the work failed.
            logging.getLogger(__name__).warning("exit code %d is not on record: %s", code, error)


def run_as_rank(
    work: Callable[[Rank], int], process: ProcessInfo, run_dir: str | None = None
) -> int:
    """Do this rank's part of some work.

    The exit code is left in `run_dir`.

    Returns:
        An exit code of `pipeline.errors`.

    Raises:
        LostRankError: a collective failed because another rank is gone.
        PostnormError: of the work.
    """
    rank = Rank(process, Path(run_dir) if run_dir else None)
    if not process.is_first:
        log.to_console(logging.WARNING, is_first=False)

    def leave(code: int) -> None:
        if rank.run_dir is not None:
            rank.leave(rank.run_dir, code)

    return leaving(lambda: _name_lost_rank(work, rank), leave)


def leaving(work: Callable[[], int], leave: Callable[[int], None]) -> int:
    """Do some work, hand its exit code to `leave` however it ends, and return it."""
    # For what no PostnormError explains: it may pass, and `launch` gives up where nothing gets on.
    code = errors.EXIT_FAILED_RETRY
    try:
        code = work()
    except errors.PostnormError as error:
        code = error.exit_code
        raise
    except OSError as error:
        if error.errno in errors.LASTING:
            code = errors.EXIT_FAILED_DO_NOT_RETRY
        raise
    finally:
        leave(code)
    return code


def _name_lost_rank(work: Callable[[Rank], int], rank: Rank) -> int:
    try:
        return work(rank)
    except RuntimeError as error:
        # Torch takes seconds to import, and is there if a collective failed.
        from pipeline.runtime import dist

        if not dist.is_lost_rank(error):
            raise
        logging.getLogger("collectives").info("where it was:", exc_info=error)
        raise errors.LostRankError(
            f"rank {rank.process.rank} lost another rank: {str(error).splitlines()[0]}. That rank "
            f"died or hung. {rank.if_lost}"
        ) from error


def agreed_signal(signals: StopRequest) -> str:
    """Give every rank the name of a signal that one of them has had, or ''. Collective."""
    from pipeline.runtime import dist

    return next(filter(None, dist.gather(signals.signal_name)), "")


class Stopped(Exception):
    """A rank is to stop; its message is the signal's name."""


class AgreedStop:
    """Signals to one rank that all ranks follow, between batches that have no collective.

    The process group must be open.
    """

    def __init__(self, signals: StopRequest) -> None:
        """Start to look at this rank's signals, and now and then at what other ranks have said."""
        self._signals = signals
        self._looked_s = time.monotonic()
        self._told = self._heard = False

    def until(self, items: Iterable[T]) -> Iterator[T]:
        """Give items as long as no rank is to stop. Not collective: ranks end at other items."""
        for item in items:
            if self._requested():
                return
            yield item

    def check(self) -> None:
        """End all ranks together. Collective.

        Raises:
            Stopped: a rank is to stop.
        """
        name = agreed_signal(self._signals)
        if name:
            raise Stopped(name)

    def _requested(self) -> bool:
        from pipeline.runtime import dist

        if self._signals.requested and not self._told:
            dist.set_flag(_MARK)
            self._told = True
        now_s = time.monotonic()
        # Not at each item: it is a question to rank 0 over the network.
        if now_s - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now_s
            self._heard = dist.is_marked(_MARK)
        return self._told or self._heard
