"""Inputs in an object store: a real S3 server on this machine, with faults on the way to it."""

import gzip
import http.client
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import boto3  # type: ignore[import-untyped]
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
import s3fs  # type: ignore[import-untyped]
from moto.server import ThreadedMotoServer

from data_prep.config import PrepConfig
from data_prep.inputs import find, refuse_changed
from data_prep.run import run
from pipeline.config.load import load
from pipeline.data.format import read_index
from pipeline.errors import ConfigError, DataError, StorageError
from pipeline.runtime import remote

# Not for `make test`: the server and its libraries take a while to start.
pytestmark = pytest.mark.usefixtures("processes")
_BUCKET = "corpora"


class _Faulty(ThreadingHTTPServer):
    """Passes requests on, and spoils the answers to some that ask for a part of a file."""

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.port_behind = port
        self.client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}")
        self.faults: list[str] = []
        self.seen = Counter[str]()
        self.lock = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    server: _Faulty
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        behind = http.client.HTTPConnection("127.0.0.1", self.server.port_behind)
        behind.request(self.command, self.path, headers=dict(self.headers))
        answer = behind.getresponse()
        body = answer.read()
        with self.server.lock:
            has_range = "Range" in self.headers
            fault = self.server.faults.pop() if has_range and self.server.faults else "none"
            self.server.seen[fault] += has_range
        self.send_response(503 if fault == "busy" else answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("date", "server", "connection", "transfer-encoding"):
                self.send_header(name, value)
        self.end_headers()
        if fault == "cut":
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
        elif self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def _server() -> Iterator[int]:
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    yield port
    server.stop()


@pytest.fixture
def store(_server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Faulty]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "for-this-test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore's own tries wait for seconds
    monkeypatch.setattr(remote, "_WAITS_S", (0.01, 0.02, 0.03))
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    proxy = _Faulty(_server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_port}")
    s3fs.S3FileSystem.clear_instance_cache()  # they remember their endpoint
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    proxy.client.create_bucket(Bucket=_BUCKET)
    yield proxy
    proxy.shutdown()
    proxy.server_close()
    thread.join()


def _upload(store: _Faulty, folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            store.client.upload_file(str(path), _BUCKET, f"{folder.name}/{name}")


def _config(prep_config: Path, output: Path, *inputs: str) -> PrepConfig:
    given = ", ".join(inputs)
    return load(
        PrepConfig,
        prep_config,
        [f"output_dir={output}", f"sources=[{{name: s, inputs: [{given}]}}]", "piece_mb=1"],
    ).config


def test_a_store_gives_what_a_folder_gives_whatever_happens_on_the_way(
    store: _Faulty, prep_config: Path, corpus: Path, tmp_path: Path
) -> None:
    lines = corpus.read_text().splitlines()
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "large.jsonl").write_text("\n".join(lines[:400] * 4))  # read in ranges
    (folder / "deep" / "packed.jsonl.gz").write_bytes(
        gzip.compress("\n".join(lines[400:500]).encode())
    )
    pq.write_table(pa.table({"text": lines[500:600]}), folder / "deep" / "table.parquet")
    (folder / "notes.bin").write_bytes(b"\0")
    _upload(store, folder)
    run(_config(prep_config, tmp_path / "a", str(folder)))
    store.faults += ["cut", "none", "busy", "none"] * 2
    run(_config(prep_config, tmp_path / "b", f"s3://{_BUCKET}/texts"))
    assert store.seen["cut"] == 2
    assert store.seen["busy"] == 2
    local, remote_ = read_index(tmp_path / "a"), read_index(tmp_path / "b")
    assert remote_.fingerprint == local.fingerprint


def test_globs_and_single_files(store: _Faulty, prep_config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "globs"
    for name in ("a/x.txt", "b/x.txt", "b/y.txt", "b/z.csv"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    _upload(store, folder)
    address = f"s3://{_BUCKET}/globs"

    def names(*inputs: str) -> list[str]:
        [source] = _config(prep_config, tmp_path, *inputs).sources
        return [file.name for file in find(source).files]

    assert names(f"{address}/*/x.txt") == ["a/x.txt", "b/x.txt"]
    assert names(f"{address}/b/y.txt") == ["y.txt"]
    assert names(f"{address}/a", f"{address}/b/x.txt") == ["a/x.txt", "b/x.txt"]
    assert sorted(names(f"{address}/b/")) == ["x.txt", "y.txt", "z.csv"]


def test_a_file_that_changes_while_it_is_read_is_an_error(
    store: _Faulty, prep_config: Path, tmp_path: Path
) -> None:
    store.client.put_object(Bucket=_BUCKET, Key="changing/a.txt", Body=b"one")
    [source] = _config(prep_config, tmp_path, f"s3://{_BUCKET}/changing").sources
    [file] = find(source).files
    refuse_changed(file)
    store.client.put_object(Bucket=_BUCKET, Key="changing/a.txt", Body=b"two")
    with pytest.raises(DataError, match=r"s3://corpora/changing/a\.txt changed while"):
        refuse_changed(file)


@pytest.mark.parametrize(
    ("address", "error", "message"),
    [
        (f"s3://{_BUCKET}/nothing/", DataError, "'s3://corpora/nothing/' matches no file"),
        ("s3://no-such-bucket/x", DataError, "no-such-bucket"),
        ("gs://bucket/x", ConfigError, "gs://bucket/x: .*install"),
        ("nosuch://bucket/x", ConfigError, "nosuch://bucket/x: .*correct the address"),
    ],
)
def test_what_is_not_there_is_said(
    store: _Faulty, prep_config: Path, tmp_path: Path, address: str, error: type, message: str
) -> None:
    [source] = _config(prep_config, tmp_path, address).sources
    with pytest.raises(error, match=message):
        find(source)


def test_a_store_that_is_gone_is_asked_a_few_times(
    store: _Faulty, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.client.put_object(Bucket=_BUCKET, Key="gone.txt", Body=b"text")
    with remote.open_file(f"s3://{_BUCKET}/gone.txt") as file:
        store.faults += ["cut"] * 4
        with pytest.raises(StorageError, match=r"s3://corpora/gone\.txt cannot .* after 4 tries"):
            file.read()
    assert caplog.text.count("tried again in") == 3
