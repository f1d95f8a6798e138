"""The part of a run's state that is not a tensor: counters and the losses behind the next decision.

A manifest stores it (`manifest.Manifest`), and a resumed run continues from it.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.config.train import SpikeConfig

# The standard deviation of normal noise is this times the median distance from the median.
_TO_DEVIATION = 1.4826


@dataclass
class LossHistory:
    """Losses of applied steps, as many as the next decision about a spike needs.

    They are the same on all ranks and are saved with every checkpoint, so a run that was killed
    decides like one that was not.
    """

    usual: list[float] = field(default_factory=list)
    """The last `window_steps` losses before those in `high`."""
    high: list[tuple[int, float]] = field(default_factory=list)
    """(batch, loss) of the last steps, all above the limit."""

    @classmethod
    def read(cls, values: dict[str, Any]) -> "LossHistory":
        """Build it from a manifest; manifests of earlier versions have no losses."""
        high = [(batch, loss) for batch, loss in values.get("high", [])]
        return cls(list(values.get("usual", [])), high)

    def limit(self, config: SpikeConfig) -> float:
        """Return the loss above which a step counts as high; infinite until the window is full."""
        if len(self.usual) < config.window_steps:
            return math.inf
        usual = np.array(self.usual)
        median = float(np.median(usual))
        deviation = _TO_DEVIATION * float(np.median(np.abs(usual - median)))
        return median + max(config.rise_nats, config.deviations * deviation)

    def add(self, batch: int, loss: float, config: SpikeConfig) -> None:
        """Add the loss of the next applied step; NaN (a batch without targets) is ignored."""
        if math.isnan(loss):
            return
        if loss > self.limit(config):
            self.high.append((batch, loss))
            return
        # The loss came back down, so the high ones were noise and belong to the window.
        self.usual += [before for _, before in self.high] + [loss]
        self.usual = self.usual[-config.window_steps :]
        self.high = []

    def is_spike(self, config: SpikeConfig) -> bool:
        """Whether the last steps form a spike."""
        return len(self.high) >= config.steps_in_a_row


@dataclass
class TrainState:
    """Counters of a run; learning rate, alpha and data follow from them and the config."""

    step: int = 0
    """Optimizer steps applied."""
    cursor: int = 0
    """Position in the data order: sequences consumed, including those of skipped steps and of
    batches left out."""
    skipped: int = 0
    """Steps skipped because a gradient was not finite."""
    skipped_in_a_row: int = 0
    """Steps skipped since the last applied one."""
    left_out: int = 0
    """Batches left out by `train.skip_batches` and after loss spikes."""
    rewinds: int = 0
    """How often the run had gone back because of a loss spike."""
    losses: LossHistory = field(default_factory=LossHistory)
    elapsed_s: float = 0.0
    """Training time of all attempts up to the last log line, on rank 0's clock."""

    held_out_loss: float | None = None
    """Loss of the newest evaluation, in nats."""
    held_out_step: int | None = None
    """Step of the newest evaluation."""

    def leave_out(self, num_sequences: int) -> None:
        """Count a batch that is not trained on."""
        self.cursor += num_sequences
        self.left_out += 1

    def advance(self, num_sequences: int, *, applied: bool) -> None:
        """Count one step."""
        self.cursor += num_sequences
        if applied:
            self.step += 1
            self.skipped_in_a_row = 0
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1
