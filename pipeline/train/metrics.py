"""Sums between two log lines: kept on the device, added over ranks once per line."""

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pipeline.data.batch import MicroBatch
from pipeline.objectives.mlm import LossSums
from pipeline.runtime import dist
from pipeline.runtime.env import ProcessInfo
from pipeline.train.engine import Engine, StepResult
from pipeline.train.layer_norms import GroupNorms, LayerNorms
from pipeline.train.timing import memory_peaks

_PEAKS = ("gpu_allocated_gb", "gpu_reserved_gb", "host_rss_gb")


@dataclass(frozen=True)
class Interval:
    """What happened since the last log line, over all ranks.

    Its time is that of the steps, waiting for data included: not that of evaluations and saves.
    """

    losses: list[tuple[int, float]]
    """(batch, mean cross-entropy of masked tokens) of each applied step."""
    loss: float
    """Mean cross-entropy of masked tokens, nats; NaN if no step was applied."""
    accuracy: float
    """Share of masked tokens predicted right."""
    elapsed_s: float
    """Time of the steps on this rank."""
    num_tokens: int
    """Slots that are no padding."""
    num_slots: int
    num_masked: int
    """Tokens to predict."""
    squared_lengths: int
    """Sum of n^2 over all pieces of documents of n tokens: pairs that attention looks at."""
    unmasked_documents: int
    """Pieces of documents of which nothing was to be predicted."""
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
    """Of the last step that was applied, if it was measured, by group."""


class Meter:
    """Adds up one rank's steps."""

    def __init__(self, engine: Engine, process: ProcessInfo, grad_clip: float) -> None:
        """Starts the first interval."""
        self._device = engine.device
        self._own_time = engine.own_time
        self._process = process
        self._layers = LayerNorms(engine, grad_clip)
        self._reset()

    def _reset(self) -> None:
        self._sums: list[torch.Tensor] = []
        self._batches: list[int] = []
        self._tokens = self._slots = self._masked = self._squares = self._unmasked_documents = 0
        self._wait_s = 0.0
        self._step_s: list[float] = []

    def begin_step(self) -> None:
        """To be called before data is asked for."""
        self._began_s = time.perf_counter()

    def have_data(self, *, measure_layers: bool) -> None:
        """Counts the time since `begin_step` as waiting; says whether the update is measured."""
        self._wait_s += time.perf_counter() - self._began_s
        self._layers_measured = measure_layers
        if measure_layers:
            self._layers.measure()

    def end_step(self, result: StepResult, number: int, batches: list[MicroBatch]) -> None:
        """Counts a step; the loss of a skipped one is no number and is left out.

        Args:
            result: of the step.
            number: of its batch.
            batches: this rank's, on the host.
        """
        self._layers.done()
        self._step_s.append(time.perf_counter() - self._began_s)
        self._tokens += sum(batch.num_tokens for batch in batches)
        self._slots += sum(batch.input_ids.numel() for batch in batches)
        self._masked += sum(len(batch.targets) for batch in batches)
        # n^2 is the sum of 2p + 1 over the positions p of a piece; padding has position 0.
        self._squares += sum(2 * int(batch.positions.sum()) + batch.num_tokens for batch in batches)
        self._unmasked_documents += sum(batch.unmasked_documents for batch in batches)
        if result.applied:
            self._sums.append(_stacked(result.sums))
            self._batches.append(number)

    def close_interval(self, grad_norm: float, *, clock_s: float) -> Interval:
        """Adds up all ranks and starts the next interval. Collective; synchronises.

        Args:
            grad_norm: of the last step, before clipping.
            clock_s: time of training on rank 0, 0 on other ranks.
        """
        elapsed_s = sum(self._step_s)
        own = [
            self._tokens, self._slots, self._masked, self._squares, self._unmasked_documents,
            self._wait_s / elapsed_s, clock_s,
        ]  # fmt: skip
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
        sizes = [3 * len(self._sums), self._layers.sums.numel(), len(own), rows.numel()]
        sums, squares, own_sums, table = torch.split(values, sizes)
        of_steps = sums.view(-1, 3)
        loss, correct, weight = of_steps.sum(0).tolist()
        losses = (of_steps[:, 0] / of_steps[:, 2]).tolist()
        batches = self._batches
        tokens, slots, masked, squared, unmasked, wait, clock = own_sums.tolist()
        by_rank = table.view(rows.shape).numpy()
        most = dict(zip(_PEAKS, by_rank.max(0)[: len(_PEAKS)].tolist(), strict=True))
        layers: dict[str, GroupNorms] = {}
        if self._layers_measured:
            layers = self._layers.norms(squares.view(self._layers.sums.shape).tolist(), grad_norm)
        self._reset()
        return Interval(
            losses=list(zip(batches, losses, strict=True)),
            loss=loss / weight if weight else float("nan"),
            accuracy=correct / weight if weight else float("nan"),
            elapsed_s=elapsed_s,
            num_tokens=int(tokens),
            num_slots=int(slots),
            num_masked=int(masked),
            squared_lengths=int(squared),
            unmasked_documents=int(unmasked),
            data_wait=wait / self._process.world_size,
            wait_s=by_rank[:, len(_PEAKS)],
            compute_s=by_rank[:, len(_PEAKS) + 1],
            clock_s=clock,
            step_s=by_rank[:, len(_PEAKS) + len(work) :],
            peak_gb={name: size for name, size in most.items() if size},
            layers=layers,
        )


def _stacked(sums: LossSums) -> torch.Tensor:
    return torch.stack((sums.loss, sums.correct, sums.weight)).detach().double()
