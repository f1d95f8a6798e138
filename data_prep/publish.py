"""Sends a finished dataset to an object store, and reads back what came there.

    ADDRESS/published.json    which dataset this is, written first; versions of what was read back
    ADDRESS/shards/*.tar, index.npz, the tokenizer, report.json, datasheet.*, packing-*.npz
    ADDRESS/index.json        written last: whoever reads it finds all that it lists

An object is not sent again if it has the right size, and either the version (ETag, else time of
change) that it had when it was read back, or the right hash now. `work/` is not sent.
"""

import hashlib
import json
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.datasheet.gather import REPORT_FILE
from pipeline.data.format import INDEX_FILE, DatasetIndex, read_index
from pipeline.data.objects import find_index
from pipeline.data.reader import refuse_unlisted
from pipeline.errors import ConfigError, DataError, StorageError
from pipeline.runtime import remote
from pipeline.runtime.files import sha256_file
from pipeline.runtime.remote import RemoteFile, is_address
from pipeline.runtime.summary import progress

RECEIPT_FILE = "published.json"
_MORE = ("index.npz", REPORT_FILE, "datasheet.html", "datasheet.md", "packing-*.npz")
_THREADS = 4
"""Each has one file in work; a store's package sends a large one in parts at the same time."""
_RECORD_EVERY_S = 10.0
_CHUNK_BYTES = 1 << 24


class Sent(NamedTuple):
    """What `publish` did."""

    files: int
    num_bytes: int
    were_there: int
    """Files that were there and were right."""


def publish(dataset: Path, address: str) -> Sent:
    """Send a dataset, or what an interrupted call did not send; every object is read back.

    Raises:
        ConfigError: this is not an address, or something else is there.
        DataError: the dataset is not finished or is damaged, or the address cannot be written.
        StorageError: the store does not answer, or gives back something else than was sent.
    """
    if not is_address(address):
        raise ConfigError(f"{address!r} is not an address: expected such as s3://bucket/path")
    index = read_index(dataset)
    refuse_unlisted(index)
    *files, last = _files(index)
    target = _Target(address.rstrip("/"), index)
    total = sum(file.num_bytes for file in (*files, last))
    with progress("publish", total, "B", stays=True) as advance:
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="publish")
        try:
            for job in as_completed([pool.submit(target.send, file) for file in files]):
                advance(job.result().num_bytes)
                target.record(after_s=_RECORD_EVERY_S)
        finally:
            pool.shutdown(cancel_futures=True)
            target.record()
        advance(target.send(last).num_bytes)
    num_sent = len(target.sent)
    num_bytes = sum(file.num_bytes for file in target.sent)
    return Sent(num_sent, num_bytes, len(files) + 1 - num_sent)


def problems(address: str) -> Iterator[str]:
    """Read all that is published at an address, and yield what differs from its index.

    Raises:
        DataError: there is no finished dataset, or files are missing.
        StorageError: the store does not answer.
    """
    index = find_index(address)
    if index is None:
        raise DataError(f"{address} holds no finished dataset: there is no {INDEX_FILE}")
    with progress("verify", len(index.shards), "shard") as advance:
        for shard in index.shards:
            found = _sha256_at(f"{address.rstrip('/')}/{shard.file}")
            if found != shard.sha256:
                yield (
                    f"{address}/{shard.file} is damaged: its sha256 is {found}, the index expects "
                    f"{shard.sha256}; run `postnorm prep publish` again, which sends it again"
                )
            advance(1)


@dataclass(frozen=True)
class _PublishedFile:
    name: str
    path: Path
    num_bytes: int
    sha256: str


def _files(index: DatasetIndex) -> list[_PublishedFile]:
    """List what is sent, the index last; of shards and tokenizer with the hash of the index."""
    hashes = {shard.file: shard.sha256 for shard in index.shards}
    hashes[index.tokenizer_file] = index.tokenizer_sha256
    hashes |= {path.name: sha256_file(path) for name in _MORE for path in index.folder.glob(name)}
    hashes[INDEX_FILE] = hashlib.sha256(index.content).hexdigest()
    files = []
    for name, sha256 in hashes.items():
        path = index.folder / name
        if not path.is_file():
            raise DataError(f"{path} does not exist; `postnorm prep verify {index.folder}`")
        files.append(_PublishedFile(name, path, path.stat().st_size, sha256))
    return files


