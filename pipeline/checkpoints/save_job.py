"""One rank's part of a save: a copy of its state, and a thread that writes it.

A thread is enough: writing (safetensors 0.8), hashing and fsync let Python run on meanwhile.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from pipeline.checkpoints.manifest import state_file
from pipeline.checkpoints.state import Part, write_part
from pipeline.runtime.files import sha256_file, sync_path

T = TypeVar("T")
Described = dict[str, dict[str, Any]]
"""path below the checkpoint -> {"bytes", "sha256"}."""


class HostCopy:
    """Buffers in host memory that a rank's state is copied to; kept from save to save."""

    def __init__(self) -> None:
        """Takes no memory yet."""
        self._buffers: dict[str, Tensor] = {}

    def take(self, parts: list[Part]) -> list[Part]:
        """The same parts, which later updates do not change; what it gave before is overwritten."""
        copied = []
        for part in parts:
            tensors = {
                kind: self._buffer(f"{kind}/{part.name}", tensor).copy_(tensor, non_blocking=True)
                for kind, tensor in part.tensors.items()
            }
            copied.append(replace(part, tensors=tensors))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copied

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape:
            # Fresh memory costs several times the copy; pinned, a GPU fills it several times as
            # fast.
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer


@dataclass(frozen=True)
class RankFiles:
    """What a rank writes into a checkpoint that is not published yet."""

    folder: Path
    rank: int
    world_size: int
    parts: list[Part]
    counters: dict[str, int]
    others: dict[str, bytes]
    """Further files, by name."""

    def write(self) -> Described:
        """Writes and flushes them, and describes them as they are read back. Not collective.

        Raises:
            OSError: the disk is full or not writable.
        """
        write_part(self.folder, self.rank, self.world_size, self.parts, self.counters)
        for name, data in self.others.items():
            (self.folder / name).write_bytes(data)
        names = [state_file(self.rank, self.world_size), *self.others]
        return {name: _flush_and_describe(self.folder / name) for name in names}


class Task(Generic[T]):
    """A function on a thread of its own, with what it returned or raised. It calls no collective.

    The thread is a daemon: a process that fails does not wait for its disk.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        """Starts it."""
        self.result: T | None = None
        self.error: Exception | None = None
        self.took_s = 0.0
        self._function = function
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def is_done(self, *, wait: bool = False) -> bool:
        """Whether it has ended."""
        if wait:
            self._thread.join()
        return not self._thread.is_alive()

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            self.result = self._function()
        except Exception as error:  # noqa: BLE001 - looked at by whoever asks
            self.error = error
        self.took_s = time.perf_counter() - started


def _flush_and_describe(path: Path) -> dict[str, Any]:
    sync_path(path)
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
