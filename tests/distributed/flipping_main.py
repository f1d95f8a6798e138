"""`python -m tests.distributed.flipping_main pretrain ...`: a bit of a rank's weights flips.

FLIP: RANK STEP TIMES; after that step on that rank, the first so many times that it is taken, a
low bit of an element of TENSOR differs.
"""

import os
import runpy
from typing import Any

import torch

from pipeline.train.engine import Engine

TENSOR = "encoder.token_embedding.weight"

_original = Engine.train_step
_flips = 0


def _train_step(self: Engine, batches: Any, *rest: Any) -> Any:
    global _flips
    result = _original(self, batches, *rest)
    rank, step, times = map(int, os.environ["FLIP"].split())
    steps_taken = self.state_parts()[1]["global_steps"]
    if rank == int(os.environ["RANK"]) and steps_taken == step and _flips < times:
        _flips += 1
        flat = dict(self.replicas())[TENSOR].view(-1)
        bits = flat.view(torch.int32 if flat.dtype == torch.float32 else torch.int16)
        bits[7] ^= 1 << 3
    return result


if __name__ == "__main__":
    Engine.train_step = _train_step  # type: ignore[method-assign]
    runpy.run_module("pipeline", run_name="__main__")
