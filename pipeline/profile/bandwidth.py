"""`python -m pipeline bandwidth`: how fast ranks of different nodes add up a tensor.

    DIR/NODE.bandwidth.json   what a node measured with whom, written by the first of its ranks

Nodes stand in a ring in the order of their ranks. Each measures with one neighbour while all other
pairs do so, too, then with the other neighbour: a slow node is slow with both, a slow network
everywhere. At last all ranks measure together. The unit is the bus bandwidth of nccl-tests, which
does not depend on the number of ranks:

    2 (n - 1) / n * bytes / seconds     (NVIDIA/nccl-tests, doc/PERFORMANCE.md, "AllReduce")

Every wait is bounded. Ranks meet in a store without a collective, so that those who are missing can
be named, and each pair opens a process group of its own, so that one that hangs holds up nobody
else's numbers. A timer ends this process whatever it hangs in.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

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


@dataclass
class _Round:
    nodes: list[str]
    ranks: int
    gb_per_s: float


@dataclass
class _Report:
    """What a node has to tell so far."""

    node: str
    rounds: list[_Round] = field(default_factory=list)
    error: str = ""
    missing: list[str] = field(default_factory=list)


class _Recorder:
    """Writes what the first rank of a node has to tell, once, before this process ends."""

    def __init__(self, folder: Path, process: ProcessInfo, timeout_s: float) -> None:
        self.report = _Report(env.node_name())
        self.phase = "starting"
        self.waits_for_others = False
        """Whether whatever takes so long is not this node's doing."""
        self._folder = folder
        self._writes = process.local_rank == 0
        self._timer = threading.Timer(timeout_s, self._end)
        self._timer.daemon = True
        self._timer.start()
        self._timeout_s = timeout_s

    def write(self, error: str = "") -> None:
        """Write the record and stop the timer."""
        self._timer.cancel()
        self.report.error = error
        if self._writes:
            name = f"{self.report.node}.bandwidth.json"
            write_json_atomic(self._folder / name, asdict(self.report))

    def _end(self) -> None:
        """End the process, because a collective that hangs cannot be left."""
        text = f"no answer within {self._timeout_s:g} s while {self.phase}"
        logger.error("error: %s: %s", self.report.node, text)
        self.write("" if self.waits_for_others else text)
        os._exit(EXIT_FAILED_RETRY)


def measure_bandwidth(
    process: ProcessInfo, folder: Path, *, nodes: Sequence[str], megabytes: float, timeout_s: float
) -> int:
    """Measure between pairs of nodes and between all, and write this node's record.

    Args:
        process: this rank.
        folder: of the records.
        nodes: names of all nodes of the job in the order of their ranks, as many ranks on each; to
            name those that are missing.
        megabytes: size of the tensor that each rank has.
        timeout_s: for everything, from now on.

    Returns:
        The exit code.

    Raises:
        LostRankError: not all ranks came; names the nodes that did not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recorder = _Recorder(folder, process, timeout_s)
    try:
        # The last third is for measuring, so that who is missing is told before the timer ends it.
        store = _meet(process, nodes, recorder, time.monotonic() + timeout_s * 2 / 3)
        _measure_all(process, store, recorder, megabytes, timeout_s)
    except LostRankError as error:
        recorder.write(str(error))
        raise
    except RuntimeError as error:
        recorder.write(f"{recorder.phase}: {str(error).splitlines()[0]}")
        raise
    recorder.write()
    if process.is_first:
        for one in recorder.report.rounds:
            logger.info("%s: %.3g GB/s", ", ".join(one.nodes), one.gb_per_s)
    return EXIT_FINISHED


def _meet(process: ProcessInfo, nodes: Sequence[str], recorder: _Recorder, until: float) -> Store:
    """Wait until every rank is here."""
    recorder.phase = "waiting for rank 0"
    host, port = env.master_address()
    if not process.is_first:
        _reach(host, port, until)
    store = TCPStore(
        host, port, process.world_size, process.is_first, wait_for_workers=False,
        timeout=timedelta(seconds=max(1.0, until - time.monotonic())),
    )  # fmt: skip
    recorder.phase = "waiting for all ranks to start"
    store.set(f"here/{process.rank}", recorder.report.node)
    missing = list(range(process.world_size))
    while missing and time.monotonic() < until and not store.check([_GIVEN_UP]):
        missing = [rank for rank in missing if not store.check([f"here/{rank}"])]
        time.sleep(_LOOK_EVERY_S if missing else 0)
    if not missing:
        return store
    store.set(_GIVEN_UP, "1")
    recorder.report.missing = _nodes_of(missing, nodes, process.world_size)
    time.sleep(1.0 if process.is_first else 0.0)  # others ask its store once more
    where = ", ".join(recorder.report.missing) or "nodes that were not named"
    raise LostRankError(
        f"{len(missing)} of {process.world_size} ranks did not start in time: rank "
        f"{', '.join(map(str, missing[:8]))}{' ..' * (len(missing) > 8)} on {where}"
    )


def _reach(host: str, port: int, until: float) -> None:
    """Wait until rank 0 listens; the store's own wait ends in a page of C++."""
    while True:
        try:
            socket.create_connection(
                (host, port), timeout=max(0.1, until - time.monotonic())
            ).close()
        except OSError as error:
            if time.monotonic() + _LOOK_EVERY_S > until:
                raise LostRankError(
                    f"rank 0 does not answer on {host}, port {port}: {error}; it did not start, or "
                    "MASTER_ADDR or MASTER_PORT is wrong"
                ) from error
            time.sleep(_LOOK_EVERY_S)
        else:
            return


