"""`python -m benchmarks.faults_main pretrain ...`: training that one fault strikes from within.

FAULT is JSON: `kind`, `rank`, `step` and `mark`. On that rank, the first time that the step was
taken, or is about to be, it strikes once and makes the file `mark`:

- "NaN loss": the loss of a micro-batch is NaN
- "NaN gradient": so is the gradient of the embedding
- "NaN in a moment": an element of the optimizer's state is NaN after the step
- "bit flip": a bit of the rank's copy of the embedding is the other one after the step
- "clock jump": the clock is `jump_s` seconds further from then on
"""

import json
import os
import runpy
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline.data.loader import MicroBatch
from pipeline.objectives.base import Sum, Sums
from pipeline.objectives.mlm import MaskedLanguageModeling
from pipeline.train.engine import Engine

_EMBEDDING = "encoder.token_embedding.weight"
_FAULT = json.loads(os.environ["FAULT"])
_train_step, _objective = Engine.train_step, MaskedLanguageModeling.__call__
_waits = {"before": False}
"""Whether the next micro-batch is struck."""


def _step(self: Engine, batches: Any, *rest: Any) -> Any:
    here = _FAULT["rank"] == int(os.environ["RANK"]) and not Path(_FAULT["mark"]).exists()
    # Asked of all ranks: it may be collective.
    done = self.state_parts()[1]["global_steps"]
    _waits["before"] = here and done + 1 >= _FAULT["step"]
    result = _train_step(self, batches, *rest)
    parts, _ = self.state_parts()
    if here and done + 1 >= _FAULT["step"]:
        if _FAULT["kind"] == "NaN in a moment":
            parts[0].tensors["exp_avg"][3] = float("nan")
        if _FAULT["kind"] == "bit flip":
            flat = dict(self.replicas())[_EMBEDDING].view(-1)
            flat.view(torch.int32 if flat.dtype == torch.float32 else torch.int16)[7] ^= 1 << 3
        if _FAULT["kind"] == "clock jump":
            true_time = time.time
            time.time = lambda: true_time() + _FAULT["jump_s"]
        Path(_FAULT["mark"]).touch()
    return result


def _sums(self: MaskedLanguageModeling, model: nn.Module, batch: MicroBatch) -> Sums:
    sums = _objective(self, model, batch)
    if not (_waits["before"] and torch.is_grad_enabled()):
        return sums
    _waits["before"] = False
    if _FAULT["kind"] == "NaN loss":
        return {**sums, "loss": Sum(sums["loss"].total * float("nan"), sums["loss"].weight)}
    if _FAULT["kind"] == "NaN gradient":
        weight = dict(getattr(model, "module", model).named_parameters())[_EMBEDDING]

        def once(gradient: torch.Tensor) -> torch.Tensor:
            hook.remove()
            return gradient * float("nan")

        hook = weight.register_hook(once)
    return sums


if __name__ == "__main__":
    Engine.train_step = _step
    MaskedLanguageModeling.__call__ = _sums
    runpy.run_module("pipeline", run_name="__main__")
