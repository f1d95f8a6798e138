"""Work that a save does beside training: copies to host memory, threads that write, and mirrors.

Threads are enough for writing: safetensors 0.8, hashing and fsync release Python's lock. A mirror
is a second folder with the run's checkpoints:

COPY_TO/copy_of.json   the run whose checkpoints these are
COPY_TO/lock           locked while a process copies
COPY_TO/ledger.jsonl   the run's ledger, without which no checkpoint after a rewind is resumed
COPY_TO/checkpoints/   the same layout as in the run's folder
"""

import fcntl
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from pipeline.checkpoints import manifest
from pipeline.checkpoints.state import TensorShard, unsound_value, write_part
from pipeline.data.ledger import copy_ledger
from pipeline.errors import CheckpointError, ConfigError
from pipeline.runtime import checkpoints, files
from pipeline.runtime.run_folder import RunFolder

logger = logging.getLogger(__name__)

T = TypeVar("T")
Described = dict[str, dict[str, Any]]
"""path below the checkpoint -> {"bytes", "sha256"}."""


class BackgroundTask(Generic[T]):
    """A function on its own thread, with its result or error. It must not call a collective."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.result: T | None = None
        self.error: Exception | None = None
        self.took_s = 0.0
        self._function = function
        # It calls no collective; writing, hashing and fsync hold the interpreter for 16 ms at
        # most.
        # A daemon: a process that fails does not wait for its disk.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def is_done(self, *, wait: bool = False) -> bool:
        """Return whether the function has returned or raised."""
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


# Kept between saves: fresh memory costs ten times the copy.
class HostCopy:
    """Host memory that holds a copy of a rank's state; reused from save to save."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, parts: list[TensorShard]) -> list[TensorShard]:
        """Copy the parts, so that later updates do not change them; overwrites the last copy."""
        copied = []
        for part in parts:
            tensors = {
                kind: self._buffer(f"{kind}/{part.name}", tensor).copy_(tensor, non_blocking=True)
                for kind, tensor in part.tensors.items()
            }
            copied.append(replace(part, tensors=tensors))
        # Copies to pinned memory are only queued: the writing thread would read what has not
        # arrived.
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


class UnsoundPartError(Exception):
    """What a rank was to write is not finite."""


def unsound_parts(parts: list[TensorShard]) -> list[str]:
    """Describe the tensors of a rank that have a value that no training gives."""
    return [
        f"{kind}/{part.name}: {text}" + f" of those from {part.start} on" * bool(part.start)
        for part in parts
        for kind, tensor in part.tensors.items()
        if (text := unsound_value(kind, tensor))
    ]


@dataclass(frozen=True)
class RankFiles:
    """The files that one rank writes into a checkpoint that is not published yet."""

    folder: Path
    rank: int
    world_size: int
    parts: list[TensorShard]
    counters: dict[str, int]
    others: dict[str, bytes]

    def write(self) -> Described:
        """Write and flush the files, then hash them as they are read back. Not collective.

        Raises:
            UnsoundPartError: a value is not finite; nothing is written.
            OSError: the disk is full or not writable.
        """
        found = unsound_parts(self.parts)
        if found:
            raise UnsoundPartError("; ".join(found))
        write_part(self.folder, self.rank, self.world_size, self.parts, self.counters)
        for name, data in self.others.items():
            files.write_atomic(self.folder / name, data)
        names = [manifest.state_file(self.rank, self.world_size), *self.others]
        return {name: _described(self.folder / name) for name in names}


def _described(path: Path) -> dict[str, Any]:
    """Read a file back."""

    def read() -> dict[str, Any]:
        return {"bytes": path.stat().st_size, "sha256": files.sha256_file(path)}

    return files.retry_storage(read, lambda: f"reading {path}")


_OWNER_FILE = "copy_of.json"
_UNFINISHED = ".copying-"
_LATER = "the next save will try again"
_NICE = 10
_LOOK_EVERY_S = 0.1
_CHUNK_BYTES = 1 << 22


