"""Collectives in the few forms used here; the process group itself is opened by the engine."""

from typing import Any, TypeVar

import torch
import torch.distributed as dist

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


def is_lost_rank(error: Exception) -> bool:
    """Whether a collective failed because another rank is gone.

    NCCL's errors have a class of their own; gloo raises RuntimeError, as torch's file writer does,
    but names its source file. A path of the user's may have "gloo" in it, too.
    """
    return isinstance(error, dist.DistError) or "third_party/gloo/" in str(error)


def from_first(value: T) -> T:
    """Gives every rank rank 0's (picklable) value; that of other ranks is not looked at."""
    box: list[T] = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def tensor_from_first(tensor: torch.Tensor) -> torch.Tensor:
    """Overwrites a tensor with rank 0's, in place. No host synchronisation."""
    dist.broadcast(tensor, src=0)
    return tensor


def gather(value: T) -> list[T]:
    """Gives every rank the list of all ranks' (picklable) values, in rank order."""
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, value)
    return box
