"""The lease on an output folder: one run writes there, all of whose processes may.

The processes of a run are a group: that of `data_prep run` alone, or the parts of one stage, of
which there may be several job arrays. Each part has one process. OUT/work/lease holds

    000007.json         the group that has the folder; the highest number counts
    000007.PART.json    a process of it: host, process, job, config; touched every few seconds

Both are made by `os.link`, which on every shared file system lets one of several succeed. A group
takes a folder by making the next number, and only if no process of the one before is alive. Of
processes of its own machine a process knows that. Of another one it waits for a sign: a file that
is touched is of a live process, one that was not touched for `EXPIRES_S` is of a dead one. Each
side first makes its own file and then looks for the other's, so that of two that come at once at
least one sees the other, and goes back.
"""

import json
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import EXIT_FAILED_RETRY, BusyError
from pipeline.runtime.files import is_alive, make_folder, retry_storage, temporary_beside

logger = logging.getLogger(__name__)

# Files, no `flock`: that does not reach over all shared file systems, and has no name to show. A
# task that is requeued at once waits this long.
EXPIRES_S = 90.0
"""A process of another machine whose file nobody touched for so long is dead."""
_TOUCHED_EVERY_S = 10.0
_TRIES = 5


@dataclass(frozen=True)
class Holder:
    """A process, and the run that it belongs to."""

    group: str
    """Equal in all processes of a run; parts of an equal run, which do the same, share it."""
    part: str
    """Different in all processes of a run that may run at once; a file name."""
    config: str
    """Hash of what the run makes."""
    host: str
    process: int
    namespace: str
    """Namespace of process numbers: containers on one host have their own."""
    born: str
    """When the process began: numbers of processes are used again."""
    job: str | None
    """SLURM's number of the job, and of the task in its array."""

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"{self.host}, process {self.process}{job}, config {self.config[:12]}"


def this_process(config: str, part: tuple[str, int, int] | None) -> Holder:
    """Describe this process.

    Args:
        config: hash of what the run makes.
        part: stage, rank and world of an array task; None for a run of its own.
    """
    process, host = os.getpid(), socket.gethostname()
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    job = f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID')}" if array else None
    job = job or os.environ.get("SLURM_JOB_ID")
    if part is None:
        group, name = f"run {host} {process} {_born(process)}", "run"
    else:
        stage, rank, world = part
        group = f"{stage} of {world}, {config}"
        name = f"part-{rank:06d}"
    return Holder(group, name, config, host, process, _namespace(), _born(process), job)


@contextmanager
def held(folder: Path, holder: Holder) -> Iterator[frozenset[str]]:
    """Hold the lease of a folder while the block runs; gives the hosts of its live processes.

    If another run takes the lease, which it does only when this process did not run for
    `EXPIRES_S`, this process ends at once, so that it writes nothing more.

    Raises:
        BusyError: a live process of another run, or the same part of this one, has it.
    """
    make_folder(folder)
    own = retry_storage(lambda: _acquire(folder, holder), lambda: f"taking {folder}")
    over = threading.Event()

    def touch() -> None:
        superseded = 0
        while not over.wait(_TOUCHED_EVERY_S if not superseded else 1):
            try:
                os.utime(own)
                if json.loads(own.read_bytes()) != asdict(holder):
                    raise FileNotFoundError(own)  # another process took it for a dead one's
                # Once is not enough: a run that was refused had its number for a moment.
                superseded = superseded + 1 if _newest(folder) != _number(own) else 0
                if superseded < 3:
                    continue
                raise FileNotFoundError(own)
            except FileNotFoundError:
                logger.critical("%s was taken by another run: this process stood still", folder)
                os._exit(EXIT_FAILED_RETRY)
            except OSError as error:
                logger.warning("the lease %s could not be renewed: %s", own, error)

    thread = threading.Thread(target=touch, daemon=True)
    thread.start()
    try:
        yield frozenset(each.host for _, each in _members(folder, _number(own)))
    finally:
        over.set()
        thread.join()
        retry_storage(lambda: own.unlink(missing_ok=True), lambda: f"removing {own}")


def holders(folder: Path) -> list[str]:
    """Describe the live processes that hold the lease of a folder, for people."""
    now_s = time.time()
    return [
        str(each)
        for path, each in _members(folder, _newest(folder))
        if _is_dead(each, path, now_s) is not True
    ]


