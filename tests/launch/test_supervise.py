"""The orders of a job's script: what follows a step, by the files of its run alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.cluster import ClusterConfig, PreflightConfig
from launch.decide import JobAttempt, Limits, StorageRetry
from launch.preflight.check import Finding, Record, write_record
from launch.records import exclude_nodes, excluded_nodes, history, script_starts
from launch.supervise import JobStart, next_order
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.errors import ConfigError
from pipeline.runtime.files import write_atomic

ROOT = Path(__file__).parents[2]
ATTEMPT = JobAttempt("7", 0, ("n1", "n2"), before=None, ranks=4)


def _start(run_dir: Path, *, checks: bool = True, gb_per_s: float = 0, asked: bool = False,
           kind: str = "pretrain", **attempt: Any) -> JobStart:  # fmt: skip
    def inputs() -> tuple[PretrainConfig, ClusterConfig]:
        preflight = PreflightConfig(bandwidth_gb_per_s=gb_per_s)
        config = load(PretrainConfig, ROOT / "configs/demo.yaml", [f"run_dir={run_dir}"]).config
        return config, ClusterConfig(max_excluded_nodes=2, preflight=preflight)

    (run_dir / "launch").mkdir(parents=True, exist_ok=True)
    return JobStart(replace(ATTEMPT, **attempt), kind, Limits(3, 2), run_dir, StorageRetry(),
                    max_excluded=2, preflight=inputs if checks else None,
                    is_asked=asked)  # fmt: skip


def _write_records(start: JobStart, *nodes: str) -> None:
    start.records.mkdir(parents=True)
    for node in nodes:
        write_record(start.records, Record(node, is_finished=True))


@pytest.mark.parametrize(
    ("checks", "asked", "order"),
    [(True, False, "check"), (False, False, "ranks"), (True, True, "ranks")],
)
def test_begin(tmp_path: Path, checks: bool, asked: bool, order: str) -> None:
    exclude_nodes(tmp_path, ["of-an-earlier-job"])
    assert next_order("start", _start(tmp_path, checks=checks, asked=asked)) == order
    assert excluded_nodes(tmp_path) == []
    [line] = script_starts(tmp_path)
    assert (line["job"], line["restart"], line["before"]) == ("7", 0, None)
    exclude_nodes(tmp_path, ["of-this-job"])
    next_order("start", _start(tmp_path, restart=1))
    assert excluded_nodes(tmp_path) == ["of-this-job"]


def test_progress_is_measured_from_what_the_start_found(tmp_path: Path) -> None:
    """With two attempts without progress in a row the job ends."""
    orders = []
    (tmp_path / "checkpoints").mkdir()
    for restart, step in enumerate([20, 20, 40, 40, 40]):
        start = _start(tmp_path, restart=min(restart, 2), job="7" if restart < 3 else "8")
        next_order("start", start)
        write_atomic(tmp_path / "checkpoints/latest", f"step-{step:08d}".encode())
        orders.append(next_order("ranks", start))
    assert orders == ["requeue", "requeue", "requeue", "requeue", "exit 2"]
    assert [line["miss"] for line in history(tmp_path)] == [False, True, False, True, True]


@pytest.mark.parametrize(
    ("restart", "old", "new", "decided", "order"),
    [
        (1, ["o1"], ["n2"], ["requeue"], "requeue"),
        (3, ["o1"], ["n2"], ["requeue", "failed"], "exit 2"),
        (1, ["o1", "o2"], [], ["failed"], "exit 2"),
    ],
    ids=["again", "too often", "too many"],
)
def test_node_without_a_record_is_left_out(
    tmp_path: Path, restart: int, old: list[str], new: list[str], decided: list[str], order: str
) -> None:
    start = _start(tmp_path, restart=restart, nodes=("n1", "n2", "n3"))
    exclude_nodes(tmp_path, old)
    _write_records(start, "n1")
    write_record(start.records, Record("n3"))  # killed because n2 could not be started
    (tmp_path / "launch/unjudged").write_text("7\n")
    assert next_order("check", start) == order
    assert excluded_nodes(tmp_path) == [*old, *new]
    assert [line["decision"] for line in history(tmp_path)] == decided
    assert {line["miss"] for line in history(tmp_path)} == {None}
    assert not (tmp_path / "launch/unjudged").exists()


def test_without_a_verdict_of_preflight_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def inputs() -> tuple[PretrainConfig, ClusterConfig]:
        raise ConfigError("train.yaml is gone")

    assert next_order("check", replace(_start(tmp_path), preflight=inputs)) == "ranks"
    assert "train.yaml is gone" in caplog.text


@pytest.mark.parametrize(("gb_per_s", "order"), [(0, "ranks"), (40, "measure")])
def test_good_nodes(tmp_path: Path, gb_per_s: float, order: str) -> None:
    start = _start(tmp_path, gb_per_s=gb_per_s)
    _write_records(start, "n1", "n2")
    assert next_order("check", start) == order
    # No node left a measurement: another would not, either.
    assert next_order("measure", start) == "exit 2"
    assert excluded_nodes(tmp_path) == []


@pytest.mark.parametrize(
    ("restart", "excluded", "order"),
    [
        (0, ["n5", "n6"], "requeue n1"),  # they are of an earlier job
        (1, ["n5"], "requeue n5,n1"),
        (1, ["n5", "n6"], "exit 1"),
        (3, [], "exit 1"),
    ],
)
def test_no_more_nodes_are_left_out_than_the_profile_allows(
    tmp_path: Path, restart: int, excluded: list[str], order: str
) -> None:
    exclude_nodes(tmp_path, excluded)
    assert next_order("storage", _start(tmp_path, restart=restart)) == order


@pytest.mark.parametrize("nodes", [("n1",), ("n1", "n2"), ("n1", "n2", "n3", "n4", "n5", "n6")])
@pytest.mark.parametrize("has_begun", [True, False])
def test_a_preemption_within_preflight_blames_no_node(
    tmp_path: Path, nodes: tuple[str, ...], has_begun: bool
) -> None:
    start = _start(tmp_path, nodes=nodes, step_code=143)
    start.records.mkdir(parents=True)
    for node in nodes if has_begun else ():
        write_record(start.records, Record(node))
    assert next_order("check", start) == "requeue"
    assert excluded_nodes(tmp_path) == []
    assert [line["decision"] for line in history(tmp_path)] == ["requeue"]
    last = replace(start, attempt=replace(start.attempt, restart=3))  # max_restarts
    assert next_order("check", last) == "exit 2"


def test_a_node_that_ended_the_others_checks_is_left_out(tmp_path: Path) -> None:
    start = _start(tmp_path, nodes=("n1", "n2", "n3"), step_code=143)  # srun's, of its own kill
    _write_records(start, "n1")
    write_record(start.records, Record("n3"))
    assert next_order("check", start) == "requeue"
    assert excluded_nodes(tmp_path) == ["n2"]


@pytest.mark.parametrize("nodes", [("n1",), ("n1", "n2", "n3")])
def test_storage_that_stays_away_in_preflight_is_waited_for_by_the_ranks(
    tmp_path: Path, nodes: tuple[str, ...]
) -> None:
    start = _start(tmp_path, nodes=nodes)
    start.records.mkdir(parents=True)
    stale = Finding("storage", "Stale file handle", "all", passes=True)
    for more, order in (([], "ranks"), ([Finding("stack", "too small", "all")], "exit 2")):
        for node in nodes:
            write_record(start.records, Record(node, [stale, *more], is_finished=True))
        assert next_order("check", start) == order


def test_an_evaluation_leaves_what_the_job_that_trains_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[str]()
    monkeypatch.setattr("launch.supervise.notify_end", lambda *args: told.append(args[2]))
    exclude_nodes(tmp_path, ["bad"])
    (tmp_path / "exit/7.0").mkdir(parents=True)
    (tmp_path / "exit/7.0/rank-00000").write_text("0")
    for kind, code in (("evaluate", "exit 0"), ("program", "exit 0")):
        start = _start(tmp_path, checks=False, kind=kind, ranks=1)
        next_order("start", start)
        kept = ["bad"] if kind == "evaluate" else []
        assert next_order("ranks", start) == code
        assert excluded_nodes(tmp_path) == kept
        assert told == ([] if kind == "evaluate" else ["finished"])
