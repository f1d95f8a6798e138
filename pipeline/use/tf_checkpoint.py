"""Reads TensorFlow checkpoints without TensorFlow: the tensor bundles that `tf.train.Saver` writes.

    PREFIX.index                  table: "" -> BundleHeaderProto, tensor name -> BundleEntryProto
    PREFIX.data-0000K-of-0000N    the tensors' bytes, little-endian, where the entries say

The table is LevelDB's: blocks of sorted keys, each key without the prefix it shares with the one
before, a block of handles to those blocks, a footer. Blocks and tensors carry a masked crc32c.

Source: tensorflow/core/util/tensor_bundle/tensor_bundle.cc, core/protobuf/tensor_bundle.proto and
core/framework/types.proto; tensorflow/core/lib/io/format.cc and block.cc; core/lib/hash/crc32c.h.
"""

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from pipeline.errors import CheckpointError

# One converter is no reason to depend on TensorFlow. Fixtures are of TensorFlow 2.21; a BERT-base
# of 440 MB was read once (0.4 s).
_MAGIC = bytes.fromhex("57fb808b247547db")
_FOOTER_BYTES = 48
_TRAILER_BYTES = 5  # of a block: compression type, masked crc32c of content and type
_BUNDLE_VERSION = 1
_DTYPES = [
    "invalid",
    "float32",
    "float64",
    "int32",
    "uint8",
    "int16",
    "int8",
    "string",
    "complex64",
    "int64",
    "bool",
    "qint8",
    "quint8",
    "qint32",
    "bfloat16",
    "qint16",
    "quint16",
    "uint16",
    "complex128",
    "float16",
    "resource",
    "variant",
    "uint32",
    "uint64",
]
_READABLE = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "bool")


