"""`python -m tests.distributed.moved_main FOLDER JSON`: the bytes of collectives in one step.

The JSON is a list of [ZeRO stage, micro-batches, optimizer]; FOLDER/moved.json gets a list with,
for each of them, the number of parameters and the bytes of whole tensors by kind of collective.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.config.train import Optimizer, TrainConfig
from pipeline.objectives.mlm import MaskedLanguageModeling
from pipeline.runtime.env import ProcessInfo
from pipeline.train.engine import Engine
from tests.distributed import engine_main as case

# By torch's name: what a plan calls it, and which argument has the whole tensor.
_KINDS = {
    "c10d.allreduce_.default": ("all-reduce", 0),
    "c10d._allgather_base_.default": ("all-gather", 0),
    "c10d._reduce_scatter_base_.default": ("reduce-scatter", 1),
    "c10d.alltoall_base_.default": ("all-to-all", 0),  # what the rank gets
}


class Moved(TorchDispatchMode):
    """Counts the bytes of whole tensors that collectives get."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), named: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d."):
            # One that is not known counts as itself, and is in no plan.
            kind, place = _KINDS.get(name, (name, 0))
            whole = args[place]
            for tensor in whole if isinstance(whole, list) else [whole]:
                self.num_bytes[kind] += tensor.numel() * tensor.element_size()
        return func(*args, **(named or {}))


def main(folder: Path, cases: list[tuple[int, int, Optimizer]], this: ProcessInfo) -> None:
    """Two steps of each case; the second one counts: the first sets up."""
    # So small a model would be whole on every rank at stage 3.
    tuned = folder / f"deepspeed-{this.rank}.json"
    tuned.write_text('{"zero_optimization": {"stage3_param_persistence_threshold": 0}}')
    found = []
    for stage, accumulation, optimizer in cases:
        model = case.model(seed=1)
        size = sum(parameter.numel() for parameter in model.parameters())
        file_of = str(tuned) if stage == 3 else None
        config = TrainConfig(zero_stage=stage, optimizer=optimizer, deepspeed_config=file_of)
        engine = Engine(model, config, this, torch.device("cpu"))
        for step in range(2):
            batches = [case.micro_batch(2, 10 * step + n, rows=2) for n in range(accumulation)]
            with Moved() as moved:
                engine.train_step(batches, MaskedLanguageModeling(), 1e-4)
        found.append([size, dict(moved.num_bytes)])
    if this.is_first:
        (folder / "moved.json").write_text(json.dumps(found))


if __name__ == "__main__":
    with case.as_rank() as rank:
        main(Path(sys.argv[1]), json.loads(sys.argv[2]), rank)
