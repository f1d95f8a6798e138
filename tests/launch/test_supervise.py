"""The orders of a job's script: what follows a step, by the files of its run alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.cluster import ClusterConfig, PreflightConfig
from launch.decide import JobAttempt, Limits, StorageRetry
from launch.preflight.check import Record, write_record
from launch.records import exclude_nodes, excluded_nodes, history, script_starts
from launch.supervise import JobStart, next_order
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.errors import ConfigError
from pipeline.runtime.files import write_atomic

ROOT = Path(__file__).parents[2]
ATTEMPT = JobAttempt("7", 0, ("n1", "n2"), before=None, ranks=4)


def _start(run_dir: Path, *, checks: bool = True, gb_per_s: float = 0, **attempt: Any) -> JobStart:
    def inputs() -> tuple[PretrainConfig, ClusterConfig]:
        preflight = PreflightConfig(bandwidth_gb_per_s=gb_per_s)
        config = load(PretrainConfig, ROOT / "configs/demo.yaml", [f"run_dir={run_dir}"]).config
        return config, ClusterConfig(max_excluded_nodes=2, preflight=preflight)

    (run_dir / "launch").mkdir(parents=True, exist_ok=True)
    return JobStart(replace(ATTEMPT, **attempt), "pretrain", Limits(3, 2), run_dir, StorageRetry(),
                    max_excluded=2, preflight=inputs if checks else None)  # fmt: skip


def _write_records(start: JobStart, *nodes: str) -> None:
    start.records.mkdir(parents=True)
    for node in nodes:
        write_record(start.records, Record(node, is_finished=True))


@pytest.mark.parametrize(
    ("checks", "at_limit", "order"),
    [(True, False, "check"), (False, False, "ranks"), (True, True, "ranks")],
)
def test_begin(tmp_path: Path, checks: bool, at_limit: bool, order: str) -> None:
    exclude_nodes(tmp_path, ["of-an-earlier-job"])
    assert next_order("start", _start(tmp_path, checks=checks, at_limit=at_limit)) == order
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
    ("restart", "old", "new", "order"),
    [
        (1, ["o1"], ["n2"], "requeue"),
        (3, ["o1"], ["n2"], "exit 2"),
        (1, ["o1", "o2"], [], "exit 2"),
    ],
    ids=["again", "too often", "too many"],
)
def test_node_without_a_record_is_left_out(
    tmp_path: Path, restart: int, old: list[str], new: list[str], order: str
) -> None:
    start = _start(tmp_path, restart=restart, nodes=("n1", "n2", "n3"))
    exclude_nodes(tmp_path, old)
    _write_records(start, "n1")
    write_record(start.records, Record("n3"))  # killed because n2 could not be started
    (tmp_path / "launch/unjudged").write_text("7\n")
    assert next_order("check", start) == order
    assert excluded_nodes(tmp_path) == [*old, *new]
    assert [line["decision"] for line in history(tmp_path)] == ["requeue"] * len(new)
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
