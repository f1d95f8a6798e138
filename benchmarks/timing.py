"""CPU time of a function."""

import time
from collections.abc import Callable
from typing import Any


def cpu_seconds(function: Callable[[], Any], repeats: int = 3) -> float:
    """CPU seconds of this process for one call, the best of some."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)
