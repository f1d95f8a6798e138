"""The step from a script to a job in the queue: one submission at a time, and as it was asked for.

SLURM reads options from the environment, and a site's submit plugin may change any of them without
a word. So what the queue says of a new job is compared with its script.
"""

import fcntl
import json
import logging
import os
import re
import shlex
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from launch.cluster import mebibytes, seconds
from launch.queue import my_jobs
from launch.records import FOLDER
from launch.slurm import NoAnswerError, SlurmError, run_command, sbatch, withheld
from pipeline.errors import BusyError, ConfigError, PostnormError
from pipeline.runtime.files import write_json_atomic

logger = logging.getLogger(__name__)

INTENT_FILE = "submitting.json"
"""In the launcher's folder while a submission is made, and after one that may have left a job."""
_LOCK_FILE = "submitting.lock"
_NOTHING = {"", "(null)", "n/a"}
# Most seconds by which the clocks of this machine and of the controller may differ.
_CLOCKS_S = 5.0


# On disk before sbatch: a lock alone would not know what a killed process left in the queue.
class PendingSubmission:
    """A submission on its way: what is on disk of it before, during and after sbatch.

    A job that no record names yet is in the file or, where sbatch was called and did not say, the
    file says that there may be one. So none is lost, whatever ends this process.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._jobs: list[str] = []
        self._is_asking = False

    @property
    def is_open(self) -> bool:
        """Whether the queue may have a job that nothing else names."""
        return self._is_asking or bool(self._jobs)

    def queue(self, words: Sequence[str], script: str, path: Path | None = None) -> str:
        """Submit a script, from its file if it has one, and return the job's id.

        Raises:
            ConfigError: SLURM made another job of it; see `withdraw`.
        """
        # Before sbatch: if this process is killed in it, the next submission knows to look for a
        # job.
        self.write(is_asking=True)
        self._is_asking = True
        try:
            job = sbatch([*words, str(path)]) if path else sbatch(words, script)
        except NoAnswerError:
            raise  # it may be in the queue
        except PostnormError:
            self._is_asking = False
            raise
        self._jobs.append(job)
        self._is_asking = False
        self.write()
        _compare(job, script)
        return job

    def settle(self) -> None:
        """Take note that every job so far has its record, and stays whatever follows."""
        self._jobs = []
        self.write()

    def write(self, *, is_asking: bool = False) -> None:
        """Bring the file up to date."""
        mine = {"host": socket.gethostname(), "process": os.getpid(), "unix_s": round(time.time())}
        write_json_atomic(self._path, {**mine, "asking": is_asking, "jobs": self._jobs})

    def withdraw(self) -> bool:
        """Cancel what was submitted; return whether it is certain that no job is left."""
        jobs = " ".join(self._jobs)
        try:
            if self._jobs:
                run_command(["scancel", *self._jobs])
                logger.warning("cancelled what was submitted until then: job %s", jobs)
        except PostnormError as error:
            logger.error(
                "job %s could not be cancelled, do it by hand: scancel %s (%s)", jobs, jobs, error
            )
            return False
        self._jobs = []
        if self._is_asking:
            logger.warning(
                "sbatch was called and did not answer, so a job may be in the queue: submit again "
                "when SLURM answers, which looks for it first (%s)",
                self._path,
            )
        return not self._is_asking

    def close(self) -> None:
        """Remove the file: every job has its record."""
        self._jobs, self._is_asking = [], False
        self._path.unlink(missing_ok=True)


@contextmanager
def submitting(
    folder: Path,
    of: Path,
    known: Callable[[], Collection[str]],
    adopt: Callable[[str], bool] = lambda job: False,
) -> Iterator[PendingSubmission]:
    """Keep every other submission out, with the intent on disk before sbatch is called.

    If the block ends with an error, it has called `PendingSubmission.withdraw`, or has not called
    sbatch.

    Args:
        folder: with the launcher's folder in it.
        of: the folder that the comments of its jobs name.
        known: lists the ids of the jobs that are recorded.
        adopt: records a job that an earlier submission left without a record, if it can tell what
            the job does.

    Raises:
        BusyError: somebody else is submitting, or an earlier submission left a job in the queue
            that no record names.
    """
    home = folder / FOLDER
    home.mkdir(parents=True, exist_ok=True)
    path = home / INTENT_FILE
    if ignored := [name for name in withheld() if name.startswith("SBATCH_")]:
        logger.warning(
            "ignoring %s from the environment: the cluster profile decides", ", ".join(ignored)
        )
    # The lock file stays: removed, two processes could hold locks of two files of its name.
    with (home / _LOCK_FILE).open("a") as lock:
        _take(lock.fileno(), of, path)
        if path.exists():
            _refuse_unrecorded(path, of, known(), adopt)
        intent = PendingSubmission(path)
        intent.write()
        try:
            yield intent
        except BaseException:
            if not intent.is_open:
                with suppress(OSError):  # the error to be told is the one that led here
                    intent.close()
            raise
        intent.close()


def _take(lock: int, of: Path, intent: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        by = _who(_read(intent))
        raise BusyError(
            f"{of} is being submitted at this moment{by}: nothing was submitted; see "
            f"`postnorm status {shlex.quote(str(of))}`"
        ) from None
    except OSError as error:
        # Some file systems have no locks: Lustre that is mounted without -o flock says ENOSYS, NFS
        # without a lock daemon ENOLCK, some FUSE file systems EOPNOTSUPP. Every submission makes a
        # numbered folder of its own all the same, so that only a rare second job is let through,
        # which then waits for the lock of the run.
        said = f"{intent.parent} has no file locks ({error.strerror})"
        logger.warning("%s: a second submission at the same moment may not be noticed", said)


def _read(intent: Path) -> dict[str, Any]:
    """Read what is known of a submission; empty if its file cannot be read, or is gone."""
    try:
        found = json.loads(intent.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _who(found: Mapping[str, Any]) -> str:
    if {"process", "host"} <= found.keys():
        return f" by process {found['process']} on {found['host']}"
    return ""


def _refuse_unrecorded(
    intent: Path, of: Path, known: Collection[str], adopt: Callable[[str], bool]
) -> None:
    """Refuse where an earlier submission left a job in the queue that nobody can record."""
    found = _read(intent)
    named = [str(job) for job in found.get("jobs", [])]
    # A file that cannot be read counts as asking: then the queue is looked at.
    if not named and not found.get("asking", True):
        return  # it did not come to sbatch
    # One that has ended meanwhile was submitted all the same.
    since = float(found.get("unix_s", float("inf"))) - _CLOCKS_S
    every = [
        job
        for job in my_jobs()
        if job.array in named
        or (job.is_of(of) and (job.is_alive or (job.submitted_unix_s or 0.0) >= since))
    ]
    left = sorted({job.array for job in every} - {job.partition("_")[0] for job in known})
    if len(left) == 1 and adopt(left[0]):
        logger.info("job %s of an earlier submission is recorded now", left[0])
        return
    alive = {job.array for job in every if job.is_alive}
    if left := [job for job in left if job in alive]:
        jobs = " ".join(left)
        raise BusyError(
            f"{of}: an earlier submission{_who(found)} ended before it could record job {jobs}, "
            f"which is in the queue: let it run as it is (`squeue --me --jobs={','.join(left)}`), "
            f"or `scancel {jobs}` and submit again"
        )


def _compare(job: str, script: str) -> None:
    """Compare a new job with its script (ConfigError: SLURM made another job of it)."""
    try:
        form = ",".join(f"{name}:0|" for name in _SHOWN[:-1]) + f",{_SHOWN[-1]}:0"
        command = ["squeue", f"--jobs={job}", "--noheader", "--states=all", f"--Format={form}"]
        line = run_command(command).partition("\n")[0]
    except SlurmError as error:
        logger.warning("job %s could not be compared with the profile: %s", job, error)
        return
    values = line.split("|", len(_SHOWN) - 1)
    if len(values) < len(_SHOWN):
        logger.warning("job %s could not be compared with the profile: squeue said %r", job, line)
        return
    shown = {name: value.strip() for name, value in zip(_SHOWN, values, strict=True)}
    if texts := differences(options_of(script), shown):
        raise ConfigError(
            f"SLURM made another job of it than the profile asks for: {'; '.join(texts)}. A submit "
            "plugin of the site may have changed it: write what it wants into the profile, or ask "
            "the administrators"
        )


def options_of(script: str) -> dict[str, str]:
    """Read the `#SBATCH` lines of a script."""
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", script, re.MULTILINE)
    return {name: "".join(shlex.split(value)) for name, value in found}


def differences(asked: Mapping[str, str], shown: Mapping[str, str]) -> list[str]:
    """List what a job has otherwise than its script asks for, as squeue shows it. Pure.

    Only what was asked for is compared: defaults are the site's.
    """
    texts = []
    for name, (field, is_same) in _COMPARED.items():
        value, want = shown[field], asked.get(name, "")
        # squeue does not show these on sites without accounting.
        unknown = field in ("Account", "QOS", "cpus-per-task") and value.lower() in _NOTHING
        if (want or name in asked) and not unknown and not is_same(want, value):
            said = f"--{name}={want}" if want else f"--{name}"
            texts.append(f"{said}, SLURM has {field} {value or 'nothing'}")
    return texts


def _same_time(want: str, value: str) -> bool:
    if not value[:1].isdigit():
        return False  # UNLIMITED
    # SLURM counts whole minutes.
    return -(-seconds(want, "time") // 60) == -(-seconds(value, "time") // 60)


def _same_memory(want: str, value: str) -> bool:
    # squeue rounds, such as 62.50G.
    match = re.fullmatch(r"([\d.]+)([KMGT]?)", value)
    if not match:
        return False
    mib, expected = float(match[1]) * mebibytes(f"1{match[2]}", "mem"), mebibytes(want, "mem")
    return abs(mib - expected) <= 0.01 * expected


def _same_gpus(want: str, value: str) -> bool:
    # 22.05 writes gres:gpu:h200:8, later versions gres/gpu:h200:8 or gres/gpu:h200=8.
    found = re.findall(r"(?:^|[:/,])gpu(?:[:/]([^:=,]+))?[:=](\d+)", value)
    numbers = {number for _, number in found} | {f"{name}:{number}" for name, number in found}
    return _items(want) <= numbers


def _same_gres(want: str, value: str) -> bool:
    """Compare the GPUs among the generic resources; sites name the others as they like."""
    gpus = [item.removeprefix("gpu:") for item in _items(want) if item.startswith("gpu:")]
    return all(_same_gpus(item, value) for item in gpus)


def _items(text: str) -> set[str]:
    """Split a list of names, whose order says nothing."""
    return set(text.split(","))


def _same_name(want: str, value: str) -> bool:
    return want.lower() == value.lower()


_COMPARED: dict[str, tuple[str, Callable[[str, str], bool]]] = {
    # A job that has started has the one of several partitions that took it.
    "partition": ("Partition", lambda want, value: _items(value) <= _items(want)),
    "account": ("Account", _same_name),
    "qos": ("QOS", _same_name),
    "time": ("TimeLimit", _same_time),
    "nodes": ("NumNodes", lambda want, value: value.partition("-")[0] == want),
    "cpus-per-task": ("cpus-per-task", _same_name),
    "mem": ("MinMemory", _same_memory),
    "gpus-per-node": ("tres-per-node", _same_gpus),
    "gres": ("tres-per-node", _same_gres),
    "reservation": ("Reservation", lambda want, value: _items(value) == _items(want)),
    "requeue": ("Requeue", lambda _, value: value.lower() not in ("0", "no", "false")),
    "comment": ("Comment", lambda want, value: value == want),
}
# The comment comes last, since it may contain anything.
_SHOWN = tuple(dict.fromkeys(field for field, _ in _COMPARED.values()))
