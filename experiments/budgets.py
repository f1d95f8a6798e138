"""With how much compute an arm gets where another one ends; each budget is a run of its own.

The target is what a part's arm `target` has at the part's first levels, seed by seed. An arm
reaches it with a budget if the mean of the paired differences is not on the wrong side of 0, surely
if the interval is not. Between two budgets the share of the target's FLOPs is interpolated on the
logarithm. FLOPs are those of `postnorm plan`, the optimizer's products included; a start from
another run counts with that run's. The hours of a study before it runs are at the end.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from experiments import page
from experiments.effects import Decision, direction, interval_by_seed, pair_of, values_by_seed
from experiments.read import Reading
from experiments.study import HARDWARE, VOCABULARY, StudyCell, StudyPlan, StudyRun, run_plan
from pipeline.model.cost import flops_per_token
from pipeline.runtime import summary
from pipeline.tasks.intervals import Interval

_SAID = {
    "small": "of two shared CPU cores, at 60 GFLOP/s and 6 s before the first step of each",
    "gpu": "of one H100 at 40% of its peak; models below width 768 wait for the host and need more",
}
# Of a run, before its first step: two processes, which import torch.
_START_S = 6.0
_ROWS, _ROWS_A_CLASS = 2000, 40
"""Of a split of a task that does not say how many it takes, and of a class of a subset."""
_S_PER_HOUR = 3600


@dataclass(frozen=True)
class Budget:
    """An arm at one combination of levels, against the target."""

    part: str
    arm: str
    levels: tuple[str, ...]
    target: str
    metric: str
    updates: int
    slots: float
    flops: float
    share: float
    """Of the target's FLOPs."""
    slots_share: float
    """Of the target's slots."""
    pairs: dict[int, float]
    """Difference from the target by seed."""
    interval: Interval | None
    """None without a pair, and where the arm is the target itself."""
    runs: tuple[str, ...]
    """The pairs of runs, as of an effect."""
    stands: bool | None = None
    """As of an effect."""

    @property
    def decision(self) -> Decision:
        """What is decided: equal to an effect's where the runs are the same."""
        return self.metric, self.runs

    def margin(self, *, surely: bool) -> float:
        """Return how far it is on the right side of the target; negative on the wrong one."""
        assert self.interval is not None
        sign = direction(self.metric)
        if not surely:
            return sign * self.interval.mean
        return self.interval.low if sign > 0 else -self.interval.high


def budgets(plan: StudyPlan, readings: Mapping[str, Reading]) -> list[Budget]:
    """Compare the arms of each part that has a target with it, in the part's first metric."""
    found = []
    for name, part in plan.parts.items():
        if not part.target:
            continue
        metric, levels = part.metrics[0], plan.levels(name)
        goal = StudyCell(name, part.target, levels[0])
        wanted, whole = values_by_seed(plan, readings, goal, metric), _cost(plan, goal)
        for arm in part.arms:
            for level in levels:
                cell = StudyCell(name, arm, level)
                mine, cost = values_by_seed(plan, readings, cell, metric), _cost(plan, cell)
                seeds = [
                    s for s in plan.of_cells[cell] if s in mine and s in wanted and cell != goal
                ]
                pairs = {s: mine[s] - wanted[s] for s in seeds}
                found.append(
                    Budget(
                        part=name,
                        arm=arm,
                        levels=level,
                        target=part.target,
                        metric=metric,
                        updates=cost.updates,
                        slots=cost.slots,
                        flops=cost.flops,
                        share=cost.flops / whole.flops,
                        slots_share=cost.slots / whole.slots,
                        pairs=pairs,
                        interval=interval_by_seed(pairs, None),
                        runs=tuple(pair_of(plan, cell, goal, s) for s in seeds),
                    )
                )
    return found


class _Cost(NamedTuple):
    updates: int
    slots: float
    flops: float


def _cost(plan: StudyPlan, cell: StudyCell) -> _Cost:
    run = plan.runs[next(iter(plan.of_cells[cell].values()))]
    chain = [run, plan.runs[run.start]] if run.start else [run]
    found = [run_plan(each.config, plan.preset) for each in chain]
    return _Cost(
        updates=sum(of.steps for of in found),
        slots=sum(of.slots for of in found),
        flops=float(sum(of.flops for of in found)),
    )