class _Target:
    """An address, what is there, and what was read back; files are sent by several threads."""

    def __init__(self, address: str, index: DatasetIndex) -> None:
        """Look at what is there; refuse an address that holds anything else than this dataset."""
        self.sent: list[_PublishedFile] = []
        self._address, self._fingerprint = address, index.fingerprint
        self._recorded_s = 0.0
        self._there = {name: file for file, name, _ in remote.list_files(address)}
        receipt: dict[str, Any] = {}
        for name in (INDEX_FILE, RECEIPT_FILE):
            if name not in self._there:
                continue
            found = _read_json(self._there[name])
            if found.get("fingerprint") != index.fingerprint:
                state = "holds" if name == INDEX_FILE else "holds a part of"
                raise ConfigError(
                    f"{address} {state} another dataset, of fingerprint "
                    f"{found.get('fingerprint')}; {index.folder} has {index.fingerprint}. Choose "
                    "another address, or remove what is there"
                )
            receipt |= found
        if self._there and not receipt:
            raise ConfigError(
                f"{address} holds {len(self._there)} files and no dataset, such as "
                f"{min(self._there)}; choose an empty folder of the store"
            )
        self._read_back: dict[str, list[Any]] = receipt.get("read_back", {})
        """sha256 and version, by name."""
        self.record()

    def send(self, file: _PublishedFile) -> _PublishedFile:
        """Send a file unless it is there, and read it back; return it."""
        there = self._there.get(file.name)
        if there is None or not self._is_right(file, there):
            there = self._upload(file)
            self.sent.append(file)
        self._read_back[file.name] = [file.sha256, there.version]
        return file

    def _is_right(self, file: _PublishedFile, there: RemoteFile) -> bool:
        if there.num_bytes != file.num_bytes:
            return False
        known = there.version and self._read_back.get(file.name) == [file.sha256, there.version]
        return bool(known) or _sha256_at(there.address) == file.sha256

    def _upload(self, file: _PublishedFile) -> RemoteFile:
        if sha256_file(file.path) != file.sha256:
            raise DataError(
                f"{file.path} is damaged: the index expects sha256 {file.sha256}; `postnorm prep "
                "verify` finds the member; restore the file from its source"
            )
        address = f"{self._address}/{file.name}"
        remote.upload(file.path, address)
        back = remote.stat(address)
        if back.num_bytes != file.num_bytes or _sha256_at(address) != file.sha256:
            raise StorageError(
                f"{address} does not give back what was sent ({file.num_bytes} bytes of sha256 "
                f"{file.sha256}); does another program write there? Run the same command again"
            )
        return back

    def record(self, after_s: float = 0) -> None:
        """Write down which dataset this is, and what was read back, if the last time is so old."""
        if time.monotonic() - self._recorded_s < after_s:
            return
        self._recorded_s = time.monotonic()
        # A copy: other threads add to it.
        body = {"fingerprint": self._fingerprint, "read_back": self._read_back.copy()}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as written:
            json.dump(body, written, indent=1)
            written.flush()
            remote.upload(Path(written.name), f"{self._address}/{RECEIPT_FILE}")


def _read_json(file: RemoteFile) -> dict[str, Any]:
    try:
        body = json.loads(remote.read_range(file.address, 0, file.num_bytes))
        if not isinstance(body, dict):
            raise ValueError("it is not an object")
    except ValueError as error:
        raise ConfigError(
            f"{file.address} is damaged, so what is there is not known: {error}; remove it, or "
            "choose another address"
        ) from error
    return body


def _sha256_at(address: str) -> str:
    digest = hashlib.sha256()
    with remote.open_file(address) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
