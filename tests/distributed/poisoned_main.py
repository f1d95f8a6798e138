"""`python -m tests.distributed.poisoned_main pretrain ...`: training with a NaN put in.

POISON_RANK computes a NaN in its POISON_CALLS-th micro-batches (a comma-separated list, or `all`):
as the loss, or in the gradients of the parameters POISON_PARAMETERS (separated by commas).
"""

import os
import runpy

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pipeline.data.loader import MicroBatch
from pipeline.objectives.base import Sum, Sums
from pipeline.objectives.mlm import MaskedLanguageModeling

_original = MaskedLanguageModeling.__call__
_calls = 0
_hooks: list[RemovableHandle] = []


def _poisoned(self: MaskedLanguageModeling, model: nn.Module, batch: MicroBatch) -> Sums:
    global _calls
    for hook in _hooks:
        hook.remove()
    _hooks.clear()
    sums = _original(self, model, batch)
    if not torch.is_grad_enabled():
        return sums
    _calls += 1
    wanted = os.environ["POISON_CALLS"]
    here = os.environ["RANK"] == os.environ["POISON_RANK"]
    if here and (wanted == "all" or str(_calls) in wanted.split(",")):
        if names := os.environ.get("POISON_PARAMETERS"):
            named = dict(getattr(model, "module", model).named_parameters())
            _hooks.extend(
                named[n].register_hook(lambda g: g * float("nan")) for n in names.split(",")
            )
            return sums
        return {**sums, "loss": Sum(sums["loss"].total * float("nan"), sums["loss"].weight)}
    return sums


if __name__ == "__main__":
    MaskedLanguageModeling.__call__ = _poisoned  # type: ignore[method-assign]
    runpy.run_module("pipeline", run_name="__main__")
