"""Work that a save does beside training: copies to host memory, a writing thread, a probe process.

Threads are enough for writing: safetensors 0.8, hashing and fsync release Python's lock.
"""

import json
import logging
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from pipeline.checkpoints.manifest import LATEST_FILE, REJECTED, published, state_file
from pipeline.checkpoints.state import Part, write_part
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, EXIT_FINISHED, RejectedError
from pipeline.runtime import env
from pipeline.runtime.files import sha256_file, sync_path, write_atomic

logger = logging.getLogger(__name__)

T = TypeVar("T")
Described = dict[str, dict[str, Any]]
"""path below the checkpoint -> {"bytes", "sha256"}."""

_PROBE_PROGRAM = "pipeline.use.probe"


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


class Probe:
    """Reads a checkpoint back in another process. Rank 0 uses it, from any thread."""

    def __init__(self) -> None:
        """Start without a process."""
        self._process: subprocess.Popen[str] | None = None
        self._cancelled = False

    def run(self, path: Path) -> float | None:
        """Start a probe, wait for its verdict, and hide a checkpoint that it finds unusable.

        Returns:
            Seconds that the probe took; None without a verdict, because the process was cancelled,
            was killed or did not start.

        Raises:
            RejectedError: the checkpoint is unusable and was renamed.
        """
        if self._cancelled:
            return None
        started = time.perf_counter()
        # Hide the GPU: the run needs all of its memory.
        variables = env.child_environment(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
        self._process = subprocess.Popen(
            [*env.module_command(_PROBE_PROGRAM), str(path)],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if self._cancelled:
            self._process.kill()
        output, complaints = self._process.communicate()
        took_s = time.perf_counter() - started
        if self._cancelled:
            logger.warning("the probe of %s was cancelled: the run stops", path)
            return None
        code = self._process.returncode
        report = _parsed(output)
        if code == EXIT_FINISHED and "num_parameters" in report:
            logger.info(
                "probe: %s is good: %s parameters and their optimizer state, read by another "
                "process in %.1f s",
                path,
                f"{report['num_parameters']:,}",
                took_s,
            )
            return took_s
        if code == EXIT_FAILED_DO_NOT_RETRY and "error" in report:
            raise _rejection(path, str(report["error"]))
        logger.warning(
            "the probe of %s came to no verdict, exit code %s: %s", path, code, complaints[-2000:]
        )
        return None

    def cancel(self) -> None:
        """Kill a running probe; the checkpoint keeps its name."""
        self._cancelled = True
        if self._process is not None:
            self._process.kill()


def _rejection(path: Path, reason: str) -> RejectedError:
    """Hide a checkpoint from every later start, and return the error to raise."""
    hidden = path.with_name(f"{REJECTED}{path.name}-{time.time_ns() // 1_000_000}")
    path.rename(hidden)
    earlier = published(path.parent)
    latest = path.parent / LATEST_FILE
    if earlier:
        write_atomic(latest, f"{earlier[0].name}\n".encode())
    else:
        latest.unlink(missing_ok=True)
    sync_path(path.parent)
    before = f"the one before is {earlier[0]}" if earlier else "no earlier checkpoint exists"
    return RejectedError(
        f"checkpoint {path.name} was read back and rejected: {reason}. It was renamed to {hidden}; "
        f"delete it when you have examined it; {before}. Check storage and memory, then start the "
        "run again"
    )


def _parsed(output: str) -> dict[str, object]:
    try:
        report = json.loads(output)
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}
