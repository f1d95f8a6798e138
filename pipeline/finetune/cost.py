"""What a benchmark costs before it runs: rows, steps, tokens, FLOPs and hours of GPUs."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.finetune.benchmark import Plan
from pipeline.finetune.run import prepare, run_config
from pipeline.model.cost import KNOWN, flops_per_token
from pipeline.runtime.summary import Line, table

SHARE_OF_PEAK = 0.4
"""Of the bf16 peak that is assumed, as in the recipes of configs/train."""
_DEVICES = ("A100", "H100")
_S_PER_HOUR = 3600


@dataclass(frozen=True)
class TaskCost:
    """One task, one model, one seed."""

    task: str
    train_rows: int
    """Rows of tokens: windows and choices count each."""
    steps: int
    train_tokens: int
    scored_tokens: int
    """Of dev after each epoch, and of dev and test at the end."""
    flops: float

    def hours(self, device: str) -> float:
        """On one device at `SHARE_OF_PEAK`; small models need more, as they wait for the host."""
        return self.flops / (KNOWN[device].bf16_flops * SHARE_OF_PEAK) / _S_PER_HOUR


def costs(plan: Plan, model: str) -> list[TaskCost]:
    """Read and tokenise the tasks of a plan, and count; nothing is trained.

    Raises:
        PostnormError: a task cannot be read, or the model.
    """
    found = []
    for name, config in plan.tasks.items():
        prepared = prepare(config, name, model, plan.out / "tokens")
        settings = run_config(prepared, 1, Path(plan.out, name), 1)
        steps, each_epoch = settings.train.num_steps, settings.monitor.eval_every_steps
        lengths = {
            split: np.array([len(row.ids) for row in rows.rows], np.int64)
            for split, rows in prepared.rows.items()
        }
        units = len(prepared.rows["train"].units(config.task.kind))
        seen = steps * config.train.batch / units
        dev, test = (int(lengths[split].sum()) if split in lengths else 0
                     for split in ("dev", "test"))  # fmt: skip
        train_tokens = round(seen * int(lengths["train"].sum()))
        scored = dev * (-(-steps // each_epoch) + 1) + test
        squares = sum(int((of * of).sum()) for of in lengths.values())
        mean_length = squares / max(1, sum(int(of.sum()) for of in lengths.values()))
        each = flops_per_token(settings.model, config.input.max_length, 0.0, mean_length)
        flops = each.total * train_tokens + each.forward * scored
        found.append(TaskCost(name, len(lengths["train"]), steps, train_tokens, scored, flops))
    return found


def cost_lines(found: list[TaskCost], num_seeds: int) -> list[Line]:
    """Return a table of the costs of one seed, and the sum over all tasks and seeds."""
    head = ("task", "rows", "steps", "M tokens", "scored", "FLOP")
    rows = [(*head, *(f"{device} h" for device in _DEVICES))]
    rows += [
        (
            each.task,
            f"{each.train_rows:,}",
            f"{each.steps:,}",
            f"{each.train_tokens / 1e6:.2f}",
            f"{each.scored_tokens / 1e6:.2f}",
            f"{each.flops:.2e}",
            *(f"{each.hours(device):.3f}" for device in _DEVICES),
        )
        for each in found
    ]
    hours = ", ".join(
        f"{num_seeds * sum(each.hours(device) for each in found):.2f} h on one {device}"
        for device in _DEVICES
    )
    total = (
        f"a model, {num_seeds} seed(s): {hours}, by FLOPs at {SHARE_OF_PEAK:.0%} of the bf16 peak, "
        "which is assumed; small models wait for the host and need more"
    )
    return [*table(rows, right=(1, 2, 3, 4, 5, 6, 7)), total]
