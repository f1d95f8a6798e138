"""Datasets in object stores: the batches of a folder, and every way in which a store can fail."""

import json
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launch.preflight.check import check_dataset
from launch.submit import mounts_of, require_index
from pipeline.config.data import DataConfig
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.data.cache import BlockCache
from pipeline.data.counts import sequences_at
from pipeline.data.format import DatasetIndex, read_index
from pipeline.data.objects import ObjectStore, find_index, open_index
from pipeline.data.reader import BlockReader
from pipeline.data.record import read_batches
from pipeline.errors import EXIT_FAILED_RETRY, ConfigError, DataError, StorageError
from pipeline.inspect.coverage import coverage
from pipeline.runtime import remote
from pipeline.use.train_dataset import TrainDataset
from tests.support.damage import flip
from tests.support.ranks import CONFIG, Ranks
from tests.support.steps import Row, open_steps, step_on
from tests.support.stores import BUCKET, Store


@pytest.fixture
def published(dataset: DatasetIndex, tmp_path: Path) -> Path:
    """What is published of a dataset, in a folder of this test's own name."""
    folder = tmp_path / f"{tmp_path.name}-data"
    shutil.copytree(dataset.folder, folder, ignore=shutil.ignore_patterns("work", "*.json"))
    for name in ("index.json", "report.json"):
        shutil.copy(dataset.folder / name, folder / name)
    return folder


def _config(tmp_path: Path, address: str, *overrides: str) -> PretrainConfig:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    given = [f"data.dir={address}", f"data.stage_dir={tmp_path / 'node'}", *overrides]
    return load(PretrainConfig, path, given).config


def _data(tmp_path: Path, address: str, **more: Any) -> DataConfig:
    return DataConfig(dir=address, stage_dir=str(tmp_path / "node"), **more)


def _rows(index: DatasetIndex, config: PretrainConfig, world: int) -> list[tuple[list[Row], int]]:
    steps = open_steps(index, config)
    return [step_on(steps, cursor, world) for cursor in range(0, 48, 8)]


def _cache_of(index: DatasetIndex) -> BlockCache:
    assert isinstance(index.store, ObjectStore)
    assert index.cache is not None
    return index.cache


@pytest.mark.parametrize("world", [1, 2])
def test_same_batches(dataset: DatasetIndex, published: Path, tmp_path: Path, world: int) -> None:
    largest = int(dataset.blocks.length.max())
    # Room for all blocks, for a few, and for none.
    for bound in (1.0, 6 * largest / 1e9, largest / 2e9):
        config = _config(tmp_path, f"file://{published}", f"data.stage_gb={bound}")
        index = open_index(config.data)
        assert _rows(index, config, world) == _rows(dataset, config, world)
        cache = _cache_of(index)
        assert sum(p.stat().st_size for p in cache.folder.glob("*/*")) <= bound * 1e9
        shutil.rmtree(cache.folder)


