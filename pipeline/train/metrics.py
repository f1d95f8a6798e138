"""Sums between two log lines: kept on the device, added over ranks once per line."""

import time
from dataclasses import dataclass

import torch

from pipeline.data.batch import MicroBatch
from pipeline.objectives.mlm import LossSums
from pipeline.runtime import dist


@dataclass(frozen=True)
class Interval:
    """What happened since the last log line, over all ranks."""

    loss: float
    """Mean cross-entropy of masked tokens, nats; NaN if no step was applied."""
    accuracy: float
    """Share of masked tokens predicted right."""
    tokens_per_s: float
    """Tokens that are no padding, per second."""
    fill: float
    """Share of slots that are no padding."""
    unmasked_documents: int
    """Pieces of documents of which nothing was to be predicted."""
    data_wait: float
    """Share of the time in which ranks waited for data, their mean."""
    stop_requested: bool
    """Whether any rank was asked to stop."""
    elapsed_s: float
    """Time of training on rank 0's clock."""


class Meter:
    """Adds up one rank's steps."""

    def __init__(self, device: torch.device) -> None:
        """Starts an interval now."""
        self._device = device
        self._reset()

    def _reset(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64, device=self._device)
        self._tokens = self._slots = self._unmasked_documents = 0
        self._wait_s = 0.0
        self._start_s = time.perf_counter()

    def add_wait(self, seconds: float) -> None:
        """Counts time spent waiting for the loader."""
        self._wait_s += seconds

    def add_step(self, sums: LossSums, batches: list[MicroBatch], *, applied: bool) -> None:
        """Counts a step; the loss of a skipped one is no number and is left out."""
        self._tokens += sum(batch.num_tokens for batch in batches)
        self._slots += sum(batch.input_ids.numel() for batch in batches)
        self._unmasked_documents += sum(batch.unmasked_documents for batch in batches)
        if applied:
            self._sums += torch.stack((sums.loss, sums.correct, sums.weight)).double()

    def close_interval(self, *, stop_requested: bool, first_rank_s: float) -> Interval:
        """Adds up all ranks and starts the next interval. Collective; synchronises.

        Args:
            stop_requested: whether this rank was asked to stop.
            first_rank_s: time of training on rank 0, 0 on other ranks.
        """
        elapsed_s = time.perf_counter() - self._start_s
        mine = [
            self._tokens, self._slots, self._unmasked_documents, self._wait_s / elapsed_s,
            float(stop_requested), first_rank_s, 1.0,
        ]  # fmt: skip
        vector = torch.cat(
            (self._sums, torch.tensor(mine, dtype=torch.float64, device=self._device))
        )
        values = dist.sum_over_ranks(vector).tolist()  # sync
        loss, correct, weight, tokens, slots, unmasked, wait, stops, clock_s, ranks = values
        self._reset()
        return Interval(
            loss=loss / weight if weight else float("nan"),
            accuracy=correct / weight if weight else float("nan"),
            tokens_per_s=tokens / elapsed_s,
            fill=tokens / slots if slots else 0.0,
            unmasked_documents=int(unmasked),
            data_wait=wait / ranks,
            stop_requested=stops > 0,
            elapsed_s=clock_s,
        )
