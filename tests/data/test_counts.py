"""Kept numbers of sequences: used only for what they were made for, remade when damaged."""

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline.config.data import DataConfig
from pipeline.data import counts
from pipeline.data.counts import BlockCounts, packing_counts
from pipeline.data.dataset import PackedSplit
from pipeline.data.format import DatasetIndex, read_index
from pipeline.data.reader import BlockReader
from pipeline.errors import DataError
from tests.support import reference_packing
from tests.support.damage import flip
from tests.support.large_index import plausible_counts, write_large_index
from tests.support.processes import python


@pytest.fixture
def copy(dataset: DatasetIndex, tmp_path: Path) -> DatasetIndex:
    folder = tmp_path / "copy"
    shutil.copytree(dataset.folder, folder, ignore=shutil.ignore_patterns("packing-*"))
    return read_index(folder)


@pytest.fixture
def expected(dataset: DatasetIndex) -> list[list[int]]:
    reader = BlockReader(dataset)
    rows = range(len(dataset.blocks))
    packings = [reference_packing.pack(reader.doc_ends(row), 128) for row in rows]
    return [[each.num_sequences for each in packings], [len(each.piece_doc) for each in packings]]


def _as_lists(found: BlockCounts) -> list[list[int]]:
    return [numbers.tolist() for numbers in found]


def _remove_shards(index: DatasetIndex) -> None:
    """From here on nothing can be counted."""
    shutil.rmtree(index.folder / "shards")


def test_sequences_are_counted_once(copy: DatasetIndex, expected: list[list[int]]) -> None:
    assert _as_lists(packing_counts(copy, 128, None)) == expected
    _remove_shards(copy)
    kept = packing_counts(copy, 128, None)
    assert kept.sequences.dtype == kept.pieces.dtype == np.int64
    assert _as_lists(kept) == expected
    with pytest.raises(DataError, match="does not exist"):
        packing_counts(copy, 256, None)


def _damage(path: Path, kind: str) -> None:
    data = path.read_bytes()
    with np.load(path) as arrays:
        kept = dict(arrays)
    if kind == "cut":
        path.write_bytes(data[:-40])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "flipped":
        flip(path, data.index(b"sequences_per_block.npy") + 180)
    elif kind == "of an older version":
        np.savez(path, **{name: kept[name] for name in kept if name != "pieces_per_block"})
    else:
        changed = {
            "of another rule": {"made_for": str(kept["made_for"]).replace("rule 1", "rule 2")},
            "too short": {"sequences_per_block": np.ones(3, np.int64)},
            "impossible": {"sequences_per_block": kept["sequences_per_block"] // 2},
        }
        np.savez(path, **{**kept, **changed[kind]})
    assert path.read_bytes() != data


@pytest.mark.parametrize("kind", [
    "cut", "empty", "flipped", "of an older version", "of another rule", "too short", "impossible"
])  # fmt: skip
def test_damaged_or_foreign_numbers_are_made_anew(
    copy: DatasetIndex, expected: list[list[int]], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    packing_counts(copy, 128, None)
    path = copy.folder / "packing-128.npz"
    _damage(path, kind)
    assert _as_lists(packing_counts(copy, 128, None)) == expected
    assert str(path) in caplog.text
    assert np.load(path)["sequences_per_block"].tolist() == expected[0]


def test_numbers_lie_in_the_run_s_folder_where_the_dataset_s_cannot_be_written(
    copy: DatasetIndex, expected: list[list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Also the superuser cannot replace a folder by a file.
    (copy.folder / "packing-128.npz").mkdir()
    run_dir = tmp_path / "run"
    assert _as_lists(packing_counts(copy, 128, run_dir)) == expected
    assert "next start" in caplog.text, "it is nowhere"
    run_dir.mkdir()
    assert _as_lists(packing_counts(copy, 128, run_dir)) == expected
    assert (run_dir / "packing-128.npz").is_file()
    _remove_shards(copy)
    assert _as_lists(packing_counts(copy, 128, run_dir)) == expected
    with caplog.at_level(logging.WARNING), pytest.raises(DataError):
        packing_counts(copy, 128, None)


def test_a_batch_notices_wrong_numbers(copy: DatasetIndex, expected: list[list[int]]) -> None:
    config = DataConfig(dir=str(copy.folder), seq_len=128)
    split = PackedSplit(copy, "train", config, {128: np.array(expected[0]) + 1})
    with pytest.raises(DataError, match=r"delete packing-128\.npz"):
        split.packing(0, 128)


_START = """
import sys
from pathlib import Path
import numpy as np
from pipeline.data import counts
from pipeline.config.runs import PretrainConfig
from pipeline.config.data import DataConfig
from pipeline.config.train import TrainConfig
from tests.support.steps import eval_loader, train_loader
from pipeline.data.format import read_index
from pipeline.data.run_order import DataRank

def peak_mib():  # ru_maxrss would be at least that of the process that started this one
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("VmHWM:") + 1]) // 1024

before = peak_mib()
index = read_index(sys.argv[1])
data = DataConfig(dir=sys.argv[1], seq_len=512)
config = PretrainConfig(run_dir="x", data=data, train=TrainConfig(global_batch=4096, micro_batch=4))
found = counts.sequences_at(index, [512], None)
loader = train_loader(index, config, DataRank(0, 1), found)
eval_loader(index, config, DataRank(0, 1), found)
[order] = loader.steps.order.segments[0].orders
assert order.num_sequences > 150_000_000
order.locate(order.num_sequences + 12345, 4096)
print(peak_mib() - before)
"""


@pytest.mark.usefixtures("processes")
def test_a_dataset_of_80000_blocks_opens_in_little_memory_reading_no_shard(tmp_path: Path) -> None:
    index = write_large_index(tmp_path / "data", num_shards=400, blocks_per_shard=200)
    counts._keep(plausible_counts(index, 512), [index.folder / "packing-512.npz"], index, 512)
    said = python("-c", _START, index.folder)  # the shards are holes: reading one would raise
    assert int(said.splitlines()[-1]) < 300  # MiB, besides Python and torch
