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
from contextlib import contextmanager
from pathlib import Path

from launch.cluster import ClusterConfig, mebibytes, seconds
from launch.queue import my_jobs
from launch.records import FOLDER
from launch.slurm import SlurmError, job_environment, run_command, sbatch
from pipeline.errors import BusyError, ConfigError
from pipeline.runtime.files import write_json_atomic

logger = logging.getLogger(__name__)

INTENT_FILE = "submitting.json"
"""In the launcher's folder while a submission is made: who makes it, and since when."""
_LOCK_FILE = "submitting.lock"
# The comment comes last, since it may contain anything.
_SHOWN = (
    "Partition", "Account", "QOS", "TimeLimit", "NumNodes", "cpus-per-task", "MinMemory",
    "tres-per-node", "Reservation", "Requeue", "Comment",
)  # fmt: skip
_NOTHING = {"", "(null)", "n/a"}


@contextmanager
def submitting(folder: Path, of: Path, known: Callable[[], Collection[str]]) -> Iterator[None]:
    """Keep every other submission out, with the intent on disk before sbatch is called.

    Args:
        folder: with the launcher's folder in it.
        of: the folder that the comments of its jobs name.
        known: lists the ids of the jobs that are recorded.

    Raises:
        BusyError: somebody else is submitting, or was killed before a job could be recorded that
            is in the queue.
    """
    home = folder / FOLDER
    home.mkdir(parents=True, exist_ok=True)
    intent = home / INTENT_FILE
    with (home / _LOCK_FILE).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(
                f"{of} is being submitted at this moment{_who(intent)}: nothing was submitted; see "
                f"`python -m launch status {shlex.quote(str(of))}`"
            ) from None
        if intent.exists():
            _refuse_unrecorded(intent, of, known())
        mine = {"host": socket.gethostname(), "process": os.getpid(), "unix_s": round(time.time())}
        write_json_atomic(intent, mine)
        try:
            yield
        finally:
            intent.unlink(missing_ok=True)


def _who(intent: Path) -> str:
    try:
        found = json.loads(intent.read_bytes())
        return f" by process {found['process']} on {found['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _refuse_unrecorded(intent: Path, of: Path, known: Collection[str]) -> None:
    """Refuse where a submission that was killed left a job that no record names."""
    alive = {job.array for job in my_jobs() if job.is_alive and job.is_of(of)}
    if left := sorted(alive - {job.partition("_")[0] for job in known}):
        raise BusyError(
            f"{of}: an earlier submission{_who(intent)} was killed before it could record job "
            f"{', '.join(left)}, which is in the queue: scancel {' '.join(left)}, then submit again"
        )


def queue_script(
    words: Sequence[str], script: str, cluster: ClusterConfig, path: Path | None = None
) -> str:
    """Submit a script, from its file if it has one, and return the job's id.

    The job gets the variables of `job_environment`, and no others of this shell.

    Raises:
        ConfigError: SLURM made another job of it, which was cancelled.
    """
    environment = job_environment(cluster.environment)
    if path:
        job = sbatch([*words, str(path)], environment=environment)
    else:
        job = sbatch(words, script, environment=environment)
    try:
        form = ",".join(f"{name}:0|" for name in _SHOWN[:-1]) + f",{_SHOWN[-1]}:0"
        command = ["squeue", f"--jobs={job}", "--noheader", "--states=all", f"--Format={form}"]
        line = run_command(command).partition("\n")[0]
    except SlurmError as error:
        logger.warning("job %s could not be compared with the profile: %s", job, error)
        return job
    values = line.split("|", len(_SHOWN) - 1)
    if len(values) < len(_SHOWN):
        logger.warning("job %s could not be compared with the profile: squeue said %r", job, line)
        return job
    shown = {name: value.strip() for name, value in zip(_SHOWN, values, strict=True)}
    if texts := differences(options_of(script), shown):
        raise ConfigError(
            f"SLURM made another job of it than the profile asks for: {'; '.join(texts)}. Job {job}"
            f" {_cancelled(job)}. A submit plugin of the site may have changed it: write what it "
            "wants into the profile, or ask the administrators"
        )
    return job


def _cancelled(job: str) -> str:
    try:
        run_command(["scancel", job])
    except SlurmError as error:
        return f"could not be cancelled, do it by hand: scancel {job} ({error})"
    return "was cancelled"


def options_of(script: str) -> dict[str, str]:
    """Read the `#SBATCH` lines of a script."""
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", script, re.MULTILINE)
    return {name: "".join(shlex.split(value)) for name, value in found}


def differences(asked: Mapping[str, str], shown: Mapping[str, str]) -> list[str]:
    """List what a job has otherwise than its script asks for, as squeue shows it. Pure.

    Only what was asked for is compared: defaults are the site's. An account, a QOS and a number of
    cores that squeue does not show are not known, which is so on sites without accounting.
    """
    texts = []
    for name, (field, is_same) in _COMPARED.items():
        value, want = shown[field], asked.get(name, "")
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
    *kind, count = want.removeprefix("gpu:").split(":")
    found = re.findall(r"(?:^|[:/,])gpu(?:[:/]([^:=,]+))?[:=](\d+)", value)
    return any(number == count and (not kind or kind[0] == name) for name, number in found)


def _same_name(want: str, value: str) -> bool:
    return want.lower() == value.lower()


_COMPARED: dict[str, tuple[str, Callable[[str, str], bool]]] = {
    # A job that has started has the one of several partitions that took it.
    "partition": ("Partition", lambda want, value: want == value or value in want.split(",")),
    "account": ("Account", _same_name),
    "qos": ("QOS", _same_name),
    "time": ("TimeLimit", _same_time),
    "nodes": ("NumNodes", lambda want, value: value.partition("-")[0] == want),
    "cpus-per-task": ("cpus-per-task", _same_name),
    "mem": ("MinMemory", _same_memory),
    "gpus-per-node": ("tres-per-node", _same_gpus),
    "gres": ("tres-per-node", _same_gpus),
    "reservation": ("Reservation", _same_name),
    "requeue": ("Requeue", lambda _, value: value.lower() not in ("0", "no", "false")),
    "comment": ("Comment", lambda want, value: value == want),
}
