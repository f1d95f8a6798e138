"""What records mean together: whose fault it is, majority, cap, bandwidth, the command."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.cluster import PreflightConfig
from launch.preflight.check import read_block
from launch.preflight.judge import Evidence, Verdict, judge
from launch.preflight.record import Bandwidth, BandwidthRound, Blame, Finding, Record, write_record
from launch.records import exclude_nodes, excluded_nodes
from pipeline.data.format import DatasetIndex, read_index
from pipeline.errors import DataError
from tests.support.checkpoints import make_checkpoint

ROOT = Path(__file__).parents[2]
NODES = ("n1", "n2", "n3", "n4")
GOOD = Record(
    node="",
    gpus=["H100"] * 8,
    driver="550.54",
    packages={"python": "3.11.7", "torch": "2.13.0"},
    fingerprint="f" * 64,
    free_gb=100.0,
    is_finished=True,
)


def _judge(
    records: dict[str, Record | None] | None = None,
    *,
    nodes: tuple[str, ...] = NODES,
    config: PreflightConfig | None = None,
    excluded: tuple[str, ...] = (),
    max_excluded: int = 3,
    **evidence: Any,
) -> Verdict:
    """Judges good nodes but for what is given; None leaves no record."""
    all_records = {node: replace(GOOD, node=node) for node in nodes}
    for node, record in (records or {}).items():
        if record is None:
            del all_records[node]
        else:
            all_records[node] = replace(record, node=node)
    given = Evidence(nodes=nodes, records=all_records, **evidence)
    verdict = judge(
        given, config or PreflightConfig(), excluded=excluded, max_excluded=max_excluded
    )
    assert list(verdict.text(given))[-1].startswith(("go: ", "go on without ", "stop: "))
    return verdict


def _having(blame: Blame, text: str = "trouble") -> Record:
    return replace(GOOD, findings=[Finding("check", text, blame)])


def test_good_nodes() -> None:
    verdict = _judge()
    assert (verdict.exit_code, verdict.bad, verdict.problems, verdict.warnings) == (0, {}, [], [])


@pytest.mark.parametrize("blame", ["node", "all"])
def test_what_one_of_several_has_is_its_own_fault(blame: Blame) -> None:
    verdict = _judge({"n3": _having(blame)})
    assert (verdict.exit_code, verdict.bad) == (75, {"n3": ["trouble"]})


@pytest.mark.parametrize(
    ("blame", "nodes", "code"),
    [("node", NODES[:2], 2), ("all", NODES[:2], 2), ("node", NODES[:1], 75), ("all", NODES[:1], 2)],
)
def test_what_all_have(blame: Blame, nodes: tuple[str, ...], code: int) -> None:
    verdict = _judge({node: _having(blame, f"of {node}") for node in nodes}, nodes=nodes)
    assert verdict.exit_code == code
    assert len(verdict.bad) == (len(nodes) if code == 75 else 0)


def test_nodes_without_a_record_do_not_hide_what_all_others_have() -> None:
    verdict = _judge({"n1": None, **{node: _having("all", "no space") for node in NODES[1:]}})
    assert verdict.exit_code == 2
    assert verdict.problems == ["all 3 nodes, n2 says: no space"]
    assert set(verdict.bad) == {"n1"}


def test_silent_nodes() -> None:
    verdict = _judge({"n2": None, "n4": None})
    assert (verdict.exit_code, list(verdict.bad)) == (75, ["n2", "n4"])
    assert "left no record within preflight.timeout_s=120" in verdict.bad["n2"][0]
    lone = _judge({"n1": None}, nodes=("n1",))
    assert (lone.exit_code, lone.bad) == (2, {})
    assert "n1: it left no record within" in lone.problems[0]
    assert "add it to exclude of the profile" in lone.problems[0]
    verdict = _judge(dict.fromkeys(NODES))
    assert (verdict.exit_code, verdict.bad) == (2, {})
    assert "none of the 4 nodes left a record" in verdict.problems[0]


def test_checks_that_srun_ended_because_of_another_node() -> None:
    """It kills all tasks as soon as one cannot be started."""
    ended: dict[str, Record | None] = {"n1": None, "n2": None, "n3": None}
    verdict = _judge(ended, begun={"n1", "n3"})
    assert (verdict.exit_code, list(verdict.bad)) == (75, ["n2"])
    assert verdict.warnings[0].startswith("n1 was not checked: srun ended its check")
    verdict = _judge({"n1": None}, begun={"n1"})
    assert verdict.bad == {"n1": ["its check began and was killed: out of memory, or it hangs"]}
    verdict = _judge(dict.fromkeys(NODES), begun=NODES[1:])
    assert (verdict.exit_code, list(verdict.bad)) == (75, ["n1"])


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (replace(GOOD, gpus=["A100"] * 8), "GPUs: A100, most nodes have H100"),
        (replace(GOOD, packages={"python": "3.11.7", "torch": "2.12.0"}),
         "packages: torch 2.12.0, most nodes have torch 2.13.0"),
        (replace(GOOD, packages={"python": "3.11.7"}),
         "packages: nothing more, most nodes have torch 2.13.0"),
        (replace(GOOD, fingerprint="e" * 64), f"dataset fingerprint: {'e' * 64}, most nodes have"),
    ],
)  # fmt: skip
def test_minority_is_bad_and_a_draw_is_a_problem(other: Record, text: str) -> None:
    verdict = _judge({"n4": other})
    assert (verdict.exit_code, list(verdict.bad)) == (75, ["n4"])
    assert verdict.bad["n4"][0].startswith(text)
    verdict = _judge({"n2": other, "n4": other})
    assert (verdict.exit_code, verdict.bad) == (2, {})
    assert "differ, and no value has a majority:" in verdict.problems[0]
    assert "on n1, n3; " in verdict.problems[0]


def test_other_driver_is_a_warning() -> None:
    verdict = _judge({"n4": replace(GOOD, driver="560.28")})
    assert verdict.exit_code == 0
    assert verdict.warnings == ["GPU drivers differ: 550.54 on n1, n2, n3; 560.28 on n4"]


def test_cap() -> None:
    two: dict[str, Record | None] = {"n1": _having("node"), "n2": None}
    assert _judge(two, max_excluded=2).exit_code == 75
    for verdict in (
        _judge(two, max_excluded=1), _judge(two, max_excluded=3, excluded=("old1", "old2"))
    ):  # fmt: skip
        assert verdict.exit_code == 2
        assert "nodes would be excluded, " in verdict.problems[0]
        assert set(verdict.bad) == {"n1", "n2"}
    assert _judge(max_excluded=1, excluded=("old1", "old2")).exit_code == 0


def test_node_that_was_excluded_and_came_again_is_told() -> None:
    assert (
        "n2: excluded before, but SLURM assigned it again" in _judge(excluded=("n2",)).warnings[0]
    )


def test_checkpoint_of_another_dataset() -> None:
    assert _judge(checkpoint=("step-1", "f" * 64)).exit_code == 0
    verdict = _judge(checkpoint=("step-1", "a" * 64))
    assert verdict.exit_code == 2
    assert f"checkpoint step-1 was trained on {'a' * 64}" in verdict.problems[0]


def test_damage_is_the_datasets_where_the_judge_sees_it_too() -> None:
    finding = Finding("shards", "shard x is damaged", "node", block=3)
    record = replace(GOOD, findings=[finding])
    verdict = _judge({"n2": record})
    assert verdict.bad == {"n2": ["only this node reads it so: shard x is damaged"]}
    verdict = _judge({"n2": record}, damaged={3})
    assert (verdict.exit_code, verdict.bad) == (2, {})
    # All nodes may read other blocks wrong, and that is still not one fault of all.
    everywhere = {
        node: replace(GOOD, findings=[replace(finding, block=i)]) for i, node in enumerate(NODES)
    }
    assert _judge(everywhere, damaged={2}).exit_code == 2  # type: ignore[arg-type]


def _bandwidths(
    gb_per_s: dict[tuple[str, str], float], nodes: tuple[str, ...] = NODES, **changed: Bandwidth
) -> dict[str, Bandwidth]:
    """Records of nodes in a ring; pairs are as fast as told, or 40 GB/s."""
    ring = [(nodes[i], nodes[(i + 1) % len(nodes)]) for i in range(len(nodes))]
    found = {}
    for node in nodes:
        rounds = [
            BandwidthRound(list(pair), 16, gb_per_s.get(pair, 40.0))
            for pair in ring
            if node in pair
        ]
        found[node] = Bandwidth(node, rounds, "", [])
    return {**found, **changed}


FAST = PreflightConfig(bandwidth_gb_per_s=40, bandwidth_share=0.7)


def test_bandwidth_that_was_not_measured_yet() -> None:
    assert _judge(config=FAST, bandwidths=None).exit_code == 0
    verdict = _judge(config=FAST, bandwidths={})
    assert (verdict.exit_code, verdict.bad) == (2, {})
    assert "no node left a record" in verdict.problems[0]


def test_slow_node_is_told_from_a_slow_network() -> None:
    assert _judge(config=FAST, bandwidths=_bandwidths({})).exit_code == 0
    # Each node counts with its faster neighbour: one slow pair names nobody.
    assert _judge(config=FAST, bandwidths=_bandwidths({("n2", "n3"): 3.0})).exit_code == 0
    slow = {("n2", "n3"): 3.0, ("n3", "n4"): 4.0}
    verdict = _judge(config=FAST, bandwidths=_bandwidths(slow))
    assert (verdict.exit_code, list(verdict.bad)) == (75, ["n3"])
    assert verdict.bad["n3"] == [
        "bandwidth: 4 GB/s, expected 28 GB/s "
        "(preflight.bandwidth_share=0.7 of the nodes' median 40)"
    ]
    ring = [("n1", "n2"), ("n2", "n3"), ("n3", "n4"), ("n4", "n1")]
    verdict = _judge(config=FAST, bandwidths=_bandwidths(dict.fromkeys(ring, 3.0)))
    assert (verdict.exit_code, verdict.bad) == (2, {})
    assert "3 GB/s is the nodes' median, expected 28 GB/s" in verdict.problems[0]


def test_share_of_the_median_is_the_limit() -> None:
    for share, code in ((0.66, 0), (0.68, 75)):
        config = replace(FAST, bandwidth_share=share)
        slow = {("n2", "n3"): 26.8, ("n3", "n4"): 26.8}
        assert _judge(config=config, bandwidths=_bandwidths(slow)).exit_code == code


def test_two_slow_nodes_cannot_be_told_apart() -> None:
    pair = NODES[:2]
    slow = Bandwidth("", [BandwidthRound(list(pair), 16, 3.0)], "", [])
    verdict = _judge(config=FAST, nodes=pair, bandwidths=dict.fromkeys(pair, slow))
    assert (verdict.exit_code, verdict.bad) == (2, {})
    lone = Bandwidth("n1", [BandwidthRound(["n1"], 8, 3.0)], "", [])
    verdict = _judge(config=FAST, nodes=("n1",), bandwidths={"n1": lone})
    assert (verdict.exit_code, verdict.bad) == (2, {})  # nor a slow node from what is expected
    assert "3 GB/s is the nodes' median" in verdict.problems[0]


def test_node_that_did_not_join_is_bad_and_those_who_waited_are_not() -> None:
    waited = Bandwidth("", [], "1 of 4 ranks did not start in time", ["n3"])
    verdict = _judge(config=FAST, bandwidths=dict.fromkeys(("n1", "n2", "n4"), waited))
    assert list(verdict.bad) == ["n3"]
    # One of its ranks joined, and left a record, but not all.
    verdict = _judge(config=FAST, bandwidths=dict.fromkeys(NODES, waited))
    assert list(verdict.bad) == ["n3"]
    # The first node keeps the store; without it nobody can tell who is missing.
    alone = Bandwidth("", [], "rank 0 does not answer", [])
    verdict = _judge(config=FAST, bandwidths=dict.fromkeys(NODES[1:], alone))
    assert list(verdict.bad) == ["n1"]


def test_pair_that_hangs() -> None:
    hung = {n: Bandwidth(n, [], "no answer while measuring n2, n3", []) for n in ("n2", "n3")}
    verdict = _judge(config=FAST, bandwidths=_bandwidths({}, **hung))
    assert list(verdict.bad) == ["n2", "n3"]
    broken = Bandwidth("", [], "NCCL error", [])
    verdict = _judge(config=FAST, bandwidths=dict.fromkeys(NODES, broken))
    assert verdict.exit_code == 2
    assert "no node could measure; n1 says: NCCL error" in verdict.problems[0]


def test_bad_node_is_not_asked_for_its_bandwidth() -> None:
    """It did not come, or slowed others down."""
    found = _bandwidths({})
    del found["n4"]
    verdict = _judge({"n4": None}, config=FAST, bandwidths=found)
    assert list(verdict.bad) == ["n4"]
    assert len(verdict.bad["n4"]) == 1


def _command(run_dir: Path, dataset: Path, records: Path, *more: str) -> tuple[int, str]:
    profile = records.parent / "cluster.yaml"
    profile.write_text("gpus_per_node: 0\nranks_per_node: 2\nmax_excluded_nodes: 2\n")
    command = [
        sys.executable, "-m", "launch", "preflight", "judge", str(ROOT / "configs/demo.yaml"),
        f"run_dir={run_dir}", f"data.dir={dataset}", "--cluster", str(profile),
        "--records", str(records), "--nodes", "n1 n2 n3 n4", "--job", "7", "--restart", "0", *more,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return done.returncode, done.stdout + done.stderr


def _write(records: Path, **changed: Record | None) -> None:
    records.mkdir(parents=True)
    for node in NODES:
        record = changed.get(node, GOOD)
        if record is not None:
            write_record(records, replace(record, node=node))


@pytest.mark.usefixtures("processes")
def test_command_excludes_bad_nodes_and_keeps_those_excluded_before(
    dataset: DatasetIndex, tmp_path: Path
) -> None:
    run_dir, records = tmp_path / "run", tmp_path / "records/7.0"
    (run_dir / "launch").mkdir(parents=True)
    exclude_nodes(run_dir, ["old"])
    _write(records, n2=None, n4=replace(GOOD, is_finished=False))
    code, output = _command(run_dir, dataset.folder, records)
    assert code == 75, output
    assert "preflight: warning: n4 was not checked" in output
    assert excluded_nodes(run_dir) == ["old", "n2"]
    assert "preflight: bad node n2: it left no record" in output
    assert output.splitlines()[-1] == "preflight: go on without n2"
    # One more than may be: stop, and say nothing to SLURM.
    write_record(records, replace(_having("node"), node="n3"))
    code, output = _command(run_dir, dataset.folder, records)
    assert code == 2
    assert "3 nodes would be excluded, n2, n3, old, more than max_excluded_nodes=2" in output
    assert excluded_nodes(run_dir) == ["old", "n2"]


@pytest.mark.usefixtures("processes")
def test_command_reads_what_a_node_found_damaged(dataset: DatasetIndex, tmp_path: Path) -> None:
    folder, records = tmp_path / "damaged", tmp_path / "records/7.0"
    shutil.copytree(dataset.folder, folder)
    shard = folder / dataset.shards[int(dataset.blocks.shard[1])].file
    with shard.open("r+b") as file:
        file.seek(int(dataset.blocks.offset[1]) + 2000)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(DataError):
        read_block(read_index(folder), 1)
    finding = Finding("shards", "block 1 is damaged", "node", block=1)
    _write(records, n2=replace(GOOD, findings=[finding]))
    code, output = _command(tmp_path / "run", folder, records)
    assert code == 2, output
    assert "problem: found by n2, and on this node, too: block 1 is damaged" in output
    code, output = _command(tmp_path / "run", dataset.folder, records)
    assert code == 75, output
    assert "bad node n2: only this node reads it so: block 1 is damaged" in output


@pytest.mark.usefixtures("processes")
def test_command_compares_with_the_newest_checkpoint(dataset: DatasetIndex, tmp_path: Path) -> None:
    run_dir, records = tmp_path / "run", tmp_path / "records/7.0"
    make_checkpoint(run_dir, 40)  # of a dataset with fingerprint "f"
    _write(records, **dict.fromkeys(NODES, replace(GOOD, fingerprint="f")))
    code, output = _command(run_dir, dataset.folder, records)
    assert code == 0, output
    assert "preflight: go: 4 good nodes" in output
    shutil.rmtree(records)
    _write(records)
    code, output = _command(run_dir, dataset.folder, records)
    assert code == 2
    assert "step-00000040 was trained on f: set data.dir" in output
