"""Collectives in the few forms used here; the process group itself is opened by the engine."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pipeline.errors import PostnormError

T = TypeVar("T")


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Adds a tensor over all ranks, in place. No host synchronisation."""
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor


def sum_modulo_2_64(values: list[int]) -> list[int]:
    """Adds whole numbers below 2^64 over all ranks, exactly, modulo 2^64. Synchronises.

    Args:
        values: as many on every rank.
    """
    # NCCL adds on this rank's GPU only. Signed sums of two's complement wrap modulo 2^64 in both.
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    signed = [value - (value >> 63 << 64) for value in values]
    summed: list[int] = sum_over_ranks(
        torch.tensor(signed, dtype=torch.int64, device=device)
    ).tolist()
    return [value % 2**64 for value in summed]


def barrier() -> None:
    """Waits for all ranks."""
    dist.barrier()


def from_first(value: T) -> T:
    """Gives every rank rank 0's (picklable) value; that of other ranks is not looked at."""
    box: list[T] = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def on_first(function: Callable[[], T]) -> T:
    """Runs on rank 0 only and gives every rank the result, or raises its PostnormError on all."""
    outcome: T | PostnormError | None = None
    if dist.get_rank() == 0:
        try:
            outcome = function()
        except PostnormError as error:
            outcome = error
    shared = from_first(outcome)
    if isinstance(shared, PostnormError):
        raise shared
    return shared  # type: ignore[return-value]


def gather(value: T) -> list[T]:
    """Gives every rank the list of all ranks' (picklable) values, in rank order."""
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, value)
    return box