def share_needed(of_arm: Sequence[Budget], *, surely: bool) -> float | None:
    """Interpolate the share of the FLOPs with which an arm reaches the target; None: it does not.

    `surely` asks that of the interval and not of the mean.
    """
    done = sorted((b for b in of_arm if b.interval is not None), key=lambda b: b.share)
    points = [(math.log(b.share), b.margin(surely=surely)) for b in done]
    points = [point for point in points if not math.isnan(point[1])]
    # From the dear end: a cheap budget that reached it by chance, below one that did not, is none.
    if not points or points[-1][1] < 0:
        return None
    for (cheap, wrong), (dear, right) in reversed(list(pairwise(points))):
        if wrong < 0:
            return math.exp(cheap + (dear - cheap) * -wrong / (right - wrong))
    return math.exp(points[0][0])


def sentences(found: Sequence[Budget]) -> list[str]:
    """Say for each arm with how much of the target's FLOPs it gets there."""
    lines = []
    for part, arm in dict.fromkeys((b.part, b.arm) for b in found):
        of_arm = [b for b in found if (b.part, b.arm) == (part, arm)]
        if [b.share for b in of_arm if arm == b.target] == [1]:
            continue
        shares = [b.share for b in of_arm if b.interval is not None]
        if not shares:
            lines.append(f"{part}: {arm}: no pair of runs has its loss yet")
            continue
        said = []
        limits = [b.margin(surely=True) for b in of_arm if b.interval is not None]
        for word, surely in (("by the mean", False), ("by the interval, before Holm", True)):
            if surely and all(map(math.isnan, limits)):
                continue  # of one seed
            share = share_needed(of_arm, surely=surely)
            if share is None:
                said.append(f"not with {max(shares):.2f} {word}")
            else:
                most = ", its least," if share <= min(shares) * (1 + 1e-9) else ""
                said.append(f"with {share:.2f}{most} {word}")
        first = of_arm[0]
        lines.append(
            f"{part}: {arm} reaches {first.metric} of {first.target} by its FLOPs: "
            f"{', '.join(said)}"
        )
    return lines


def table(found: Sequence[Budget]) -> Iterator[str]:
    """Write a part's budgets."""
    rows = []
    for each in found:
        mean = limits = ""
        if each.interval is not None:
            mean = f"{each.interval.mean:+.4f}"
            if each.interval.method != "none":
                limits = f"{each.interval.low:+.4f} .. {each.interval.high:+.4f}"
        slots = f"{each.updates:,}", f"{each.slots:.2e}", f"{each.slots_share:.3f}"
        flops = f"{each.flops:.2e}", f"{each.share:.3f}"
        after = {True: "stands", False: "falls", None: ""}[each.stands]
        shown = mean, limits, str(len(each.pairs)), after
        rows.append((each.arm, "/".join(each.levels), *slots, *flops, *shown))
    target = f"of {found[0].target}"
    counted = "updates", "slots", target, "FLOP", target
    compared = f"{found[0].metric} minus its", "95% interval", "pairs", "after Holm"
    head = ("arm", "levels", *counted, *compared)
    return page.table("llrrrrrrlrl", head, rows)


# What a study costs before it runs


def cost_lines(made: StudyPlan, *, listed: bool) -> Iterator[str]:
    """Estimate the time of a study, run by run where they are to be listed."""
    rows = [("run", "steps", "FLOP", "hours")]
    total = flops = 0.0
    for run in made.runs.values():
        found = run_plan(run.config, made.preset)
        seconds = (found.train_s or 0.0) + _START_S
        total, flops = total + seconds, flops + found.flops
        hours = f"{seconds / _S_PER_HOUR:.3f}"
        rows.append((run.name, f"{run.config.train.num_steps:,}", f"{found.flops:.2e}", hours))
    tasks = sum(_task_seconds(made, made.runs[run], task) for run, task, _ in made.fine_tunings)
    if listed:
        yield from summary.table(rows, right=(1, 2, 3))
    yield (
        f"{made.name}, preset {made.preset}: {len(made.runs)} pre-training runs of {flops:.2e} "
        f"FLOP, {len(made.fine_tunings)} fine-tunings: {total / _S_PER_HOUR:.2f} + "
        f"{tasks / _S_PER_HOUR:.2f} hours {_SAID[made.preset]}; without evaluations"
    )


def _task_seconds(made: StudyPlan, run: StudyRun, task: str) -> float:
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
    size = run.config.model.vocab_size or VOCABULARY
    model = replace(run.config.model, vocab_size=size)
    each = flops_per_token(model, config.input.max_length, 0.0)
    flops = seen * each.total + (scored[0] * (seen / rows + 1) + scored[1]) * each.forward
    hardware = HARDWARE[made.preset]
    speed = hardware.flops_per_rank * hardware.utilisation
    return flops * config.input.max_length / speed + _START_S
