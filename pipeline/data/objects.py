"""Opens datasets in object stores: small files are copied to the node, blocks are kept there.

    STAGE_DIR/store-KEY/index.json, index.npz, tokenizer, report ...    all but the shards
    STAGE_DIR/store-KEY/blocks/                                         see `cache`
    STAGE_DIR/store-KEY/lock                                            held by who copies

KEY follows from the address and from what the store says of index.json (size, and ETag or time), so
a dataset that is published anew gets another folder. `index.json` is copied last.
"""

import fcntl
import hashlib
import logging
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pipeline.config.data import DataConfig
from pipeline.data.cache import BlockCache, Bytes
from pipeline.data.format import INDEX_FILE, DatasetIndex, read_index
from pipeline.data.reader import refuse_strangers
from pipeline.errors import ConfigError, DataError
from pipeline.runtime import env, remote
from pipeline.runtime.files import remove_abandoned, sha256_file
from pipeline.runtime.remote import RemoteFile, is_address

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ObjectStore:
    """A `pipeline.data.format.BlockStore` in an object store."""

    address: str

    def read(self, file: str, offset: int, length: int) -> Bytes:
        """Read bytes of a shard, with the tries of `remote`."""
        data = remote.read_range(f"{self.address}/{file}", offset, offset + length)
        return np.frombuffer(data, np.uint8)

    def size(self, file: str) -> int:
        """Ask how many bytes a shard has now."""
        return remote.stat(f"{self.address}/{file}").num_bytes


def open_index(config: DataConfig) -> DatasetIndex:
    """Read the index of a dataset, in a folder or in an object store.

    From a store the small files are copied to `stage_dir`, once for the processes of a node.

    Raises:
        DataError: there is no finished dataset, or it is damaged.
        StorageError: the store does not answer.
        ConfigError: `stage_dir` cannot be used.
    """
    if not is_address(config.dir):
        return read_index(config.dir)
    assert config.stage_dir is not None  # the config is refused without
    published = _Published.found(config.dir)
    # Filled in here and not where the config is read: $TMPDIR is another folder on each node.
    folder = Path(env.expand(config.stage_dir, "data.stage_dir")) / published.key
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # freed with the file, however the process ends
            index = published.kept(folder) or published.copied(folder)
    except OSError as error:
        raise ConfigError(
            f"data.stage_dir, {config.stage_dir}, cannot be used: {error}; choose a node-local "
            "folder with free space that this user can write to and that can be locked"
        ) from error
    published.require_shards(index)
    cache = BlockCache(folder / "blocks", int(config.stage_gb * 1e9))
    counts = cache.counts()
    logger.info(
        "shards are read from %s; %s keeps %.3f of at most %g GB, %d damaged blocks were fetched "
        "again so far",
        published.address,
        cache.folder,
        counts.kept_bytes / 1e9,
        config.stage_gb,
        counts.damaged_blocks,
    )
    return replace(index, store=ObjectStore(published.address), cache=cache)


def find_index(folder: str | Path) -> DatasetIndex | None:
    """Read the index of a dataset of which nothing else is read; None if it is not finished.

    Raises:
        As `open_index`.
    """
    if not is_address(str(folder)):
        return read_index(folder) if (Path(folder) / INDEX_FILE).is_file() else None
    published = _Published.listed(str(folder))
    if INDEX_FILE not in published.files:
        return None
    with tempfile.TemporaryDirectory(prefix="postnorm-") as copy:
        index = published.copied(Path(copy))
    published.require_shards(index)
    return index


@dataclass(frozen=True)
class _Published:
    """What a store lists below an address."""

    address: str
    files: dict[str, RemoteFile]
    """Files by name below the address."""

    @classmethod
    def listed(cls, address: str) -> "_Published":
        address = address.rstrip("/")
        return cls(address, {name: file for file, name, _ in remote.list_files(address)})

    @classmethod
    def found(cls, address: str) -> "_Published":
        """List the files of a finished dataset."""
        published = cls.listed(address)
        if INDEX_FILE not in published.files:
            raise DataError(
                f"{published.address} holds no finished dataset: there is no {INDEX_FILE} among "
                f"{len(published.files)} files. `postnorm prep publish DATASET "
                f"{published.address}` sends one, with {INDEX_FILE} last; or correct data.dir"
            )
        return published

    @property
    def key(self) -> str:
        """Name of the folder of this node that holds what was copied."""
        index = self.files[INDEX_FILE]
        text = f"{self.address} {index.num_bytes} {index.version}"
        return f"store-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def kept(self, folder: Path) -> DatasetIndex | None:
        """Read what was copied before; None if it must be copied again."""
        # A store that says no version may have another index of the same size.
        if not self.files[INDEX_FILE].version or not (folder / INDEX_FILE).is_file():
            return None
        try:
            return _read_copy(folder)
        except DataError as error:
            logger.warning("copied again from %s: %s", self.address, error)
            return None

    def copied(self, folder: Path) -> DatasetIndex:
        """Copy all but the shards, and check them."""
        remove_abandoned(folder)
        # First: a copy that is cut off must not look complete to `kept`.
        (folder / INDEX_FILE).unlink(missing_ok=True)
        small = {name for name in self.files if "/" not in name} - {INDEX_FILE}
        for name in (*sorted(small), INDEX_FILE):
            remote.download(self.files[name].address, folder / name)
        try:
            return _read_copy(folder)
        except DataError as error:
            (folder / INDEX_FILE).unlink()
            raise DataError(
                f"the files of {self.address} do not fit each other: {error}. If it is being "
                "published, wait until that is done; else run `postnorm prep publish` again"
            ) from error

    def require_shards(self, index: DatasetIndex) -> None:
        """Check that all shards are there with the right size, and no other tar."""
        for shard in index.shards:
            file = self.files.get(shard.file)
            if file is None or file.num_bytes != shard.num_bytes:
                found = "does not exist" if file is None else f"has {file.num_bytes} bytes"
                raise DataError(
                    f"shard {self.address}/{shard.file} {found}, the index expects "
                    f"{shard.num_bytes} bytes; run `postnorm prep publish` again, which sends what "
                    "differs, or correct data.dir"
                )
        tars = {name for name in self.files if name.startswith("shards/") and name.endswith(".tar")}
        refuse_strangers(self.address, tars - {shard.file for shard in index.shards})


def _read_copy(folder: Path) -> DatasetIndex:
    index = read_index(folder)
    tokenizer = folder / index.tokenizer_file
    if not tokenizer.is_file() or sha256_file(tokenizer) != index.tokenizer_sha256:
        raise DataError(f"tokenizer {tokenizer} is missing or damaged")
    return index
