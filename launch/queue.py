"""Jobs as SLURM knows them: from its queue, then from its accounting; otherwise unknown.

A job that the queue does not know may still run: a controller that crashes forgets young jobs while
their tasks run on, and later gives their ids to other jobs. So a job counts as ended only if SLURM
says so, and as ours only if it carries the comment that it was submitted with.

Every question fails as `run_command` does where SLURM does not exist or does not answer.

`Quota` is how many jobs a user may have in the queue (MaxSubmitJobs of an association,
MaxSubmitJobsPerUser of a QOS, where each element of an array counts). A call in the foreground
submits the next array when it fits. Jobs submit nothing: many sites forbid sbatch on nodes, and a
job that fails to submit the next one fails where nobody looks. What is left to submit follows from
files, so the same call continues where another was ended.
"""

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.cluster import ClusterConfig
from launch.site import submit_limit
from launch.slurm import NoSlurmError, SlurmError, TooManyJobsError, run_command
from pipeline.errors import PostnormError

logger = logging.getLogger(__name__)

RUNNING, PENDING, UNKNOWN = "RUNNING", "PENDING", "UNKNOWN"
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"}
ENDED |= {"OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"}
_WAITING = {PENDING, "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"}
# The printed formats are stable: `squeue --json` ignores `-j`, and `scontrol show job` mixes job
# names with its keys. The comment, which may contain anything, comes last.
_SQUEUE = (
    "JobArrayID", "ArrayJobID", "State", "Reason", "Partition", "NodeList", "RestartCnt",
    "SubmitTime", "StartTime", "EndTime", "TimeLimit", "exit_code", "Comment",
)  # fmt: skip
_SACCT = (
    "JobID", "State", "Reason", "Partition", "NodeList", "Submit", "Start", "End", "Timelimit",
    "ExitCode", "Comment",
)  # fmt: skip
_NOTHING = {"", "(null)", "None", "N/A", "Unknown", "None assigned", "n/a"}
# Clocks of a cluster differ by less than this.
_ID_REUSED_S = 600.0
_SHARE = 4
"""Arrays that fill the room: the next one comes when the first of them have ended."""

# Reasons for a pending job, by the names of `job_reason_string` (SLURM,
# src/common/slurm_protocol_defs.c).
_REASONS = {
    "None": "not considered yet",
    "Resources": "next in line, waits for free nodes",
    "Priority": "other jobs come first",
    "Dependency": "waits for another job to end",
    "DependencyNeverSatisfied": "the job it waits for failed: it never starts; cancel it",
    "BeginTime": "not before its start time; a requeued job waits about two minutes",
    "Cleaning": "being requeued; its last start is still ending",
    "JobHeldUser": "held by you: scontrol release {job}",
    "JobHeldAdmin": "held by an administrator: ask your site",
    "JobArrayTaskLimit": "its array runs as many tasks as it may at once",
    "ReqNodeNotAvail": "nodes it needs are down, drained or reserved",
    "PartitionDown": "the partition is down: ask your site",
    "PartitionInactive": "the partition is closed: ask your site",
    "PartitionTimeLimit": "its time limit is above the partition's: it never starts; lower it",
    "PartitionNodeLimit": "more nodes than the partition allows: it never starts; lower it",
    "PartitionConfig": "the partition does not allow what it asks for: it never starts",
    "NodeDown": "a node that it needs is down",
    "BadConstraints": "no node has what it asks for: it never starts",
    "Licenses": "waits for a licence",
    "Reservation": "waits for its reservation",
    "ReservationDeleted": "its reservation is gone: it never starts; cancel it",
    "InvalidAccount": "the account is not valid: cancel it and submit with another",
    "InvalidQOS": "the QOS is not valid: cancel it and submit with another",
    "JobLaunchFailure": "the node could not start it: see the job's log, or ask your site",
    "Prolog": "a node is being prepared",
    "FrontEndDown": "a front end is down: ask your site",
}
_REASONS_BY_PREFIX = {
    "QOSMax": "you use as much as the QOS allows you at once",
    "QOSMin": "the job asks for less than the QOS requires: it never starts",
    "QOSGrp": "all users of the QOS together use as much as it allows",
    "QOS": "a limit of the QOS",
    "AssocMax": "you use as much as your account allows you at once",
    "AssocGrp": "your account uses as much as it may",
    "Assoc": "a limit of your account",
    "MaxJobsPerAccount": "your account has as many jobs as it may have",
    "launch_failed_requeued_held": "a node failed to start it, and SLURM holds it: "
    "scontrol release {job}",
    "launch failed requeued held": "a node failed to start it, and SLURM holds it: "
    "scontrol release {job}",
    "job_requeued_in_held_state": "requeued and held: scontrol release {job}",
    "job requeued in held state": "requeued and held: scontrol release {job}",
    "Nodes required for job are DOWN": "nodes it needs are down, drained or reserved",
}


