"""Packing, reading and assembly of batches without masking, and opening a large set; one JSON line.

    python -m benchmarks.loading DATASET [--seq-len 512]

DATASET is a folder written by `python -m data_prep run`. Speeds are per CPU-second of one process,
the best of seven: "pack" of tokens, for ours and the Python reference; "assemble" of slots, of
micro-batches of 16,384 slots in the order of a run, whose blocks were read before, for ours and
for filling document by document in Python.
"read" compares `pread` of a block with copying or hashing it out
of a fresh map of its shard, in MB of warm page cache.

"open" is the start on an index of 80,000 blocks and over 150 million sequences whose numbers of
sequences are kept: CPU seconds, by how much the process grew at most, and its size before (Python,
numba). "worker_peak_mib": memory of a worker process. "count" is the time to count the sequences
of DATASET's blocks, in CPU ms a block.
"""

import argparse
import hashlib
import json
import mmap
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config.data import DataConfig
from pipeline.config.runs import PretrainConfig
from pipeline.config.train import TrainConfig
from pipeline.data import counts
from pipeline.data.format import DatasetIndex, read_index
from pipeline.data.packing import PackedSequences, pack
from pipeline.data.reader import BlockReader, read_range
from pipeline.objectives.inputs import train_steps
from tests.support import reference_packing
from tests.support.large_index import plausible_counts, write_large_index
from tests.support.reference_slots import reference_slots

_BATCH_SLOTS = 16_384


def _cpu_s(work: Callable[[], Any]) -> float:
    best = float("inf")
    for _ in range(7):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return best


def _packing(index: DatasetIndex, seq_len: int) -> dict[str, float]:
    reader = BlockReader(index)
    ends = [reader.doc_ends(row) for row in range(len(index.blocks))]
    tokens = int(index.blocks.num_tokens.sum())
    return {
        name: round(tokens / _cpu_s(lambda f=function: [f(e, seq_len) for e in ends]) / 1e6)
        for name, function in (("ours", pack), ("python", reference_packing.pack))
    }