class Mirror:
    """Copy the checkpoints that a run keeps. Only for rank 0; failures are warnings and retried."""

    def __init__(self, run_dir: Path, target: Path, rule: manifest.Retention) -> None:
        """Check that the folder belongs to this run; nothing is copied yet.

        Raises:
            ConfigError: the folder has copies of another run's checkpoints, or is the run's own.
        """
        if target.resolve() == run_dir.resolve():
            raise ConfigError(
                f"checkpoint.copy_to={target} is run_dir itself, so nothing would be copied; "
                "choose a folder on other storage"
            )
        self._run_dir, self._target, self._rule = run_dir, target, rule
        self._source, self._folder = run_dir / checkpoints.FOLDER, target / checkpoints.FOLDER
        self._task: BackgroundTask[None] | None = None
        self._is_due = False
        self._num_moved = 0  # chunks and files
        self.busy_with: Path | None = None
        """The checkpoint that is being copied; it must not be removed."""
        path = target / _OWNER_FILE
        owner = json.loads(path.read_bytes()) if path.is_file() else self._owner()
        if owner != self._owner():
            raise ConfigError(
                f"checkpoint.copy_to={target} has checkpoints of the run {owner.get('run_dir')}, "
                f"not of {self._owner()['run_dir']}; choose a folder for each run, or remove "
                f"{path} if that run was moved here"
            )

    def request(self) -> None:
        """Copy missing checkpoints in the background, after any copy that is already running."""
        self._is_due = True
        if self._task is None or self._task.is_done():
            self._task = BackgroundTask(self._work)

    def finish(self, beat: Callable[[], None] = lambda: None) -> None:
        """Wait until every requested copy has been tried; calls `beat` while it gets on."""
        while self._task is not None:
            if not self._task.is_done():
                logger.info("waiting for the copy of checkpoints to %s", self._target)
            moved = -1
            while not self._task.is_done():
                if moved != self._num_moved:  # storage that hangs gives no sign of life
                    moved = self._num_moved
                    beat()
                time.sleep(_LOOK_EVERY_S)
            # A request may have come between the thread's last look and its end.
            self._task = BackgroundTask(self._work) if self._is_due else None

    def _work(self) -> None:
        # On Linux each thread has its own priority.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while self._is_due:
            self._is_due = False
            try:
                self._copy_missing()
            except OSError as error:
                logger.warning("%s cannot be written: %s; %s", self._target, error, _LATER)
            finally:
                self.busy_with = None

    def _copy_missing(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with RunFolder(self._target).lock.open("w") as lock:
            # A process of an earlier start may still copy; two would remove each other's unfinished
            # folders.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            files.write_json_atomic(self._target / _OWNER_FILE, self._owner())
            for prefix in (_UNFINISHED, manifest.REMOVING):
                for path in self._folder.glob(f"{prefix}*"):
                    shutil.rmtree(path)
            kept = checkpoints.published(self._source)
            # The run went back: what came later is of a way that it left, and newer in its copies.
            left = (
                path
                for path in checkpoints.published(self._folder)
                if kept and checkpoints.step_of(path) > checkpoints.step_of(kept[0])
            )
            manifest.remove(left)
            if kept:  # else the run's folder is lost, and this is all that is left of it
                copy_ledger(self._run_dir, self._target)
            # The newest first. A checkpoint that the run has removed meanwhile is skipped.
            for path in kept:
                self.busy_with = path
                try:
                    if path.exists() and not self._is_copied(path):
                        self._copy(path)
                except (OSError, CheckpointError) as error:
                    shutil.rmtree(self._unfinished(path), ignore_errors=True)
                    logger.warning(
                        "%s could not be copied to %s: %s; %s", path, self._folder, error, _LATER
                    )
            copies = checkpoints.published(self._folder)
            if copies:
                manifest.remove(manifest.superseded(self._folder, self._rule, copies[0]))

    def _is_copied(self, path: Path) -> bool:
        # Not by name alone: a copy of the same step may be from before a rewind.
        copy = self._folder / path.name / checkpoints.MANIFEST_FILE
        return (
            copy.is_file() and copy.read_bytes() == (path / checkpoints.MANIFEST_FILE).read_bytes()
        )

    def _copy(self, path: Path) -> None:
        final = self._folder / path.name
        unfinished = self._unfinished(path)
        for name, entry in checkpoints.read_manifest(path).files.items():
            (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
            if self._copy_file(path / name, unfinished / name) != entry["sha256"]:
                raise CheckpointError(f"{path / name} does not match its manifest")
            self._num_moved += 1
        files.write_atomic(
            unfinished / checkpoints.MANIFEST_FILE, (path / checkpoints.MANIFEST_FILE).read_bytes()
        )
        for folder in [unfinished, *(p for p in unfinished.rglob("*") if p.is_dir())]:
            files.sync_folder(folder)
        manifest.remove([final] if final.exists() else [])
        files.rename(unfinished, final)
        files.sync_folder(self._folder)
        # Not this one: the newest is copied first, older ones after it.
        newest = max(checkpoints.published(self._folder), key=checkpoints.step_of)
        files.write_atomic(self._folder / checkpoints.LATEST_FILE, f"{newest.name}\n".encode())
        logger.info("copied %s to %s", path.name, final)

    def _copy_file(self, source: Path, target: Path) -> str:
        """Copy and flush a file; return the sha256 of the copy."""
        with source.open("rb") as read, target.open("wb") as written:
            while chunk := read.read(_CHUNK_BYTES):
                written.write(chunk)
                self._num_moved += 1
            written.flush()
            os.fsync(written.fileno())
        self._num_moved += 1
        return files.sha256_file(target)

    def _unfinished(self, path: Path) -> Path:
        return self._folder / f"{_UNFINISHED}{path.name}"

    def _owner(self) -> dict[str, str]:
        return {"run_dir": str(self._run_dir.absolute())}
