"""`python -m tests.distributed.spiking_main pretrain ...`: some batches throw the weights off.

SPIKE_HASHES: hashes of micro-batches, separated by commas; a step with one of them is taken with
a learning rate that is a thousand times as high. Which step it is, or how often the run was
started, plays no part.
"""

import os
import runpy
from typing import Any

from pipeline.runtime import dist
from pipeline.train.engine import Engine

_original = Engine.train_step


def _train_step(self: Engine, batches: Any, objective: Any, lr: float, *rest: Any) -> Any:
    wanted = {int(text) for text in os.environ["SPIKE_HASHES"].split(",")}
    if any(dist.gather(any(batch.hash in wanted for batch in batches))):
        lr *= 1000
    return _original(self, batches, objective, lr, *rest)


if __name__ == "__main__":
    Engine.train_step = _train_step  # type: ignore[method-assign]
    runpy.run_module("pipeline", run_name="__main__")
