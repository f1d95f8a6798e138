"""`python -m tests.distributed.slow_main pretrain ...`: rank 1 takes 60 ms longer a micro-batch."""

import os
import runpy
import time

import torch

from pipeline.objectives import mlm

_original = mlm.masked_lm_loss


def _slow(logits: torch.Tensor, targets: torch.Tensor) -> mlm.LossSums:
    if os.environ["RANK"] == "1":
        time.sleep(0.06)
    return _original(logits, targets)


if __name__ == "__main__":
    mlm.masked_lm_loss = _slow
    runpy.run_module("pipeline", run_name="__main__")