@dataclass(frozen=True)
class JobFacts:
    """A job, or an element of an array, as SLURM sees it. None or empty: not known (yet)."""

    job: str
    """Such as `412`, or `413_5` in an array."""
    array: str
    """Id of its array; its own id if it is not in an array."""
    state: str
    """SLURM's own word, or `UNKNOWN`."""
    source: str
    """`squeue`, `sacct`, or empty for an unknown job."""
    reason: str = ""
    """SLURM's own word for why a job is pending or failed; why an unknown job is unknown."""
    partition: str = ""
    nodes: str = ""
    """Such as `node[1-4]`."""
    restarts: int | None = None
    submitted_unix_s: float | None = None
    """Time of the submission, or of the last requeue."""
    started_unix_s: float | None = None
    """Time of this start; of a pending job, the expected one."""
    end_unix_s: float | None = None
    """Time of its end; of a running job, of its time limit."""
    time_limit: str = ""
    exit_code: str = ""
    """`code:signal` of an ended job."""
    comment: str = ""

    @property
    def is_ended(self) -> bool:
        """Whether SLURM says that it has ended; a person may still requeue it."""
        return self.state in ENDED

    @property
    def is_waiting(self) -> bool:
        """Whether it is in the queue and not on nodes."""
        return self.state in _WAITING

    @property
    def is_alive(self) -> bool:
        """Whether it waits, runs or is ending."""
        return self.state != UNKNOWN and not self.is_ended

    def is_of(self, folder: Path) -> bool:
        """Return whether its comment names a run or dataset folder, symbolic links resolved."""
        return self.comment.startswith("/") and (
            self.comment == str(folder) or Path(self.comment).resolve() == folder.resolve()
        )


def reason_in_words(reason: str, job: str) -> str:
    """Explain why a job is pending and what a person can do; empty for an unknown reason."""
    name = reason.partition(",")[0]
    if name.startswith(("QOSMax", "AssocMax")) and "PerJob" in name:
        giver = "QOS" if name.startswith("QOS") else "account"
        return f"the {giver} does not allow one job that much: it never starts; ask for less"
    words = _REASONS.get(name) or next(
        (text for prefix, text in _REASONS_BY_PREFIX.items() if reason.startswith(prefix)), ""
    )
    return words.replace("{job}", job)


def my_jobs() -> list[JobFacts]:
    """List this user's jobs in the queue, ended ones for some minutes; arrays element-wise."""
    return _squeue(["--me"])


def jobs_of(jobs: Sequence[str]) -> list[JobFacts]:
    """List those of `jobs` that the queue knows; arrays element-wise."""
    if not jobs:
        return []
    try:
        return _squeue([f"--jobs={','.join(jobs)}"])
    except SlurmError as error:
        # squeue says so of a single unknown job only; of several, it leaves the unknown ones out.
        if "Invalid job id" in str(error):
            return []
        raise


def job_facts(
    job: str, folder: Path | None = None, submitted_unix_s: float | None = None
) -> JobFacts:
    """Ask the queue, then accounting, about one job; `UNKNOWN` with the reason if neither can tell.

    Only a job of `folder` counts, if it is given, and no record from before the submission.
    """
    queued = jobs_of([job])
    # Another job may have the same id by chance.
    ours = [facts for facts in queued if folder is None or facts.is_of(folder)]
    if ours:
        return current(ours)
    strange = "the queue does not know it"
    if queued:
        strange = f"the job that has its id now is another ({queued[-1].comment or 'no comment'})"
    return _accounted(job, strange, submitted_unix_s)


