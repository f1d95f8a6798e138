"""The loader at many ranks: bytes read and tokens a CPU-second, and what workers hand over.

    python -m benchmarks.loader_ranks DATASET [--worlds 1 8 64 256 1024] [--seq-len 128 512]
        [--json FILE] [--table FILE]

DATASET is a folder written by `python -m data_prep run`, whose blocks stand many times in an index
that is made here: 2,048 blocks, so that no window comes twice while its blocks are kept. A node has
8 ranks. Of each world the ranks of two nodes are simulated, one node after the other, its ranks by
turns in one process, with the caches and shared memory of a node. A rank has 64 sequences of a step
at 128 slots and 32 at 512, with 1,024 ranks the batches of You et al. 2020 (65,536 and 32,768), but
a step has no fewer slots than that of Devlin et al. 2019, 256 x 512.

"bytes" are those asked of the storage (blocks, and documents' ends), a token of text that one of
these ranks trains on; "M/CPU-s" millions of tokens of text a second of CPU time of these ranks,
reading, hashing, packing and drawing the order included. At least 48 steps and two whole windows of
blocks are made first, until the memory of a node has been filled once, and then as many are
measured. Steps are made by as many a call as the loader makes. The page cache is warm.

"workers" compares wall time of `TrainLoader.steps_from`, whose steps nothing uses: a thread of the
rank, and two worker processes; and the CPU time of the rank and of both workers. Wall time needs
three idle cores; what they would give follows from the CPU time: "times with a core each".

"open" is the start in the middle of a synthetic set, from `benchmarks.loading`, in a fresh process:
CPU seconds, and memory that it adds.
"""

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import loading
from pipeline.config.data import DataConfig
from pipeline.config.runs import PretrainConfig
from pipeline.config.train import TrainConfig
from pipeline.data import reader
from pipeline.data.counts import sequences_at
from pipeline.data.format import Blocks, DatasetIndex, read_index
from pipeline.data.loader import TrainLoader
from pipeline.data.run_order import DataRank, TrainSteps
from pipeline.objectives.inputs import train_inputs

_PER_RANK = {128: 64, 512: 32}
_LEAST_SLOTS = 256 * 512
_RANKS_PER_NODE = 8
_BLOCKS = 2048
_WINDOWS = 2
_numbers = itertools.count()
_LEAST_STEPS = 48
_GOALS = {1: (1, 30), 64: (8, 15), 1024: (16, 8)}
"""By world: times the bytes of world 1 at most, millions of tokens a CPU-second at least."""


