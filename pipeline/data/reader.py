"""Memory-mapped access to the blocks of a dataset, with every byte checked before it is used."""

import hashlib
import io
import json
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.data.shards import MEMBERS, DatasetIndex
from pipeline.errors import DataError

_NPY_HEADER_BYTES = 256  # a one-dimensional array's takes 128
_RESTORE = (
    "restore this shard from its source, or delete it and run `python -m data_prep run` again"
)


@dataclass(frozen=True)
class Block:
    """One block; arrays are views of the mapped file."""

    tokens: npt.NDArray[np.unsignedinteger]
    """(n,) uint16 or uint32."""
    doc_ends: npt.NDArray[np.int64]
    """(d,) int64, the last one is n."""
    word_bits: npt.NDArray[np.uint8]
    """(ceil(n/8),) uint8."""
    meta_json: bytes

    def word_starts(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """Whether each of tokens[start:stop] starts a word; (stop - start,) bool."""
        first_byte = start // 8
        bits = np.unpackbits(self.word_bits[first_byte : (stop + 7) // 8])
        return bits[start - 8 * first_byte : stop - 8 * first_byte].astype(bool)

    @cached_property
    def document_ids(self) -> list[str]:
        """Ids of the documents, in order."""
        return list(json.loads(self.meta_json)["document_ids"])


class BlockReader:
    """Reads blocks of a dataset by their row in the index.

    Opening checks that every shard is there, has its size and ends as a tar must; a block's
    sha256 is checked when it is first touched.
    """

    def __init__(self, index: DatasetIndex, shards: Iterable[int] | None = None) -> None:
        """Maps shards.

        Args:
            index: of the dataset.
            shards: rows of the shards to open; all by default.

        Raises:
            DataError: a shard is missing, cut short, grown or without its end marker.
        """
        self.index = index
        rows = range(len(index.shards)) if shards is None else shards
        self._maps = {row: self._open(row) for row in rows}
        self._checked: set[int] = set()

    def block(self, row: int) -> Block:
        """Returns one block.

        Raises:
            DataError: the block's bytes are not those that were written; names shard and member.
        """
        if row not in self._checked:
            self.check(row)
            self._checked.add(row)
        tokens, docs, words = (self._array(row, member) for member in range(3))
        return Block(tokens, docs, words, self._payload(row, 3))

    def doc_ends(self, row: int) -> npt.NDArray[np.int64]:
        """End offsets of a block's documents alone, without reading (or hashing) its tokens.

        Raises:
            DataError: this member is not as it was written.
        """
        self._check_member(row, MEMBERS.index("docs.npy"))
        return self._array(row, MEMBERS.index("docs.npy")).astype(np.int64)

    def check(self, row: int) -> None:
        """Compares a block's bytes with the index.

        Raises:
            DataError: they differ; names shard and member.
        """
        blocks = self.index.blocks
        data = self._maps[int(blocks.shard[row])]
        start, length = int(blocks.offset[row]), int(blocks.length[row])
        with memoryview(data) as view:
            if (
                hashlib.sha256(view[start : start + length]).digest()
                == blocks.sha256[row].tobytes()
            ):
                return
        for member in range(len(MEMBERS)):
            self._check_member(row, member)
        raise DataError(
            f"{self.index.where(row)} is damaged: a tar header or padding byte of this block "
            f"changed, its members are intact; {_RESTORE}"
        )

    def check_all(self, rows: Iterable[int]) -> None:
        """Checks many blocks now, so that damage shows before training starts."""
        for row in rows:
            self.check(row)
            self._checked.add(row)

    def _check_member(self, row: int, member: int) -> None:
        found = hashlib.sha256(self._payload(row, member)).digest()
        expected = self.index.blocks.member_sha256[row, member].tobytes()
        if found != expected:
            raise DataError(
                f"{self.index.where(row, member)} is damaged: its sha256 is {found.hex()}, "
                f"the index expects {expected.hex()}; {_RESTORE}"
            )

    def _open(self, row: int) -> mmap.mmap:
        shard = self.index.shards[row]
        path = self.index.folder / shard.file
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise DataError(
                f"shard {path} does not exist, the index lists it with members "
                f"{_span(shard.keys)}; {_RESTORE}"
            ) from None
        except (OSError, ValueError) as error:
            raise DataError(f"shard {path} cannot be mapped: {error}; {_RESTORE}") from error
        if len(data) != shard.num_bytes:
            raise DataError(self._wrong_size_text(row, path, len(data)))
        blocks = self.index.blocks
        last = int(np.flatnonzero(blocks.shard == row)[-1])
        end = int(blocks.offset[last] + blocks.length[last])
        if any(data[end:]):
            raise DataError(
                f"shard {path} is damaged behind its last member {shard.keys[-1]}.{MEMBERS[-1]}: "
                f"a tar ends in zeros; {_RESTORE}"
            )
        return data

    def _wrong_size_text(self, row: int, path: Path, found: int) -> str:
        shard = self.index.shards[row]
        text = f"shard {path} has {found} bytes, the index expects {shard.num_bytes}"
        blocks = self.index.blocks
        for block in np.flatnonzero(blocks.shard == row):
            ends = blocks.member_offset[block] + blocks.member_length[block]
            missing = np.flatnonzero(ends > found)
            if len(missing):
                member = f"{self.index.block_key(int(block))}.{MEMBERS[int(missing[0])]}"
                return f"{text}: it is cut at or before member {member}; {_RESTORE}"
        return f"{text}; all members are there, its end is not as written; {_RESTORE}"

    def _payload(self, row: int, member: int) -> bytes:
        blocks = self.index.blocks
        start = int(blocks.member_offset[row, member])
        return self._maps[int(blocks.shard[row])][
            start : start + int(blocks.member_length[row, member])
        ]

    def _array(self, row: int, member: int) -> npt.NDArray[Any]:
        """A view of a .npy member; format: numpy.lib.format version 1.0."""
        blocks = self.index.blocks
        data = self._maps[int(blocks.shard[row])]
        start = int(blocks.member_offset[row, member])
        # Not through the map's own file position: threads share it.
        header = io.BytesIO(data[start : start + _NPY_HEADER_BYTES])
        np.lib.format.read_magic(header)
        shape, _, dtype = np.lib.format.read_array_header_1_0(header)
        return np.frombuffer(data, dtype=dtype, count=shape[0], offset=start + header.tell())


def _span(keys: tuple[str, ...]) -> str:
    return keys[0] if len(keys) == 1 else f"{keys[0]} .. {keys[-1]}"