@dataclass(frozen=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    crc32c: int
    is_sliced: bool


class TfCheckpoint:
    """A checkpoint whose index was read and checked; tensors are read when asked for.

    Args:
        prefix: PREFIX, PREFIX.index or a folder with exactly one checkpoint.

    Raises:
        CheckpointError: there is no such checkpoint, or its index is damaged or of another format.
    """

    def __init__(self, prefix: Path) -> None:
        self._index = _find_index(prefix)
        try:
            table = dict(_read_table(self._index.read_bytes()))
            self._num_shards = _read_header(table.pop(b"", b""))
            # A key that starts with a zero byte is a slice of a partitioned tensor.
            whole = {key: value for key, value in table.items() if key[0]}
            self._entries = {k.decode(errors="replace"): _read_entry(v) for k, v in whole.items()}
        except OSError as error:
            raise CheckpointError(
                f"{self._index} cannot be read ({error.strerror}); give the path of a checkpoint "
                "without the .index and .data-... at its end, or its folder"
            ) from None
        except CheckpointError as error:
            raise CheckpointError(f"{self._index}: {error}") from None

    def names(self) -> list[str]:
        """List the names of all tensors, sorted."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, or of the whole one where it is partitioned."""
        return self._entry(name).shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the type that `read` gives: the stored one, but float32 for bfloat16."""
        stored = self._entry(name).dtype
        if stored not in _READABLE:
            raise CheckpointError(
                f"{self._index}: tensor {name} has dtype {stored}, expected one of "
                f"{', '.join(_READABLE)}; leave it out"
            )
        return np.dtype("float32" if stored == "bfloat16" else stored)

    def read(self, name: str) -> npt.NDArray[Any]:
        """Read a tensor's values into an array of `shape(name)` and `dtype(name)`.

        Raises:
            CheckpointError: the name is unknown, the tensor is partitioned or of a dtype that is
                not read, its data file is missing or too short, or its bytes fail their crc32c.
        """
        entry, dtype = self._entry(name), self.dtype(name)
        stored = np.dtype("<u2") if entry.dtype == "bfloat16" else dtype.newbyteorder("<")
        if entry.is_sliced:
            raise CheckpointError(
                f"{self._index}: tensor {name} is partitioned (stored in slices), expected a whole "
                "one; load it in TensorFlow without a partitioner and save it again"
            )
        if entry.size != math.prod(entry.shape) * stored.itemsize:
            raise _damaged(
                f"{self._index}: tensor {name} has {entry.size} bytes, expected "
                f"{stored.itemsize} for each value of shape {entry.shape}"
            )
        values = np.frombuffer(self._read_bytes(name, entry), stored)
        if entry.dtype == "bfloat16":  # the high half of a float32
            values = np.left_shift(values, 16, dtype=np.uint32).view(dtype)
        return values.astype(dtype).reshape(entry.shape)

    def _read_bytes(self, name: str, entry: _Entry) -> bytes:
        file_name = f"{self._index.stem}.data-{entry.shard:05d}-of-{self._num_shards:05d}"
        path, end = self._index.with_name(file_name), entry.offset + entry.size
        try:
            with path.open("rb") as file:
                if (num_bytes := path.stat().st_size) < end:
                    raise _damaged(
                        f"{path} has {num_bytes} bytes, expected at least {end}, where tensor "
                        f"{name} ends"
                    )
                file.seek(entry.offset)
                data = file.read(entry.size)
        except OSError as error:
            raise _damaged(
                f"{path}, which holds tensor {name}, cannot be read ({error.strerror}); expected "
                f"{self._num_shards} data file(s) beside {self._index.name}"
            ) from None
        _check_crc32c(f"{path}: tensor {name} at byte {entry.offset}", data, entry.crc32c)
        return data

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            near = difflib.get_close_matches(name, self._entries)
            raise CheckpointError(
                f"{self._index} has no tensor {name!r}, similar ones of its {len(self._entries)} "
                f"are {near}; correct the name or take another checkpoint"
            )
        return self._entries[name]


def _damaged(what: str) -> CheckpointError:
    return CheckpointError(
        f"{what}; the checkpoint is damaged or incomplete: download or copy it again"
    )


def _find_index(prefix: Path) -> Path:
    beside = Path(f"{prefix}.index")
    if beside.is_file() or prefix.suffix == ".index":
        return beside if beside.is_file() else prefix
    found = sorted(prefix.glob("*.index"))
    if len(found) > 1:
        raise CheckpointError(
            f"{prefix} holds {len(found)} checkpoints ({', '.join(path.name for path in found)}), "
            "expected one; give the path of one of them"
        )
    for path in sorted(prefix.iterdir()) if prefix.is_dir() and not found else [prefix]:
        if path.is_file() and _last_bytes(path, len(_MAGIC)) == _MAGIC:
            raise CheckpointError(
                f"{path} is a checkpoint of the V1 format, which is not supported, expected V2 "
                "(PREFIX.index and PREFIX.data-...); load it in TensorFlow and save it again with "
                "tf.compat.v1.train.Saver(write_version=2)"
            )
    return found[0] if found else prefix / "*.index" if prefix.is_dir() else beside


def _last_bytes(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - count))
        return file.read()


def _read_table(table: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Read keys and values of a table (format.cc: Footer::DecodeFrom)."""
    footer = table[-_FOOTER_BYTES:]
    if len(footer) < _FOOTER_BYTES or not footer.endswith(_MAGIC):
        raise _damaged(
            f"its {len(table)} bytes end in {footer[-8:].hex()!r}, expected {_MAGIC.hex()!r}, the "
            "magic number of an index, at the end of at least 48"
        )
    _, at = _varint(footer, _varint(footer, 0)[1])  # the handle of an empty block
    for _, handle in _entries(_block(table, footer[at:])):
        yield from _entries(_block(table, handle))


def _block(table: bytes, handle: bytes) -> bytes:
    """Read the block that a handle (varint offset, varint size) points to (ReadBlock)."""
    offset, at = _varint(handle, 0)
    end = offset + _varint(handle, at)[0]
    limit = len(table) - _FOOTER_BYTES - _TRAILER_BYTES
    if end > limit:
        raise _damaged(f"a block is at bytes {offset} to {end}, expected it to end by {limit}")
    trailer = table[end : end + _TRAILER_BYTES]
    content, crc32c = table[offset : end + 1], int.from_bytes(trailer[1:], "little")
    _check_crc32c(f"the block at byte {offset}", content, crc32c)
    if trailer[0] != 0:
        raise CheckpointError(
            f"the block at byte {offset} has compression type {trailer[0]} (1 is snappy), expected "
            "0 (none), as tf.train.Saver writes; load it in TensorFlow and save it again"
        )
    return content[:-1]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Read keys and values of a block (block.cc); at its end are restart points, unused here."""
    limit = len(block) - 4 * (int.from_bytes(block[-4:], "little") + 1)
    at, key = 0, b""
    while at < limit:
        shared, at = _varint(block, at)
        key_bytes, at = _varint(block, at)
        value_bytes, at = _varint(block, at)
        key = key[:shared] + block[at : at + key_bytes]
        at += key_bytes + value_bytes
        yield key, block[at - value_bytes : at]


def _read_header(message: bytes) -> int:
    """Read the number of data files from the BundleHeaderProto."""
    numbers, parts = _fields(message)
    num_shards, byte_order = numbers.get(1, 0), numbers.get(2, 0)
    min_reader = _fields(b"".join(parts.get(3, [])))[0].get(2, 0)
    if num_shards < 1 or byte_order != 0 or min_reader > _BUNDLE_VERSION:
        raise CheckpointError(
            f"its header has {num_shards} data files, byte order {byte_order} and asks for a "
            f"reader of version {min_reader}, expected at least 1, 0 (little-endian) and at most "
            f"{_BUNDLE_VERSION}; save it again on a common machine, in the V2 format"
        )
    return num_shards


def _read_entry(message: bytes) -> _Entry:
    """Read a BundleEntryProto."""
    numbers, parts = _fields(message)
    dims = _fields(b"".join(parts.get(2, [])))[1].get(2, [])
    shape = tuple(_fields(dim)[0].get(1, 0) for dim in dims)
    dtype, shard, offset, size, crc32c = (numbers.get(field, 0) for field in (1, 3, 4, 5, 6))
    name = _DTYPES[dtype] if dtype < len(_DTYPES) else f"number {dtype}"
    return _Entry(name, shape, shard, offset, size, crc32c, 7 in parts)


def _fields(message: bytes) -> tuple[dict[int, int], dict[int, list[bytes]]]:
    """Read numbers, and texts or messages, by field (protobuf.dev/programming-guides/encoding)."""
    numbers: dict[int, int] = {}
    parts: dict[int, list[bytes]] = {}
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        field, wire_type = tag >> 3, tag & 7
        if wire_type == 0:
            numbers[field], at = _varint(message, at)
        elif wire_type == 2:
            size, at = _varint(message, at)
            parts.setdefault(field, []).append(message[at : at + size])
            at += size
        else:
            size = 8 if wire_type == 1 else 4
            numbers[field] = int.from_bytes(message[at : at + size], "little")
            at += size
    return numbers, parts


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a number of 7 bits a byte, low ones first, and the position after it."""
    for end in range(at, min(at + 10, len(data))):
        if data[end] < 0x80:
            return sum((data[i] & 0x7F) << 7 * (i - at) for i in range(at, end + 1)), end + 1
    raise _damaged(f"{data[at : at + 10].hex()!r} at byte {at} is not a number of variable length")


def _check_crc32c(what: str, data: bytes, expected: int) -> None:
    """Compare a masked crc (crc32c.h)."""
    crc: int = google_crc32c.value(data)
    # Masked, so that a crc of bytes that hold a crc stays a good one.
    if (found := ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF) != expected:
        raise _damaged(f"{what} has masked crc32c {found:#010x}, expected {expected:#010x}")