def _assembly(index: DatasetIndex, seq_len: int) -> dict[str, float]:
    num_sequences = max(1, _BATCH_SLOTS // seq_len)
    config = PretrainConfig(
        run_dir="unused",
        data=DataConfig(dir=str(index.folder), seq_len=seq_len),
        train=TrainConfig(global_batch=num_sequences, micro_batch=num_sequences),
    )
    steps = train_steps(index, config.train_data)
    split, segment = steps.split, steps.order.segments[0]
    of_epoch = int(split.counts[seq_len].sum())
    firsts = range(0, min(of_epoch, 200 * num_sequences), num_sequences)
    batches = [segment.locate(first, num_sequences) for first in firsts]
    packed = {
        block: (split.block(block), split.packing(block, seq_len))
        for places in batches
        for block in places.blocks.tolist()
    }

    def in_python() -> None:
        for places in batches:
            slots = PackedSequences.empty(num_sequences, seq_len)
            for row, (block, sequence) in enumerate(
                zip(places.blocks, places.sequences, strict=True)
            ):
                reference_slots(slots, row, *packed[int(block)], int(sequence), index.vocabulary)

    slots = len(batches) * num_sequences * seq_len
    locate_s = _cpu_s(lambda: [segment.locate(first, num_sequences) for first in firsts])
    return {
        "ours": round(slots / _cpu_s(lambda: [split.slots(b, seq_len) for b in batches]) / 1e6, 1),
        "python": round(slots / _cpu_s(in_python) / 1e6, 1),
        "locate_us_a_batch": round(locate_s / len(batches) * 1e6, 1),
    }


def _reading(index: DatasetIndex) -> dict[str, float]:
    blocks = index.blocks
    rows = [
        (index.shard_path(int(blocks.shard[row])), int(blocks.offset[row]),
         int(blocks.length[row]))
        for row in range(len(blocks))
    ]  # fmt: skip

    def through_maps(use: Callable[[memoryview], object]) -> None:
        maps = {}
        for path in {path for path, _, _ in rows}:
            with path.open("rb") as file:
                maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        for path, start, length in rows:
            with memoryview(maps[path]) as view, view[start : start + length] as block:
                use(block)

    def hashed_read() -> None:
        for path, start, length in rows:
            hashlib.sha256(read_range(path, start, length, str).data).digest()

    megabytes = sum(length for _, _, length in rows) / 1e6
    return {
        "pread": round(megabytes / _cpu_s(lambda: [read_range(*row, str) for row in rows])),
        "map_copy": round(megabytes / _cpu_s(lambda: through_maps(bytes))),
        "pread_hash": round(megabytes / _cpu_s(hashed_read)),
        "map_hash": round(megabytes / _cpu_s(lambda: through_maps(hashlib.sha256))),
    }


_OPEN = """
import sys, time
from benchmarks.timing import peak_mib
from pipeline.config.data import DataConfig
from pipeline.config.runs import PretrainConfig
from pipeline.data.format import read_index
from pipeline.objectives.inputs import train_steps

before, started = peak_mib(), time.process_time()
config = PretrainConfig(run_dir="unused", data=DataConfig(dir=sys.argv[1], seq_len=512))
steps = train_steps(read_index(sys.argv[1]), config.train_data)
sequences = int(steps.split.counts[512].sum())
steps.order.segments[0].locate(sequences // 2, 4096)
print(sequences, time.process_time() - started, peak_mib() - before, before)
"""


def opening(folder: Path, num_shards: int = 400) -> dict[str, float]:
    """Start in the middle of a simulated set of 700 MB a shard, whose index is written anew."""
    index = write_large_index(folder, num_shards=num_shards, blocks_per_shard=200)
    counts._keep(plausible_counts(index, 512), [folder / "packing-512.npz"], index, 512)
    command = [sys.executable, "-c", _OPEN, str(folder)]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    sequences, cpu_s, grown, before = map(float, done.stdout.split())
    return {
        "sequences": int(sequences),
        "cpu_s": round(cpu_s, 2),
        "grown_mib": round(grown),
        "before_mib": round(before),
    }


_WORKER = """
import sys
from benchmarks.timing import peak_mib
from pipeline.config.data import DataConfig
from pipeline.config.runs import PretrainConfig
from pipeline.data.counts import sequences_at
from pipeline.data.format import read_index
from pipeline.data.run_order import DataRank
from pipeline.data.workers import Workers
from pipeline.objectives.inputs import train_inputs

index, seq_len = read_index(sys.argv[1]), int(sys.argv[2])
config = PretrainConfig(run_dir="unused", data=DataConfig(dir=sys.argv[1], seq_len=seq_len))
inputs = train_inputs(config.train_data, index)
counts = sequences_at(index, [seq_len], None)
workers = Workers(1, index, config.train_data, inputs, DataRank(0, 1), counts)
for place, _ in zip(config.batches.batches_from(0), range(100)):
    workers.ask(place.cursor)
    workers.take()
print(peak_mib(workers.processes[0].pid))
workers.close()
"""


def worker_peak_mib(dataset: Path, seq_len: int) -> int:
    """Most memory of a worker process that makes 100 steps of 512 sequences."""
    command = [sys.executable, "-c", _WORKER, str(dataset), str(seq_len)]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return round(float(done.stdout))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--seq-len", type=int, default=512)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        opened = opening(Path(temporary) / "large")
    index = read_index(arguments.dataset)
    count_s = _cpu_s(lambda: counts._count(index, arguments.seq_len))
    result = {
        "seq_len": arguments.seq_len,
        "tokens": int(index.blocks.num_tokens.sum()),
        "documents": int(index.blocks.num_documents.sum()),
        "pack_mtokens_per_cpu_s": _packing(index, arguments.seq_len),
        "assemble_mslots_per_cpu_s": _assembly(index, arguments.seq_len),
        "read_mb_per_cpu_s": _reading(index),
        "open": opened,
        "worker_peak_mib": worker_peak_mib(arguments.dataset, arguments.seq_len),
        "count_cpu_ms_per_block": round(count_s / len(index.blocks) * 1e3, 3),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "numba": version("numba"),
        },
    }
    print(json.dumps(result))  # noqa: T201


if __name__ == "__main__":
    main()
