"""Collectives in the few forms used here, and the process group of what needs no engine."""

import ctypes
import itertools
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pipeline.errors import PostnormError
from pipeline.runtime import env, watchdog
from pipeline.runtime.env import ProcessInfo

T = TypeVar("T")
_LOOK_EVERY_S = 0.5
_REPORT_EVERY_S = 5.0
_PROGRESS = "postnorm/progress"
_waits = itertools.count()
_reported_s = float("-inf")
_objects: dist.ProcessGroup | None = None
"""The group that Python objects travel through; None: that of tensors."""


def own_device(process: ProcessInfo) -> torch.device:
    """Make this rank's GPU the current one and get it, or the CPU; before a group is opened."""
    # Both are torch 2.13's defaults; older ones differ. Without the first a timeout hangs.
    env.set_default("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    env.set_default("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if not torch.cuda.is_available():
        # 9,600 page faults a layer and step took an eighth of the layer's time.
        _keep_freed_memory()
        return torch.device("cpu")
    torch.cuda.set_device(process.local_rank)
    return torch.device("cuda", process.local_rank)


def _keep_freed_memory() -> None:
    """Let glibc use the memory of freed tensors again, instead of giving it back at each step.

    The process stays as large as it was at most. Where there is no glibc, nothing changes.
    """
    # By default glibc maps blocks above 32 MB anew, and gives the top of the heap back: a layer of
    # width 256 over 4,096 tokens had 9,600 page faults a step, an eighth of its time.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # mallopt(3): M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_TOP_PAD, in bytes.
    for option, size in ((-3, 2**30), (-1, 2**31 - 1), (-2, 2**28)):
        if mallopt is not None:
            mallopt(option, size)


def backend_of(device: torch.device) -> str:
    """Name what collectives between such devices go through."""
    return "nccl" if device.type == "cuda" else "gloo"


def open_group(process: ProcessInfo, device: torch.device, timeout_s: float) -> None:
    """Join the process group, without DeepSpeed.

    `timeout_s` bounds the wait for all ranks to start, and each collective.
    """
    dist.init_process_group(
        backend_of(device),
        timeout=timedelta(seconds=timeout_s),
        rank=process.rank,
        world_size=process.world_size,
    )
    open_objects(timeout_s)


def open_objects(timeout_s: float) -> None:
    """Open a gloo group for Python objects beside NCCL's, after that. Collective.

    Through NCCL a pickled object goes to the GPU and back, and waits for all kernels in the queue.
    """
    global _objects
    _objects = None
    if dist.get_backend() == "nccl":
        _objects = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))


def close_group() -> None:
    """Leave the process group together: a rank that tears gloo down early can abort its peers."""
    barrier()
    dist.destroy_process_group()


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Add up a tensor over all ranks, in place. No host synchronisation."""
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor


def exchange(flat: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    """Send each rank a stretch of a flat tensor, and get one of each. No host synchronisation.

    `sent` and `received` are numbers of elements by rank; stretches are in the order of the ranks.
    """
    given = flat.new_empty(sum(received))
    dist.all_to_all_single(given, flat, received, sent)
    return given


def sum_modulo_2_64(values: list[int]) -> list[int]:
    """Add up whole numbers below 2^64 over all ranks, exactly, modulo 2^64. Synchronises."""
    # NCCL adds on this rank's GPU only. Signed sums of two's complement wrap modulo 2^64 in both.
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    signed = [value - (value >> 63 << 64) for value in values]
    summed: list[int] = sum_over_ranks(
        torch.tensor(signed, dtype=torch.int64, device=device)
    ).tolist()
    return [value % 2**64 for value in summed]


def barrier() -> None:
    """Wait for all ranks."""
    dist.barrier(group=_objects)


def wait_for(ranks: Collection[int], what: str) -> None:
    """Wait until `ranks` have come here, too; each of them only until the others have.

    For what may take longer than `train.collective_timeout_s`: a collective would end by it, even
    though the other ranks work. All ranks call it together or not at all.

    Raises:
        DistError: rank 0, which keeps the store, is gone.
    """
    watchdog.heartbeat(f"waiting for other ranks: {what}")
    # Private, but torch has no other way to the store that its process group was opened with.
    store = dist.distributed_c10d._get_default_store()
    # A new key each time, as keys are not removed; ranks count alike because they call together.
    key = f"postnorm/wait-{next(_waits)}"
    here = dist.get_rank() in ranks
    arrived, progress, pause_s = store.add(key, int(here)), 0, 0.001
    while arrived < len(ranks):
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LOOK_EVERY_S)
        # Adding 0 reads at once: `get` waits for a key that nobody has set, and then times out.
        arrived = store.add(key, 0)
        seen = store.add(_PROGRESS, 0)
        # The store has no timeout, and this rank's watchdog counts any rank's call of
        # `heartbeat_all`.
        if seen != progress:
            watchdog.heartbeat(f"waiting for other ranks: {what}")
        progress = seen


def heartbeat_all(phase: str) -> None:
    """Beat for this rank's watchdog, and for those of the ranks that `wait_for` it."""
    global _reported_s
    watchdog.heartbeat(phase)
    if time.monotonic() - _reported_s > _REPORT_EVERY_S:
        _reported_s = time.monotonic()
        dist.distributed_c10d._get_default_store().add(_PROGRESS, 1)