def test_fetched_once(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched, read = Counter[str](), remote.read_range

    def counted(address: str, start: int, end: int) -> bytes:
        fetched["bytes"] += end - start
        return read(address, start, end)

    monkeypatch.setattr(remote, "read_range", counted)
    config = _config(tmp_path, f"file://{published}")
    index = open_index(config.data)
    counts = sequences_at(index, [64], tmp_path)  # of these the run's folder keeps the result
    trained = index.blocks.length[index.split_blocks("train")]
    epoch = int(counts[64][index.split_blocks("train")].sum())

    def run(sequences: int) -> float:
        """Read so many sequences; return bytes fetched for a token of the training text."""
        fetched.clear()
        steps = open_steps(open_index(config.data), config)
        for cursor in range(0, sequences // 8 * 8, 8):
            step_on(steps, cursor, 1)
        return fetched["bytes"] / index.totals["train"]["tokens"]

    cold, warm = run(epoch), run(epoch)
    ends = sum(
        shard.num_bytes - int((index.blocks.offset + index.blocks.length)[rows].max())
        for number, shard in enumerate(index.shards)
        if shard.split == "train" and len(rows := np.flatnonzero(index.blocks.shard == number))
    )
    print(f"{cold:.2f} bytes a token with a cold cache, {warm:.2f} with a warm one")
    assert cold == (trained.sum() + ends) / index.totals["train"]["tokens"]
    # What a second opening reads are index and tokenizer, from this node.
    assert warm == 0


def test_commands_with_a_store(dataset: DatasetIndex, published: Path, tmp_path: Path) -> None:
    address = f"file://{published}"
    with pytest.raises(ConfigError, match=r"data\.stage_dir"):
        DataConfig(dir=address)
    with pytest.raises(DataError, match="object store"):
        read_index(address)
    config = _config(tmp_path, address)
    seen, local = coverage(config), coverage(_config(tmp_path, str(dataset.folder)))
    assert seen.datasets[0].sources == local.datasets[0].sources
    assert seen.stretches == local.stretches
    assert check_dataset(config.data, 4, "seed") == (dataset.fingerprint, [])
    arguments = {"seq_len": 64, "global_batch": 8}
    ours = TrainDataset(address, stage_dir=str(tmp_path / "node"), **arguments)
    one, other = next(iter(ours)), next(iter(TrainDataset(dataset.folder, **arguments)))
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert find_index(address).fingerprint == dataset.fingerprint
    require_index(address, "/elsewhere")
    assert mounts_of("/work", address, "runs") == ("/work",)
    (published / "index.json").unlink()
    assert find_index(address) is None
    with pytest.raises(ConfigError, match=r"no index\.json; .*prep publish"):
        require_index(address, "/elsewhere")
    with pytest.raises(DataError, match=r"index\.json .*publish"):
        open_index(config.data)


def test_small_files(published: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = _data(tmp_path, f"file://{published}/")
    folder = open_index(data).folder
    assert folder.is_relative_to(tmp_path / "node")
    before = {path.name: path.stat().st_ino for path in folder.iterdir() if path.is_file()}
    assert before.keys() >= {"index.json", "index.npz", "tokenizer.model", "report.json"}
    assert open_index(data).folder == folder
    (folder / "index.npz").write_bytes(b"damaged")
    assert "copied again" not in caplog.text
    open_index(data)
    assert "copied again from file:///" in caplog.text
    assert "index.npz is damaged" in caplog.text
    # One that another dataset replaced has a folder of its own.
    body = json.loads((published / "index.json").read_bytes())
    (published / "index.json").write_text(json.dumps(body))
    assert open_index(data).folder != folder


def test_a_dataset_that_does_not_fit_together_is_refused(published: Path, tmp_path: Path) -> None:
    data = _data(tmp_path, f"file://{published}")
    shard = next((published / "shards").glob("*.tar"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=rf"{shard.name} .*{len(whole) - 1} bytes"):
        open_index(data)
    shard.unlink()
    with pytest.raises(DataError, match=rf"{shard.name} .*prep publish"):
        open_index(data)
    shard.write_bytes(whole)
    shutil.copy(shard, published / "shards" / "more.tar")
    with pytest.raises(DataError, match=r"shards/more\.tar"):
        open_index(data)
    (published / "shards" / "more.tar").unlink()
    (published / "index.npz").write_bytes(b"other")
    shutil.rmtree(tmp_path / "node")
    for _ in range(2):
        with pytest.raises(DataError, match=r"fit .*published"):
            open_index(data)


def test_a_stage_dir_that_cannot_be_used(published: Path, tmp_path: Path) -> None:
    (tmp_path / "node").write_text("a file")
    with pytest.raises(ConfigError, match=r"data\.stage_dir, .*/node.*choose"):
        open_index(_data(tmp_path, f"file://{published}"))


def test_damage_on_disk(published: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = _data(tmp_path, f"file://{published}")
    index = open_index(data)
    reader, cache = BlockReader(index), _cache_of(index)
    ends = reader.block(0).doc_ends.tolist()
    [path] = cache.folder.glob("*/*")
    flip(path, int(index.blocks.member_offset[0, 1] - index.blocks.offset[0]) + 130)
    damaged = path.read_bytes()
    assert (reader.doc_ends(0).tolist(), reader.block(0).doc_ends.tolist()) == (ends, ends)
    assert path.read_bytes() != damaged
    assert cache.counts().damaged_blocks == 1
    with caplog.at_level("INFO"):
        open_index(data)
    assert "1 damaged blocks" in caplog.text


def _blocks(index: DatasetIndex, rows: Iterable[int]) -> list[bytes]:
    reader = BlockReader(index)
    return [reader.block(row).tokens.tobytes() for row in rows]


def test_faults_of_a_store_change_no_block(
    store: Store, dataset: DatasetIndex, published: Path, tmp_path: Path
) -> None:
    store.upload(published)
    address = f"s3://{BUCKET}/{published.name}"
    index = open_index(_data(tmp_path, address))
    store.faults += ["none", "cut", "none", "flip", "busy", "cut", "none"]
    rows = range(len(index.blocks))
    assert _blocks(index, rows) == _blocks(dataset, rows)
    assert store.seen["cut"] == 2
    assert store.seen["busy"] == store.seen["flip"] == 1
    before = store.part_bytes
    assert _blocks(open_index(_data(tmp_path, address)), rows) == _blocks(dataset, rows)
    assert store.part_bytes == before, "all blocks were kept"


def test_gone_and_changed_objects_are_told(store: Store, published: Path, tmp_path: Path) -> None:
    store.upload(published)
    index = open_index(_data(tmp_path, f"s3://{BUCKET}/{published.name}"))
    store.faults += ["busy"] * 4
    with pytest.raises(StorageError, match=rf"s3://{BUCKET}/.*\.tar .* 4 ") as found:
        _blocks(index, [0])
    assert found.value.exit_code == EXIT_FAILED_RETRY
    _blocks(index, [0])
    store.upload(published)
    index = open_index(_data(tmp_path, f"s3://{BUCKET}/{published.name}"))
    info = index.shards[0]
    content = bytearray((published / info.file).read_bytes())
    _blocks(index, [0])
    content[int(index.blocks.member_offset[0, 0]) + 200] ^= 1
    content[int(index.blocks.member_offset[1, 0]) + 200] ^= 1
    key = f"{published.name}/{info.file}"
    store.client.put_object(Bucket=BUCKET, Key=key, Body=bytes(content))
    _blocks(index, [0])  # kept, and right
    with pytest.raises(DataError, match=r"s3://.*\.tokens\.npy .*replaced"):
        _blocks(index, [1])
    store.client.put_object(Bucket=BUCKET, Key=key, Body=bytes(content[:1000]))
    with pytest.raises(DataError, match=r"s3://.*\.tar .*1000 bytes.* \d+"):
        _blocks(index, [1])
    store.client.delete_object(Bucket=BUCKET, Key=key)
    with pytest.raises(DataError, match=r"s3://.*\.tar .*prep publish"):
        _blocks(index, [1])


def test_a_run_with_a_worker_trains_on_a_store(
    store: Store, dataset: DatasetIndex, published: Path, tmp_path: Path, start_ranks: type[Ranks]
) -> None:
    store.upload(published)
    address = f"s3://{BUCKET}/{published.name}"
    overrides = ["train.num_steps=12", "data.workers=1", "data.stage_gb=0.0002"]
    ranks = start_ranks(tmp_path / "run", dataset, *overrides, f"data.dir={address}",
                        f"data.stage_dir={tmp_path / 'node'}", world_size=1)  # fmt: skip
    assert ranks.wait(400) == [0], ranks.output
    steps = open_steps(dataset, _config(tmp_path, str(dataset.folder), *overrides))
    found = [(batch.cursor, batch.hash) for batch in read_batches(ranks.run_dir)]
    assert found == [(cursor, step_on(steps, cursor, 1)[1]) for cursor in range(0, 96, 8)]
    assert f"shards are read from {address}" in ranks.output
    kept = sum(path.stat().st_size for path in (tmp_path / "node").glob("*/blocks/*/*"))
    assert 0 < kept <= 200_000
