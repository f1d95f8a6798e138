"""All that a run must remember besides weights and optimizer state."""

import time
from dataclasses import dataclass, field

from pipeline.train.spikes import LossHistory


@dataclass
class TrainState:
    """Counters; the rest follows from them and the config."""

    step: int = 0
    """Optimizer steps applied."""
    cursor: int = 0
    """Sequences consumed, those of skipped steps and of batches left out too: the position in the
    data order."""
    skipped: int = 0
    """Steps skipped because a gradient was not finite."""
    skipped_in_a_row: int = 0
    """Of those, the ones since the last applied step."""
    left_out: int = 0
    """Batches left out by `train.skip_batches` and after loss spikes."""
    rewinds: int = 0
    """Rewinds of the run that this state comes after."""
    losses: LossHistory = field(default_factory=LossHistory)
    elapsed_s: float = 0.0
    """Time of training until the last log line on rank 0's clock, all attempts: see `Clock`."""

    held_out_loss: float | None = None
    """Of the newest evaluation, nats."""
    held_out_step: int | None = None
    """Where that was."""

    def leave_out(self, num_sequences: int) -> None:
        """Counts a batch that is not trained on."""
        self.cursor += num_sequences
        self.left_out += 1

    def advance(self, num_sequences: int, *, applied: bool) -> None:
        """Counts one step."""
        self.cursor += num_sequences
        if applied:
            self.step += 1
            self.skipped_in_a_row = 0
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1


class Clock:
    """Time of training on one rank: all that passes in the loop, of all attempts.

    Ranks take rank 0's, which they learn with each log line and not in between: a schedule that
    depends on it is the same on all ranks, and no step waits for it. What an attempt did after the
    last log line before its checkpoint is not counted.
    """

    def __init__(self, elapsed_s: float) -> None:
        """Goes on from what earlier attempts took."""
        self._start_s = time.perf_counter() - elapsed_s

    def read_s(self) -> float:
        """Seconds."""
        return time.perf_counter() - self._start_s
