"""Copies of a run's checkpoints in a second place, made while training goes on.

COPY_TO/copy_of.json   the run that they are of
COPY_TO/lock           locked while a process copies
COPY_TO/checkpoints/   as in the run's folder
"""

import fcntl
import json
import logging
import os
import shutil
import threading
from pathlib import Path

from pipeline.checkpoints.manifest import (
    FOLDER,
    LATEST_FILE,
    MANIFEST_FILE,
    published,
    read_manifest,
    step_of,
)
from pipeline.checkpoints.retention import REMOVING, Retention, remove, superseded
from pipeline.checkpoints.save_job import Task
from pipeline.errors import CheckpointError, ConfigError
from pipeline.runtime.files import sha256_file, sync_path, write_atomic, write_json_atomic
from pipeline.runtime.run_folder import RunFolder

logger = logging.getLogger(__name__)

_OWNER_FILE = "copy_of.json"
_UNFINISHED = ".copying-"
_LATER = "tried again at the next save"
_NICE = 10
_CHUNK_BYTES = 1 << 22


class Mirror:
    """Keeps a copy of what a run keeps. For rank 0; what fails is a warning, and tried again."""

    def __init__(self, run_dir: Path, target: Path, rule: Retention) -> None:
        """Copies nothing yet.

        Raises:
            ConfigError: the folder has copies of another run's checkpoints.
        """
        self._run_dir, self._target, self._rule = run_dir, target, rule
        self._source, self._folder = run_dir / FOLDER, target / FOLDER
        self._task: Task[None] | None = None
        self._is_due = False
        self.busy_with: Path | None = None
        """The checkpoint that is being copied: not to be removed."""
        owner = target / _OWNER_FILE
        found = json.loads(owner.read_bytes()) if owner.is_file() else self._owner()
        if found != self._owner():
            raise ConfigError(
                f"checkpoint.copy_to={target} has checkpoints of the run {found.get('run_dir')}, "
                f"not of {self._owner()['run_dir']}; choose a folder for each run, or remove "
                f"{owner} if that run was moved here"
            )

    def request(self) -> None:
        """Asks for what is missing there to be copied; at once, or after what is being copied."""
        self._is_due = True
        if self._task is None or self._task.is_done():
            self._task = Task(self._work)

    def finish(self) -> None:
        """Waits until everything asked for was tried."""
        while self._task is not None:
            if not self._task.is_done():
                logger.info("waiting for the copy of checkpoints to %s", self._target)
            self._task.is_done(wait=True)
            self._task = Task(self._work) if self._is_due else None

    def _work(self) -> None:
        # On Linux a thread has a priority of its own.
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
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_json_atomic(self._target / _OWNER_FILE, self._owner())
            for prefix in (_UNFINISHED, REMOVING):
                for path in self._folder.glob(f"{prefix}*"):
                    shutil.rmtree(path)
            # The newest first; what the run has superseded meanwhile is not worth copying.
            for path in published(self._source):
                self.busy_with = path
                try:
                    if path.exists() and not self._is_there(path):
                        self._copy(path)
                except (OSError, CheckpointError) as error:
                    shutil.rmtree(self._unfinished(path), ignore_errors=True)
                    logger.warning(
                        "%s could not be copied to %s: %s; %s", path, self._folder, error, _LATER
                    )
            there = published(self._folder)
            if there:
                remove(superseded(self._folder, self._rule, there[0]))

    def _is_there(self, path: Path) -> bool:
        """Whether a copy of it is; one of the same step may be of an attempt that was undone."""
        copy = self._folder / path.name / MANIFEST_FILE
        return copy.is_file() and copy.read_bytes() == (path / MANIFEST_FILE).read_bytes()

    def _copy(self, path: Path) -> None:
        final = self._folder / path.name
        unfinished = self._unfinished(path)
        for name, entry in read_manifest(path).files.items():
            (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
            if _copy_file(path / name, unfinished / name) != entry["sha256"]:
                raise CheckpointError(f"{path / name} is not what its manifest says")
        write_atomic(unfinished / MANIFEST_FILE, (path / MANIFEST_FILE).read_bytes())
        for folder in [unfinished, *(p for p in unfinished.rglob("*") if p.is_dir())]:
            sync_path(folder)
        remove([final] if final.exists() else [])
        unfinished.rename(final)
        sync_path(self._folder)
        newest = max(published(self._folder), key=step_of)
        write_atomic(self._folder / LATEST_FILE, f"{newest.name}\n".encode())
        logger.info("copied %s to %s", path.name, final)

    def _unfinished(self, path: Path) -> Path:
        return self._folder / f"{_UNFINISHED}{path.name}"

    def _owner(self) -> dict[str, str]:
        return {"run_dir": str(self._run_dir.absolute())}


def _copy_file(source: Path, target: Path) -> str:
    """Copies and flushes a file; returns the sha256 of what is there then."""
    with source.open("rb") as read, target.open("wb") as written:
        shutil.copyfileobj(read, written, _CHUNK_BYTES)
        written.flush()
        os.fsync(written.fileno())
    return sha256_file(target)
