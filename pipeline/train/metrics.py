"""Sums between two log lines: kept on the device, added over ranks once per line."""

import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pipeline.data.loader import MicroBatch
from pipeline.objectives.base import Objective, Sums
from pipeline.runtime import dist
from pipeline.runtime.env import ProcessInfo
from pipeline.train.engine import Engine, StepResult
from pipeline.train.health import GroupNorms, LayerNorms
from pipeline.train.timing import memory_peaks

_PEAKS = ("gpu_allocated_gb", "gpu_reserved_gb", "host_rss_gb")


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


class Meter:
    """Adds up one rank's steps."""

    def __init__(
        self, engine: Engine, process: ProcessInfo, objective: Objective, grad_clip: float
    ) -> None:
        """Start the first interval."""
        self._device = engine.device
        self._own_time = engine.own_time
        self._process = process
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

    def close_interval(self, grad_norm: float, *, clock_s: float) -> LogInterval:
        """Add up all ranks and starts the next interval. Collective; synchronises.

        Args:
            grad_norm: of the last step, before clipping.
            clock_s: time of training on rank 0, 0 on other ranks.
        """
        elapsed_s = sum(self._step_s)
        own = [
            float(self._tokens),
            float(self._slots),
            float(self._squares),
            *self._weights.values(),
            *map(float, self._counts.values()),
            self._wait_s / elapsed_s,
            clock_s,
        ]
        steps = len(self._step_s)
        work = [self._wait_s / steps, self._own_time.take_s() / steps]
        # A row a rank, zeros but for its own: their sum has everyone's.
        rows = torch.zeros(self._process.world_size, len(_PEAKS) + len(work) + steps)
        rows = rows.double()
        peaks = [size / 1e9 for size in memory_peaks(self._device)]
        mine = [*peaks, *work, *self._step_s]
        rows[self._process.rank] = torch.tensor(mine, dtype=torch.float64)
        host = torch.cat((torch.tensor(own, dtype=torch.float64), rows.flatten()))
        on_device = [*self._sums, self._layers.sums.flatten()]
        vector = torch.cat((*on_device, host.to(self._device)))
        values = dist.sum_over_ranks(vector).cpu()  # sync
        names = self._names
        sizes = [
            2 * len(names) * len(self._sums),
            self._layers.sums.numel(),
            len(own),
            rows.numel(),
        ]
        sums, squares, own_sums, table = torch.split(values, sizes)
        of_steps = sums.view(len(self._sums), len(names), 2)
        whole = dict(zip(names, of_steps.sum(0).tolist(), strict=True))
        tokens, slots, squared, *more, wait, clock = own_sums.tolist()
        by_rank = table.view(rows.shape).numpy()
        most = dict(zip(_PEAKS, by_rank.max(0)[: len(_PEAKS)].tolist(), strict=True))
        layers: dict[str, GroupNorms] = {}
        if self._layers_measured:
            layers = self._layers.norms(squares.view(self._layers.sums.shape).tolist(), grad_norm)
        interval = LogInterval(
            losses=[
                (batch, self._minimised(dict(zip(names, step, strict=True))))
                for batch, step in zip(self._batches, of_steps.tolist(), strict=True)
            ],
            loss=self._minimised(whole),
            means={name: _mean(*pair) for name, pair in whole.items()},
            weights=dict(zip(self._weights, more, strict=False)),
            counts=dict(zip(self._counts, map(int, more[len(self._weights) :]), strict=True)),
            elapsed_s=elapsed_s,
            num_tokens=int(tokens),
            num_slots=int(slots),
            squared_lengths=int(squared),
            data_wait=wait / self._process.world_size,
            wait_s=by_rank[:, len(_PEAKS)],
            compute_s=by_rank[:, len(_PEAKS) + 1],
            clock_s=clock,
            step_s=by_rank[:, len(_PEAKS) + len(work) :],
            peak_gb={name: size for name, size in most.items() if size},
            layers=layers,
        )
        self._reset()
        return interval

    def _minimised(self, sums: dict[str, tuple[float, float]]) -> float:
        """Return what a step minimises, from sums over all ranks."""
        return self._objective.tracked_loss({n: total / w for n, (total, w) in sums.items() if w})


def _mean(total: float, weight: float) -> float:
    return total / weight if weight else float("nan")


def _stacked(sums: Sums) -> torch.Tensor:
    """(2 * sums,) fp64 totals and weights by turns."""
    pairs = [torch.stack((each.total, each.weight)).detach().double() for each in sums.values()]
    return torch.cat(pairs)
