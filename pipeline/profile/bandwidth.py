"""The speed at which ranks of different nodes add up a tensor: `postnorm bandwidth`.

    DIR/NODE.bandwidth.json   a node's measurements, written by the first of its ranks

Nodes stand in a ring in the order of their ranks. Each measures with one neighbour while all other
pairs do the same, then with the other neighbour: a slow node is slow with both. The unit is the bus
bandwidth of nccl-tests, which does not depend on the number of ranks:

    2 (n - 1) / n * bytes / seconds     (NVIDIA/nccl-tests, doc/PERFORMANCE.md, "AllReduce")

Every wait is bounded. A timer ends this process whatever it hangs in.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from pipeline.errors import EXIT_FAILED_RETRY, EXIT_FINISHED, LostRankError
from pipeline.runtime import env
from pipeline.runtime.env import ProcessInfo
from pipeline.runtime.files import write_json_atomic

logger = logging.getLogger(__name__)

_WARM_UPS, _REPEATS = 2, 5
_LOOK_EVERY_S = 0.1
_GIVEN_UP = "given-up"


class _Report:
    """The report of this node, written once before the process ends; a timer bounds everything."""

    def __init__(self, folder: Path, process: ProcessInfo, timeout_s: float) -> None:
        self.node = env.node_name()
        self.rounds: list[dict[str, Any]] = []
        """All-reduces that it took part in: `nodes`, `ranks` and `gb_per_s`."""
        self.missing: list[str] = []
        self.phase = "starting"
        self.waits_for_others = False
        """Whether other nodes are to blame if this phase takes too long."""
        self._path = folder / f"{self.node}.bandwidth.json" if process.local_rank == 0 else None
        self._timeout_s = timeout_s
        self._timer = threading.Timer(timeout_s, self._end)
        self._timer.daemon = True
        self._timer.start()

    def write(self, error: str = "") -> None:
        """Stop the timer and write the report, if this rank is the first of its node."""
        self._timer.cancel()
        if self._path:
            body = {"node": self.node, "rounds": self.rounds, "missing": self.missing}
            write_json_atomic(self._path, {**body, "error": error})

    def _end(self) -> None:
        """End the process: a collective that hangs cannot be left."""
        text = f"no answer within {self._timeout_s:g} s while {self.phase}"
        logger.error("error: %s: %s", self.node, text)
        self.write("" if self.waits_for_others else text)
        os._exit(EXIT_FAILED_RETRY)


def measure_bandwidth(
    process: ProcessInfo, folder: Path, *, nodes: Sequence[str], megabytes: float, timeout_s: float
) -> int:
    """Measure between pairs of nodes, or inside the only one, and write this node's report.

    `nodes` are all nodes of the job in the order of their ranks, with as many ranks on each, to
    name missing ones. Everything ends within `timeout_s`.

    Raises:
        LostRankError: not all ranks came, or one was lost; names the missing nodes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    report = _Report(folder, process, timeout_s)
    try:
        # The last third is for measuring; missing ranks are named before the timer ends everything.
        store = _meet(process, nodes, report, time.monotonic() + timeout_s * 2 / 3)
        _measure_all(process, store, report, megabytes, timeout_s)
    except LostRankError as error:
        report.write(str(error))
        raise
    except RuntimeError as error:
        report.write(f"{report.phase}: {str(error).splitlines()[0]}")
        raise LostRankError(f"{report.node}: while {report.phase}: {error}") from error
    report.write()
    if process.is_first:
        for one in report.rounds:
            logger.info("%s: %.3g GB/s", ", ".join(one["nodes"]), one["gb_per_s"])
    return EXIT_FINISHED


