"""Turns signals that ask to stop into a request that the loop honours between two steps.

SLURM sends SIGUSR1 before the time limit (as the job script asks) and SIGTERM on preemption; some
sites send SIGUSR2. SIGINT is Ctrl-C.

This module imports nothing that takes time: it is loaded before all others.
"""

import signal
from types import FrameType

_NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


class StopRequest:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        """Installs the handlers; call early, by default these signals kill."""
        self.signal_name = ""
        for number in _NUMBERS:
            signal.signal(number, self._receive)
            # A library's system call goes on, as if there had been no signal.
            signal.siginterrupt(number, False)

    @property
    def requested(self) -> bool:
        """Whether one of the signals has come."""
        return bool(self.signal_name)

    def ignore_from_now(self) -> None:
        """For the end of the process: Python would restore the signals' default, which kills."""
        for number in _NUMBERS:
            signal.signal(number, signal.SIG_IGN)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # Nothing else: logging in a handler can run into itself.
        del frame
        self.signal_name = signal.Signals(number).name
