"""`python -m tests.distributed.slow_main pretrain ...`: rank 1 says that it computed for days.

What ranks measure of themselves is replaced, so no test depends on how fast they really were.
"""

import os
import runpy

from pipeline.train.timing import LocalComputeTimer

SLOW_S, FAST_S = 1e6, 1e3


def _take_s(_: LocalComputeTimer) -> float:
    return SLOW_S if os.environ["RANK"] == "1" else FAST_S


if __name__ == "__main__":
    LocalComputeTimer.take_s = _take_s  # type: ignore[method-assign]
    runpy.run_module("pipeline", run_name="__main__")
