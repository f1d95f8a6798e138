"""Files in object stores and on the web, by addresses such as s3://bucket/folder/file.

fsspec reads and writes them, with the package that it names for each kind of store; `s3` is tested,
others are not. Keys, endpoints and regions come from where that package looks for them: variables
such as AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL, or its own files; they never stand in a config.

A file is read by ranges, each tried again for a bounded time. A range that comes short is an error
of the connection and not the end of the file.
"""

import functools
import glob
import hashlib
import io
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar

from pipeline.errors import ConfigError, DataError, StorageError
from pipeline.runtime.files import temporary_beside

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Before each further try. botocore tries a request five times by itself.
_WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_RANGE_BYTES = 1 << 22
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_VERSIONS = (
    "ETag", "etag", "blob_id", "md5Hash", "content_md5", "checksum", "generation",
    "LastModified", "last_modified", "mtime", "modified", "created",
)  # fmt: skip
"""Where stores say which content an address has, the surest first."""


@dataclass(frozen=True)
class RemoteFile:
    """What a store says of a file."""

    address: str
    num_bytes: int
    version: int
    """A number that follows from its hash or time of change; 0 if the store says neither."""


def is_address(text: str) -> bool:
    """Return whether a text names a file in a store, and not one in the file system."""
    return bool(_ADDRESS.match(text))


def stat(address: str) -> RemoteFile:
    """Ask for a file's size and version.

    Raises:
        DataError: there is none, or it may not be read.
        StorageError: the store does not answer.
        ConfigError: no package for such addresses is installed.
    """
    store, path = _store(address)
    return _described(address, _with_retries(lambda: store.info(path), address))


def list_files(address: str) -> list[tuple[RemoteFile, str, bool]]:
    """List the files of an address: a file, all below a folder, or what fits a glob.

    Returns:
        Each file with its name below the folder, or below the part of the glob without wildcards,
        and whether it was found in a folder, sorted; none if there is none. Folders that fit a glob
        are listed as well.

    Raises:
        As `stat`.
    """
    store, path = _store(address)
    if glob.has_magic(path):
        parts = PurePosixPath(path).parts
        fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
        root = str(PurePosixPath(*parts[:fixed]))
        hits = _with_retries(lambda: store.glob(path, detail=True), address)
    else:
        root = path.rstrip("/")
        hits = {root: {"type": "directory"}}
    found = {name: (info, False) for name, info in hits.items() if info["type"] != "directory"}
    for hit in hits.keys() - found.keys():
        below = _with_retries(functools.partial(store.find, hit, detail=True), address)
        found |= {name: (info, name != hit) for name, info in below.items()}
    kind = address[: address.index("://")]
    files = []
    for name, (info, in_folder) in sorted(found.items()):
        if info.get("type") == "directory" or (not info.get("size") and name.endswith("/")):
            continue  # stores without folders have empty objects in their place
        whole = name if is_address(name) else f"{kind}://{name}"
        name_below = name.removeprefix(root).lstrip("/") or PurePosixPath(name).name
        files.append((_described(whole, info), name_below, in_folder))
    return files


def open_file(address: str) -> IO[bytes]:
    """Open a file to read it; it can be sought (raises as `stat`; reading raises them, too)."""
    return io.BufferedReader(_Ranges(stat(address)), _RANGE_BYTES)


def read_range(address: str, start: int, end: int) -> bytes:
    """Read bytes of a file from `start` up to `end`, which it must have (raises as `stat`)."""

    def read() -> bytes:
        store, path = _store(address)
        data: bytes = store.cat_file(path, start=start, end=end)
        if len(data) != end - start:
            raise ConnectionError(f"{len(data)} bytes came of {end - start} from {start} on")
        return data

    return _with_retries(read, address) if end > start else b""


def download(address: str, path: Path) -> None:
    """Copy a file to this machine; `path` is then complete, or as it was.

    Raises:
        OSError: it cannot be written here; else as `stat`.
    """
    temporary = temporary_beside(path)
    try:
        with open_file(address) as source, temporary.open("wb") as target:
            shutil.copyfileobj(source, target, _RANGE_BYTES)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def upload(path: Path, address: str) -> None:
    """Send a file, which others see when it is complete (raises as `stat`)."""

    def send() -> None:
        store, target = _store(address)
        if "file" not in store.protocol:
            store.put_file(str(path), target)
            return
        # A store shows an object when it is complete, a file system shows a copy that grows.
        store.makedirs(PurePosixPath(target).parent, exist_ok=True)
        store.put_file(str(path), f"{target}.part")
        os.replace(f"{target}.part", target)

    _with_retries(send, address, "written")


class _Ranges(io.RawIOBase):
    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.num_bytes}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        start, end = self._at, min(self._at + len(buffer), self._file.num_bytes)
        if end <= start:
            return 0
        buffer[: end - start] = read_range(self._file.address, start, end)
        self._at = end
        return end - start


# Our own ranges on top of fsspec: its files have caches that differ from store to store, and take
# an answer that was cut short for the end of some files.
def _store(address: str) -> tuple[Any, str]:
    """Return fsspec's file system, without memory of listings, and the path in it."""
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped,import-not-found]

        # fsspec keeps one for each process: connections must not be shared with forked ones.
        store, path = url_to_fs(address)
    except ImportError as error:
        raise ConfigError(
            f"{address}: {error}; install what reads such addresses, for s3:// with "
            "`pip install 'postnorm[s3]'`"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{address}: {error}; correct the address") from error
    store.invalidate_cache()
    return store, path


def _described(address: str, info: dict[str, Any]) -> RemoteFile:
    if info.get("size") is None:
        raise DataError(
            f"{address}: the store does not say how large it is, so a cut answer could not be "
            "told from the end; copy the file"
        )
    version = next((info[key] for key in _VERSIONS if info.get(key)), None)
    digest = hashlib.sha256(str(version).encode()).digest()
    return RemoteFile(
        address, int(info["size"]), int.from_bytes(digest[:7]) if version is not None else 0
    )


def _with_retries(ask: Callable[[], T], address: str, done: str = "read") -> T:
    for wait in (*_WAITS_S, None):
        try:
            return ask()
        except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
            said = str(error) or type(error).__name__
            raise DataError(f"{address} cannot be {done}: {said}") from error
        # Stores have errors of their own for connections that broke (aiohttp, botocore, gcsfs).
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            if wait is None:
                raise StorageError(
                    f"{address} cannot be {done} at the moment, after {len(_WAITS_S) + 1} tries: "
                    f"{said}; look at the store and the network, then run the same command again"
                ) from error
            logger.warning("%s: %s; tried again in %g s", address, said, wait)
            time.sleep(wait)
    raise AssertionError  # the last one returns or raises
