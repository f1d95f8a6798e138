"""Signals to one rank that all ranks follow, between batches that have no collective."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from pipeline.runtime import dist
from pipeline.train.stop import StopRequest

T = TypeVar("T")
_LOOK_EVERY_S = 1.0
_MARK = "stop"


class Stopped(Exception):
    """A rank is to stop; its message is the signal's name."""


class AgreedStop:
    """Whether this process group is to end; the group must be open."""

    def __init__(self, signals: StopRequest) -> None:
        """Looks at the signals of this rank, and now and then at what other ranks have said."""
        self._signals = signals
        self._looked_s = time.monotonic()
        self._told = self._heard = False

    def until(self, items: Iterable[T]) -> Iterator[T]:
        """Gives items as long as no rank is to stop. Not collective: ranks end at other items."""
        for item in items:
            if self._requested():
                return
            yield item

    def check(self) -> None:
        """Ends all ranks together. Collective.

        Raises:
            Stopped: a rank is to stop.
        """
        names = [name for name in dist.gather(self._signals.signal_name) if name]
        if names:
            raise Stopped(names[0])

    def _requested(self) -> bool:
        if self._signals.requested and not self._told:
            dist.mark(_MARK)
            self._told = True
        now_s = time.monotonic()
        if now_s - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now_s
            self._heard = dist.is_marked(_MARK)
        return self._told or self._heard