def _nodes_of(ranks: Sequence[int], nodes: Sequence[str], world_size: int) -> list[str]:
    """Return the nodes of some ranks, if the nodes are known."""
    if not nodes or world_size % len(nodes):
        return []
    per_node = world_size // len(nodes)
    return list(dict.fromkeys(nodes[rank // per_node] for rank in ranks))


def _measure_all(
    process: ProcessInfo, store: Store, recorder: _Recorder, megabytes: float, timeout_s: float
) -> None:
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", process.local_rank) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    tensor = torch.ones(int(megabytes * 1e6 / 4), dtype=torch.float32, device=device)
    names = [store.get(f"here/{rank}").decode() for rank in range(process.world_size)]
    nodes = list(dict.fromkeys(names))
    rounds = [list(map(list, pairs)) for pairs in pairs_in_ring(nodes)]
    if len(nodes) != 2:
        rounds.append([nodes])
    for number, groups in enumerate(rounds):
        for members in groups:
            ranks = [rank for rank, name in enumerate(names) if name in members]
            if process.rank in ranks and len(ranks) > 1:
                recorder.phase = f"measuring {', '.join(members)}"
                dist.init_process_group(
                    "nccl" if has_gpu else "gloo",
                    store=PrefixStore(f"{number}/{members[0]}", store),
                    rank=ranks.index(process.rank), world_size=len(ranks),
                    timeout=timedelta(seconds=timeout_s),
                )  # fmt: skip
                gb_per_s = _measure(len(ranks), tensor)
                recorder.report.rounds.append(_Round(members, len(ranks), gb_per_s))
        # Also before a group is closed: NCCL may still be sending what this rank is done with.
        recorder.phase, recorder.waits_for_others = "waiting for the other pairs", True
        _wait_for_all(process, store, f"done/{number}")
        recorder.waits_for_others = False
        if dist.is_initialized():
            dist.destroy_process_group()


def _wait_for_all(process: ProcessInfo, store: Store, key: str) -> None:
    """Wait until all ranks have come here; the timer bounds it."""
    store.add(key, 1)
    try:
        while store.add(key, 0) < process.world_size:
            time.sleep(_LOOK_EVERY_S)
    except RuntimeError:
        return  # rank 0 keeps the store; it has seen all of them, and left


def pairs_in_ring(nodes: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Round of pairs that do not touch, so that every node meets both of its neighbours.

    Two rounds for an even number of nodes, three for an odd one, one for two nodes, none for one.
    """
    count = len(nodes)
    edges = [(nodes[i], nodes[(i + 1) % count]) for i in range(count if count > 2 else count - 1)]
    rounds = [edges[0 : count - 1 : 2], edges[1:count:2]]
    if count > 2 and count % 2:
        rounds = [edges[0 : count - 1 : 2], edges[1 : count - 1 : 2], [edges[-1]]]
    return [pairs for pairs in rounds if pairs]


def _measure(num_ranks: int, tensor: torch.Tensor) -> float:
    """Time all-reduces over the open process group.

    Args:
        num_ranks: of the group.
        tensor: (n,) float32 on the device of this rank; its values become meaningless.

    Returns:
        GB/s of bus bandwidth, by the time of the slowest rank.
    """
    for _ in range(_WARM_UPS):  # connections are made at the first
        dist.all_reduce(tensor)
    _wait_for(tensor)
    started = time.perf_counter()
    for _ in range(_REPEATS):
        dist.all_reduce(tensor)
    _wait_for(tensor)
    took_s = torch.tensor(time.perf_counter() - started, device=tensor.device)
    dist.all_reduce(took_s, op=dist.ReduceOp.MAX)
    num_bytes = tensor.numel() * tensor.element_size()
    tensor.fill_(1.0)
    return bus_bandwidth(num_ranks, num_bytes, float(took_s) / _REPEATS) / 1e9


def bus_bandwidth(num_ranks: int, num_bytes: int, seconds: float) -> float:
    """Compute the bytes/s of an all-reduce as nccl-tests reports them.

    Args:
        num_ranks: that take part.
        num_bytes: that each of them has.
        seconds: of one all-reduce.
    """
    return 2 * (num_ranks - 1) / num_ranks * num_bytes / seconds


def _wait_for(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
