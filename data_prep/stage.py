"""How a stage runs: independent tasks, each done completely or not at all, skipped when done.

A task writes its files under temporary names, renames them, and last writes `NAME.done.json`
with a key, its counts and the sha256 of every file. The key is a hash of everything the result
depends on; a task whose key and files are as recorded is not run again. So a killed run continues
where it was, and a changed config or input repeats exactly what depends on it.
"""

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from tqdm import tqdm

from pipeline.runtime.files import sha256_file, sync_path, write_json_atomic

T = TypeVar("T")
CODE_VERSION = 4
"""Raised when a stage's code gives other results than before, so that old results are redone."""


@dataclass(frozen=True)
class Task(Generic[T]):
    """One unit of work."""

    name: str
    """File name prefix of its results."""
    folder: Path
    key: str
    """Hash of everything the result depends on."""
    payload: T
    """Argument for the stage's function."""

    @property
    def marker(self) -> Path:
        """The file whose existence says that the task is done."""
        return self.folder / f"{self.name}.done.json"

    def path(self, suffix: str) -> Path:
        """A result file."""
        return self.folder / f"{self.name}{suffix}"


@dataclass(frozen=True)
class Done:
    """A finished task's record."""

    key: str
    result: dict[str, Any]
    files: dict[str, dict[str, Any]]
    """name -> {"bytes", "sha256"}."""

    @property
    def digest(self) -> str:
        """Hash of what the task produced, for the keys of tasks that read it."""
        return make_key({name: file["sha256"] for name, file in self.files.items()})


def make_key(*parts: Any) -> str:
    """Hash of plain values, with the code version."""
    text = json.dumps([CODE_VERSION, *parts], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary path beside `path` that takes its place if the block succeeds."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync_path(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def finished(task: Task[Any]) -> Done | None:
    """The task's record, if it was done with this key and its files are still there."""
    try:
        done = Done(**json.loads(task.marker.read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    same = done.key == task.key and all(
        (task.folder / name).is_file() and (task.folder / name).stat().st_size == file["bytes"]
        for name, file in done.files.items()
    )
    return done if same else None


def run_stage(
    title: str,
    tasks: Sequence[Task[T]],
    function: Callable[[Task[T]], tuple[dict[str, Any], list[Path]]],
    workers: int,
) -> list[Done]:
    """Runs what is not done yet, over several processes, with a progress bar.

    Args:
        title: label of the bar.
        tasks: work; folders are made.
        function: does one task; returns its result (plain values) and the files it wrote. Must be
            a module-level function.
        workers: number of processes.

    Returns:
        Records of all tasks, in order.

    Raises:
        Exception: the first failure of a task; tasks already done stay done.
    """
    for task in tasks:
        task.folder.mkdir(parents=True, exist_ok=True)
    records = [finished(task) for task in tasks]
    waiting = [i for i, record in enumerate(records) if record is None]
    bar = tqdm(total=len(tasks), initial=len(tasks) - len(waiting), desc=title, unit="task")
    with bar:
        for i, record in _results(tasks, waiting, function, workers):
            records[i] = record
            bar.update()
    return [record for record in records if record is not None]


def _results(
    tasks: Sequence[Task[T]],
    waiting: list[int],
    function: Callable[[Task[T]], tuple[dict[str, Any], list[Path]]],
    workers: int,
) -> Iterator[tuple[int, Done]]:
    if min(workers, len(waiting)) <= 1:
        for i in waiting:
            yield i, _complete(tasks[i], function)
        return
    # Spawned, not forked: libraries may hold threads and locks.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(waiting)), mp_context=context) as pool:
        futures = {pool.submit(_complete, tasks[i], function): i for i in waiting}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _complete(
    task: Task[T], function: Callable[[Task[T]], tuple[dict[str, Any], list[Path]]]
) -> Done:
    task.marker.unlink(missing_ok=True)
    result, paths = function(task)
    files = {
        path.relative_to(task.folder).as_posix(): {
            "bytes": path.stat().st_size, "sha256": sha256_file(path)
        }
        for path in paths
    }  # fmt: skip
    done = Done(task.key, result, files)
    write_json_atomic(task.marker, {"key": done.key, "result": result, "files": files})
    return done
