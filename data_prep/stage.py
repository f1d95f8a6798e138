"""How a stage runs: independent tasks, each done completely or not at all, skipped when done.

A task writes its files under temporary names, renames them, and last writes `NAME.done.json`
with a key, its counts and the sha256 of every file. The key is a hash of everything the result
depends on; a task whose key and files are as recorded is not run again. So a killed run continues
where it was, and a changed config or input repeats exactly what depends on it.

While a task runs, `NAME.running.json` stands beside its results and is touched every few seconds;
a task that failed leaves `NAME.failed.json`. Both only inform people: the code decides nothing by
them.
"""

import datetime
import hashlib
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from data_prep.config import PrepConfig
from pipeline.errors import EXIT_FAILED_RETRY, BusyError, DataError
from pipeline.runtime.files import (
    flush_file,
    is_alive,
    make_folder,
    remove_abandoned,
    rename,
    retry_storage,
    sha256_file,
    temporary_beside,
    write_json_atomic,
)
from pipeline.runtime.stop import kept_from_children
from pipeline.runtime.summary import progress
from pipeline.runtime.summary import table as aligned

T = TypeVar("T")
_TOUCHED_EVERY_S = 10
_SILENT_AFTER_S = 90
CODE_VERSION = 12
"""To be raised when a stage's code gives other results than before: old results are then redone."""


INGEST_STAGES = ("ingest", "normalise", "filter")
"""Names under which the one pass over the input files counts its three parts."""
# Parallel file systems slow down in folders of more than some ten thousand files.
FOLDER_TASKS = 1000
"""Tasks of a stage with their files in one folder; the next ones get another below it."""
REPEATED_IDS = "documents with the id of another"
SEEN_LINE = "line seen before"
OF_LINES = (SEEN_LINE,)
"""Reasons for which lines are rejected, not documents."""


def task_name(number: int, digits: int) -> str:
    """Name a task by its number; from `FOLDER_TASKS` on with a folder, such as 001/01234."""
    name, folder = f"{number:0{digits}d}", number // FOLDER_TASKS
    return f"{folder:03d}/{name}" if folder else name


@dataclass(frozen=True)
class StageTask(Generic[T]):
    """One unit of work."""

    name: str
    """Prefix of its results' paths in `folder`, see `task_name`."""
    folder: Path
    key: str
    """Hash of everything the result depends on."""
    payload: T
    """Argument for the stage's function."""

    @property
    def marker(self) -> Path:
        """The file that is written last: its existence says that the task is done."""
        return self.folder / f"{self.name}.done.json"

    def path(self, suffix: str) -> Path:
        """Return the path of a result file."""
        return self.folder / f"{self.name}{suffix}"


Result = tuple[dict[str, Any], list[Path]]
"""Result of a task: plain values for its record, and the files written to `StageTask.folder`."""
Function = Callable[[StageTask[T]], Result]
"""The code of a stage: does one task."""


@dataclass(frozen=True)
class Stage:
    """Tasks that do not depend on each other, and the function that does one."""

    name: str
    tasks: Sequence[StageTask[Any]]
    function: Function[Any]
    """Defined at the top of a module: other processes import it."""
    reads: Sequence[tuple[Path, str]] = ()
    """Files of earlier stages that the tasks read, with their sha256 as recorded; texts are not
    among them: each is compared when it is read."""


@dataclass(frozen=True)
class Done:
    """A finished task's record."""

    key: str
    result: dict[str, Any]
    files: dict[str, dict[str, Any]]
    """name -> {"bytes", "sha256"}."""

    @property
    def digest(self) -> str:
        """Hash of the task's files, for the keys of tasks that read them."""
        return make_key({name: file["sha256"] for name, file in self.files.items()})


