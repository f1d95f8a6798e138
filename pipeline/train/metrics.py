"""Numbers of an interval between two log lines: sums on the device, clocks, and norms by layer.

Norms of gradient, update and weights by group of layers: on each rank the optimizer's hooks see the
summed and clipped gradient of its own part of the master weights. Sums of squares of the parts add
up over the ranks, so nothing is gathered and nothing waits for the GPU.
"""

import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.config.data import BatchSpec
from pipeline.data.loader import MicroBatch
from pipeline.model.architecture import OBJECTIVE_PARTS
from pipeline.objectives.base import Objective, Sums
from pipeline.runtime import dist
from pipeline.train.engine import Engine, StepResult
from pipeline.train.optimizers.slices import squared_norm
from pipeline.train.timing import memory_peaks

_PEAKS = ("gpu_allocated_gb", "gpu_reserved_gb", "host_rss_gb")


_LAYER = re.compile(r"encoder\.layers\.(\d+)\.")


@dataclass(frozen=True)
class GroupNorms:
    """Norms of one update in a group of layers."""

    gradient: float
    """L2 norm before clipping."""
    update_ratio: float
    """Norm of the change (with the learning rate) over the norm of the weights before it."""


def group_of(parameter: str) -> str:
    """Return `embeddings`, `layer_00` and so on, `head` for all after the last layer, or
    `objective` for what an objective has of its own.
    """
    layer = _LAYER.match(parameter)
    if layer:
        return f"layer_{int(layer[1]):02d}"
    if parameter.startswith(OBJECTIVE_PARTS):
        return "objective"
    return "embeddings" if parameter.startswith("encoder.") and "embedding" in parameter else "head"