def _meet(process: ProcessInfo, nodes: Sequence[str], report: _Report, until: float) -> Store:
    """Wait until every rank has registered in the store."""
    report.phase = "waiting for rank 0"
    host, port = env.master_address()
    size, rank, is_server = process.world_size, process.rank, process.is_first
    if not is_server:
        _wait_for_listener(host, port, until)
    timeout = timedelta(seconds=max(1.0, until - time.monotonic()))
    # A store without a collective, so that missing ranks can be named.
    store = TCPStore(host, port, size, is_server, wait_for_workers=False, timeout=timeout)
    report.phase = "waiting for all ranks to start"
    store.set(f"here/{rank}", report.node)
    missing = list(range(size))
    while missing and time.monotonic() < until and not store.check([_GIVEN_UP]):
        missing = [rank for rank in missing if not store.check([f"here/{rank}"])]
        time.sleep(_LOOK_EVERY_S if missing else 0)
    if not missing:
        return store
    store.set(_GIVEN_UP, "1")
    if nodes and size % len(nodes) == 0:
        names = [nodes[rank * len(nodes) // size] for rank in missing]
        report.missing = list(dict.fromkeys(names))
    # Rank 0 serves the store, and the others read it once more.
    time.sleep(1.0 if is_server else 0.0)
    where = ", ".join(report.missing) or "unknown nodes"
    raise LostRankError(
        f"{len(missing)} of {size} ranks did not start in time: rank "
        f"{', '.join(map(str, missing[:8]))}{' ..' * (len(missing) > 8)} on {where}"
    )


def _wait_for_listener(host: str, port: int, until: float) -> None:
    """Wait until rank 0 listens; a store that waits by itself retries, and prints pages of C++."""
    while True:
        left_s = until - time.monotonic()
        try:
            socket.create_connection((host, port), timeout=max(0.1, left_s)).close()
            return
        except OSError as error:
            if left_s < _LOOK_EVERY_S:
                raise LostRankError(
                    f"rank 0 does not answer on {host}, port {port}: {error}; it did not start, or "
                    "MASTER_ADDR or MASTER_PORT is wrong"
                ) from error
            time.sleep(_LOOK_EVERY_S)


def _measure_all(
    process: ProcessInfo, store: Store, report: _Report, megabytes: float, timeout_s: float
) -> None:
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", process.local_rank) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    tensor = torch.ones(int(megabytes * 1e6 / 4), dtype=torch.float32, device=device)
    names = [store.get(f"here/{rank}").decode() for rank in range(process.world_size)]
    nodes = list(dict.fromkeys(names))
    rounds: list[list[list[str]]] = [[*map(list, pairs)] for pairs in pairs_in_ring(nodes)]
    for number, groups in enumerate(rounds or [[nodes]]):
        for members in groups:
            ranks = [rank for rank, name in enumerate(names) if name in members]
            if process.rank in ranks and len(ranks) > 1:
                report.phase = f"measuring {', '.join(members)}"
                # A group for each pair, so that a pair that hangs affects no other pair's numbers.
                dist.init_process_group(
                    "nccl" if has_gpu else "gloo",
                    store=PrefixStore(f"{number}/{members[0]}", store),
                    rank=ranks.index(process.rank),
                    world_size=len(ranks),
                    timeout=timedelta(seconds=timeout_s),
                )
                gb_per_s = _measure(len(ranks), tensor)
                one = {"nodes": members, "ranks": len(ranks), "gb_per_s": gb_per_s}
                report.rounds.append(one)
        # Also before a group is closed: NCCL may still be sending after this rank is done.
        report.phase, report.waits_for_others = "waiting for the other pairs", True
        _wait_for_all(process, store, f"done/{number}")
        report.waits_for_others = False
        if dist.is_initialized():
            dist.destroy_process_group()


def _wait_for_all(process: ProcessInfo, store: Store, key: str) -> None:
    """Wait until all ranks have come here; the timer bounds it."""
    store.add(key, 1)
    try:
        while store.add(key, 0) < process.world_size:
            time.sleep(_LOOK_EVERY_S)
    except RuntimeError:
        return  # rank 0, which serves the store, has seen all ranks and left


# Disjoint, each pair in a group of its own: overlapping groups with `use_local_synchronization`
# hung with 3 nodes (torch 2.13, gloo).
def pairs_in_ring(nodes: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Return rounds of disjoint pairs in which every node meets both of its neighbours.

    Two rounds for an even number of nodes, three for an odd one, one for two nodes, none for one.
    """
    count = len(nodes)
    edges = [(nodes[i], nodes[(i + 1) % count]) for i in range(count if count > 2 else count - 1)]
    is_odd_ring = count > 2 and count % 2 == 1
    # In an odd ring the last edge touches both the first and the one before it.
    last = [edges.pop()] if is_odd_ring else []
    return [pairs for pairs in (edges[0::2], edges[1::2], last) if pairs]


def _measure(num_ranks: int, tensor: torch.Tensor) -> float:
    """Time all-reduces over the open process group; return GB/s by the time of the slowest rank.

    The values of the tensor become meaningless.
    """
    for _ in range(_WARM_UPS):  # the first one opens the connections
        dist.all_reduce(tensor)
    _synchronise(tensor)
    started = time.perf_counter()
    for _ in range(_REPEATS):
        dist.all_reduce(tensor)
    _synchronise(tensor)
    took_s = torch.tensor(time.perf_counter() - started, device=tensor.device)
    dist.all_reduce(took_s, op=dist.ReduceOp.MAX)
    num_bytes = tensor.numel() * tensor.element_size()
    tensor.fill_(1.0)
    return bus_bandwidth(num_ranks, num_bytes, float(took_s) / _REPEATS) / 1e9


def bus_bandwidth(num_ranks: int, num_bytes: int, seconds: float) -> float:
    """Compute the bytes/s of an all-reduce as nccl-tests reports them."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes / seconds


def _synchronise(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
