"""What `launch status` says of runs and preparations in every state, and never says wrongly."""

import json
import time
from pathlib import Path

import pytest

from launch import control, logs, status
from launch.queue import JobFacts
from launch.records import PrepSubmission, read_prep, require_run, submissions, write_prep
from pipeline.errors import DataError
from tests.support.processes import python
from tests.support.recorded_slurm import NO_ACCOUNTING, UNKNOWN_JOB, RecordedSlurm
from tests.support.run_folder import RunFolder


def _prep_lines(folder: Path) -> list[str]:
    return status.prep_summary(status.prep_report(folder)).text().splitlines()


def _line(state: str, folder: Path, *, reason: str = "None", start: str = "N/A", end: str = "N/A",
          nodes: str = "", restarts: int = 0, job: str = "412") -> str:  # fmt: skip
    array = job.partition("_")[0]
    return f"{job}|{array}|{state}|{reason}|train|{nodes}|{restarts}|1795292495|{start}|{end}|" \
           f"1:00:00|0|{folder}"  # fmt: skip


def _trains(run: RunFolder, job: str = "412") -> float:
    """A run that was requeued once and has just logged step 210; returns the time."""
    now = time.time()
    run.submitted(job, now - 700)
    run.started(f"{job}.0", now - 600)
    run.trained(10, now - 500)
    run.saved(90, now - 310)
    run.exited(f"{job}.0", 75, 75)
    run.decided(job, 0, "requeue", "asked to stop before the time limit", now - 280)
    run.started(f"{job}.1", now - 200, from_step=90)
    run.trained(110, now - 101)
    run.trained(210, now - 1)
    run.saved(200, now - 20)
    return now


@pytest.mark.usefixtures("processes")
def test_a_running_job(recorded: RecordedSlurm, run: RunFolder) -> None:
    now = _trains(run)
    (run.folder / "launch" / "excluded").write_text("cm3\n")
    end, start = str(int(now) + 3000), str(int(now) - 600)
    recorded.says("squeue", _line("RUNNING", run.folder, nodes="cm[1-2]", restarts=1, start=start,
                                  end=end))  # fmt: skip
    facts = (
        "412 running on cm[1-2] for 00:10:00, 00:50:00 left of 1:00:00, 1 restart",
        "excluded    cm3",
        f"[{'#' * 8}{'-' * 32}] 21.0%  step 210 of 1,000",
        "loss        6.5000 at step ",
        "ETA         00:13:10   last sign of life 00:00:0",  # 1 s a step
        "restarts    1, the last from step 90; rewinds 0",
        "checkpoint  step 200, 00:00:2",
        "from step 0   requeue: asked to stop before the time limit\n",
        "from step 90  running",
    )
    _check(run, "running", "\nheld-out  ", "\nrate  ", "\ntokens  ", *facts, at=now)


def _check(run: RunFolder, state: str, *facts: str, at: float | None = None) -> None:
    """Compare the state, and look for what the text must name, whatever it says around it."""
    report = status.run_report(run.folder)
    assert status.headline(report) == state
    text = status.run_summary(report, float(int(at or time.time()))).text()
    assert [fact for fact in facts if fact not in text] == [], text


@pytest.mark.usefixtures("processes")
def test_a_requeued_job_waits(recorded: RecordedSlurm, run: RunFolder) -> None:
    now = int(_trains(run))
    line = _line("PENDING", run.folder, reason="BeginTime", start=str(now + 3600), restarts=1)
    recorded.says("squeue", line)
    _check(run, "pending", "412", "BeginTime", "expected in 0")


@pytest.mark.usefixtures("processes")
def test_an_unknown_job_is_not_called_ended(recorded: RecordedSlurm, run: RunFolder) -> None:
    now = _trains(run)
    recorded.says("squeue", "")
    _check(run, "unknown", "no accounting", "sign of life 00:00:0", f"`touch {run.folder}/STOP`")
    run.decided("412", 1, "failed", "2 attempts without a new checkpoint", now)
    _check(run, "failed", "2 attempts without")
    (run.folder / "done.json").write_text("{}")
    _check(run, "finished", "done.json")
    assert recorded.calls("sacct")


def test_training_comes_before_its_evaluation(recorded: RecordedSlurm, run: RunFolder) -> None:
    run.submitted("411")
    run.submitted("412")
    run.submitted("413", kind="evaluate")
    recorded.says("squeue", "\n".join([_line("PENDING", run.folder, job="413", reason="Priority"),
                                       _line("CANCELLED", run.folder, job="411"),
                                       _line("TIMEOUT", run.folder)]))  # fmt: skip
    report = status.run_report(run.folder)
    assert [facts.job for facts in report.jobs] == ["412", "413"]
    assert status.headline(report) == "timeout"


@pytest.mark.usefixtures("processes")
def test_a_job_that_failed_says_why(recorded: RecordedSlurm, run: RunFolder) -> None:
    now = _trains(run)
    run.decided("412", 1, "failed", "rank 0 failed permanently (exit code 2)", now)
    end = str(int(now) - 3600)
    line = _line("FAILED", run.folder, reason="NonZeroExitCode", nodes="cm1", end=end, restarts=1)
    recorded.says("squeue", line.replace("|0|/", "|512|/"))
    facts = ("NonZeroExitCode", "cm1", "01:00:", "exit code 2:0", "rank 0 failed permanently")
    _check(run, "failed", *facts)


