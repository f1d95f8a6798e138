"""All-reduce between pretended nodes: the ring, the unit, and a node that does not come."""

import json
import os
import sys
from pathlib import Path

import pytest

from launch.preflight.check import Bandwidth, read_bandwidth
from pipeline.profile.bandwidth import bus_bandwidth, pairs_in_ring
from tests.support import warm
from tests.support.processes import free_port

_NODES = ("b1", "b2", "b3")


class _Launch:
    """Ranks of three pretended nodes, of which some may not exist."""

    def __init__(self, records: Path, nodes_of_ranks: dict[int, str], world_size: int,
                 timeout_s: float) -> None:  # fmt: skip
        self.records = records
        self._output, port = records.with_suffix(".out"), free_port()
        command = [sys.executable, "-m", "pipeline", "bandwidth", "--records", str(records),
                   "--nodes", " ".join(_NODES), "--megabytes", "4", "--timeout",
                   str(timeout_s)]  # fmt: skip
        names = list(nodes_of_ranks.values())
        self._ranks = []
        for number, (rank, node) in enumerate(nodes_of_ranks.items()):
            variables = {
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(names[:number].count(node)),
                "WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1", "SLURMD_NODENAME": node,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }  # fmt: skip
            with self._output.open("a") as file:
                self._ranks.append(warm.start(command, variables, file.fileno()))

    def wait(self) -> tuple[list[int], str]:
        return [rank.wait(timeout=120) for rank in self._ranks], self._output.read_text()

    def read(self) -> dict[str, Bandwidth]:
        return {node: found for node in _NODES if (found := read_bandwidth(self.records, node))}


@pytest.mark.usefixtures("processes")
def test_every_node_measures_with_both_neighbours(tmp_path: Path) -> None:
    launch = _Launch(tmp_path / "records", {0: "b1", 1: "b1", 2: "b2", 3: "b3"}, 4, timeout_s=100)
    codes, output = launch.wait()
    assert codes == [0] * 4, output
    found = launch.read()
    assert set(found) == set(_NODES)
    for node, bandwidth in found.items():
        assert (bandwidth.node, bandwidth.error, bandwidth.missing) == (node, "", [])
        pairs = bandwidth.rounds
        assert {name for one in pairs for name in one.nodes} == set(_NODES)
        assert all(len(one.nodes) == 2 and node in one.nodes for one in pairs)
        assert all(one.ranks == 2 + ("b1" in one.nodes) for one in pairs)
        assert all(0 < one.gb_per_s < 1000 for one in bandwidth.rounds)
    # Both of a pair tell the same number, that of the slowest rank.
    told = {(*one.nodes, one.gb_per_s) for bandwidth in found.values() for one in bandwidth.rounds}
    assert len(told) == 3


@pytest.mark.usefixtures("processes")
def test_missing_ranks_are_named_within_the_time(tmp_path: Path) -> None:
    """In one job b2 does not start, in the other the first node, which would keep the store."""
    second = _Launch(tmp_path / "second", {0: "b1", 2: "b3"}, 3, timeout_s=9)
    first = _Launch(tmp_path / "first", {1: "b2"}, 3, timeout_s=5)
    codes, output = second.wait()
    assert codes == [1, 1], output
    assert "1 of 3 ranks did not start in time: rank 1 on b2" in output
    assert {node: one.missing for node, one in second.read().items()} == {
        "b1": ["b2"], "b3": ["b2"]
    }  # fmt: skip
    codes, output = first.wait()
    assert codes == [1], output
    assert "rank 0 does not answer on 127.0.0.1" in output
    assert set(first.read()) == {"b2"}


def test_unit_is_that_of_nccl_tests() -> None:
    """2(n-1)/n; for 8 ranks 1.75 times size over time."""
    assert bus_bandwidth(8, 4_000_000_000, 2.0) == pytest.approx(3.5e9)
    assert bus_bandwidth(2, 1000, 1.0) == 1000


@pytest.mark.parametrize("count", range(1, 10))
def test_pairs_of_a_round_do_not_touch_and_cover_the_ring(count: int) -> None:
    nodes = [f"n{i}" for i in range(count)]
    rounds = pairs_in_ring(nodes)
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
    edges = [frozenset(pair) for pairs in rounds for pair in pairs]
    ring = {frozenset((nodes[i], nodes[(i + 1) % count])) for i in range(count)}
    assert len(edges) == len(set(edges))
    assert set(edges) == {edge for edge in ring if len(edge) == 2}
    assert len(rounds) <= 3


def test_record_is_json(tmp_path: Path) -> None:
    (tmp_path / "b1.bandwidth.json").write_text(json.dumps({"node": "b1"}))
    assert read_bandwidth(tmp_path, "b1") is None
