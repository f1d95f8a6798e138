"""What SLURM knows of jobs: from its queue, then from its accounting; else it is not known.

Printed formats are the ones that stay: `squeue --json` passes over `-j` and `scontrol show job`
mixes job names with its keys. A size of 0 prints a field in full; the comment, which may contain
anything, comes last.

A job that the queue does not know need not have ended: a controller that crashes forgets young
jobs while their tasks run on, and later gives their ids to other jobs. So a job counts as ended
only if SLURM says so, and as ours only if it carries the comment that it was submitted with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.slurm import NoSlurmError, SlurmError, run_command
from pipeline.errors import PostnormError

RUNNING, PENDING, COMPLETING, UNKNOWN = "RUNNING", "PENDING", "COMPLETING", "UNKNOWN"
ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
}  # fmt: skip
_WAITING = {PENDING, "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"}
_SQUEUE = (
    "JobArrayID", "ArrayJobID", "State", "Reason", "Partition", "NodeList", "RestartCnt",
    "SubmitTime", "StartTime", "EndTime", "TimeLimit", "exit_code", "Comment",
)  # fmt: skip
_SACCT = (
    "JobID", "State", "Reason", "Partition", "NodeList", "Submit", "Start", "End", "Timelimit",
    "ExitCode", "Comment",
)  # fmt: skip
_NOTHING = {"", "(null)", "None", "N/A", "Unknown", "None assigned", "n/a"}
_ID_REUSED_S = 600.0
"""Clocks of a cluster differ by less."""


@dataclass(frozen=True)
class JobFacts:
    """A job, or an element of an array, as SLURM sees it. None or empty: not known, or not yet."""

    job: str
    """Such as `412`, or `413_5` in an array."""
    array: str
    """Id of its array; of a job in none, its own."""
    state: str
    """SLURM's own word, or `UNKNOWN`."""
    source: str
    """`squeue`, `sacct`, or empty for an unknown job."""
    reason: str = ""
    """Of a pending or failed job, SLURM's own word; of an unknown job, why."""
    partition: str = ""
    nodes: str = ""
    """Such as `node[1-4]`."""
    restarts: int | None = None
    submitted_unix_s: float | None = None
    """Of a requeued job: when it was requeued."""
    started_unix_s: float | None = None
    """Of this start; of a pending job the expected one."""
    end_unix_s: float | None = None
    """When it ended; of a running job, its time limit."""
    time_limit: str = ""
    exit_code: str = ""
    """Of an ended job: `code:signal`."""
    comment: str = ""

    @property
    def is_ended(self) -> bool:
        """SLURM says that it is over; it may still be requeued by a person."""
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
        """Whether it carries the mark of a run or dataset folder, its comment.

        Args:
            folder: absolute; links on the way to it do not matter.
        """
        return self.comment.startswith("/") and (
            self.comment == str(folder) or Path(self.comment).resolve() == folder.resolve()
        )


def my_jobs() -> list[JobFacts]:
    """All jobs of this user that the queue knows, ended ones for some minutes; arrays element-wise.

    Raises:
        SlurmError: SLURM is not there or does not answer.
    """
    return _squeue(["--me"])


def jobs_of(jobs: Sequence[str]) -> list[JobFacts]:
    """Those of `jobs` that the queue knows; arrays element-wise.

    Raises:
        SlurmError: SLURM is not there or does not answer.
    """
    if not jobs:
        return []
    try:
        return _squeue([f"--jobs={','.join(jobs)}"])
    except SlurmError as error:
        # Said of a single unknown job only; of several, the unknown ones are left out.
        if "Invalid job id" in str(error):
            return []
        raise


def job_facts(
    job: str, folder: Path | None = None, submitted_unix_s: float | None = None
) -> JobFacts:
    """What is known of one job.

    Args:
        job: its id.
        folder: that it is of; a job of another has the same id by chance. None takes any.
        submitted_unix_s: when it was submitted; records of accounting before it are not its own.

    Returns:
        State `UNKNOWN`, with the reason, where SLURM cannot tell.

    Raises:
        SlurmError: SLURM is not there or does not answer.
    """
    found = jobs_of([job])
    ours = [facts for facts in found if folder is None or facts.is_of(folder)]
    if ours:
        return ours[-1]
    strange = "the queue does not know it"
    if found:
        strange = f"the job that has its id today is another ({found[-1].comment or 'no comment'})"
    return _accounted(job, strange, submitted_unix_s)


def _squeue(which: list[str]) -> list[JobFacts]:
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
        # That of the time before the start stays behind.
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
    """From accounting, if the site has it and it saw the job's end."""
    try:
        # One line for each start.
        command = ["sacct", "--allocations", "--duplicates", "--noheader", "--parsable2"]
        output = run_command([*command, f"--jobs={job}", f"--format={','.join(_SACCT)}"])
    except PostnormError as error:
        why = "and accounting does not answer"
        if "accounting storage is disabled" in str(error) or isinstance(error, NoSlurmError):
            why = "and there is no accounting"
        return JobFacts(job, job, UNKNOWN, "", f"{strange}, {why}")
    lines = [
        dict(zip(_SACCT, line.split("|", len(_SACCT) - 1), strict=True))
        for line in output.splitlines()
        if line.strip()
    ]
    earliest_s = (submitted_unix_s or 0.0) - _ID_REUSED_S
    lines = [line for line in lines if (_time(line["Submit"]) or earliest_s) >= earliest_s]
    if not lines:
        return JobFacts(job, job, UNKNOWN, "", f"{strange}, nor does accounting")
    last = lines[-1]
    state = last["State"].partition(" ")[0]  # such as `CANCELLED by 1000`
    if state not in ENDED:
        return JobFacts(job, job, UNKNOWN, "", f"{strange}; accounting says {state}, which is old")
    return JobFacts(
        job=job,
        array=job.partition("_")[0],
        state=state,
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
    """From Unix seconds, which the commands are asked for."""
    return float(value) if value.strip().isdigit() else None


def _exit_code(value: str) -> str:
    """`code:signal`; squeue prints the status of `wait`."""
    if not value.isdigit():
        return value
    return f"{int(value) >> 8}:{int(value) & 0x7F}"


def still_queued(jobs: Sequence[str]) -> list[str]:
    """Those of some jobs or arrays that are waiting or running.

    Raises:
        SlurmError: SLURM is not there or does not answer.
    """
    if not jobs:
        return []
    there = run_command(["squeue", "--me", "--noheader", "--format=%F"]).split()
    return [job for job in jobs if job in there]
