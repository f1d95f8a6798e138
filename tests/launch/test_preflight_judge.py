"""What records mean together: whose fault it is, majority, cap, bandwidth, the command."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.cluster import PreflightConfig
from launch.preflight.check import (
    Bandwidth,
    BandwidthRound,
    Blame,
    Finding,
    Record,
    read_block,
    write_record,
)
from launch.preflight.judge import Evidence, Verdict, judge
from pipeline.data.format import DatasetIndex, read_index
from pipeline.errors import DataError
from tests.support import warm
from tests.support.checkpoints import make_checkpoint
from tests.support.damage import flip

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


NODE, ALL = _having("node"), _having("all")
TWO, OLD = {"n1": NODE, "n2": None}, ("old1", "old2")
RING = [("n1", "n2"), ("n2", "n3"), ("n3", "n4"), ("n4", "n1")]
DAMAGED = Finding("shards", "shard x is damaged", "node", block=3)
EVERYWHERE = {
    node: replace(GOOD, findings=[replace(DAMAGED, block=i)]) for i, node in enumerate(NODES)
}
WAITED = Bandwidth("", [], "1 of 4 ranks did not start in time", ["n3"])
ALONE = Bandwidth("", [], "rank 0 does not answer", [])
BROKEN = Bandwidth("", [], "NCCL error", [])
PAIR = Bandwidth("", [BandwidthRound(["n1", "n2"], 16, 3.0)], "", [])
LONE = Bandwidth("n1", [BandwidthRound(["n1"], 8, 3.0)], "", [])
HUNG = {n: Bandwidth(n, [], "no answer while measuring n2, n3", []) for n in ("n2", "n3")}
NO_N4 = {node: found for node, found in _bandwidths({}).items() if node != "n4"}
Records = dict[str, Record | None]


@pytest.mark.parametrize(
    ("records", "given", "code", "bad", "fact"),
    [
        ({}, {}, 0, "", ""),
        # What one of several has is its own fault, what all have is not.
        ({"n3": NODE}, {}, 75, "n3", "trouble"),
        ({"n3": ALL}, {}, 75, "n3", "trouble"),
        (dict.fromkeys(NODES[:2], NODE), {"nodes": NODES[:2]}, 2, "", ""),
        (dict.fromkeys(NODES[:2], ALL), {"nodes": NODES[:2]}, 2, "", ""),
        (dict.fromkeys(NODES[:1], NODE), {"nodes": NODES[:1]}, 75, "n1", ""),
        (dict.fromkeys(NODES[:1], ALL), {"nodes": NODES[:1]}, 2, "", ""),
        ({"n1": None, **dict.fromkeys(NODES[1:], ALL)}, {}, 2, "n1", "all 3 nodes, n2"),
        # Silent nodes.
        ({"n2": None, "n4": None}, {}, 75, "n2 n4", "preflight.timeout_s=120"),
        ({"n1": None}, {"nodes": ("n1",)}, 2, "", "exclude"),
        (dict.fromkeys(NODES), {}, 2, "", "none of the 4 nodes"),
        # srun kills all checks as soon as one cannot be started.
        (dict.fromkeys(NODES[:3]), {"begun": {"n1", "n3"}}, 75, "n2", "n1 was not checked"),
        ({"n1": None}, {"begun": {"n1"}}, 75, "n1", "killed"),
        (dict.fromkeys(NODES), {"begun": NODES[1:]}, 75, "n1", ""),
        ({"n4": replace(GOOD, driver="560.28")}, {}, 0, "", "550.54 on n1, n2, n3; 560.28 on n4"),
        # At most so many are excluded.
        (TWO, {"max_excluded": 2}, 75, "n1 n2", ""),
        (TWO, {"max_excluded": 1}, 2, "n1 n2", "would be excluded"),
        (TWO, {"max_excluded": 3, "excluded": OLD}, 2, "n1 n2", "would be excluded"),
        ({}, {"max_excluded": 1, "excluded": OLD}, 0, "", ""),
        ({}, {"excluded": ("n2",)}, 0, "", "n2: excluded before"),
        ({}, {"checkpoint": ("step-1", "f" * 64)}, 0, "", ""),
        ({}, {"checkpoint": ("step-1", "a" * 64)}, 2, "", "step-1 was trained on " + "a" * 64),
        # Damage is the dataset's where the judge sees it too; nodes may read other blocks wrong.
        ({"n2": replace(GOOD, findings=[DAMAGED])}, {}, 75, "n2", "only this node"),
        ({"n2": replace(GOOD, findings=[DAMAGED])}, {"damaged": {3}}, 2, "", ""),
        (EVERYWHERE, {"damaged": {2}}, 2, None, ""),
    ],
)
def test_verdict(
    records: Records, given: dict[str, Any], code: int, bad: str | None, fact: str
) -> None:
    verdict = _judge(records, **given)
    assert verdict.exit_code == code
    assert bad is None or list(verdict.bad) == bad.split()
    assert fact in str(verdict)


@pytest.mark.parametrize(("other", "text"), [
    (replace(GOOD, gpus=["A100"] * 8), "A100, most nodes have H100"),
    (replace(GOOD, packages={"python": "3.11.7", "torch": "2.12.0"}),
     "torch 2.12.0, most nodes have torch 2.13.0"),
    (replace(GOOD, packages={"python": "3.11.7"}), "most nodes have torch 2.13.0"),
    (replace(GOOD, fingerprint="e" * 64), f"{'e' * 64}, most nodes have"),
])  # fmt: skip
def test_minority_is_bad_and_a_draw_is_a_problem(other: Record, text: str) -> None:
    verdict = _judge({"n4": other})
    assert (verdict.exit_code, list(verdict.bad)) == (75, ["n4"])
    assert text in verdict.bad["n4"][0]
    verdict = _judge({"n2": other, "n4": other})
    assert (verdict.exit_code, verdict.bad) == (2, {})
    assert "on n1, n3; " in verdict.problems[0]


@pytest.mark.parametrize(("records", "bandwidths", "given", "code", "bad", "fact"), [
    ({}, None, {}, 0, "", ""),  # not measured yet
    ({}, {}, {}, 2, "", "no node left a record"),
    ({}, _bandwidths({}), {}, 0, "", ""),
    # Each node counts with its faster neighbour: one slow pair names nobody.
    ({}, _bandwidths({RING[1]: 3.0}), {}, 0, "", ""),
    ({}, _bandwidths({RING[1]: 3.0, RING[2]: 4.0}), {}, 75, "n3",
     "4 GB/s, expected 28 GB/s (preflight.bandwidth_share=0.7 of the nodes' median 40)"),
    ({}, _bandwidths({RING[1]: 27.8, RING[2]: 27.8}), {}, 75, "n3", ""),
    ({}, _bandwidths({RING[1]: 28.2, RING[2]: 28.2}), {}, 0, "", ""),
    ({}, _bandwidths(dict.fromkeys(RING, 3.0)), {}, 2, "", "3 GB/s is the nodes' median"),
    # Two slow nodes cannot be told apart, nor a slow one from what is expected.
    ({}, dict.fromkeys(NODES[:2], PAIR), {"nodes": NODES[:2]}, 2, "", ""),
    ({}, {"n1": LONE}, {"nodes": ("n1",)}, 2, "", "3 GB/s is the nodes' median"),
    # A node that did not join is bad, those who waited are not; one of its ranks may have.
    ({}, dict.fromkeys(("n1", "n2", "n4"), WAITED), {}, 75, "n3", ""),
    ({}, dict.fromkeys(NODES, WAITED), {}, 75, "n3", ""),
    # The first node keeps the store; without it nobody can tell who is missing.
    ({}, dict.fromkeys(NODES[1:], ALONE), {}, 75, "n1", ""),
    ({}, _bandwidths({}, **HUNG), {}, 75, "n2 n3", ""),
    ({}, dict.fromkeys(NODES, BROKEN), {}, 2, "", "n1 says: NCCL error"),
    # A bad node is not asked: it did not come, or slowed others down.
    ({"n4": None}, NO_N4, {}, 75, "n4", ""),
])  # fmt: skip
def test_bandwidth(records: Records, bandwidths: dict[str, Bandwidth] | None, given: dict[str, Any],
                   code: int, bad: str, fact: str) -> None:  # fmt: skip
    config = PreflightConfig(bandwidth_gb_per_s=40, bandwidth_share=0.7)
    verdict = _judge(records, config=config, bandwidths=bandwidths, **given)
    assert (verdict.exit_code, list(verdict.bad)) == (code, bad.split())
    assert all(len(reasons) == 1 for reasons in verdict.bad.values())
    assert fact in str(verdict)


def _command(run_dir: Path, dataset: Path) -> tuple[str, str]:
    """The order that follows the check of the nodes, and what the log has."""
    profile = run_dir.parent / "cluster.yaml"
    profile.write_text("gpus_per_node: 0\nranks_per_node: 2\n")
    command = ["launch", "supervise", str(run_dir), str(ROOT / "configs/demo.yaml"),
               f"run_dir={run_dir}", f"data.dir={dataset}", "--cluster", str(profile),
               "--after", "check", "--kind", "pretrain", "--ranks", "8",
               "--nodes", "n1 n2 n3 n4", "--job", "7", "--restart", "0", "--max-restarts", "9",
               "--max-attempts", "2"]  # fmt: skip
    done = warm.run(*command)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1], done.stderr


def _write(records: Path, **changed: Record) -> None:
    records.mkdir(parents=True)
    for node in NODES:
        write_record(records, replace(changed.get(node, GOOD), node=node))


@pytest.mark.usefixtures("processes")
def test_command_reads_what_a_node_found_damaged(dataset: DatasetIndex, tmp_path: Path) -> None:
    folder, records = tmp_path / "damaged", tmp_path / "run/launch/preflight/7.0"
    shutil.copytree(dataset.folder, folder)
    shard = folder / dataset.shards[int(dataset.blocks.shard[1])].file
    flip(shard, int(dataset.blocks.offset[1]) + 2000)
    with pytest.raises(DataError):
        read_block(read_index(folder), 1)
    finding = Finding("shards", "block 1 is damaged", "node", block=1)
    _write(records, n2=replace(GOOD, findings=[finding]))
    order, output = _command(tmp_path / "run", folder)
    assert order == "exit 2", output
    assert "problem: found by n2, and on this node, too: block 1 is damaged" in output
    order, output = _command(tmp_path / "run", dataset.folder)
    assert order == "requeue", output
    assert "bad node n2: only this node reads it so: block 1 is damaged" in output


@pytest.mark.usefixtures("processes")
def test_command_compares_with_the_newest_checkpoint(dataset: DatasetIndex, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    records = run_dir / "launch/preflight/7.0"
    make_checkpoint(run_dir, 40)  # of a dataset with fingerprint "f"
    _write(records, **dict.fromkeys(NODES, replace(GOOD, fingerprint="f")))
    order, output = _command(run_dir, dataset.folder)
    assert order == "ranks", output
    assert "preflight: go: 4 good nodes" in output
    shutil.rmtree(records)
    _write(records)
    order, output = _command(run_dir, dataset.folder)
    assert order == "exit 2"
    assert "step-00000040 was trained on f: set data.dir" in output
