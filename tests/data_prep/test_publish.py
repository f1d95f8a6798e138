"""Published datasets: complete or not there, sent once, and never over something else."""

import json
import shutil
from pathlib import Path

import pytest

from data_prep.commands import VERBS
from data_prep.config import PrepConfig
from data_prep.publish import RECEIPT_FILE, Sent, problems, publish
from pipeline.config.data import DataConfig
from pipeline.config.load import load
from pipeline.data import format as dataset_format
from pipeline.data.format import DatasetIndex, read_index
from pipeline.data.objects import find_index, open_index
from pipeline.errors import ConfigError, DataError
from pipeline.runtime import remote
from tests.support.damage import flip
from tests.support.stores import BUCKET, Store


@pytest.fixture
def copy(dataset: DatasetIndex, tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    shutil.copytree(dataset.folder, folder, ignore=shutil.ignore_patterns("work"))
    return folder


@pytest.fixture
def uploaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what is sent, without receipts."""
    names: list[str] = []
    real = remote.upload

    def upload(path: Path, address: str) -> None:
        if not address.endswith(RECEIPT_FILE):
            names.append(address.rpartition("/")[2])
        real(path, address)

    monkeypatch.setattr(remote, "upload", upload)
    return names


def _expected(folder: Path) -> set[str]:
    index = read_index(folder)
    names = {shard.file.rpartition("/")[2] for shard in index.shards}
    others = [path.name for name in ("datasheet.*", "packing-*.npz") for path in folder.glob(name)]
    return {*names, *others, "index.json", "index.npz", index.tokenizer_file, "report.json"}


def test_a_dataset_is_published_once(copy: Path, tmp_path: Path, uploaded: list[str]) -> None:
    address = f"file://{tmp_path}/far/away"
    sent = publish(copy, f"{address}/")
    assert set(uploaded) == _expected(copy)
    assert uploaded[-1] == "index.json"
    assert sent.files == len(uploaded)
    assert list(problems(address)) == []
    index = open_index(DataConfig(dir=address, stage_dir=str(tmp_path / "node")))
    assert index.fingerprint == read_index(copy).fingerprint
    uploaded.clear()
    assert publish(copy, address) == Sent(0, 0, sent.files)
    assert uploaded == []


def test_an_interrupted_call_is_continued(
    copy: Path, tmp_path: Path, uploaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, real = f"file://{tmp_path}/target", remote.upload
    last = sorted(path.name for path in (copy / "shards").glob("*.tar"))[-1]

    def interrupted(path: Path, address: str) -> None:
        if path.name == last:
            raise KeyboardInterrupt
        real(path, address)

    with monkeypatch.context() as patch:
        patch.setattr(remote, "upload", interrupted)
        with pytest.raises(KeyboardInterrupt):
            publish(copy, address)
    assert find_index(address) is None
    assert "index.json" not in uploaded
    first = set(uploaded)
    uploaded.clear()
    sent = publish(copy, address)
    assert set(uploaded) == _expected(copy) - first
    assert last in uploaded
    assert sent.were_there == len(first)
    assert list(problems(address)) == []


def test_nothing_is_sent_twice(copy: Path, tmp_path: Path, uploaded: list[str]) -> None:
    target = tmp_path / "target"
    address = f"file://{target}"
    publish(copy, address)
    receipt = json.loads((target / RECEIPT_FILE).read_bytes())
    (target / RECEIPT_FILE).write_text(json.dumps(receipt | {"read_back": {}}))
    (target / "index.json").unlink()
    # A copy that was killed, and one that is whole and wrong.
    shards = sorted((target / "shards").glob("*.tar"))
    (target / "shards" / f"{shards[0].name}.part").write_bytes(b"half")
    shards[0].unlink()
    flip(shards[1], 1000)
    uploaded.clear()
    publish(copy, address)
    assert set(uploaded) == {shards[0].name, shards[1].name, "index.json"}
    assert list(problems(address)) == []
    # What changed after it was read back is sent again.
    flip(shards[0], 1000)
    [found] = problems(address)
    assert f"{shards[0].name} is damaged: its sha256 is" in found
    uploaded.clear()
    publish(copy, address)
    assert uploaded == [shards[0].name]


def test_an_address_that_holds_something_else_is_refused(copy: Path, tmp_path: Path) -> None:
    address, target = f"file://{tmp_path}/target", tmp_path / "target"
    publish(copy, address)
    other = tmp_path / "other"
    shutil.copytree(copy, other)
    body = json.loads((other / "index.json").read_bytes())
    del body["fingerprint"]
    body["unigram_entropy_nats"] += 0.01
    body["fingerprint"] = dataset_format._fingerprint(body)
    (other / "index.json").write_text(json.dumps(body))
    ours, theirs = (read_index(folder).fingerprint for folder in (copy, other))
    with pytest.raises(ConfigError, match=f" {ours}; .* {theirs}"):
        publish(other, address)
    (target / "index.json").unlink()
    with pytest.raises(ConfigError, match="holds a part of another dataset"):
        publish(other, address)
    (target / RECEIPT_FILE).unlink()
    with pytest.raises(ConfigError, match=r"\d+ files .*datasheet"):
        publish(copy, address)
    with pytest.raises(ConfigError, match=r"'/tmp' .*expected .*s3://"):
        publish(copy, "/tmp")


def test_a_damaged_dataset_is_not_published(copy: Path, tmp_path: Path) -> None:
    shard = next((copy / "shards").glob("*.tar"))
    flip(shard, 1000)
    with pytest.raises(DataError, match=rf"{shard.name} .*prep verify"):
        publish(copy, f"file://{tmp_path}/target")
    assert not (tmp_path / "target" / "index.json").exists()


def test_output_dir_in_a_store_is_refused_with_what_to_do(prep_config: Path) -> None:
    with pytest.raises(ConfigError, match=r"leases .*prep publish FOLDER s3://b/data"):
        load(PrepConfig, prep_config, ["output_dir=s3://b/data"])


@pytest.mark.parametrize("verb", ["datasheet", "export"])
def test_commands_that_need_a_folder_say_so(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    next(each for each in VERBS if each.name == verb).add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["s3://bucket/data", "--out", "x"][: 3 if verb == "export" else 1])
    assert "s3://bucket/data is in a store: copy it to a folder" in capsys.readouterr().err


def test_a_store_is_sent_to_through_faults(store: Store, copy: Path, tmp_path: Path) -> None:
    address = f"s3://{BUCKET}/{tmp_path.name}/mine"
    store.send_faults += ["none", "busy", "cut", "none", "none"]
    store.faults += ["flip", "cut", "none"]
    assert publish(copy, address).were_there == 0
    assert store.send_faults == store.faults == []
    assert store.sent[-1].endswith("/mine/index.json")
    names = {name.rpartition("/")[2] for name in store.names(f"{tmp_path.name}/mine/")}
    assert names == _expected(copy) | {RECEIPT_FILE}
    assert list(problems(address)) == []
    store.client.put_object(Bucket=BUCKET, Key=f"{tmp_path.name}/mine/report.json", Body=b"{}")
    assert publish(copy, address).files == 1