@dataclass
class StageCounts:
    """Counts of one stage, or of one of its tasks. Bytes are UTF-8 bytes of text."""

    documents_in: int = 0
    bytes_in: int = 0
    documents_out: int = 0
    bytes_out: int = 0
    rejected: dict[str, list[int]] = field(default_factory=dict)
    """reason -> [documents or lines, bytes]."""

    def take(self, num_bytes: int, count: int = 1) -> None:
        """Count a document that came in, or `count` rows that could not be read."""
        self.documents_in += count
        self.bytes_in += num_bytes

    def give(self, num_bytes: int) -> None:
        """Count a document that goes on."""
        self.documents_out += 1
        self.bytes_out += num_bytes

    def reject(self, reason: str, num_bytes: int, count: int = 1) -> None:
        """Count one rejected document, or `count` rejected lines."""
        documents, total = self.rejected.get(reason, [0, 0])
        self.rejected[reason] = [documents + count, total + num_bytes]

    @property
    def documents_rejected(self) -> int:
        """Documents that came in and do not go on; rejected lines are not documents."""
        return sum(
            documents for reason, (documents, _) in self.rejected.items() if reason not in OF_LINES
        )

    def add_up(self, came: int | None) -> bool:
        """Return whether every document that `came` from the stage before, if known, is told of."""
        left = self.documents_in - self.documents_rejected
        return came in (None, self.documents_in) and left == self.documents_out

    def mask(self, sizes: npt.NDArray[np.int64], keep: npt.NDArray[np.bool_], reason: str) -> None:
        """Count documents of (d,) `sizes` in bytes; those outside (d,) `keep` are rejected."""
        self.documents_in += len(sizes)
        self.bytes_in += int(sizes.sum())
        self.documents_out += int(keep.sum())
        self.bytes_out += int(sizes[keep].sum())
        if not keep.all():
            self.reject(reason, int(sizes[~keep].sum()), int((~keep).sum()))

    def add(self, part: dict[str, Any]) -> None:
        """Add the counts of a task, as `to_json` gave them."""
        for name in ("documents_in", "bytes_in", "documents_out", "bytes_out"):
            setattr(self, name, getattr(self, name) + part[name])
        for reason, (documents, num_bytes) in part["rejected"].items():
            self.reject(reason, num_bytes, documents)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        return asdict(self)

    @classmethod
    def total(cls, parts: Iterable[dict[str, Any]]) -> "StageCounts":
        """Add up the counts of tasks."""
        total = cls()
        for part in parts:
            total.add(part)
        return total


def table(stages: dict[str, StageCounts]) -> str:
    """Format one line per stage, and its rejections below."""
    rows = [("stage", "documents in", "MB in", "documents out", "MB out", "rejected")]
    rejections = []
    for name, counts in stages.items():
        rejected = sum(documents for documents, _ in counts.rejected.values())
        came, left = f"{counts.bytes_in / 1e6:.2f}", f"{counts.bytes_out / 1e6:.2f}"
        documents_in, documents_out = f"{counts.documents_in:,}", f"{counts.documents_out:,}"
        rows.append((name, documents_in, came, documents_out, left, f"{rejected:,}"))
        rejections += [
            f"    {name}: {reason}: {documents:,} ({num_bytes / 1e6:.2f} MB)"
            for reason, (documents, num_bytes) in sorted(counts.rejected.items())
        ]
    return "\n".join([*aligned(rows, right=range(1, 6)), *rejections])


@dataclass(frozen=True)
class Size:
    """Size of a corpus before it is read, for estimates; text that stages drop counts in full."""

    config: PrepConfig
    pieces: int
    largest_bytes: float
    """Text of the largest piece."""
    text_bytes: float
    documents: float
    eval_bytes: float
    """Text of the evaluation sets."""


@dataclass(frozen=True)
class Estimate:
    """Expected cost of one stage.

    Rates are those of `benchmarks/data_prep.py` on one core of an AMD EPYC, Chinese and English
    text; other processors and texts differ by a factor of up to two.
    """

    tasks: int
    cpu_s: float
    disk_bytes: float
    """Size of the results."""
    memory_bytes: float
    """Peak of one task."""
    files: int
    """That the stage leaves in its folder and those below, records of its tasks among them."""


