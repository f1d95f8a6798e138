"""`python -m tests.distributed.clock_main pretrain ...`: each look at the clock takes 1 s.

On rank 1 it takes 2 s, so that ranks which went by their own clocks would not agree.
"""

import os
import runpy

from pipeline.train.timing import Clock


def _start(self: Clock, elapsed_s: float) -> None:
    self._start_s = elapsed_s


def _read_s(self: Clock) -> float:
    self._start_s += 1.0 + int(os.environ["RANK"])
    return self._start_s


if __name__ == "__main__":
    Clock.__init__ = _start  # type: ignore[method-assign]
    Clock.read_s = _read_s  # type: ignore[method-assign]
    runpy.run_module("pipeline", run_name="__main__")