def current(jobs: Sequence[JobFacts]) -> JobFacts:
    """Choose of the jobs of a chain the one that runs, or is the next to, or was the last.

    The others of a chain that has ended are cancelled. A job that is in no chain is its own.
    """
    # By number: as text element 10 would come before element 2.
    every = sorted(jobs, key=_number_in_array)
    running = [job for job in every if job.is_alive and not job.is_waiting]
    waiting = [job for job in every if job.is_waiting]
    done = [job for job in every if job.is_ended and job.state != "CANCELLED"]
    return (running or waiting or done[-1:] or every[-1:])[0]


def _number_in_array(facts: JobFacts) -> int:
    # Accounting has one line for all elements that never began, such as 413_[3-8%1].
    number = re.search(r"\d+", facts.job.partition("_")[2])
    return int(number[0]) if number else 0


def _squeue(which: list[str]) -> list[JobFacts]:
    # A size of 0 prints a field in full.
    form = ",".join(f"{name}:0|" for name in _SQUEUE[:-1]) + f",{_SQUEUE[-1]}:0"
    output = run_command(
        ["squeue", *which, "--noheader", "--states=all", "--array", f"--Format={form}"]
    )
    return [_from_squeue(line) for line in output.splitlines() if line.strip()]


def _from_squeue(line: str) -> JobFacts:
    values = dict(zip(_SQUEUE, line.rstrip().split("|", len(_SQUEUE) - 1), strict=True))
    job, state = values["JobArrayID"], values["State"]
    has_end = state in ENDED or (state == RUNNING and values["TimeLimit"] != "UNLIMITED")
    return JobFacts(
        job=job,
        array=values["ArrayJobID"],
        state=state,
        source="squeue",
        # A running job keeps the reason from before its start, which says nothing any more.
        reason=_text(values["Reason"]) if state in ENDED | _WAITING else "",
        partition=_text(values["Partition"]),
        nodes=_text(values["NodeList"]),
        restarts=int(values["RestartCnt"]),
        submitted_unix_s=_time(values["SubmitTime"]),
        started_unix_s=_time(values["StartTime"]),
        end_unix_s=_time(values["EndTime"]) if has_end else None,
        time_limit=_text(values["TimeLimit"]),
        exit_code=_exit_code(values["exit_code"]) if state in ENDED else "",
        comment=_text(values["Comment"]),
    )


def _accounted(job: str, strange: str, submitted_unix_s: float | None) -> JobFacts:
    """Ask accounting, if the site has it and it saw the job's end."""
    try:
        found = accounted([job], submitted_unix_s)
    except PostnormError as error:
        why = "and accounting does not answer"
        if "accounting storage is disabled" in str(error) or isinstance(error, NoSlurmError):
            why = "and there is no accounting"
        return JobFacts(job, job, UNKNOWN, "", f"{strange}, {why}")
    if not found:
        return JobFacts(job, job, UNKNOWN, "", f"{strange}, nor does accounting")
    last = current(found)
    if not last.is_ended:
        # A controller that crashed did not report the end to accounting: RUNNING may stand there
        # for ever.
        said = f"{strange}; accounting says {last.state}, which is old"
        return JobFacts(job, job, UNKNOWN, "", said)
    return replace(last, job=job, array=job.partition("_")[0])


def accounted(jobs: Sequence[str], submitted_unix_s: float | None) -> list[JobFacts]:
    """List what accounting knows of `jobs` since their submission; arrays element-wise."""
    # With --duplicates sacct prints one line for each start.
    command = ["sacct", "--allocations", "--duplicates", "--noheader", "--parsable2"]
    output = run_command([*command, f"--jobs={','.join(jobs)}", f"--format={','.join(_SACCT)}"])
    earliest_s = (submitted_unix_s or 0.0) - _ID_REUSED_S
    starts: dict[str, list[dict[str, str]]] = {}
    for text in output.splitlines():
        if text.strip():
            line = dict(zip(_SACCT, text.split("|", len(_SACCT) - 1), strict=True))
            if (_time(line["Submit"]) or earliest_s) >= earliest_s:
                starts.setdefault(line["JobID"], []).append(line)
    return [_from_sacct(lines) for lines in starts.values()]