def make_key(*parts: Any) -> str:
    """Hash plain values together with the code version."""
    text = json.dumps([CODE_VERSION, *parts], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Provide a temporary path beside `path` that takes its place if the block succeeds.

    The folder is made if it does not exist.
    """
    path.parent.mkdir(exist_ok=True)
    temporary = temporary_beside(path)
    try:
        yield temporary
        flush_file(temporary)
        rename(temporary, path)
    except BaseException:
        with suppress(OSError):  # what failed to be written may fail to be removed
            temporary.unlink(missing_ok=True)
        raise


def save_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Write a .npy file, complete or not at all."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.save(file, array)


def finished(task: StageTask[Any]) -> Done | None:
    """Return the task's record if it was done with this key and its files are still there."""
    try:
        done = Done(**json.loads(task.marker.read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    same = done.key == task.key and all(
        (task.folder / name).is_file() and (task.folder / name).stat().st_size == file["bytes"]
        for name, file in done.files.items()
    )
    return done if same else None


@dataclass(frozen=True)
class State:
    """Progress of a task."""

    name: Literal["done", "running", "failed", "stopped", "waiting"]
    """`stopped`: it ran, and its process ended without leaving an error."""
    text: str = ""
    """Host, process and start of a running task, or the error of a failed one."""


def state_of(task: StageTask[Any]) -> State:
    """Read the state of a task from its files."""
    if finished(task):
        return State("done")
    running, failed = task.path(".running.json"), task.path(".failed.json")
    try:
        seen = json.loads(running.read_bytes())
        silent_s = time.time() - running.stat().st_mtime
        gone = seen["host"] == socket.gethostname() and not is_alive(seen["process"])
        text = f"{seen['host']}, process {seen['process']}, since {seen['since']}"
        return State("stopped" if gone or silent_s > _SILENT_AFTER_S else "running", text)
    except (FileNotFoundError, ValueError, KeyError):
        pass
    try:
        error = json.loads(failed.read_bytes())
        return State("failed", f"{error['error']} ({error['host']}, {error['time']})")
    except (FileNotFoundError, ValueError, KeyError):
        return State("waiting")


def recorded_sha256(path: Path) -> str | None:
    """Look up what the task that wrote a file recorded; None if it has no record yet."""
    marker = path.with_name(f"{path.name.partition('.')[0]}.done.json")
    try:
        files = json.loads(marker.read_bytes())["files"]
        # Named from the stage's folder, below which the file's own may lie.
        return str({Path(name).name: of for name, of in files.items()}[path.name]["sha256"])
    except (FileNotFoundError, KeyError):
        return None


# Two runs in one folder once mixed their pieces with exit code 0, and a flipped bit went into the
# dataset.
def require_written(path: Path, found: str, expected: str, marker: Path | None = None) -> None:
    """Check that a file is as its task wrote it (DataError: it is not)."""
    if found != expected:
        raise not_as_written(path, f"its sha256 is {found}, and {expected} was recorded", marker)


def not_as_written(path: Path, problem: str, marker: Path | None = None) -> DataError:
    """Return the error that says that a task's file was changed, and what to do.

    The task's marker is named as the file if none is given.
    """
    marker = marker or path.with_name(f"{path.name.partition('.')[0]}.done.json")
    return DataError(
        f"{path} is not what its task wrote: {problem}; something changed or damaged it since. "
        f"Check the storage, remove {marker}, and run again: the task is repeated, and what "
        "depends on it"
    )


def _check(reads: Sequence[tuple[Path, str]], workers: int) -> None:
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for (path, expected), found in zip(
            reads, pool.map(lambda each: sha256_file(each[0]), reads), strict=True
        ):
            require_written(path, found, expected)


def run_tasks(
    stage: Stage, workers: int, rank: int = 0, world: int = 1, *, hosts: Iterable[str] = ()
) -> list[Done]:
    """Run the unfinished tasks of a part of a stage over several processes, with a progress bar.

    Task i belongs to rank i % world. Before, the rank's share of what the stage reads is compared
    with what was written. Temporary files of other `hosts` are left alone. Returns the records of
    the part's tasks, in order.

    Raises:
        BusyError: a process was killed.
        DataError: a file is not as its task wrote it.
        Exception: the first failure of a task; tasks already done stay done.
    """
    tasks = stage.tasks[rank::world]
    for folder in {task.folder for task in stage.tasks}:
        make_folder(folder)
        for part in (folder, *(path for path in folder.iterdir() if path.is_dir())):
            remove_abandoned(part, hosts)
    for folder in {task.marker.parent for task in tasks}:
        make_folder(folder)
    records = [finished(task) for task in tasks]
    waiting = [i for i, record in enumerate(records) if record is None]
    if waiting or world > 1:  # other ranks may have work to do
        _check(stage.reads[rank::world], workers)
    for task, record in zip(tasks, records, strict=True):
        if record:  # its process may have been killed between the record and the end
            task.path(".running.json").unlink(missing_ok=True)
    done = len(tasks) - len(waiting)
    with progress(stage.name, len(tasks), "task", done=done, stays=True) as advance:
        for i, record in _results(tasks, waiting, stage.function, workers):
            records[i] = record
            advance(1)
    return [record for record in records if record is not None]


def _results(
    tasks: Sequence[StageTask[T]], waiting: list[int], function: Function[T], workers: int
) -> Iterator[tuple[int, Done]]:
    if min(workers, len(waiting)) <= 1:
        for i in waiting:
            yield i, _complete(tasks[i], function)
        return
    # Spawned, not forked: libraries may hold threads and locks.
    context = multiprocessing.get_context("spawn")
    number = min(workers, len(waiting))
    pool = ProcessPoolExecutor(number, mp_context=context, initializer=_end_with_parent)
    try:
        with kept_from_children([signal.SIGINT]):
            futures = {pool.submit(_complete, tasks[i], function): i for i in waiting}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise BusyError(
            "a worker process was killed, perhaps by the system because memory ran out (see "
            "`dmesg`); finished tasks stay done, and the same command continues; lower "
            "`workers` if it happens again"
        ) from error
    except KeyboardInterrupt:
        # Nobody waits for tasks that take an hour: what they have not finished is done again.
        for worker in multiprocessing.active_children():
            worker.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


# After kill -9 of the parent workers waited for ever, and outlived the job.
def _end_with_parent() -> None:
    """End this worker when the process that started it is killed."""
    parent = multiprocessing.parent_process()
    assert parent

    def watch() -> None:
        # Without its parent it would wait for work forever.
        parent.join()
        os._exit(EXIT_FAILED_RETRY)

    threading.Thread(target=watch, daemon=True).start()


def _complete(task: StageTask[T], function: Function[T]) -> Done:
    # All of the task: what a flush has refused once must be written again.
    return retry_storage(
        lambda: _complete_once(task, function), lambda: f"task {task.marker.stem} in {task.folder}"
    )


def _complete_once(task: StageTask[T], function: Function[T]) -> Done:
    already = finished(task)
    if already:
        return already  # another process has done it since this one looked
    task.marker.unlink(missing_ok=True)
    with _announced(task):
        result, paths = function(task)
        files: dict[str, dict[str, Any]] = {}
        for path in paths:
            described = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
            files[path.relative_to(task.folder).as_posix()] = described
        done = Done(task.key, result, files)
        write_json_atomic(task.marker, {"key": done.key, "result": result, "files": files})
    return done


@contextmanager
def _announced(task: StageTask[Any]) -> Iterator[None]:
    """Record beside the results that the task runs, or why it failed."""
    running, failed = task.path(".running.json"), task.path(".failed.json")
    failed.unlink(missing_ok=True)
    place = {"host": socket.gethostname(), "process": os.getpid()}
    with _naming(running):
        running.write_text(json.dumps({**place, "since": _now()}))
    over = threading.Event()

    def touch() -> None:
        while not over.wait(_TOUCHED_EVERY_S):
            with suppress(OSError):  # storage may fail in passing
                running.touch()

    thread = threading.Thread(target=touch, daemon=True)
    thread.start()
    try:
        with _naming(task.folder):
            yield
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        with suppress(OSError):  # the disk may be full, which the error itself says
            failed.write_text(json.dumps({**place, "time": _now(), "error": text}))
        raise
    finally:
        over.set()
        thread.join()
        running.unlink(missing_ok=True)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let an error of a write to an open file, which has no name of one, name this."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
