"""Work that a save does beside training: copies to host memory, and a thread that writes.

Threads are enough for writing: safetensors 0.8, hashing and fsync release Python's lock.
"""

import logging
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

logger = logging.getLogger(__name__)

T = TypeVar("T")
Described = dict[str, dict[str, Any]]
"""path below the checkpoint -> {"bytes", "sha256"}."""


class Task(Generic[T]):
    """A function on its own thread, with its result or error. It must not call a collective.

    The thread is a daemon, so a process that fails does not wait for its disk.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        """Start the thread."""
        self.result: T | None = None
        self.error: Exception | None = None
        self.took_s = 0.0
        self._function = function
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def is_done(self, *, wait: bool = False) -> bool:
        """Whether the function has returned or raised."""
        if wait:
            self._thread.join()
        return not self._thread.is_alive()

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            self.result = self._function()
        except Exception as error:  # noqa: BLE001 - whoever asks for the result handles it
            self.error = error
        self.took_s = time.perf_counter() - started


class HostCopy:
    """Host memory that holds a copy of a rank's state; reused from save to save."""

    def __init__(self) -> None:
        """Start without buffers; the first copy allocates them."""
        self._buffers: dict[str, Tensor] = {}

    def take(self, parts: list[Part]) -> list[Part]:
        """Copy the parts, so that later updates do not change them; overwrites the last copy."""
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
            # Allocating costs several times as much as the copy, so buffers are kept. A GPU fills
            # pinned memory several times as fast.
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer


@dataclass(frozen=True)
class RankFiles:
    """The files that one rank writes into a checkpoint that is not published yet."""

    folder: Path
    rank: int
    world_size: int
    parts: list[Part]
    counters: dict[str, int]
    others: dict[str, bytes]
    """Content of further files, by name."""

    def write(self) -> Described:
        """Write and flush the files, then hash them as they are read back. Not collective.

        Raises:
            OSError: the disk is full or not writable.
        """
        write_part(self.folder, self.rank, self.world_size, self.parts, self.counters)
        for name, data in self.others.items():
            (self.folder / name).write_bytes(data)
        names = [state_file(self.rank, self.world_size), *self.others]
        return {name: _flush_and_describe(self.folder / name) for name in names}


def _flush_and_describe(path: Path) -> dict[str, Any]:
    sync_path(path)
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
