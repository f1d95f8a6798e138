"""What SLURM said, read right; what it did not say, not guessed; asked again while it is away."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from launch import slurm as door
from launch.queue import UNKNOWN, JobFacts, current, job_facts, my_jobs, reason_in_words
from launch.slurm import NoAnswerError, SlurmError, run_command
from pipeline.errors import EXIT_FAILED_RETRY
from tests.support.recorded_slurm import NO_CONTROLLER, TIMED_OUT, RecordedSlurm

QUEUE = """\
7|7|FAILED|NonZeroExitCode|train|cm4|0|1795292495|1795292496|1795292496|10:00|768|(null)
10|10|FAILED|JobLaunchFailure|train|cm1|0|1795292878|1795292879|1795292880|10:00|10|(null)
2|2|PENDING|Resources|train||0|1795292495|1795293096|1795296696|1:00:00|0|/runs/a|b
12|12|PENDING|ReqNodeNotAvail, UnavailableNodes:cm4|train||0|1795292535|N/A|N/A|10:00|0|(null)
4|4|PENDING|JobHeldUser|train||0|1795292495|N/A|N/A|10:00|0|(null)
1|1|RUNNING|None|train|cm[1-2]|2|1795292495|1795292495|1795293095|10:00|0|/tmp/my runs/a
8_5|8|RUNNING|BeginTime|train|cm4|0|1795292495|1795292700|1826828700|UNLIMITED|0|(null)
13|13|COMPLETING|None|train|cm4|1|1795292535|N/A|N/A|10:00|0|/tmp/r/b"""
OF_JOB_1 = QUEUE.splitlines()[5]
REQUEUED = "1|REQUEUED|None|train|cm[1-2]|1795292820|1795292821|1795292825|00:10:00|0:0|"
FINISHED = "1|COMPLETED|None|train|cm[1-2]|1795292825|1795292831|1795292932|00:10:00|0:0|"


@pytest.fixture(autouse=True)
def _steered(recorded: RecordedSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in [("SQUEUE_USERS", "nobody"), ("SACCT_FORMAT", "Job"), ("SCANCEL_STATE", "")]:
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(door, "_FIRST_WAIT_S", 0.01)


def test_a_recorded_queue(recorded: RecordedSlurm) -> None:
    recorded.says("squeue", QUEUE)
    found = {facts.job: facts for facts in my_jobs()}
    assert found["1"] == JobFacts(
        job="1", array="1", state="RUNNING", source="squeue", partition="train", nodes="cm[1-2]",
        restarts=2, submitted_unix_s=1795292495, started_unix_s=1795292495, end_unix_s=1795293095,
        time_limit="10:00", comment="/tmp/my runs/a",
    )  # fmt: skip
    assert (found["7"].reason, found["7"].exit_code) == ("NonZeroExitCode", "3:0")
    assert found["10"].exit_code == "0:10"
    assert (found["2"].reason, found["2"].started_unix_s) == ("Resources", 1795293096)
    assert (found["2"].end_unix_s, found["2"].comment) == (None, "/runs/a|b")
    assert found["12"].reason == "ReqNodeNotAvail, UnavailableNodes:cm4"
    assert found["4"].started_unix_s is None
    # The reason of the time before the start is no reason any more, and there is no limit.
    assert (found["8_5"].array, found["8_5"].reason, found["8_5"].end_unix_s) == ("8", "", None)
    waiting = {"2", "12", "4"}
    alive = waiting | {"1", "8_5", "13"}
    jobs = {"is_ended": {"7", "10"}, "is_waiting": waiting, "is_alive": alive}
    for kind, expected in jobs.items():
        assert {job for job, facts in found.items() if getattr(facts, kind)} == expected


def test_a_job_that_nobody_knows_is_unknown(recorded: RecordedSlurm) -> None:
    facts = job_facts("9999")
    assert (facts.state, facts.is_ended, facts.is_alive) == (UNKNOWN, False, False)
    assert facts.reason == "the queue does not know it, and there is no accounting"
    (recorded.folder / "sacct").unlink()
    (recorded.folder / "sacct").symlink_to("/nowhere")
    assert job_facts("9999").state == UNKNOWN


def test_accounting_knows_what_the_queue_forgot(recorded: RecordedSlurm) -> None:
    recorded.says("sacct", f"{REQUEUED}\n{FINISHED}")
    facts = job_facts("1", Path("/tmp/my runs/a"), submitted_unix_s=1795292819.5)
    assert (facts.state, facts.restarts, facts.source) == ("COMPLETED", 1, "sacct")
    assert facts.end_unix_s == 1795292932
    recorded.says("sacct", FINISHED.replace("COMPLETED", "CANCELLED by 1000"))
    assert job_facts("1").state == "CANCELLED"
    # Of a chain that has ended, one line stands for all jobs that never began.
    never = FINISHED.replace("1|COMPLETED", "1_[2-8%1]|CANCELLED by 1000", 1)
    ended = [FINISHED.replace("1|", f"1_{n}|", 1) for n in (0, 1)]
    recorded.says("sacct", "\n".join([never, ended[0].replace("COMPLETED", "TIMEOUT"), ended[1]]))
    assert (job_facts("1").job, job_facts("1").state) == ("1", "COMPLETED")
    recorded.says("sacct", never)
    assert job_facts("1").state == "CANCELLED"


@pytest.mark.parametrize(
    ("line", "submitted_unix_s", "why"),
    [
        # Accounting never hears of the end of a job that the controller lost.
        (FINISHED.replace("COMPLETED", "RUNNING"), None, "accounting says RUNNING, which is old"),
        (REQUEUED, None, "accounting says REQUEUED, which is old"),
        (FINISHED, 1795300000.0, "nor does accounting"),  # an earlier job with the same id
        ("", None, "nor does accounting"),
    ],
)
def test_not_in_accounting(
    recorded: RecordedSlurm, line: str, submitted_unix_s: float | None, why: str
) -> None:
    recorded.says("sacct", line)
    facts = job_facts("1", submitted_unix_s=submitted_unix_s)
    assert facts.state == UNKNOWN
    assert why in facts.reason


def test_another_job_with_the_same_id_is_not_ours(recorded: RecordedSlurm) -> None:
    recorded.says("squeue", OF_JOB_1)
    (recorded.folder / "link").symlink_to("/tmp/my runs")
    assert job_facts("1", recorded.folder / "link" / "a").state == "RUNNING"
    assert job_facts("1", Path("/tmp/my runs/a")).state == "RUNNING"
    facts = job_facts("1", Path("/tmp/my runs/b"))
    assert facts.state == UNKNOWN
    assert "/tmp/my runs/a" in facts.reason


@pytest.mark.parametrize("error", [NO_CONTROLLER, TIMED_OUT])
def test_asked_again_until_the_controller_answers(recorded: RecordedSlurm, error: str) -> None:
    recorded.recovers("squeue", error, times=3, text=OF_JOB_1)
    assert [facts.state for facts in my_jobs()] == ["RUNNING"]
    assert len(recorded.calls("squeue")) == 4


def test_a_controller_stays_away(recorded: RecordedSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []  # time passes only while someone sleeps
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(door, "time", clock)
    monkeypatch.setattr(door, "_FIRST_WAIT_S", 1.0)
    recorded.says("squeue", NO_CONTROLLER, code=1)
    with pytest.raises(NoAnswerError, match="nothing is known of its jobs") as caught:
        run_command(["squeue"], patience_s=100)
    assert caught.value.exit_code == EXIT_FAILED_RETRY
    assert slept == [1, 2, 4, 8, 16, 30, 30]
    assert len(recorded.calls("squeue")) == 8


def test_what_may_have_been_done_is_not_done_again(recorded: RecordedSlurm) -> None:
    recorded.says("sbatch", "sbatch: error: Batch job submission failed: Socket timed out on "
                  "send/recv operation", code=1)  # fmt: skip
    with pytest.raises(NoAnswerError):
        run_command(["sbatch"], repeatable=False)
    assert len(recorded.calls("sbatch")) == 1
    recorded.recovers("sbatch", "sbatch: error: Batch job submission failed: Unable to contact "
                      "slurm controller (connect failure)", times=1, text="12")  # fmt: skip
    assert run_command(["sbatch"], repeatable=False) == "12\n"


def test_a_refusal_is_final(recorded: RecordedSlurm) -> None:
    recorded.says("scontrol", "Job is pending execution for job 3", code=1)
    with pytest.raises(SlurmError, match=r"scontrol requeue 3 .*\(1\): Job is") as got:
        run_command(["scontrol", "requeue", "3"])
    assert not isinstance(got.value, NoAnswerError)
    assert len(recorded.calls("scontrol")) == 1


@pytest.mark.parametrize(("reason", "words"), [
    ("Resources", "free nodes"), ("JobHeldUser", "scontrol release 412"),
    ("ReqNodeNotAvail, UnavailableNodes:cm4", "down, drained or reserved"),
    ("QOSMaxJobsPerUserLimit", "QOS"), ("AssocMaxNodePerJobLimit", "account"),
    ("QOSGrpGRES", "all users of the QOS"), ("DependencyNeverSatisfied", "never starts"),
    ("SomethingNew", ""),
])  # fmt: skip
def test_reasons_in_words(reason: str, words: str) -> None:
    found = reason_in_words(reason, "412")
    assert words in found
    assert bool(found) == bool(words)


@pytest.mark.parametrize(
    ("states", "index"),
    [
        ("COMPLETED RUNNING PENDING PENDING", 1),
        ("FAILED FAILED PENDING PENDING", 2),  # the next one is not considered yet
        ("FAILED COMPLETED CANCELLED CANCELLED", 1),
        ("FAILED NODE_FAIL COMPLETING PENDING", 2),
        ("CANCELLED CANCELLED", 1),
        ("PENDING", 0),
    ],
)
def test_a_chain_is_its_running_or_next_or_last_job(states: str, index: int) -> None:
    chain = [JobFacts(f"7_{n}", "7", state, "squeue") for n, state in enumerate(states.split())]
    # squeue sorts by state.
    assert current(chain[::-1]).job == f"7_{index}"
    assert current([JobFacts(f"7_{n}", "7", "PENDING", "squeue") for n in (10, 9, 11)]).job == "7_9"
