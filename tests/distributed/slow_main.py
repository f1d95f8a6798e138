"""`python -m tests.distributed.slow_main pretrain ...`: rank 1 takes 60 ms longer a micro-batch."""

import os
import runpy
import time

from torch import nn

from pipeline.data.batch import MicroBatch
from pipeline.objectives.base import Sums
from pipeline.objectives.mlm import MaskedLanguageModeling

_original = MaskedLanguageModeling.__call__


def _slow(self: MaskedLanguageModeling, model: nn.Module, batch: MicroBatch) -> Sums:
    if os.environ["RANK"] == "1":
        time.sleep(0.06)
    return _original(self, model, batch)


if __name__ == "__main__":
    MaskedLanguageModeling.__call__ = _slow  # type: ignore[method-assign]
    runpy.run_module("pipeline", run_name="__main__")