def repeated(index: DatasetIndex) -> DatasetIndex:
    """An index with the training blocks of a dataset again and again."""
    rows = index.split_blocks("train")
    times = -(-_BLOCKS // len(rows))
    used, of_shard = np.unique(index.blocks.shard[rows], return_inverse=True)
    columns = {
        name: np.concatenate([array[rows]] * times) for name, array in vars(index.blocks).items()
    }
    columns["shard"] = np.concatenate([of_shard + k * len(used) for k in range(times)]).astype(
        np.int32
    )
    return replace(
        index,
        fingerprint=f"{index.fingerprint} x {times}",
        shards=tuple(index.shards[shard] for shard in used) * times,
        blocks=Blocks(**columns),
        block_source=np.concatenate([index.block_source[rows]] * times),
    )  # fmt: skip


def _config(index: DatasetIndex, seq_len: int, world: int, **data: Any) -> PretrainConfig:
    per_rank = _PER_RANK[seq_len]
    return PretrainConfig(
        run_dir="unused",
        data=DataConfig(**{"dir": str(index.folder), **data}, seq_len=seq_len),
        train=TrainConfig(
            global_batch=max(per_rank * world, _LEAST_SLOTS // seq_len), micro_batch=per_rank
        ),
    )


def measure_node(
    index: DatasetIndex, counts: dict[int, Any], seq_len: int, share: DataRank, num_steps: int = 0
) -> dict[str, float]:
    """Steps of all ranks of the share's node; sums of tokens, bytes, CPU seconds."""
    world, node = share.world_size, share.rank // _RANKS_PER_NODE
    # Not read, but part of the name of the shared memory: each node has its own, empty at first.
    config = _config(index, seq_len, world, dir=f"{os.getpid()} {next(_numbers)}")
    num_ranks, inputs = min(world, _RANKS_PER_NODE), train_inputs(config.train_data, index)
    ranks = [
        TrainSteps(index, config.train_data, inputs, counts, sharing=world > 1)
        for _ in range(num_ranks)
    ]
    shares = [DataRank(node * num_ranks + k, world) for k in range(num_ranks)]
    size = config.train.global_batch
    first = 0
    if not num_steps:
        # To the end of a window: what is read of the next one belongs to later steps.
        _, ends = ranks[0].order.segments[0].orders[0]._epoch_windows(0)
        last = max(_WINDOWS - 1, int(np.searchsorted(ends, _LEAST_STEPS * size)))
        first = int(ends[last]) // size
        num_steps = int(ends[2 * last + 1]) // size - first
    num_bytes, read = 0, reader.read_range

    def counted(path: Path, offset: int, length: int, what: Any) -> Any:
        nonlocal num_bytes
        num_bytes += length
        return read(path, offset, length, what)

    reader.read_range = counted
    try:
        _make(ranks, shares, range(first))
        num_bytes, started = 0, time.process_time()
        _make(ranks, shares, range(first, first + num_steps))
        cpu_s = time.process_time() - started
    finally:
        reader.read_range = read
    text = index.blocks.num_tokens.sum() / counts[seq_len].sum()
    tokens = num_steps * size / world * num_ranks * text
    return {"tokens": float(tokens), "bytes": num_bytes, "cpu_s": cpu_s}


def _make(ranks: list[TrainSteps], shares: list[DataRank], numbers: range) -> None:
    """Make the steps of some ranks, as many a call as their loaders do."""
    at = numbers.start
    while at < numbers.stop:
        cursor = ranks[0].plan.number(at).cursor
        count = min(numbers.stop - at, ranks[0].together(cursor, shares[0]))
        for steps, share in zip(ranks, shares, strict=True):
            steps.micro_batches(cursor, share, steps=count)
        at += count


def measure_world(
    index: DatasetIndex, counts: dict[int, Any], seq_len: int, world: int, rounds: int
) -> dict[str, float]:
    """Medians of rounds over two nodes of a world."""
    nodes = max(1, world // _RANKS_PER_NODE)
    chosen = sorted({nodes // 3, 2 * nodes // 3})
    bytes_per_token, speeds = [], []
    measure_node(index, counts, seq_len, DataRank(0, world), num_steps=1)  # compiles
    for _ in range(rounds):
        found = [
            measure_node(index, counts, seq_len, DataRank(node * _RANKS_PER_NODE, world))
            for node in chosen
        ]
        gc.collect()
        tokens = sum(one["tokens"] for one in found)
        bytes_per_token.append(sum(one["bytes"] for one in found) / tokens)
        speeds.append(tokens / sum(one["cpu_s"] for one in found) / 1e6)
    return {
        "bytes_per_token": round(statistics.median(bytes_per_token), 2),
        "mtokens_per_cpu_s": round(statistics.median(speeds), 2),
        "best_mtokens_per_cpu_s": round(max(speeds), 2),
    }


def measure_workers(
    index: DatasetIndex, counts: dict[int, Any], seq_len: int, rounds: int
) -> dict[str, float]:
    """Steps of a rank that is alone, by its thread and by two workers in turns; medians."""
    speeds = defaultdict[str, list[float]](list)
    for name, workers in [("thread", 0), ("workers", 2)] * rounds:
        config = _config(index, seq_len, 1, workers=workers, prefetch_steps=4)
        inputs = train_inputs(config.train_data, index)
        loader = TrainLoader(index, config.train_data, inputs, DataRank(0, 1), counts)
        steps = loader.steps_from(0)
        for _ in range(32):  # workers start and compile
            next(steps)
        children = [child.pid or 0 for child in multiprocessing.active_children()]
        started, before = time.perf_counter(), [time.process_time(), _cpu_s(children)]
        tokens = sum(b.num_tokens for step in itertools.islice(steps, 300) for b in step)
        speeds[f"{name}_mtokens_per_s"].append(tokens / (time.perf_counter() - started) / 1e6)
        for who, was, now in zip(
            ("rank", "both_workers"), before, (time.process_time(), _cpu_s(children)), strict=True
        ):
            speeds[f"{name}_{who}_cpu_ns_per_token"].append((now - was) / tokens * 1e9)
        steps.close()
    del speeds["thread_both_workers_cpu_ns_per_token"]
    pairs = zip(speeds["workers_mtokens_per_s"], speeds["thread_mtokens_per_s"], strict=True)
    speeds["times"] = [workers / thread for workers, thread in pairs]
    cpu = [speeds[f"{who}_cpu_ns_per_token"] for who in
           ("thread_rank", "workers_rank", "workers_both_workers")]  # fmt: skip
    speeds["times_with_a_core_each"] = [
        alone / max(rank, both / 2) for alone, rank, both in zip(*cpu, strict=True)
    ]
    return {name: round(statistics.median(values), 2) for name, values in speeds.items()}


def _cpu_s(processes: list[int]) -> float:
    """Return the CPU seconds of some processes that run."""
    stats = [Path(f"/proc/{one}/stat").read_text().rsplit(")", 1)[1].split() for one in processes]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")


def table(result: dict[str, Any]) -> str:
    """Format the figures as Markdown."""
    lines = [
        "# The loader at many ranks", "",
        "`python -m benchmarks.loader_ranks DATASET`; what is measured is said there. "
        f"{result['machine']}, load {result['load']}.", "",
        "| slots | ranks | bytes a token | of world 1 | at most | M tokens a CPU-s | best "
        "| at least |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for seq_len, worlds in result["worlds"].items():
        for world, one in worlds.items():
            most, least = _GOALS.get(int(world), ("", ""))
            lines.append(
                f"| {seq_len} | {int(world):,} | {one['bytes_per_token']} | "
                f"{one.get('times_world_1', '')} | {most} | {one['mtokens_per_cpu_s']} | "
                f"{one['best_mtokens_per_cpu_s']} | {least} |"
            )
    for title in ("workers", "open"):
        for seq_len, one in result.get(title, {}).items():
            values = ", ".join(f"{name} {value:,}" for name, value in one.items())
            lines += ["", f"{title}, {seq_len}: {values}"]
    return "\n".join([*lines, ""])


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--seq-len", type=int, nargs="+", default=[128, 512], choices=_PER_RANK)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 8, 64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-workers", action="store_true")
    parser.add_argument(
        "--open-shards", type=int, nargs="*", default=[400, 1600, 6400],
        help="sizes of synthetic sets, of 200 blocks of a million tokens each",
    )  # fmt: skip
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path)
    arguments = parser.parse_args()
    index = repeated(read_index(arguments.dataset))
    result: dict[str, Any] = {
        "machine": f"{os.cpu_count()} x {platform.machine()}, python {platform.python_version()}, "
        f"numpy {np.__version__}",
        "load": os.getloadavg()[0],
        "worlds": {},
    }
    whole = read_index(arguments.dataset)
    rows = whole.split_blocks("train")
    for seq_len in arguments.seq_len:
        of_rows = sequences_at(whole, [seq_len], None)[seq_len][rows]
        counts = {seq_len: np.concatenate([of_rows] * (len(index.blocks) // len(rows)))}
        found = result["worlds"][str(seq_len)] = {}
        for world in arguments.worlds:
            one = measure_world(index, counts, seq_len, world, arguments.rounds)
            if "1" in found or world == 1:
                least = found.get("1", one)["bytes_per_token"]
                one["times_world_1"] = round(one["bytes_per_token"] / least, 2)
            found[str(world)] = one
            sys.stderr.write(f"{seq_len} slots, {world} ranks: {one}\n")
        if not arguments.without_workers:
            workers = measure_workers(index, counts, seq_len, arguments.rounds)
            result.setdefault("workers", {})[seq_len] = workers
    for num_shards in arguments.open_shards:
        with tempfile.TemporaryDirectory() as folder:
            opened = loading.opening(Path(folder) / "large", num_shards)
        result.setdefault("open", {})[f"{num_shards * 200:,} blocks"] = opened
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.table:
        arguments.table.write_text(table(result))
    sys.stdout.write(table(result))


if __name__ == "__main__":
    main()
