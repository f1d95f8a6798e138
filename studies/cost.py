"""What a study costs before it runs: FLOPs and hours of its runs and fine-tunings."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launch.cluster import ClusterConfig, HardwareConfig
from launch.plan import RunPlan
from launch.plan import plan as plan_run
from pipeline.config.runs import PretrainConfig
from pipeline.data.format import INDEX_FILE, read_index
from pipeline.model.cost import flops_per_token
from pipeline.runtime.summary import table

if TYPE_CHECKING:
    from studies.config import StudyPlan, StudyRun

_HARDWARE = {
    # Two shared cores: narrow models reach about that, 4 layers by 128 in bf16 reach 0.09.
    "small": HardwareConfig(tflops=0.06, utilisation=1.0),
    "gpu": HardwareConfig(gpu="H100"),
}
_SAID = {
    "small": "of two shared CPU cores, at 60 GFLOP/s and 6 s before the first step of each",
    "gpu": "of one H100 at 40% of its peak; models below width 768 wait for the host and need more",
}
_START_S = 6.0
"""Of a run, before its first step: two processes, which import torch."""
_ROWS, _ROWS_A_CLASS = 2000, 40
"""Of a split of a task that does not say how many it takes, and of a class of a subset."""
_VOCABULARY = 4096
"""The embedded corpus', where the data is not there yet."""
_S_PER_HOUR = 3600


def run_plan(config: PretrainConfig, preset: str = "gpu") -> RunPlan:
    """Plan a run as `postnorm plan` does, on the device of a preset."""
    size = config.model.vocab_size
    if size is None and (Path(config.data.dir) / INDEX_FILE).is_file():
        size = read_index(config.data.dir).vocab_size
    config = replace(config, model=replace(config.model, vocab_size=size or _VOCABULARY))
    profile = ClusterConfig(hardware=_HARDWARE[preset])
    return plan_run(config, profile, counts_activations=False)


def cost_lines(made: "StudyPlan", *, listed: bool) -> Iterator[str]:
    """Estimate the time of a study, run by run where they are to be listed."""
    rows = [("run", "steps", "FLOP", "hours")]
    total = flops = 0.0
    for run in made.runs.values():
        found = run_plan(run.config, made.preset)
        seconds = (found.train_s or 0.0) + _START_S
        total, flops = total + seconds, flops + found.flops
        hours = f"{seconds / _S_PER_HOUR:.3f}"
        rows.append((run.name, f"{run.config.train.num_steps:,}", f"{found.flops:.2e}", hours))
    tasks = sum(_task_seconds(made, made.runs[run], task) for run, task in made.fine_tunings)
    if listed:
        yield from table(rows, right=(1, 2, 3))
    yield (
        f"{made.name}, preset {made.preset}: {len(made.runs)} pre-training runs of {flops:.2e} "
        f"FLOP, {len(made.fine_tunings)} fine-tunings: {total / _S_PER_HOUR:.2f} + "
        f"{tasks / _S_PER_HOUR:.2f} hours {_SAID[made.preset]}; without evaluations"
    )


def _task_seconds(made: "StudyPlan", run: "StudyRun", task: str) -> float:
    """Bound the time of a fine-tuning: every row as long as the task allows."""
    config, classes = made.tasks[task], made.study.tasks[task].classes
    rows = config.data.train_rows or _ROWS
    scored = [config.data.dev_rows or _ROWS, config.data.test_rows or _ROWS]
    if classes is not None:
        rows = classes.rows or (classes.rows_a_class or 0) * classes.number
        scored = [min(most, _ROWS_A_CLASS * classes.number) for most in scored]
    seen = config.train.epochs * rows
    if config.train.steps is not None:
        seen = config.train.steps * config.train.batch
    size = run.config.model.vocab_size or _VOCABULARY
    model = replace(run.config.model, vocab_size=size)
    each = flops_per_token(model, config.input.max_length, 0.0)
    flops = seen * each.total + (scored[0] * (seen / rows + 1) + scored[1]) * each.forward
    hardware = _HARDWARE[made.preset]
    speed = hardware.flops_per_rank * hardware.utilisation
    return flops * config.input.max_length / speed + _START_S
