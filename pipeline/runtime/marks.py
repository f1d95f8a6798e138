"""Moments of a training step that a profiler writes down, so that kernels can be told apart."""

from torch.profiler import record_function

PREFIX = "postnorm:"
BEGIN, END, DATA, FORWARD, HEAD, BODY, UPDATE = (
    "begin", "end", "data", "forward", "head", "body", "update",
)  # fmt: skip
"""What is done from a mark to the next: BODY is what is no HEAD in a backward pass."""


def mark(phase: str) -> None:
    """From now on the host is in another phase; costs microseconds where nothing is profiled."""
    with record_function(PREFIX + phase):
        pass
