"""What a benchmark costs before it runs: rows, steps, tokens, FLOPs and hours of GPUs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pipeline.finetune.prepare import Prepared, prepare
from pipeline.finetune.run import run_config
from pipeline.model.cost import KNOWN, flops_per_token, update_flops
from pipeline.runtime.summary import Line, table
from pipeline.tasks.task import TaskConfig

SHARE_OF_PEAK = 0.4
"""Assumed share of the bf16 peak, as in the recipes of configs/train."""
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
    """Tokens of dev after each epoch, and of dev and test at the end."""
    flops: float
    search_flops: float
    """FLOPs of the runs of `search`, which one seed has."""

    def hours(self, device: str, num_seeds: int = 1, *, search: bool = False) -> float:
        """Hours on a device at `SHARE_OF_PEAK`; small models need more: they wait for the host."""
        searched = search and self.search_flops > 0  # the best trial is the first seed's run
        flops = (num_seeds - searched) * self.flops + searched * self.search_flops
        return flops / (KNOWN[device].bf16_flops * SHARE_OF_PEAK) / _S_PER_HOUR


def costs(tasks: Mapping[str, TaskConfig], model: str, out: Path) -> list[TaskCost]:
    """Read and tokenise tasks, by name, and count; nothing is trained.

    Raises:
        PostnormError: a task cannot be read, or the model.
    """
    found = []
    for name, config in tasks.items():
        prepared = prepare(config, name, model, out / "tokens")
        trials = [replace(prepared, config=config.at(point)) for point in config.search.points]
        search = sum(_cost(trial, out / name).flops for trial in trials)
        found.append(replace(_cost(prepared, out / name), search_flops=search))
    return found


def _cost(prepared: Prepared, folder: Path) -> TaskCost:
    """Count one run without its search."""
    config, settings = prepared.config, run_config(prepared, 1, folder, 1)
    steps, each_epoch = settings.train.num_steps, settings.monitor.eval_every_steps
    lengths = {
        split: np.array([len(row.ids) for row in rows.rows], np.int64)
        for split, rows in prepared.rows.items()
    }
    sums = {split: int(of.sum()) for split, of in lengths.items()}
    seen = steps * config.train.batch / prepared.num_units
    train_tokens = round(seen * sums["train"])
    scored = sums.get("dev", 0) * (-(-steps // each_epoch) + 1) + sums.get("test", 0)
    mean_length = sum(int((of * of).sum()) for of in lengths.values()) / max(1, sum(sums.values()))
    each = flops_per_token(settings.model, config.input.max_length, 0.0, mean_length)
    flops = each.total * train_tokens + each.forward * scored
    flops += steps * update_flops(settings.model, settings.train, 1).total
    rows = len(lengths["train"])
    return TaskCost(prepared.name, rows, steps, train_tokens, scored, flops, 0.0)


def cost_lines(found: list[TaskCost], num_seeds: int) -> list[Line]:
    """Return a table of the costs of one seed, and the sum over all tasks, seeds and searches."""
    head = ("task", "rows", "steps", "M tokens", "scored", "FLOP", *_DEVICES)
    rows = [
        (
            each.task,
            f"{each.train_rows:,}",
            f"{each.steps:,}",
            f"{each.train_tokens / 1e6:.3g}",
            f"{each.scored_tokens / 1e6:.3g}",
            f"{each.flops:.2e}",
            *(_time(each.hours(device)) for device in _DEVICES),
        )
        for each in found
    ]
    times = ", ".join(
        f"{_time(sum(each.hours(device, num_seeds, search=True) for each in found))} on one "
        f"{device}"
        for device in _DEVICES
    )
    with_search = " and the search" * any(each.search_flops for each in found)
    total = (
        f"a model, {num_seeds} seed(s){with_search}: {times}, by FLOPs at {SHARE_OF_PEAK:.0%} of "
        "the bf16 peak, which is assumed; small models wait for the host and need more"
    )
    return [*table([head, *rows], right=(1, 2, 3, 4, 5, 6, 7)), total]


def _time(hours: float) -> str:
    """Write three digits in hours, or in minutes or seconds where it is less than one."""
    for unit, value in (("h", hours), ("min", 60 * hours)):
        if value >= 1:
            return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"
    return f"{_S_PER_HOUR * hours:.3g} s"
