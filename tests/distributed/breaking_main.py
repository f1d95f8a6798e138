"""`python -m tests.distributed.breaking_main pretrain ...`: a rank's optimizer state turns NaN.

BREAK_HASHES: hashes of micro-batches, separated by commas; after the step with one of them, an
element of a moment on the rank that has that micro-batch is NaN.
"""

import os
import runpy
from typing import Any

from pipeline.train.engine import Engine

_original = Engine.train_step


def _train_step(self: Engine, batches: Any, *rest: Any) -> Any:
    result = _original(self, batches, *rest)
    parts, _ = self.state_parts()
    wanted = {int(text) for text in os.environ["BREAK_HASHES"].split(",")}
    if any(batch.hash in wanted for batch in batches):
        parts[0].tensors["exp_avg"][3] = float("nan")
    return result


if __name__ == "__main__":
    Engine.train_step = _train_step  # type: ignore[method-assign]
    runpy.run_module("pipeline", run_name="__main__")
