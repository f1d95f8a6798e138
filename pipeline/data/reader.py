"""Reads the blocks of a dataset from storage, and checks every byte before it is used.

Files are read with `pread` and not mapped: an error of the storage is then an OSError that can be
retried (a mapped file kills the process with SIGBUS), and a block needs one request. Shards in an
object store are read by `index.store`, and `index.cache` keeps blocks on this node.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.data.format import MEMBERS, BlockStore, DatasetIndex, token_dtype
from pipeline.errors import PASSING, DataError, StorageError
from pipeline.runtime.files import PAUSES_S, retry_storage

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

_SHOWN = 5
# Matched, not evaluated: numpy's reader calls `ast.literal_eval`, and Python 3.11's keeps one
# recursion counter for all threads (python/cpython issue 106905): threads failed now and then with
# SystemError.
_NPY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([^']+)', 'fortran_order': False, "
    rb"'shape': \((\d+),\), \} *\n",
    re.DOTALL,
)
_NPY_HEADER_BYTES = 256  # the header of a one-dimensional array takes 128
_RESTORE = "restore this shard from its source, or delete it and run `postnorm prep run` again"
_PUBLISH_AGAIN = (
    "it was replaced or damaged after it was published: run `postnorm prep publish` again, which "
    "sends what differs, or correct data.dir"
)


def read_range(
    path: Path, offset: int, length: int, what: Callable[[], str]
) -> npt.NDArray[np.uint8]:
    """Read bytes of a file; retry if the storage fails for a moment.

    `what` describes the range, for messages.

    Returns:
        (length,) uint8, not writable; shorter if the file ends early.

    Raises:
        FileNotFoundError: the file does not exist.
        StorageError: the storage failed at every try.
        OSError: any other failure, at once.
    """
    try:
        return retry_storage(
            lambda: _read_once(path, offset, length), lambda: f"{what()} cannot be read"
        )
    except OSError as error:
        if error.errno not in PASSING:
            raise
        raise StorageError(
            f"{what()} cannot be read: {error}, {len(PAUSES_S) + 1} times in "
            f"{sum(PAUSES_S):g} s; expected storage that answers: check its state and "
            "start again; the dataset need not be prepared again"
        ) from error


def _read_once(path: Path, offset: int, length: int) -> npt.NDArray[np.uint8]:
    data = np.empty(length, np.uint8)
    view = data.data
    # No file stays open, so that any number of shards can be read, and a retry reopens the file,
    # which fixes a stale handle.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        done = 0
        while done < length:
            # Linux reads 2 GiB at most in one call, and network file systems may return less than
            # asked.
            count = os.preadv(descriptor, [view[done:]], offset + done)
            if not count:
                break
            done += count
    finally:
        os.close(descriptor)
    # Blocks are cached and shared by threads: a write into one would change later batches.
    data = data[:done]
    data.flags.writeable = False
    return data


@dataclass(frozen=True)
class Block:
    """One block; its arrays are views of the bytes that were read, not writable."""

    tokens: npt.NDArray[np.unsignedinteger]
    """(n,) uint16 or uint32."""
    doc_ends: npt.NDArray[np.int64]
    """(d,) int64, the last one is n."""
    word_bits: npt.NDArray[np.uint8]
    """(ceil(n/8),) uint8."""
    meta_json: bytes

    def word_starts(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Return whether each of tokens[start:stop] starts a word; (stop - start,) bool."""
        first_byte = start // 8
        bits = np.unpackbits(self.word_bits[first_byte : (stop + 7) // 8])
        return bits[start - 8 * first_byte : stop - 8 * first_byte].astype(bool)

    @cached_property
    def document_ids(self) -> list[str]:
        """Ids of the documents, in order."""
        return list(json.loads(self.meta_json)["document_ids"])


# pread, not a mapping: it costs the same with hashing (1,398 against 1,430 MB a CPU-second, warm;
# `python -m benchmarks.loading DATASET`), an I/O error can be tried again where SIGBUS kills, and
# no file stays open. The price: each rank reads all blocks of its window (16 x 2.3 MB).
class BlockReader:
    """Reads blocks of a dataset by their row in the index; threads may share it.

    Opening it checks that every shard exists with the right size; for a store `open_index` has done
    that. The first use of a shard checks that it ends as a tar must, and every reading of a block
    its sha256 unless `check_blocks` is "never" (one of a store always): a block that changes under
    a running job is noticed before it is used again. Methods raise DataError, which names shard and
    member, if bytes are not those of the index, and StorageError if they cannot be read at the
    moment.
    """

    def __init__(
        self,
        index: DatasetIndex,
        shards: Iterable[int] | None = None,
        check_blocks: Literal["first_touch", "never"] = "first_touch",
    ) -> None:
        """Check that all shards exist with the right size, without reading them.

        `shards` are rows of the index, all by default.

        Raises:
            DataError: a shard is missing, cut short or grown.
        """
        self.index = index
        self._touched: set[int] = set()
        # A cache has checked a block that it gives.
        self._check_blocks = check_blocks == "first_touch" and index.cache is None
        self._store, self._cache = index.store, index.cache
        self._remedy = _RESTORE
        if self._store is not None:
            self._remedy = _PUBLISH_AGAIN
            return
        for shard in range(len(index.shards)) if shards is None else shards:
            self._check_size(shard)

    def block(self, row: int) -> Block:
        """Read all of one block; callers keep what they need again."""
        data = self._block_bytes(row)
        docs_member = MEMBERS.index("docs.npy")
        if self._check_blocks:
            self._check(row, data)
        else:
            # Compiled code relies on the documents' ends.
            self._check_member(row, docs_member, self._payload(row, docs_member, data))
        tokens, docs, words = (
            self._array(row, member, self._payload(row, member, data)) for member in range(3)
        )
        blocks = self.index.blocks
        expected = int(blocks.num_tokens[row]), int(blocks.num_documents[row])
        if (len(tokens), len(docs)) != expected or len(words) != -(-len(tokens) // 8):
            raise DataError(
                f"{self.index.where(row)} is damaged: {len(tokens)} tokens, {len(docs)} documents "
                f"and {len(words)} bytes of word bits, the index says {expected[0]} tokens in "
                f"{expected[1]} documents; {self._remedy}"
            )
        return Block(tokens, docs, words, self._payload(row, 3, data).tobytes())

    def doc_ends(self, row: int) -> npt.NDArray[np.int64]:
        """Read the end offsets of a block's documents, without reading (or hashing) its tokens."""
        member = MEMBERS.index("docs.npy")
        return self._array(row, member, self._read_member(row, member))

    def meta_json(self, row: int) -> bytes:
        """Read a block's meta.json alone: source and document ids."""
        return self._read_member(row, MEMBERS.index("meta.json")).tobytes()

    def check(self, row: int) -> None:
        """Compare a block's bytes with the index."""
        data = self._block_bytes(row)
        if self._cache is None:
            self._check(row, data)

    def keep(self, row: int, wait_s: float = 0.0) -> tuple[bool, bool]:
        """Copy a block to the index's cache: see `BlockCache.fill`."""
        assert self._cache is not None
        sha256 = self.index.blocks.sha256[row].tobytes()
        return self._cache.fill(
            sha256, lambda: self._fetched(row), lambda data: self._check(row, data), wait_s
        )

    def check_all(self, rows: Iterable[int]) -> None:
        """Check many blocks now, so that damage shows before training starts."""
        for row in rows:
            self.check(row)

    def check_end(self, shard: int) -> None:
        """Check the end of a shard after its last block; done when a shard is first touched."""
        blocks = self.index.blocks
        last = int(np.searchsorted(blocks.shard, shard, side="right")) - 1
        end = int(blocks.offset[last] + blocks.length[last])
        info = self.index.shards[shard]
        data = self._read(shard, end, info.num_bytes - end, lambda: self.index.where(last))
        if data.any():
            raise DataError(
                f"shard {self.index.shard_name(shard)} is damaged after its last member "
                f"{info.keys[-1]}.{MEMBERS[-1]}: a tar ends in zeros; {self._remedy}"
            )

    def _read_member(self, row: int, member: int) -> Bytes:
        """Read and check one member without the rest of its block."""
        blocks = self.index.blocks
        start, length = int(blocks.member_offset[row, member]), blocks.member_length[row, member]
        shard, before = int(blocks.shard[row]), start - int(blocks.offset[row])
        if self._cache is not None:
            kept = self._cache.part(blocks.sha256[row].tobytes(), before, int(length))
            # If it is damaged, reading the whole block tells, counts and repairs it.
            if kept is not None and self._is_member(row, member, kept):
                return kept
        data = self._read(shard, start, int(length), lambda: self.index.where(row, member))
        self._check_member(row, member, data)
        return data

    def _block_bytes(self, row: int) -> Bytes:
        if self._cache is None:
            return self._fetched(row)
        sha256 = self.index.blocks.sha256[row].tobytes()
        return self._cache.get(
            sha256, lambda: self._fetched(row), lambda data: self._check(row, data)
        )

    def _fetched(self, row: int) -> Bytes:
        """Read a block where the shards are."""
        blocks = self.index.blocks
        shard = int(blocks.shard[row])
        if shard not in self._touched:
            self.check_end(shard)
            # Without a lock: two threads at once check the same end twice, which does no harm.
            self._touched.add(shard)
        start, length = int(blocks.offset[row]), int(blocks.length[row])
        return self._read(shard, start, length, lambda: self.index.where(row))

    def _check(self, row: int, data: Bytes) -> None:
        if hashlib.sha256(data.data).digest() == self.index.blocks.sha256[row].tobytes():
            return
        for member in range(len(MEMBERS)):
            self._check_member(row, member, self._payload(row, member, data))
        raise DataError(
            f"{self.index.where(row)} is damaged: a tar header or padding byte of this block "
            f"changed, its members are intact; {self._remedy}"
        )

    def _check_member(self, row: int, member: int, data: Bytes) -> None:
        if not self._is_member(row, member, data):
            raise DataError(
                f"{self.index.where(row, member)} is damaged: its sha256 is "
                f"{hashlib.sha256(data.data).hexdigest()}, the index expects "
                f"{self.index.blocks.member_sha256[row, member].tobytes().hex()}; {self._remedy}"
            )

    def _is_member(self, row: int, member: int, data: Bytes) -> bool:
        expected = self.index.blocks.member_sha256[row, member].tobytes()
        return bool(hashlib.sha256(data.data).digest() == expected)

    def _check_size(self, shard: int) -> None:
        path = self.index.shard_path(shard)
        try:
            found = path.stat().st_size
        except FileNotFoundError:
            raise DataError(self._missing_text(shard)) from None
        except OSError as error:
            raise StorageError(
                f"shard {path} cannot be examined: {error}; check the storage and start again"
            ) from error
        if found != self.index.shards[shard].num_bytes:
            raise DataError(self._wrong_size_text(shard, found))

    def _missing_text(self, shard: int) -> str:
        keys = self.index.shards[shard].keys
        listed = keys[0] if len(keys) == 1 else f"{keys[0]} .. {keys[-1]}"
        return (
            f"shard {self.index.shard_name(shard)} does not exist, the index lists it with members "
            f"{listed}; {self._remedy}"
        )

    def _read(self, shard: int, offset: int, length: int, what: Callable[[], str]) -> Bytes:
        if self._store is not None:
            return self._read_store(self._store, shard, offset, length)
        try:
            data = read_range(self.index.shard_path(shard), offset, length, what)
        except FileNotFoundError:
            raise DataError(self._missing_text(shard)) from None
        except OSError as error:
            raise DataError(f"{what()} cannot be read: {error}; {self._remedy}") from error
        if len(data) < length:
            raise DataError(self._wrong_size_text(shard, offset + len(data)))
        return data

    def _read_store(self, store: BlockStore, shard: int, offset: int, length: int) -> Bytes:
        info = self.index.shards[shard]
        try:
            return store.read(info.file, offset, length)
        except StorageError:
            # Where an object was replaced by a shorter one, answers come short each time.
            found = store.size(info.file)
            if found != info.num_bytes:
                raise DataError(self._wrong_size_text(shard, found)) from None
            raise
        except DataError as error:
            raise DataError(f"{error}; {self._remedy}") from error

    def _wrong_size_text(self, row: int, found: int) -> str:
        shard = self.index.shards[row]
        name = self.index.shard_name(row)
        text = f"shard {name} has {found} bytes, the index expects {shard.num_bytes}"
        blocks = self.index.blocks
        for block in np.flatnonzero(blocks.shard == row):
            ends = blocks.member_offset[block] + blocks.member_length[block]
            missing = np.flatnonzero(ends > found)
            if len(missing):
                member = f"{self.index.block_key(int(block))}.{MEMBERS[int(missing[0])]}"
                return f"{text}: it is cut at or before member {member}; {self._remedy}"
        return f"{text}; all members are complete, but its end changed; {self._remedy}"

    def _payload(self, row: int, member: int, data: Bytes) -> Bytes:
        """Return the bytes of a member from those of its block."""
        blocks = self.index.blocks
        start = int(blocks.member_offset[row, member] - blocks.offset[row])
        return data[start : start + int(blocks.member_length[row, member])]

    def _array(self, row: int, member: int, data: Bytes) -> npt.NDArray[Any]:
        """View a .npy member as an array; format: numpy.lib.format version 1.0."""
        # NumPy's own reader of headers calls `ast.literal_eval`, which fails at random in Python
        # 3.11 when threads call it at the same time (python/cpython issue 106905).
        header = _NPY_HEADER.match(data[:_NPY_HEADER_BYTES].tobytes())
        dtype = np.dtype(
            token_dtype(self.index.vocab_size) if member == 0 else (np.int64, np.uint8)[member - 1]
        )
        try:
            if header is None:
                raise ValueError("it does not begin like a one-dimensional .npy array")
            if header[1].decode("latin1") != dtype.str:
                raise ValueError(f"its type is {header[1].decode('latin1')}, expected {dtype.str}")
            return np.frombuffer(data, dtype=dtype, count=int(header[2]), offset=header.end())
        except ValueError as error:
            where = self.index.where(row, member)
            raise DataError(f"{where} is damaged: {error}; {self._remedy}") from error


def refuse_unlisted(index: DatasetIndex) -> None:
    """Refuse tars beside the shards that the index does not list, because nobody would read them.

    Raises:
        DataError: there are some.
        StorageError: the folder cannot be listed.
    """
    listed = {index.folder / shard.file for shard in index.shards}
    folders = {path.parent for path in listed}
    try:
        found = {path for folder in folders for path in folder.iterdir() if path.suffix == ".tar"}
    except FileNotFoundError:
        return  # opening the shards reports which are missing
    except OSError as error:
        raise StorageError(
            f"the shards of {index.folder} cannot be listed: {error}; check the storage and start "
            "again"
        ) from error
    refuse_strangers(str(index.folder), {path.name for path in found - listed})


def refuse_strangers(where: str, names: set[str]) -> None:
    """Refuse tars that the index does not list (DataError), if there are any."""
    if strangers := sorted(names):
        shown = ", ".join(strangers[:_SHOWN]) + (" .." if len(strangers) > _SHOWN else "")
        raise DataError(
            f"{where}: {len(strangers)} tar(s) beside the shards that the index does not "
            f"list, so that nothing in them is trained on: {shown}. Move them away; to train on "
            "their text, add it to the sources of the data preparation's config and run "
            "`postnorm prep run` again, which lists the shards that it makes"
        )
