"""`postnorm.submit`: what it hands over, and what its handle says of a job until its end."""

import json
import threading
import time
from pathlib import Path

import pytest

import postnorm
from launch import jobs
from launch.records import append_history
from launch.slurm import NoSlurmError
from pipeline.data.format import DatasetIndex
from pipeline.errors import ConfigError, PostnormError
from pipeline.runtime.checkpoints import published
from tests.launch.test_submit import Place
from tests.support.ranks import CONFIG


@pytest.fixture
def place(
    tmp_path: Path, dataset: DatasetIndex, processes: None, monkeypatch: pytest.MonkeyPatch
) -> Place:
    made = Place(tmp_path, dataset)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", made.slurm.environment["PATH"])
    return made


def _queue(place: Place, state: str, reason: str = "None") -> None:
    """What squeue answers of job 101; nothing where the state is ''."""
    line = f"101|101|{state}|{reason}|train||0|1|N/A|N/A|1:00:00|0|{place.run_dir}\n"
    (place.slurm.folder / "queue").write_text(line if state else "")


def _decided(place: Place, decision: str, reason: str) -> None:
    append_history(place.run_dir, {"job": "101", "decision": decision, "reason": reason})


def _trained(place: Place, step: int, loss: float) -> None:
    with (place.run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "train", "step": step, "loss": loss}) + "\n")


def test_a_job_is_followed_from_the_queue_to_its_result(place: Place) -> None:
    run = postnorm.submit("train.yaml", {"train.lr": 2e-4}, cluster="c.yaml")
    assert (run.job, run.run_dir) == ("101", place.run_dir)
    [(arguments, _)] = place.slurm.calls
    assert arguments == ["--parsable", str(place.run_dir / "launch/0001/job.sh")]
    record = place.record(1)
    assert (record["command"], record["overrides"]) == ("postnorm.submit", ["train.lr=0.0002"])

    _queue(place, "PENDING", "Resources")
    assert run.status() == postnorm.SubmittedStatus("waiting", "Resources", 0, None)
    _queue(place, "RUNNING")
    _trained(place, 10, 6.5)
    assert run.status() == postnorm.SubmittedStatus("running", "", 10, 6.5)
    with pytest.raises(TimeoutError, match=r"is running after 0\.1 s"):
        run.wait(0.1, poll_s=0.03)
    # Another kind of job for the same run changes nothing.
    other = place.run_dir / "launch" / "0002"
    other.mkdir()
    evaluation = {**record, "number": 2, "job": "102", "kind": "evaluate"}
    (other / "submission.json").write_text(json.dumps(evaluation))
    assert run.status().state == "running"

    def end() -> None:
        time.sleep(0.5)
        _decided(place, "requeue", "the attempt saved")
        _queue(place, "PENDING", "BeginTime")
        time.sleep(0.5)
        _trained(place, 20, 6.25)
        _decided(place, "finished", "done")
        _queue(place, "COMPLETED")

    thread = threading.Thread(target=end)
    thread.start()
    assert run.wait(60, poll_s=0.05) == postnorm.SubmittedStatus("finished", "done", 20, 6.25)
    thread.join()
    result = run.result()
    assert (result.finished, result.exit_code, result.step, result.loss) == (True, 0, 20, 6.25)


@pytest.mark.parametrize(("queued", "decision", "state"), [
    ("FAILED", "failed", "failed"), ("", "failed", "failed"), ("CANCELLED", "", "cancelled"),
    ("NODE_FAIL", "", "failed"), ("", "", "unknown"),
])  # fmt: skip
def test_a_job_that_did_not_finish_has_no_result(
    place: Place, monkeypatch: pytest.MonkeyPatch, queued: str, decision: str, state: str
) -> None:
    monkeypatch.setattr(jobs, "_PATIENCE_S", 0.1)
    run = postnorm.submit("train.yaml", cluster="c.yaml")
    _queue(place, queued)
    if decision:
        _decided(place, decision, "rank 1 failed permanently")
    assert run.wait(60, poll_s=0.05).state == state
    with pytest.raises(PostnormError, match=f"job 101 is {state}") as caught:
        run.result(60, poll_s=0.05)
    assert ("rank 1 failed permanently" in str(caught.value)) == bool(decision)


def test_a_job_is_cancelled(place: Place) -> None:
    run = postnorm.submit("train.yaml", cluster="c.yaml")
    _queue(place, "RUNNING")
    queue = place.slurm.folder / "queue"
    (place.slurm.folder / "scancel").write_text(
        f'#!/bin/bash\necho "$*" >>{place.slurm.folder}/cancelled; sed -i s/RUNNING/CANCELLED/ '
        f"{queue}\n"
    )
    run.cancel(save=False)
    assert place.slurm.lines("cancelled") == ["101"]
    assert run.status().state == "cancelled"


def test_what_cannot_start_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, given, named in (
        (["data.dir=nowhere"], {"local": True}, r"data\.dir=nowhere"),
        ([], {"cluster": "c.yaml", "ranks": 4}, "ranks=4.*local=True"),
    ):
        with pytest.raises(ConfigError, match=named):
            postnorm.submit("train.yaml", words, **given)  # type: ignore[arg-type]
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NoSlurmError):
        postnorm.submit("train.yaml", cluster="c.yaml")
    assert not place.run_dir.exists()


@pytest.mark.usefixtures("processes")
def test_a_local_run_ends_is_cancelled_or_fails(dataset: DatasetIndex, tmp_path: Path) -> None:
    config = tmp_path / "train.yaml"
    config.write_text(CONFIG)
    given = {"run_dir": tmp_path / "run", "data.dir": dataset.folder, "train.num_steps": 8,
             "train.warmup_steps": 2, "train.alpha_warmup_steps": 2}  # fmt: skip
    run = postnorm.submit(config, given, local=True)
    assert (run.status().state, run.wait(400, poll_s=0.2).state) == ("running", "finished")
    assert (run.result().step, run.result().exit_code) == (8, 0)
    assert run.result().loss

    run = postnorm.submit(config, {**given, "train.num_steps": 100_000}, local=True)
    while run.status().step < 12:
        assert run.status().state == "running"
        time.sleep(0.1)
    run.cancel()
    assert (run.status().state, run.result().exit_code) == ("stopped", 75)
    assert published(tmp_path / "run/checkpoints")[0].name == f"step-{run.result().step:08d}"

    run = postnorm.submit(config, {**given, "model.num_layers": 3}, local=True)
    assert run.wait(400, poll_s=0.2).state == "failed"
    with pytest.raises(PostnormError, match="is failed: "):
        run.result()
