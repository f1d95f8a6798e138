"""CPU time of a function, and memory of this process."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def cpu_seconds(function: Callable[[], Any], repeats: int = 3) -> float:
    """CPU seconds of this process for one call, the best of some."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def peak_mib(process: int | str = "self") -> float:
    """Most memory that a process, by default this one, had so far, in MiB.

    Not ru_maxrss, which a new process inherits from the one that started it.
    """
    status = Path(f"/proc/{process}/status").read_text().split()
    return int(status[status.index("VmHWM:") + 1]) / 1024