def _acquire(folder: Path, holder: Holder) -> Path:
    """Make the file of this process; waits for those that may be dead."""
    for attempt in range(_TRIES):
        number = _newest(folder)
        ours = number > 0 and _group(folder, number) == holder.group
        _wait_for_death(folder, number, holder, same_group=ours)
        if not ours:
            number += 1
            if not _make(folder / f"{number:06d}.json", {"group": holder.group}):
                continue  # another run was quicker
        own = folder / f"{number:06d}.{holder.part}.json"
        for path, each in _members(folder, number):
            if path == own and _is_dead(each, path, _now_s(folder)):  # of the same part
                path.unlink(missing_ok=True)
        if _make(own, asdict(holder)):
            if _newest(folder) == number and not _alive_before(folder, number):
                _remove_older(folder, number)
                return own
            own.unlink(missing_ok=True)
        if not ours:
            (folder / f"{number:06d}.json").unlink(missing_ok=True)
        time.sleep(random.uniform(0, 0.2 * (attempt + 1)))
    raise BusyError(f"{folder}: other runs take this folder at the same moment; try again")


def _wait_for_death(folder: Path, number: int, holder: Holder, *, same_group: bool) -> None:
    """Return when no process stands in the way (BusyError: one is alive)."""
    first_seen: dict[Path, float] = {}
    told = False
    while True:
        unknown = None
        now_s = _now_s(folder)
        for path, each in _members(folder, number):
            if same_group and each.part != holder.part:
                continue
            dead = _is_dead(each, path, now_s)
            if dead:
                continue
            if dead is None:
                touched_s = _touched_s(path)
                dead = None if touched_s == first_seen.setdefault(path, touched_s) else False
            if dead is False:
                what = "the same part of this run" if same_group else "another run"
                raise BusyError(
                    f"{folder.parent.parent} is in use by {what}: {each}; wait for its end or stop "
                    "it, or choose another output_dir"
                )
            unknown = each
        if unknown is None:
            return
        if not told:
            logger.warning("waiting up to %.0f s to see whether %s is alive", EXPIRES_S, unknown)
            told = True
        time.sleep(1)


def _touched_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _alive_before(folder: Path, number: int) -> bool:
    older = [each for each in _members(folder) if _number(each[0]) < number]
    now_s = _now_s(folder)
    return any(not _is_dead(each, path, now_s) for path, each in older)


def _is_dead(each: Holder, path: Path, now_s: float) -> bool | None:
    """Return whether a process is dead; None if that is not known."""
    if each.host == socket.gethostname() and each.namespace == _namespace():
        return not is_alive(each.process) or _born(each.process) != each.born
    return now_s - _touched_s(path) > EXPIRES_S or None


def _now_s(folder: Path) -> float:
    """Read the clock that stamps the folder's files, which may not be this machine's."""
    path = temporary_beside(folder / "now")
    try:
        path.touch()
        os.utime(path)
        return path.stat().st_mtime
    finally:
        path.unlink(missing_ok=True)


def _members(folder: Path, number: int | None = None) -> list[tuple[Path, Holder]]:
    """List processes, dead ones too: those of a number, or all."""
    found = []
    for path in sorted(folder.glob(f"{'*' if number is None else f'{number:06d}'}.*.json")):
        with suppress(FileNotFoundError):
            found.append((path, Holder(**json.loads(path.read_bytes()))))
    return found


def _newest(folder: Path) -> int:
    # Listed anew each time: a name made here makes a client of a shared file system look again.
    return max((_number(path) for path in folder.glob("[0-9]*.json")), default=0)


def _number(path: Path) -> int:
    return int(path.name.partition(".")[0])


def _group(folder: Path, number: int) -> str | None:
    try:
        return str(json.loads((folder / f"{number:06d}.json").read_bytes())["group"])
    except FileNotFoundError:
        return None


def _make(path: Path, content: dict[str, Any]) -> bool:
    """Make a file with its content at once; say whether there was none before."""
    temporary = temporary_beside(path)
    temporary.write_text(json.dumps(content))
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True


def _remove_older(folder: Path, number: int) -> None:
    for path in folder.glob("[0-9]*.json"):
        if _number(path) < number:
            path.unlink(missing_ok=True)


def _namespace() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} " + os.readlink(
            "/proc/self/ns/pid"
        )
    except OSError:
        return "unknown"


def _born(process: int) -> str:
    """Return the start of a process of this machine in ticks; empty if there is none."""
    try:
        # The name of the program, in parentheses, may hold spaces.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
