"""Turns signals that ask to stop into a request that the loop honours between two steps.

SLURM sends SIGUSR1 before the time limit (as the job script asks) and SIGTERM on preemption; some
sites send SIGUSR2. SIGINT is Ctrl-C.
"""

# Nothing that takes time is imported here: a command line loads this module before all others,
# because by default these signals kill.
import os
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType

from pipeline.errors import EXIT_INTERRUPTED

_NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
EARLY = ("pretrain", "finetune", "multitask", "evaluate", "benchmark", "transfer")
"""Verbs that train or evaluate here, and look at the request; any other is to be killed by the
signals."""


class StopRequest:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        self.signal_name = ""
        self.before = {number: signal.signal(number, self._receive) for number in _NUMBERS}
        for number in _NUMBERS:
            # A library's system call goes on, as if there had been no signal.
            signal.siginterrupt(number, False)

    @property
    def requested(self) -> bool:
        """Whether one of the signals has come."""
        return bool(self.signal_name)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # Nothing else: logging in a handler can run into itself.
        del frame
        self.signal_name = signal.Signals(number).name


# A process has one set of handlers, so one request.
_request: StopRequest | None = None


def listen() -> StopRequest:
    """Get this process's request; the first call installs the handlers."""
    global _request
    if _request is None:
        _request = StopRequest()
    return _request


def listen_early(words: Sequence[str]) -> None:
    """Install the handlers if the verb that was asked for looks at them.

    Any other verb ends at Ctrl-C, in one line even while modules are imported.
    """
    if words and words[0] in EARLY and "--dry-run" not in words:
        listen()
    else:
        sys.excepthook = _without_traceback


def _without_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write("interrupted\n")
    sys.stderr.flush()
    # CPython kills itself with SIGINT when the interrupt passed through C code: no exit code 130.
    os._exit(EXIT_INTERRUPTED)


@contextmanager
def kept_from_children(signals: Collection[signal.Signals]) -> Iterator[None]:
    """Start processes in this block that never get these signals, which a terminal sends to all."""
    from multiprocessing import resource_tracker

    # The first child starts the tracker, which unblocks signals behind our back.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def release() -> None:
    """Give the signals back to whoever had them; the next `listen` is a new request."""
    global _request
    if _request is not None:
        for number, handler in _request.before.items():
            signal.signal(number, handler)
        _request = None


def ignore_from_now() -> None:
    """Ignore the signals at the end of a process that listened."""
    if _request is not None:
        for number in _NUMBERS:
            # Python, as it ends, would let them kill.
            signal.signal(number, signal.SIG_IGN)