class LayerNorms:
    """Measures the update after `measure`, at the cost of a copy of this rank's master weights."""

    def __init__(self, engine: Engine, grad_clip: float) -> None:
        """Hook into the optimizer; without partitions there are no groups."""
        partitions = engine.partitions()
        # Names inside DeepSpeed's engine begin with `module.`.
        names = {
            group_of(name.removeprefix("module.")) for name, _ in engine.model.named_parameters()
        }
        self.groups = sorted(names) if partitions else []
        self.sums = torch.zeros(len(self.groups), 3, dtype=torch.float64, device=engine.device)
        """(groups, 3) this rank's sums of squares: clipped gradient, update, weights before."""
        self.grad_clip = grad_clip
        self._spans = {id(flat): self._group_spans(places) for flat, places in partitions}
        self._before: dict[int, Tensor] = {}
        self._wanted = False
        if partitions:
            engine.optimizer.register_step_pre_hook(self._before_step)
            engine.optimizer.register_step_post_hook(self._after_step)

    def measure(self) -> None:
        """Measure the next update that is applied."""
        self.sums.zero_()
        self._wanted = True

    def done(self) -> None:
        """End a measurement after the step."""
        self._wanted = False

    def norms(self, sums: list[list[float]], grad_norm: float) -> dict[str, GroupNorms]:
        """Compute norms by group from `sums` over all ranks and the global norm before clipping."""
        # DeepSpeed divides the gradient by this if the norm is above the limit.
        clipped = max(1.0, (grad_norm + 1e-6) / self.grad_clip) if self.grad_clip else 1.0
        return {
            group: GroupNorms(gradient**0.5 * clipped, (update / weights) ** 0.5 if weights else 0)
            for group, (gradient, update, weights) in zip(self.groups, sums, strict=True)
        }

    def _group_spans(self, places: dict[str, tuple[int, int]]) -> list[tuple[int, int, int]]:
        """List (group, start, stop) of a partition, with neighbours of one group joined."""
        parts = sorted((*place, self.groups.index(group_of(n))) for n, place in places.items())
        spans = []
        for group, of_group in groupby(parts, key=lambda part: part[2]):
            run = list(of_group)
            spans.append((group, run[0][0], run[-1][1]))
        return spans

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for flat in self._wanted_of(optimizer):
            assert flat.grad is not None
            self._before[id(flat)] = flat.detach().clone()
            self._add(0, flat, flat.grad)
            self._add(2, flat, flat)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for flat in self._wanted_of(optimizer):
            self._add(1, flat, flat.detach() - self._before.pop(id(flat)))

    def _wanted_of(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        # DeepSpeed updates one group of parameters at a time, with this list cut to that group.
        return [group["params"][0] for group in optimizer.param_groups] if self._wanted else []

    @torch.no_grad()
    def _add(self, column: int, flat: Tensor, values: Tensor) -> None:
        for group, start, stop in self._spans.get(id(flat), []):
            self.sums[group, column] += squared_norm(values[start:stop])


@dataclass(frozen=True)
class LogInterval:
    """What happened since the last log line, over all ranks.

    Its time is that of the steps, waiting for data included: not that of evaluations and saves.
    """

    losses: list[tuple[int, float]]
    """(batch, minimised loss) of each applied step."""
    loss: float
    """The minimised loss over all steps; NaN if no step was applied."""
    means: dict[str, float]
    """The objective's sums, each over its weight; NaN where the weight is 0."""
    weights: dict[str, float]
    """Divisor of each loss, such as the number of masked tokens; skipped steps too."""
    counts: dict[str, int]
    """What the objective counts."""
    elapsed_s: float
    """Time of the steps on this rank."""
    num_tokens: int
    """Slots that are no padding."""
    num_slots: int
    squared_lengths: int
    """Sum of n^2 over all pieces of documents of n tokens: pairs that attention looks at."""
    data_wait: float
    """Share of the time in which ranks waited for data, their mean."""
    wait_s: npt.NDArray[np.float64]
    """(ranks,) waiting for data in a step, mean of the interval."""
    compute_s: npt.NDArray[np.float64]
    """(ranks,) forward and backward passes of a step until the first collective, likewise."""
    clock_s: float
    """Time of training on rank 0's clock, all attempts together."""
    step_s: npt.NDArray[np.float64]
    """(ranks, steps) time of each step: the slowest rank's on all of them."""
    peak_gb: dict[str, float]
    """Memory of the rank that held most; the GPU's only where there is one."""
    layers: dict[str, GroupNorms]
    """Norms by layer group for the last applied step; empty if it was not measured."""


class StepNumbers(NamedTuple):
    """What the last applied step of an interval was taken with."""

    place: BatchSpec
    alpha: float
    lr: float
    grad_norm: float
    """Before clipping."""
    more: Mapping[str, float]
    """What its weighing wants to be seen."""


class Meter:
    """Adds up one rank's steps."""

    last: StepNumbers | None
    """The last applied step of the interval; None: it has none yet."""

    def __init__(self, engine: Engine, objective: Objective, grad_clip: float) -> None:
        """Start the first interval."""
        self._device = engine.device
        self._own_time = engine.own_time
        self._objective = objective
        self._layers = LayerNorms(engine, grad_clip)
        self._reset()

    def _reset(self) -> None:
        self._sums: list[torch.Tensor] = []
        self._batches: list[int] = []
        self._tokens = self._slots = self._squares = 0
        self._weights = Counter[str]()
        self._counts = Counter[str]()
        self._wait_s = 0.0
        self._step_s: list[float] = []
        self.last = None

    def clips_at(self, grad_clip: float) -> None:
        """Take note that gradients are clipped at another norm from now on."""
        self._layers.grad_clip = grad_clip

    def begin_step(self) -> None:
        """Start the clock of a step; call it before data is asked for."""
        self._began_s = time.perf_counter()

    def have_data(self, *, measure_layers: bool) -> None:
        """Count the time since `begin_step` as waiting; says whether the update is measured."""
        self._wait_s += time.perf_counter() - self._began_s
        self._layers_measured = measure_layers
        if measure_layers:
            self._layers.measure()

    def end_step(self, result: StepResult, number: int, batches: list[MicroBatch]) -> None:
        """Count a step; the loss of a skipped one is NaN or infinite and is left out.

        Args:
            result: of the step.
            number: of its batch.
            batches: this rank's, on the host.
        """
        self._layers.done()
        self._step_s.append(time.perf_counter() - self._began_s)
        self._tokens += sum(batch.num_tokens for batch in batches)
        self._slots += sum(batch.input_ids.numel() for batch in batches)
        # n^2 is the sum of 2p + 1 over the positions p of a piece; padding has position 0.
        self._squares += sum(2 * int(batch.positions.sum()) + batch.num_tokens for batch in batches)
        for batch in batches:
            self._weights.update(batch.weights)
            self._counts.update(batch.counts)
        self._names = list(result.sums)
        if result.applied:
            self._sums.append(_stacked(result.sums))
            self._batches.append(number)

    @property
    def last_step_s(self) -> float:
        """Time of the last step on this rank."""
        return self._step_s[-1]

    def close_interval(self, *, clock_s: float) -> LogInterval:
        """Add up all ranks and start the next interval. Collective; synchronises.

        Args:
            clock_s: time of training on rank 0, 0 on other ranks.
        """
        steps, elapsed_s = len(self._step_s), sum(self._step_s)
        own = (
            (self._tokens, self._slots, self._squares),
            [float(weight) for weight in self._weights.values()],
            list(self._counts.values()),
            [size / 1e9 for size in memory_peaks(self._device)],
            (self._wait_s / elapsed_s, clock_s),
            (self._wait_s / steps, self._own_time.take_s() / steps),
            self._step_s,
        )
        # A row for each rank.
        columns = (np.array(column) for column in zip(*dist.gather(own), strict=True))
        sizes, weights, counts, peaks, shared, work, step_s = columns
        tokens, slots, squared = sizes.sum(0).tolist()
        wait_share, clock = shared.sum(0).tolist()

        vector = torch.cat((*self._sums, self._layers.sums.flatten()))
        values = dist.sum_over_ranks(vector).cpu() if vector.numel() else vector  # sync
        names, num_steps = self._names, len(self._sums)
        sums, squares = torch.split(values, [2 * len(names) * num_steps, self._layers.sums.numel()])
        of_steps = sums.view(num_steps, len(names), 2)
        whole = dict(zip(names, of_steps.sum(0).tolist(), strict=True))
        layers: dict[str, GroupNorms] = {}
        if self._layers_measured:
            assert self.last is not None, "an interval has an applied step"
            of_groups = squares.view(self._layers.sums.shape).tolist()
            layers = self._layers.norms(of_groups, self.last.grad_norm)
        interval = LogInterval(
            losses=[
                (batch, self._minimised(dict(zip(names, step, strict=True))))
                for batch, step in zip(self._batches, of_steps.tolist(), strict=True)
            ],
            loss=self._minimised(whole),
            means={
                name: total / weight if weight else float("nan")
                for name, (total, weight) in whole.items()
            },
            weights=dict(zip(self._weights, weights.sum(0).tolist(), strict=True)),
            counts=dict(zip(self._counts, counts.sum(0).tolist(), strict=True)),
            elapsed_s=elapsed_s,
            num_tokens=tokens,
            num_slots=slots,
            squared_lengths=squared,
            data_wait=wait_share / len(shared),
            wait_s=work[:, 0],
            compute_s=work[:, 1],
            clock_s=clock,
            step_s=step_s,
            peak_gb={n: gb for n, gb in zip(_PEAKS, peaks.max(0).tolist(), strict=True) if gb},
            layers=layers,
        )
        self._reset()
        return interval

    def _minimised(self, sums: dict[str, tuple[float, float]]) -> float:
        """Return what a step minimises, from sums over all ranks."""
        return self._objective.tracked_loss({n: total / w for n, (total, w) in sums.items() if w})


def _stacked(sums: Sums) -> torch.Tensor:
    """(2 * sums,) fp64 totals and weights by turns."""
    pairs = [torch.stack((each.total, each.weight)).detach().double() for each in sums.values()]
    return torch.cat(pairs)