@pytest.mark.usefixtures("processes")
def test_without_slurm(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _trains(run)
    monkeypatch.setenv("PATH", str(tmp_path))  # no SLURM
    text = status.run_summary(status.run_report(run.folder)).text()
    assert "squeue was not found" in text
    assert "step 210 of 1,000" in text


def test_not_submitted_not_started_or_no_run(recorded: RecordedSlurm, run: RunFolder) -> None:
    recorded.says("squeue", "")
    _check(run, "not started", "not submitted")
    with pytest.raises(DataError, match=f"such as {run.folder}"):
        require_run(run.folder.parent / "runn")
    (run.folder.parent / "data" / "work").mkdir(parents=True)
    with pytest.raises(DataError, match="data preparation"):
        require_run(run.folder.parent / "data")
    (run.folder / "launch" / "0001").mkdir()
    (run.folder / "launch" / "0001" / "submission.json").write_text('{"number": 1}')
    with pytest.raises(DataError, match=r"0001/submission.json.*'job'"):
        submissions(run.folder)
    assert not recorded.calls("sacct")


@pytest.mark.usefixtures("processes")
def test_starts_that_slurm_ended_have_records(recorded: RecordedSlurm, run: RunFolder) -> None:
    now = time.time() - 10_000
    run.submitted("5", now)
    for number in range(7):
        run.started(f"5.{number}", now + 100 * number, from_step=number or None)
    run.decided("5", 7, "requeue", "preflight: cm2 has 3 of 4 GPUs", now + 900)
    recorded.says("squeue", _line("PENDING", run.folder, job="5", reason="Resources", restarts=8))
    text = status.run_summary(status.run_report(run.folder)).text()
    lines = [line for line in text.splitlines() if line.startswith("start")]
    assert len(lines) == 5
    assert lines[0].split()[1] == "5.3"
    assert "killed: no rank left an exit code" in lines[0]
    assert lines[-1].endswith("did not train  requeue: preflight: cm2 has 3 of 4 GPUs")


@pytest.mark.usefixtures("processes")
def test_the_queue_as_a_table(recorded: RecordedSlurm, run: RunFolder, tmp_path: Path) -> None:
    _trains(run)
    data = tmp_path / "data"
    (data / "work" / "logs").mkdir(parents=True)
    (data / "work" / "logs" / "submitted.json").write_text('{"jobs": {"ingest": ["7"]}}')
    (tmp_path / "stranger").mkdir()
    recorded.says("squeue", "\n".join([
        _line("RUNNING", run.folder, nodes="cm1", restarts=1),
        _line("CANCELLED", run.folder, job="411"),
        _line("PENDING", tmp_path / "gone", job="9", reason="Resources"),
        _line("PENDING", tmp_path / "stranger", job="10", reason="Resources"),
        _line("RUNNING", data, job="7_0", nodes="cm2"),
        _line("PENDING", data, job="7_1", reason="JobArrayTaskLimit"),
        _line("PENDING", Path("(null)"), job="12", reason="Priority"),
    ]))  # fmt: skip
    _, *lines = status.queue_text(status.queue_reports()).splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert set(rows) == {str(run.folder), str(tmp_path / "gone"), str(data)}
    assert rows[str(run.folder)][:4] == ["412", "running", "-", "210/1,000"]
    assert rows[str(tmp_path / "gone")][:3] == ["9", "pending", "Resources"]
    assert rows[str(data)][:7] == ["7", "running", "-", "1", "run,", "1", "wait"]
    # Of a chain the element that runs, and training before its evaluation.
    run.submitted("413", kind="evaluate")
    lines = [_line("PENDING", run.folder, job="413", reason="Priority"),
             _line("PENDING", run.folder, job="412_3", reason="JobArrayTaskLimit"),
             _line("RUNNING", run.folder, job="412_2", nodes="cm1")]  # fmt: skip
    recorded.says("squeue", "\n".join(lines))
    [row] = status.queue_text(status.queue_reports()).splitlines()[1:]
    assert row.split()[1:3] == ["412_2", "running"]
    recorded.says("squeue", "")
    assert status.queue_reports() == []


def test_an_evaluation_says_nothing_of_a_run_trained_by_hand(run: RunFolder) -> None:
    run.submitted("9", kind="evaluate")
    run.decided("9", 0, "finished", "done", time.time())
    report = status.report_of(run.folder, [], "SLURM cannot be asked")
    assert status.headline(report) == "unknown"


def test_a_data_preparation(recorded: RecordedSlurm, tmp_path: Path) -> None:
    assert status.prep_report(tmp_path) is None
    (tmp_path / "work" / "logs").mkdir(parents=True)
    stages = {"ingest": ["7", "8"], "shards": ["9"], "verify": ["10"]}
    (tmp_path / "work" / "logs" / "submitted.json").write_text(json.dumps({"jobs": stages}))
    recorded.says("squeue", "\n".join([
        _line("COMPLETED", tmp_path, job="7_0"), _line("RUNNING", tmp_path, job="7_1"),
        _line("FAILED", tmp_path, job="8_0", reason="NonZeroExitCode"),
        _line("PENDING", tmp_path, job="9_0", reason="DependencyNeverSatisfied"),
        _line("RUNNING", Path("/other"), job="10_0"),
    ]))  # fmt: skip
    lines = _prep_lines(tmp_path)
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert rows["ingest"] == ["0", "1", "1", "1", "1", "FAILED"]
    assert rows["shards"][:5] == ["1", "0", "0", "0", "DependencyNeverSatisfied:"]
    assert rows["verify"][:4] == ["-"] * 4
    assert "--jobs=7,8,9,10" in recorded.calls("squeue")[0]
    assert "--jobs=10 " in recorded.calls("sacct")[0]


def test_an_ended_preparation_is_judged_by_files(recorded: RecordedSlurm, tmp_path: Path) -> None:
    def said() -> tuple[str, dict[str, str]]:
        title, *lines = _prep_lines(tmp_path)
        rows = [line.split(maxsplit=5) for line in lines]
        counted = {row[0]: " ".join(row[1:]) for row in rows if row[0] in ("ingest", "shards")}
        return title.removeprefix(f"{tmp_path}: "), counted

    (tmp_path / "work" / "logs").mkdir(parents=True)
    (tmp_path / "work" / "launch" / "0001").mkdir(parents=True)
    now = time.time()
    write_prep(tmp_path, PrepSubmission({"ingest": ["7"], "shards": ["9"]}, now))
    unknown = {"ingest": "- - - - not known to SLURM (any more): 7",
               "shards": "- - - - not known to SLURM (any more): 9"}  # fmt: skip
    assert said() == ("data preparation", unknown)
    # Accounting knows more, if there is one; an older job had the same id.
    ended = "|None|cpu|n1|{}|{}|{}|1:00:00|0:0|"
    lines = [("7_0", "FAILED", -9000), ("7_0", "COMPLETED", 5), ("9_0", "TIMEOUT", 5)]
    recorded.says("sacct", "\n".join(
        f"{job}|{state}{ended.format(*[int(now) + after] * 3)}" for job, state, after in lines
    ))  # fmt: skip
    assert said()[1] == {"ingest": "0 0 1 0", "shards": "0 0 0 1 1 TIMEOUT"}
    recorded.says("sacct", NO_ACCOUNTING, code=1)
    (tmp_path / "work" / "launch" / "0001" / "failed-ingest").write_text("part 3 of 12\n")
    title, rows = said()
    assert (title, rows["ingest"]) == ("data preparation, failed", "- - - - failed: part 3 of 12")
    (tmp_path / "index.json").touch()
    done = {"ingest": "- - - - done", "shards": "- - - - done"}
    assert said() == ("data preparation, complete", done)


def test_cancelled_unaccounted(recorded: RecordedSlurm, run: RunFolder, tmp_path: Path) -> None:
    run.submitted("412")
    for command in ("scontrol", "scancel"):
        recorded.says(command, "")
    alive = _line("RUNNING", run.folder, restarts=2)
    recorded.says("squeue", alive, alive, "")
    assert "cancelled job 412" in "\n".join(control.cancel(run.folder, save=False, save_s=0))
    assert status.headline(status.report_of(run.folder, [], "SLURM cannot be asked")) == "cancelled"
    recorded.says("squeue", "")
    report = status.run_report(run.folder)
    assert status.headline(report) == "cancelled"
    assert report.history[-1]["restart"] == 2
    # Nor is it counted as an attempt without progress.
    assert report.history[-1]["miss"] is None
    assert "ended, cancelled" in logs.why_job_is_over(run.folder, "412")

    data = tmp_path / "data"
    (data / "work" / "logs").mkdir(parents=True)
    write_prep(data, PrepSubmission({"ingest": ["7"]}, 5.0))
    alive = _line("RUNNING", data, job="7_0")
    recorded.says("squeue", alive, alive, "")
    assert "cancelled job 7" in "\n".join(control.cancel_prep(data, {"ingest": ["7"]}))
    recorded.says("squeue", UNKNOWN_JOB, code=1)
    title, *lines = _prep_lines(data)
    assert title == f"{data}: data preparation, cancelled"
    assert "cancelled on " in "".join(lines)
    assert read_prep(data).submitted_unix_s == 5.0


@pytest.mark.usefixtures("processes")
def test_json_has_all_of_it(recorded: RecordedSlurm, run: RunFolder) -> None:
    _trains(run)
    recorded.says("squeue", _line("PENDING", run.folder, reason="Priority"))
    command = ("-m", "launch", "status", "--json")
    one, every = (json.loads(python(*command, *folder)) for folder in ([run.folder], []))
    assert (one["jobs"][0]["reason"], one["run"]["step"]) == ("Priority", 210)
    assert [report["run_dir"] for report in every] == [str(run.folder)]
    assert set(JobFacts.__annotations__) == set(one["jobs"][0])
    assert set(status.RunReport.__annotations__) == set(one)
