"""Inputs in an object store: a real S3 server on this machine, with faults on the way to it."""

import gzip
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from data_prep.config import PrepConfig
from data_prep.inputs import find, refuse_changed
from data_prep.run import run
from pipeline.data.format import read_index
from pipeline.errors import ConfigError, DataError, StorageError
from pipeline.runtime import remote
from tests.support.prepare import config_of
from tests.support.stores import BUCKET, Store


def _config(prep_config: Path, output: Path, *inputs: str) -> PrepConfig:
    return config_of(prep_config, output, ", ".join(inputs), "piece_mb=1")


def test_same_as_a_folder(store: Store, prep_config: Path, corpus: Path, tmp_path: Path) -> None:
    lines = corpus.read_text().splitlines()
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "large.jsonl").write_text("\n".join(lines[:400] * 4))  # read in ranges
    (folder / "deep" / "packed.jsonl.gz").write_bytes(
        gzip.compress("\n".join(lines[400:500]).encode())
    )
    pq.write_table(pa.table({"text": lines[500:600]}), folder / "deep" / "table.parquet")
    (folder / "notes.bin").write_bytes(b"\0")
    store.upload(folder)
    run(_config(prep_config, tmp_path / "a", str(folder)))
    store.faults += ["cut", "none", "busy", "none"] * 2
    run(_config(prep_config, tmp_path / "b", f"s3://{BUCKET}/texts"))
    assert (store.seen["cut"], store.seen["busy"]) == (2, 2)
    local, remote_ = read_index(tmp_path / "a"), read_index(tmp_path / "b")
    assert remote_.fingerprint == local.fingerprint


def test_globs_single_files_and_changes(store: Store, prep_config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "globs"
    for name in ("a/x.txt", "b/x.txt", "b/y.txt", "b/z.csv"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    store.upload(folder)
    address = f"s3://{BUCKET}/globs"

    def names(*inputs: str) -> list[str]:
        [source] = _config(prep_config, tmp_path, *inputs).sources
        return [file.name for file in find(source).files]

    assert names(f"{address}/*/x.txt") == ["a/x.txt", "b/x.txt"]
    assert names(f"{address}/*") == ["a/x.txt", "b/x.txt", "b/y.txt", "b/z.csv"]  # its folders
    assert names(f"{address}/b/y.txt") == ["y.txt"]
    assert names(f"{address}/a", f"{address}/b/x.txt") == ["a/x.txt", "b/x.txt"]
    assert sorted(names(f"{address}/b/")) == ["x.txt", "y.txt", "z.csv"]
    store.client.put_object(Bucket=BUCKET, Key="changing/a.txt", Body=b"one")
    [source] = _config(prep_config, tmp_path, f"s3://{BUCKET}/changing").sources
    [file] = find(source).files
    refuse_changed(file)
    store.client.put_object(Bucket=BUCKET, Key="changing/a.txt", Body=b"two")
    with pytest.raises(DataError, match=r"s3://corpora/changing/a\.txt changed"):
        refuse_changed(file)


@pytest.mark.parametrize(("address", "error", "message"), [
    (f"s3://{BUCKET}/nothing/", DataError, "'s3://corpora/nothing/' matches no file"),
    ("s3://no-such-bucket/x", DataError, "no-such-bucket"),
    ("gs://bucket/x", ConfigError, "gs://bucket/x: .*install"),
    ("nosuch://bucket/x", ConfigError, "nosuch://bucket/x: .*correct the address"),
])  # fmt: skip
def test_what_is_not_there_is_said(
    store: Store, prep_config: Path, tmp_path: Path, address: str, error: type, message: str
) -> None:
    [source] = _config(prep_config, tmp_path, address).sources
    with pytest.raises(error, match=message):
        find(source)


def test_a_gone_store_is_asked_again(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.client.put_object(Bucket=BUCKET, Key="gone.txt", Body=b"text")
    with remote.open_file(f"s3://{BUCKET}/gone.txt") as file:
        store.faults += ["cut"] * 4
        with pytest.raises(StorageError, match=r"s3://corpora/gone\.txt .* 4 "):
            file.read()
    assert caplog.text.count("tried again in") == 3