def _from_sacct(lines: Sequence[Mapping[str, str]]) -> JobFacts:
    """Read the lines of all starts of a job, oldest first."""
    last = lines[-1]
    return JobFacts(
        job=last["JobID"],
        array=last["JobID"].partition("_")[0],
        state=last["State"].partition(" ")[0],  # such as `CANCELLED by 1000`
        source="sacct",
        reason=_text(last["Reason"]),
        partition=_text(last["Partition"]),
        nodes=_text(last["NodeList"]),
        restarts=len(lines) - 1,
        submitted_unix_s=_time(last["Submit"]),
        started_unix_s=_time(last["Start"]),
        end_unix_s=_time(last["End"]),
        time_limit=_text(last["Timelimit"]),
        exit_code=last["ExitCode"],
        comment=_text(last["Comment"]),
    )


def _text(value: str) -> str:
    value = value.strip()
    return "" if value in _NOTHING else value


def _time(value: str) -> float | None:
    """Read Unix seconds, the format that the commands are asked for."""
    return float(value) if value.strip().isdigit() else None


def _exit_code(value: str) -> str:
    """Convert the status of `wait`, which squeue prints, to `code:signal`."""
    if not value.isdigit():
        return value
    # As WEXITSTATUS and WTERMSIG; bit 7 says that there was a core dump.
    return f"{int(value) >> 8}:{int(value) & 0x7F}"


def alive_of(folder: Path, jobs: Sequence[str]) -> list[str]:
    """List those of some jobs that wait or run and are a folder's, whoever submitted them.

    The comment of a sweep's array names the sweep, in which the run's folder lies.
    """
    known = (folder, *folder.absolute().parents)
    alive = {
        name
        for facts in jobs_of(jobs)
        if facts.is_alive and (not facts.comment or any(map(facts.is_of, known)))
        for name in (facts.job, facts.array)
    }
    return [job for job in jobs if job in alive]


def still_queued(jobs: Sequence[str]) -> list[str]:
    """List those of this user's jobs, arrays or elements of arrays that are waiting or running."""
    if not jobs:
        return []
    there = run_command(["squeue", "--me", "--noheader", "--array", "--format=%F %i"]).split()
    # %F is the id of an array, %i that of its element: jobs are asked for by either.
    return [job for job in jobs if job in there]


@dataclass(frozen=True)
class Quota:
    """The jobs that a user may have in the queue, and whether to wait for them to end."""

    limit: int = 0
    """0: not known, so that sbatch alone says when it is reached."""
    every_s: float | None = None
    """Seconds between two looks at the queue; None: do not wait."""

    @property
    def waits(self) -> bool:
        """Whether to wait where there is no room."""
        return self.every_s is not None

    def array_size(self, largest: int) -> int:
        """Return the number of elements that arrays should have at most."""
        return min(largest, max(1, self.limit // _SHARE)) if self.limit else largest

    def lacks(self, size: int) -> str:
        """Return why so many jobs more do not fit now; empty if they do."""
        if not self.limit:
            return ""
        taken = sum(facts.is_alive for facts in my_jobs())
        if taken + size <= self.limit:
            return ""
        return f"{taken} of {self.limit} jobs that you may have are in the queue"

    def wait(self, size: int, what: str, stop: Callable[[], None]) -> None:
        """Wait until so many jobs more fit; `stop` raises where waiting has become no use.

        Raises:
            TooManyJobsError: they do not fit, and this does not wait.
        """
        said = ""
        while True:
            stop()
            why = self.lacks(size)
            if not why:
                return
            if not self.waits:
                raise TooManyJobsError(f"{what}: {size} more do not fit: {why}")
            if why != said:
                logger.info("%s: waiting for room: %s", what, why)
                said = why
            self.pause()

    def pause(self) -> None:
        """Wait until the next look."""
        time.sleep(self.every_s or 0.0)


def room_of(cluster: ClusterConfig, *, prep: bool, every_s: float | None) -> Quota:
    """Find the limit for the jobs of a profile: its own, else what accounting says."""
    if cluster.max_submit_jobs:
        return Quota(cluster.max_submit_jobs, every_s)
    account, qos = cluster.account, cluster.qos
    if prep:
        account, qos = cluster.prep.account or account, cluster.prep.qos or qos
    return Quota(submit_limit(account, qos) or 0, every_s)
