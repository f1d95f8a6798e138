"""Sends a finished dataset to an object store, and reads back what came there.

    ADDRESS/published.json    which dataset this is, written first; versions of what was read back
    ADDRESS/shards/*.tar, index.npz, the tokenizer, report.json, datasheet.*, packing-*.npz
    ADDRESS/index.json        written last: whoever reads it finds all that it lists

An object is not sent again if it has the right size, and either the version (ETag, else time of
change) that it had when it was read back, or the right hash now. `work/` is not sent.
"""

import hashlib
import json
import logging
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
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

logger = logging.getLogger(__name__)

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

    def plus(self, file: "_PublishedFile", *, was_sent: bool) -> "Sent":
        """Count a file."""
        if not was_sent:
            return self._replace(were_there=self.were_there + 1)
        return self._replace(files=self.files + 1, num_bytes=self.num_bytes + file.num_bytes)


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
    files = _files(index)
    target = _Target.opened(address.rstrip("/"), index)
    total = sum(file.num_bytes for file in files.values())
    sent = Sent(0, 0, 0)
    with progress("publish", total, "B", stays=True) as advance:
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="publish")
        try:
            last = files.pop(INDEX_FILE)
            jobs = {pool.submit(target.send, name, file): file for name, file in files.items()}
            for job in as_completed(jobs):
                sent = sent.plus(jobs[job], was_sent=job.result())
                advance(jobs[job].num_bytes)
        finally:
            pool.shutdown(cancel_futures=True)
            target.record(now=True)
        sent = sent.plus(last, was_sent=target.send(INDEX_FILE, last))
        advance(last.num_bytes)
    return sent


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
    path: Path
    num_bytes: int
    sha256: str


def _files(index: DatasetIndex) -> dict[str, _PublishedFile]:
    """Return what is sent, by name; of shards and tokenizer with the hash of the index."""
    recorded = {shard.file: shard.sha256 for shard in index.shards}
    recorded[index.tokenizer_file] = index.tokenizer_sha256
    recorded[INDEX_FILE] = hashlib.sha256(index.content).hexdigest()
    more = {path.name: sha256_file(path) for name in _MORE for path in index.folder.glob(name)}
    files = {}
    for name, sha256 in (recorded | more).items():
        path = index.folder / name
        if not path.is_file():
            raise DataError(f"{path} does not exist; `postnorm prep verify {index.folder}`")
        files[name] = _PublishedFile(path, path.stat().st_size, sha256)
    return files


@dataclass
class _Target:
    """An address, what is there, and what was read back."""

    address: str
    fingerprint: str
    there: dict[str, RemoteFile]
    read_back: dict[str, list[Any]]
    """sha256 and version, by name."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _recorded_s: float = 0.0

    @classmethod
    def opened(cls, address: str, index: DatasetIndex) -> "_Target":
        """Look at what is there; refuse an address that holds anything else than this dataset."""
        there = {name: file for file, name, _ in remote.list_files(address)}
        receipt: dict[str, Any] = {}
        for name in (INDEX_FILE, RECEIPT_FILE):
            if name not in there:
                continue
            receipt = _read_json(there[name])
            found = receipt.get("fingerprint")
            if found != index.fingerprint:
                state = "holds" if name == INDEX_FILE else "holds a part of"
                raise ConfigError(
                    f"{address} {state} another dataset, of fingerprint {found}; {index.folder} "
                    f"has {index.fingerprint}. Choose another address, or remove what is there"
                )
        if there and not receipt:
            raise ConfigError(
                f"{address} holds {len(there)} files and no dataset, such as {min(there)}; choose "
                "an empty folder of the store"
            )
        target = cls(address, index.fingerprint, there, receipt.get("read_back", {}))
        target.record(now=True)
        return target

    def send(self, name: str, file: _PublishedFile) -> bool:
        """Send a file unless it is there, and read it back; return whether it was sent."""
        there = self.there.get(name)
        if there is not None and there.num_bytes == file.num_bytes:
            if there.version and self.read_back.get(name) == [file.sha256, there.version]:
                return False
            if _sha256_at(there.address) == file.sha256:
                self._has(name, file, there)
                return False
        if sha256_file(file.path) != file.sha256:
            raise DataError(
                f"{file.path} is damaged: the index expects sha256 {file.sha256}; `postnorm prep "
                "verify` finds the member; restore the file from its source"
            )
        address = f"{self.address}/{name}"
        remote.upload(file.path, address)
        back = remote.stat(address)
        if back.num_bytes != file.num_bytes or _sha256_at(address) != file.sha256:
            raise StorageError(
                f"{address} does not give back what was sent ({file.num_bytes} bytes of sha256 "
                f"{file.sha256}); does another program write there? Run the same command again"
            )
        self._has(name, file, back)
        return True

    def _has(self, name: str, file: _PublishedFile, there: RemoteFile) -> None:
        with self._lock:
            self.read_back[name] = [file.sha256, there.version]
        self.record()

    def record(self, *, now: bool = False) -> None:
        """Write down which dataset this is, and what was read back: now, or every few seconds."""
        with self._lock:
            if not now and time.monotonic() - self._recorded_s < _RECORD_EVERY_S:
                return
            self._recorded_s = time.monotonic()
            body = {"fingerprint": self.fingerprint, "read_back": self.read_back}
            with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
                json.dump(body, file, indent=1)
                file.flush()
                remote.upload(Path(file.name), f"{self.address}/{RECEIPT_FILE}")


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
