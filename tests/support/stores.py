"""A real S3 server on this machine, with faults on the way to it; the fixture is `store`."""

import http.client
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pipeline.runtime import remote

BUCKET = "corpora"


class Store(ThreadingHTTPServer):
    """Passes requests on, and spoils some: those for a part of an object, and those that send one.

    A fault is "cut" (the connection ends in the middle), "busy" (503), "flip" (one bit of the
    answer is another) or "none"; the last one in a list comes first.
    """

    def __init__(self, port: int, client: Any) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.port_behind = port
        self.client = client  # asks the server itself, without faults
        self.faults: list[str] = []
        self.send_faults: list[str] = []
        self.seen = Counter[str]()  # faults of requests for a part
        self.sent: list[str] = []  # paths of requests that sent something
        self.part_bytes = 0  # of answers to requests for a part
        self.lock = threading.Lock()

    def upload(self, folder: Path) -> None:
        """Put all files of a folder below its name."""
        for path in folder.rglob("*"):
            if path.is_file():
                name = path.relative_to(folder).as_posix()
                self.client.upload_file(str(path), BUCKET, f"{folder.name}/{name}")

    def names(self, prefix: str) -> list[str]:
        """List the objects below a prefix, without it."""
        listed = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        return [each["Key"].removeprefix(prefix) for each in listed]


class _Handler(BaseHTTPRequestHandler):
    server: Store
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server, body = self.server, self._body()
        with server.lock:
            has_range = "Range" in self.headers
            faults = server.faults if has_range else server.send_faults if body else []
            fault = faults.pop() if faults else "none"
            server.seen[fault] += has_range
            if body:
                server.sent.append(self.path)
        if body and fault == "cut":
            self.close_connection = True
            return
        behind = http.client.HTTPConnection("127.0.0.1", server.port_behind)
        behind.request(self.command, self.path, body, dict(self.headers))
        answer = behind.getresponse()
        content = answer.read()
        if has_range:
            with server.lock:
                server.part_bytes += len(content)
        self.send_response(503 if fault == "busy" else answer.status)
        length = str(len(content))
        for name, value in answer.getheaders():
            if name.lower() == "content-length":
                length = value  # of HEAD, too
            elif name.lower() not in ("date", "server", "connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if fault == "flip":
            content = content[:-1] + bytes([content[-1] ^ 1])
        if fault == "cut":
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
        elif self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _body(self) -> bytes:
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        body = b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            del self.headers["Transfer-Encoding"]
        return body

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def behind() -> Iterator[int]:
    """Start the server; gives its port."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    yield port
    server.stop()


@contextmanager
def serve(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Have addresses s3://BUCKET/... lead to the server, through what makes the faults."""
    import boto3  # type: ignore[import-untyped]
    import s3fs  # type: ignore[import-untyped]

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "for-this-test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore's own tries wait for seconds
    monkeypatch.setattr(remote, "_WAITS_S", (0.01, 0.02, 0.03))
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    proxy = Store(port, boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_port}")
    s3fs.S3FileSystem.clear_instance_cache()  # they remember their endpoint
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    proxy.client.create_bucket(Bucket=BUCKET)
    yield proxy
    proxy.shutdown()
    proxy.server_close()
    thread.join()
