"""`python -m tests.distributed.saving_main pretrain ...`: saves that wait, or whose files change.

GATE: a file that rank 1 waits for before it ends any save.
SPOILED: the number of updates whose files change on the disk after they were written and hashed.
"""

import os
import runpy
import time
from pathlib import Path

from pipeline.checkpoints.background import Described, RankFiles
from pipeline.checkpoints.manifest import state_file

_original = RankFiles.write


def _write(files: RankFiles) -> Described:
    written = _original(files)
    if str(files.counters["updates"]) == os.environ.get("SPOILED"):
        path = files.folder / state_file(files.rank, files.world_size)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    while "GATE" in os.environ and files.rank == 1 and not Path(os.environ["GATE"]).exists():
        time.sleep(0.01)
    return written


if __name__ == "__main__":
    RankFiles.write = _write  # type: ignore[method-assign]
    runpy.run_module("pipeline", run_name="__main__")
