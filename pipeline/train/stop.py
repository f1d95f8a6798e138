"""Turns SIGTERM and SIGUSR1 into a request that the loop honours between two steps.

SLURM sends SIGUSR1 before the time limit (as the job script asks) and SIGTERM on preemption.
"""

import signal
from types import FrameType


class StopRequest:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        """Installs the handlers; call early, an unhandled SIGUSR1 kills."""
        self.signal_name = ""
        signal.signal(signal.SIGTERM, self._receive)
        signal.signal(signal.SIGUSR1, self._receive)

    @property
    def requested(self) -> bool:
        """Whether one of the signals has come."""
        return bool(self.signal_name)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # Nothing else: logging in a handler can run into itself.
        del frame
        self.signal_name = signal.Signals(number).name
