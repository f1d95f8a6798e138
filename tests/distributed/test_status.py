"""`postnorm status` on runs that run, were stopped, killed, finished, or are none."""

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training_report import long_run
from pipeline.inspect.status import run_status
from tests.distributed.conftest import Train
from tests.support import warm
from tests.support.ranks import records


def test_a_finished_run(straight_run: Path) -> None:
    done = warm.run("postnorm", "status", straight_run, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["run"]
    assert (found["state"], found["step"], found["num_steps"]) == ("finished", 40, 40)
    train, held_out = records(straight_run), records(straight_run, "eval")
    assert found["loss"] == train[-1]["loss"]
    assert (found["held_out_loss"], found["held_out_step"]) == (held_out[-1]["loss"], 40)
    seen = found["glance"]
    assert seen["uniform_guess"] == held_out[0]["uniform_guess"] > seen["unigram_entropy"] > 0
    assert (seen["share_done"], seen["epochs"]) == (1.0, {"all": train[-1]["epoch"]})
    assert (train[19]["share_done"], train[19]["restarts"]) == (0.5, 0.0)
    assert found["tokens"] == sum(record["tokens"] for record in train)
    assert (found["eta_s"], found["checkpoint"]["step"]) == (0, 40)
    assert [start["end"] for start in found["starts"]] == ["finished"]
    text = warm.run("postnorm", "status", straight_run).stdout
    assert f"[{'#' * 40}] 100.0%  step 40 of 40" in text


def test_speed_of_a_finished_run(straight_run: Path) -> None:
    found = long_run(straight_run)
    train = records(straight_run)
    assert (found["steps"], found["loss_first"]) == (40, train[0]["loss"])
    waits = [record["data_wait"] for record in train[4:]]
    assert found["data_wait"] == pytest.approx(sum(waits) / 36)
    assert found["eval_loss_last"] == records(straight_run, "eval")[-1]["loss"]


def test_running_then_killed_then_stopped(tmp_path: Path, train: Train) -> None:
    run_dir = tmp_path / "run"
    overrides = ("train.num_steps=100000", "checkpoint.every_steps=10")
    ranks = train.start("run", *overrides)
    ranks.wait_for_step(14)
    ranks.wait_for_checkpoint(10)
    running = run_status(run_dir)
    assert (running.state, [start.state for start in running.starts]) == ("running", ["running"])
    assert 14 <= running.step < 10_000
    assert running.eta_s is not None
    assert running.eta_s > 0
    assert running.checkpoint.step >= 10
    assert not [text for text in running.warnings if "progress" in text]
    later = running.starts[0].unix_s + 3600
    assert "no progress for 3," in run_status(run_dir, later).warnings[0]
    ranks.signal(signal.SIGKILL)
    ranks.wait()
    killed = run_status(run_dir)
    assert killed.state == "killed"
    assert killed.starts[0].end == "killed: no rank left an exit code"
    # Another host, which does not see the lock, cannot tell before the run would have ended itself.
    [record] = [json.loads(line) for line in (run_dir / "attempts.jsonl").open()]
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(run_dir, elsewhere)
    (elsewhere / "attempts.jsonl").write_text(json.dumps(record | {"host": "another"}) + "\n")
    last_s = records(elsewhere)[-1]["unix_s"]
    found = [run_status(elsewhere, last_s + later) for later in (1, 90, 100_000)]
    assert [status.state for status in found] == ["running", "unknown", "killed"]
    assert "no sign of life for 90 s" in found[1].starts[0].end

    ranks = train.start("run", *overrides)
    ranks.wait_for_step(killed.step + 3)
    ranks.signal(signal.SIGTERM)
    ranks.ended(75)
    stopped = run_status(run_dir)
    assert [start.state for start in stopped.starts] == ["killed", "stopped"]
    assert stopped.state == "stopped"
    assert stopped.starts[1].resumed_from_step is not None
    lines = {record["step"]: record["tokens"] for record in records(run_dir)}
    assert len(records(run_dir)) > len(lines), "no step was repeated"
    assert stopped.tokens == sum(lines.values())


def test_time_left_is_of_the_steps_or_of_the_budget(straight_run: Path, train: Train) -> None:
    folder = train.copied(straight_run)
    last = records(straight_run)[-1]
    seconds = (1.0, 2.0, 3.0)
    with (folder / "metrics.jsonl").open("a") as file:
        for number, elapsed_s in enumerate(seconds, start=1):
            line = {**last, "step": 40 + number, "elapsed_s": 100 * elapsed_s, "attempt": 1}
            file.write(json.dumps(line | {"unix_s": last["unix_s"] + 100 * number}) + "\n")
    resolved = (folder / "resolved.yaml").read_text()

    def left_s(num_steps: int, **budget: float) -> float | None:
        text = resolved.replace("num_steps: 40", f"num_steps: {num_steps}")
        if budget:
            text = text.replace("schedule: linear", "schedule: time_budget")
            text = text.replace("budget_hours: null", f"budget_hours: {budget['hours']}")
        assert text != resolved
        (folder / "resolved.yaml").write_text(text)
        return run_status(folder).eta_s

    by_steps = left_s(1000)
    assert by_steps is not None
    assert by_steps > 1000
    assert left_s(1000, hours=1000.0) == by_steps
    assert left_s(1000, hours=0.1) == pytest.approx(360 - 300)
    assert left_s(1000, hours=0.05) == 0


@pytest.mark.parametrize(
    ("kind", "values", "warning"),
    [
        ("train", {"data_wait": 5.0}, "of the time goes by waiting for data"),
        ("train", {"loss": None}, "a loss is NaN"),
        ("skip", {"step": 17, "total": 3.0}, "3 steps were skipped.* after step 17"),
    ],
)
def test_warnings(
    straight_run: Path, train: Train, kind: str, values: dict[str, Any], warning: str
) -> None:
    folder = train.copied(straight_run)
    line = {**records(straight_run)[-1], "kind": kind, **values}
    # Half a line of a killed writer stands before it.
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "ki\n' + json.dumps(line) + "\n")
    # On a busy machine a rank may be slow, and a disk nearly full: there may be others.
    if "data_wait" in values:  # what a start's first line has is no lasting wait
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        again = json.dumps({**line, "attempt": 2})
        (folder / "metrics.jsonl").write_text("\n".join([*lines[:-1], again, ""]))
        assert not re.search(warning, " ".join(run_status(folder).warnings))
        (folder / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    assert len([text for text in run_status(folder).warnings if re.search(warning, text)]) == 1


def test_a_rank_that_failed_beside_one_that_was_killed(straight_run: Path, train: Train) -> None:
    folder = train.copied(straight_run)
    (folder / "done.json").unlink()
    (folder / "exit/local-1/rank-00001").unlink()
    (folder / "exit/local-1/rank-00000").write_text("1\n")
    status = run_status(folder)
    assert status.state == "failed"
    said = "failed, trying again may help; 1 of 2 ranks left no exit code: killed"
    assert status.starts[0].end == said
