"""Damage to a dataset: every kind is refused, with shard and member by name."""

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from data_prep.verify import verify
from pipeline.config.data import DataConfig
from pipeline.data import format as dataset_format
from pipeline.data.counts import sequences_at
from pipeline.data.dataset import PackedSplit
from pipeline.data.format import DatasetIndex, read_index
from pipeline.data.reader import BlockReader
from pipeline.errors import DataError
from tests.support.damage import flip


@pytest.fixture
def copy(dataset: DatasetIndex, tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(dataset.folder, folder)
    return folder


def _shard(folder: Path) -> Path:
    return folder / read_index(folder).shards[0].file


def _read_everything(folder: Path) -> None:
    reader = BlockReader(read_index(folder))
    reader.check_all(range(len(reader.index.blocks)))


def test_intact_and_unfinished_datasets(dataset: DatasetIndex, tmp_path: Path) -> None:
    _read_everything(dataset.folder)
    assert verify(dataset.folder) == []
    with pytest.raises(DataError, match="postnorm prep run"):
        read_index(tmp_path)


def test_what_is_claimed_of_the_whole_is_derived_again(copy: Path) -> None:
    body = json.loads((copy / "index.json").read_bytes())
    del body["fingerprint"]
    body["totals"]["train"]["tokens"] += 1
    body["totals"]["eval"]["documents"] += 1
    body["unigram_entropy_nats"] += 0.01
    # A fingerprint that fits, as if the writer had counted wrong.
    body["fingerprint"] = dataset_format._fingerprint(body)
    (copy / "index.json").write_text(json.dumps(body))
    found = "\n".join(verify(copy))
    for text in ("train: ", " tokens, the index says ", "eval: ", " documents, the index says ",
                 " nats, the index says ", "report.json: fingerprint is "):  # fmt: skip
        assert text in found


def test_a_report_that_does_not_add_up(copy: Path) -> None:
    path = copy / "report.json"
    report = json.loads(path.read_bytes())
    report["stages"]["normalise"]["documents_out"] -= 1
    path.write_text(json.dumps(report))
    first, second = verify(copy)
    assert "documents do not add up in stage normalise" in first
    assert "documents do not add up in stage filter" in second
    path.unlink()
    [gone] = verify(copy)
    assert "report.json cannot be read" in gone


def test_every_flipped_byte_is_found(copy: Path) -> None:
    path = _shard(copy)
    size = path.stat().st_size
    with tarfile.open(path) as tar:
        members = tar.getmembers()
    # Headers, payloads and padding of the first members, then anywhere, then the end marker.
    places = [m.offset + 5 for m in members[:8]] + [m.offset_data + 200 for m in members[:8]]
    places += [m.offset_data + m.size for m in members[:8] if m.size % 512]
    places += [*np.random.default_rng(0).integers(0, size, 20).tolist(), size - 1, size - 700]
    for place in places:
        flip(path, place)
        with pytest.raises(DataError, match=rf"shard {path}.*member.*train-000000-\d{{4}}"):
            _read_everything(copy)
        problems = verify(copy)
        assert problems
        assert str(path) in problems[0]
        flip(path, place)
    assert verify(copy) == []


def test_damaged_shard_is_refused(copy: Path) -> None:
    path = _shard(copy)
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        member = tar.getmembers()[6]
    for damaged, message in (
        (whole[: member.offset], f"it is cut at or before member {member.name}"),
        (whole + bytes(512), "all members are complete, but its end changed"),
        (b"", "has 0 bytes"), (None, "does not exist"),
    ):  # fmt: skip
        path.write_bytes(damaged or b"")
        if damaged is None:
            path.unlink()
        with pytest.raises(DataError, match=f"shard {path}.*{message}"):
            _read_everything(copy)
        [problem] = verify(copy)
        assert message in problem


@pytest.mark.parametrize("name", ["index.json", "index.npz", "tokenizer.model"])
def test_damaged_index_or_tokenizer_is_refused(copy: Path, name: str) -> None:
    path = copy / name
    # Between the arrays of an .npz are headers, some of whose bits say nothing.
    within = {"index.json": b"vocab_size", "tokenizer.model": b"\n",
              "index.npz": read_index(copy).blocks.sha256[0].tobytes()}  # fmt: skip
    flip(path, path.read_bytes().index(within[name]) + 14)
    if name == "tokenizer.model":
        assert "tokenizer.model is damaged" in verify(copy)[0]
    else:
        with pytest.raises(DataError, match=f"{path} (was changed|is damaged)"):
            read_index(copy)


def test_reading_compiles_no_python(dataset: DatasetIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise SystemError("AST constructor recursion depth mismatch")

    monkeypatch.setattr("ast.literal_eval", fail)  # so it ends now and then among threads
    assert len(BlockReader(dataset).block(0).tokens) == dataset.blocks.num_tokens[0]


def test_a_block_that_changes_under_a_running_job_is_not_used_again(copy: Path) -> None:
    index = read_index(copy)
    config = DataConfig(dir=str(copy), seq_len=64, window_blocks=1)
    split = PackedSplit(index, "train", config, sequences_at(index, [64], None))
    kept = [split.block(position).tokens.copy() for position in range(3)]
    with tarfile.open(_shard(copy)) as tar:
        flip(_shard(copy), tar.getmembers()[0].offset_data + 150)
    with pytest.raises(DataError, match=r"tokens\.npy .*sha256"):
        split.block(0)
    assert split.block(2).tokens.tolist() == kept[2].tolist()


def test_blocks_that_are_never_checked_still_have_sound_document_ends(copy: Path) -> None:
    with tarfile.open(_shard(copy)) as tar:
        tokens, docs = tar.getmembers()[:2]
    flip(_shard(copy), tokens.offset_data + 150)
    index = read_index(copy)
    with pytest.raises(DataError, match=f"member {tokens.name} is damaged"):
        BlockReader(index).block(0)
    changed = BlockReader(index, check_blocks="never").block(0)
    assert len(changed.tokens) == index.blocks.num_tokens[0]
    for member, at in ((docs, 150), (tokens, 2)):
        flip(_shard(copy), member.offset_data + at)
        with pytest.raises(DataError, match=f"member {member.name} is damaged"):
            BlockReader(index, check_blocks="never").block(0)
        flip(_shard(copy), member.offset_data + at)


def test_a_shard_that_vanishes_or_shrinks_later_is_named(copy: Path) -> None:
    reader = BlockReader(read_index(copy))
    reader.block(0)
    with _shard(copy).open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(DataError, match=r"expects .*cut .*member"):
        reader.block(1)
    _shard(copy).unlink()
    with pytest.raises(DataError, match="does not exist"):
        reader.block(1)
