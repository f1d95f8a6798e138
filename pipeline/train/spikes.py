"""Loss spikes: when the loss jumps and stays, which batches are left out, where the run goes back.

All of it is a function of the losses, which are the same on all ranks, and is looked at in steps
that are multiples of `monitor.log_every_steps` only. The losses that a decision needs are saved
with every checkpoint: a run that was killed decides as one that was not.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.config.runs import PretrainConfig
from pipeline.config.train import SpikeConfig
from pipeline.data.ledger import Rewind
from pipeline.data.record import BatchRecord

# Of normal noise this times the median distance from the median is the standard deviation.
_TO_DEVIATION = 1.4826


@dataclass
class LossHistory:
    """Losses of applied steps, as far as a decision needs them."""

    usual: list[float] = field(default_factory=list)
    """The last `window_steps` before those that are high now."""
    high: list[tuple[int, float]] = field(default_factory=list)
    """(batch, loss) of the last steps, all high."""

    @classmethod
    def read(cls, values: dict[str, Any]) -> "LossHistory":
        """From a manifest; an earlier version's has nothing."""
        high = [(batch, loss) for batch, loss in values.get("high", [])]
        return cls(list(values.get("usual", [])), high)

    def limit(self, config: SpikeConfig) -> float:
        """Loss above which a step is high; infinite as long as too little is known."""
        if len(self.usual) < config.window_steps:
            return math.inf
        usual = np.array(self.usual)
        median = float(np.median(usual))
        deviation = _TO_DEVIATION * float(np.median(np.abs(usual - median)))
        return median + max(config.rise_nats, config.deviations * deviation)

    def add(self, batch: int, loss: float, config: SpikeConfig) -> None:
        """Takes the loss of the next applied step; NaN, of a batch without a target, is none."""
        if math.isnan(loss):
            return
        if loss > self.limit(config):
            self.high.append((batch, loss))
            return
        # The run got over those that were high.
        self.usual += [before for _, before in self.high] + [loss]
        self.usual = self.usual[-config.window_steps :]
        self.high = []

    def is_spike(self, config: SpikeConfig) -> bool:
        """Whether the last steps are a spike."""
        return len(self.high) >= config.steps_in_a_row


def trained_in_spite(config: PretrainConfig, records: list[BatchRecord], before: int) -> list[int]:
    """Batches of `train.skip_batches` that a run was trained on before it was told to skip them.

    Args:
        config: of the run.
        records: what it has logged.
        before: number of its next batch.
    """
    skipped = LeftOut(config, [])
    return [
        record.batch for record in records
        if record.batch < before and record.step is not None and record.batch in skipped
    ]  # fmt: skip


class LeftOut:
    """Batches that are not trained on: those of `train.skip_batches`, and those of rewinds."""

    def __init__(self, config: PretrainConfig, rewinds: list[Rewind]) -> None:
        """Joins both."""
        self._ranges = [range(each.first, each.last + 1) for each in config.train.skip_batches]
        self._ranges += [range(each.first_batch, each.last_batch + 1) for each in rewinds]

    def __contains__(self, batch: int) -> bool:
        """Whether a batch, by its number, is left out."""
        return any(batch in each for each in self._ranges)
