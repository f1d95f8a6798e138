"""`python -m tests.distributed.frozen_main pretrain ...`: rank 1 stops itself in the third step.

That is a SIGSTOP when its gradient is computed, before the ranks add theirs. In the second step all
ranks write the timeouts of their process groups to a file beside the run's folder.
"""

import json
import os
import runpy
import signal
import sys
from pathlib import Path

import torch
from torch.distributed import distributed_c10d

from pipeline.train.timing import LocalComputeTimer

_original = LocalComputeTimer.end
_steps = 0


def _end(self: LocalComputeTimer) -> None:
    global _steps
    _original(self)
    _steps += 1  # once a step at ZeRO stage 1
    if _steps == 2:
        found = [
            group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
            for group in distributed_c10d._world.pg_map
        ]
        [run_dir] = [Path(text[8:]) for text in sys.argv if text.startswith("run_dir=")]
        name = f"timeouts-{run_dir.name}-{os.environ['RANK']}"
        (run_dir.parent / name).write_text(json.dumps(found))
    if _steps == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    LocalComputeTimer.end = _end  # type: ignore[method-assign]
    runpy.run_module("pipeline", run_name="__main__")
