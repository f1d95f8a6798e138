"""How far something has come, in the log, where it takes long."""

import logging
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from pipeline.runtime.log import duration_text

logger = logging.getLogger(__name__)

T = TypeVar("T")
_EVERY_S = 10.0


class Progress:
    """A line every ten seconds."""

    def __init__(self, num_items: int, num_sequences: int) -> None:
        """Starts the clock.

        Args:
            num_items: that `over` will give.
            num_sequences: in all of them.
        """
        self._num_items, self._num_sequences = num_items, num_sequences
        self._start_s = self._told_s = time.monotonic()

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """Gives the items on, and says how many were asked for."""
        for number, item in enumerate(items):
            now_s = time.monotonic()
            if number and now_s - self._told_s >= _EVERY_S:
                self._told_s = now_s
                self._tell(number / self._num_items, now_s - self._start_s)
            yield item

    def _tell(self, done: float, took_s: float) -> None:
        logger.info(
            "evaluated about %s of %s sequences (%.0f%%), %s left",
            f"{done * self._num_sequences:,.0f}", f"{self._num_sequences:,}", 100 * done,
            duration_text(took_s * (1 - done) / done),
        )  # fmt: skip
