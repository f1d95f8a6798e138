"""`python -m tests.distributed.poisoned_main pretrain ...`: training with a NaN loss put in.

POISON_RANK computes a NaN in its POISON_CALLS-th micro-batches (a comma-separated list, or `all`).
"""

import os
import runpy

import torch

from pipeline.objectives import mlm

_original = mlm.masked_lm_loss
_calls = 0


def _poisoned(logits: torch.Tensor, targets: torch.Tensor) -> mlm.LossSums:
    global _calls
    sums = _original(logits, targets)
    if not torch.is_grad_enabled():
        return sums
    _calls += 1
    wanted = os.environ["POISON_CALLS"]
    here = os.environ["RANK"] == os.environ["POISON_RANK"]
    if here and (wanted == "all" or str(_calls) in wanted.split(",")):
        return mlm.LossSums(sums.loss * float("nan"), sums.correct, sums.weight)
    return sums


if __name__ == "__main__":
    mlm.masked_lm_loss = _poisoned
    runpy.run_module("pipeline", run_name="__main__")
