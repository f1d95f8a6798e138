"""`python -m tests.distributed.saving_main pretrain ...`: saves that wait, or that write nonsense.

GATE: a file that rank 1 waits for before it ends any save.
SPOILED: the number of updates whose state gets a NaN on its way to the disk.
"""

import os
import runpy
import time
from pathlib import Path

from pipeline.checkpoints.background import Described, RankFiles

_original = RankFiles.write


def _write(files: RankFiles) -> Described:
    if str(files.counters["updates"]) == os.environ.get("SPOILED"):
        files.parts[-1].tensors["exp_avg"][-1] = float("nan")
    written = _original(files)
    while "GATE" in os.environ and files.rank == 1 and not Path(os.environ["GATE"]).exists():
        time.sleep(0.01)
    return written


if __name__ == "__main__":
    RankFiles.write = _write  # type: ignore[method-assign]
    runpy.run_module("pipeline", run_name="__main__")