def set_flag(name: str) -> None:
    """Leave a mark that all ranks can see from now on. Not collective."""
    dist.distributed_c10d._get_default_store().add(f"postnorm/mark-{name}", 1)


def is_marked(name: str) -> bool:
    """Return whether any rank has left that mark; asks rank 0's store. Not collective."""
    return dist.distributed_c10d._get_default_store().add(f"postnorm/mark-{name}", 0) > 0


# torch's file writer and gloo both raise RuntimeError, the writer in several wordings: errors that
# name a source file of gloo's, and NCCL's class, are a lost rank, all others the disk's.
def is_lost_rank(error: Exception) -> bool:
    """Return whether a collective failed because another rank is gone."""
    # NCCL's errors have a class of their own; gloo raises RuntimeError, as torch's file writer
    # does, but names its source file. A path of the user's may have "gloo" in it, too.
    return isinstance(error, dist.DistError) or "third_party/gloo/" in str(error)


def from_first(value: T) -> T:
    """Give every rank rank 0's (picklable) value; that of other ranks is not looked at."""
    box: list[T] = [value]
    dist.broadcast_object_list(box, src=0, group=_objects)
    return box[0]


def on_first(function: Callable[[], T], what: str) -> T:
    """Run on rank 0 only and give every rank the result, or raise its PostnormError on all.

    The function may take long if it calls `heartbeat_all`; `what` names it for the watchdog.
    """
    result: T | None = None
    with raise_on_all_ranks([0], what):
        if dist.get_rank() == 0:
            result = function()
    return from_first(result)  # type: ignore[return-value]


@contextmanager
def raise_on_all_ranks(slow: Collection[int] = (), what: str = "") -> Iterator[None]:
    """Raise the first rank's PostnormError on all ranks at the end of a block. Collective.

    The only way in which ranks agree on an error.

    Ranks in `slow` may take longer than `train.collective_timeout_s`; they call `heartbeat_all`.
    """
    error: PostnormError | None = None
    try:
        yield
    except PostnormError as own:
        error = own
    if slow:
        wait_for(slow, what)
    # Ranks without an error would wait for the one that left, in their next collective, until it
    # times out.
    for each in gather(error):
        if each is not None:
            raise each


def tensor_from_first(tensor: torch.Tensor) -> torch.Tensor:
    """Overwrite a tensor with rank 0's, in place. No host synchronisation."""
    dist.broadcast(tensor, src=0)
    return tensor


def gather(value: T) -> list[T]:
    """Give every rank the list of all ranks' (picklable) values, in rank order."""
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, value, group=_objects)
    return box
