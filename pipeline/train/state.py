"""All that a run must remember besides weights and optimizer state."""

from dataclasses import dataclass


@dataclass
class TrainState:
    """Counters; the rest follows from them and the config."""

    step: int = 0
    """Optimizer steps applied."""
    cursor: int = 0
    """Sequences consumed, by applied and skipped steps: the position in the data order."""
    skipped: int = 0
    """Steps skipped because a gradient was not finite."""
    skipped_in_a_row: int = 0
    """Of those, the ones since the last applied step."""

    def advance(self, num_sequences: int, *, applied: bool) -> None:
        """Counts one step."""
        self.cursor += num_sequences
        if applied:
            self.step += 1
            self.skipped_in_a_row = 0
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1
