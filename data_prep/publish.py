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
# Each has one file in work; a store's package sends a large one in parts at the same time.
_THREADS = 4
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
    address, index = address.rstrip("/"), read_index(dataset)
    refuse_unlisted(index)
    *files, last = _files(index)
    there = {name: file for file, name, _ in remote.list_files(address)}
    # sha256 and version, by name.
    read_back = _receipt(address, there, index).get("read_back", {})
    sent: list[_PublishedFile] = []

    def send(file: _PublishedFile) -> int:
        """Send a file unless it is there, and read it back; return its size."""
        found = there.get(file.name)
        if found is None or not _is_right(file, found, read_back.get(file.name)):
            found = _upload(file, f"{address}/{file.name}")
            sent.append(file)
        read_back[file.name] = [file.sha256, found.version]
        return file.num_bytes

    def record() -> float:
        """Write down which dataset this is and what was read back; return the time."""
        # A copy: other threads add to it.
        body = {"fingerprint": index.fingerprint, "read_back": read_back.copy()}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as written:
            json.dump(body, written, indent=1)
            written.flush()
            remote.upload(Path(written.name), f"{address}/{RECEIPT_FILE}")
        return time.monotonic()

    recorded_s = record()
    total = sum(file.num_bytes for file in (*files, last))
    with progress("publish", total, "B", stays=True) as advance:
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="publish")
        try:
            for job in as_completed([pool.submit(send, file) for file in files]):
                advance(job.result())
                if time.monotonic() - recorded_s >= _RECORD_EVERY_S:
                    recorded_s = record()
        finally:
            pool.shutdown(cancel_futures=True)
            record()
        # The index, when all is there: whoever reads it finds all that it lists.
        advance(send(last))
    num_bytes = sum(file.num_bytes for file in sent)
    return Sent(len(sent), num_bytes, len(files) + 1 - len(sent))


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


class _PublishedFile(NamedTuple):
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


def _receipt(address: str, there: dict[str, RemoteFile], index: DatasetIndex) -> dict[str, Any]:
    """Read what is on record at an address; refuse one that holds anything but this dataset."""
    receipt: dict[str, Any] = {}
    for name in (INDEX_FILE, RECEIPT_FILE):
        if name not in there:
            continue
        found = _read_json(there[name])
        if found.get("fingerprint") != index.fingerprint:
            state = "holds" if name == INDEX_FILE else "holds a part of"
            raise ConfigError(
                f"{address} {state} another dataset, of fingerprint {found.get('fingerprint')}; "
                f"{index.folder} has {index.fingerprint}. Choose another address, or remove what "
                "is there"
            )
        receipt |= found
    if there and not receipt:
        raise ConfigError(
            f"{address} holds {len(there)} files and no dataset, such as {min(there)}; choose an "
            "empty folder of the store"
        )
    return receipt


def _is_right(file: _PublishedFile, there: RemoteFile, read_back: list[Any] | None) -> bool:
    """Compare an object with its file: by the version that was read back, else by its hash."""
    if there.num_bytes != file.num_bytes:
        return False
    known = there.version and read_back == [file.sha256, there.version]
    return bool(known) or _sha256_at(there.address) == file.sha256


def _upload(file: _PublishedFile, address: str) -> RemoteFile:
    if sha256_file(file.path) != file.sha256:
        raise DataError(
            f"{file.path} is damaged: the index expects sha256 {file.sha256}; `postnorm prep "
            "verify` finds the member; restore the file from its source"
        )
    remote.upload(file.path, address)
    back = remote.stat(address)
    if back.num_bytes != file.num_bytes or _sha256_at(address) != file.sha256:
        raise StorageError(
            f"{address} does not give back what was sent ({file.num_bytes} bytes of sha256 "
            f"{file.sha256}); does another program write there? Run the same command again"
        )
    return back


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
