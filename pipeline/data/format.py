"""The on-disk contract between data preparation and training: shards, blocks, index, fingerprint.

A dataset folder holds

    index.json, index.npz    content of every shard, written last; its hash is the fingerprint
    tokenizer.model          sentencepiece, or tokenizer.json: BERT's WordPiece
    shards/*.tar             webdataset tars; a shard's members come in groups of four, a block
    shards/*.json            sidecar of each shard, from which the index is made
    packing-SEQLEN*.npz      written by training, see `pipeline/data/counts.py`; may be deleted

    KEY.tokens.npy   (n,) uint16 or uint32     token ids of the block's documents, no specials
    KEY.docs.npy     (d,) int64                end offset of each document
    KEY.words.npy    (ceil(n/8),) uint8        one bit a token, high bit first: starts a word
    KEY.meta.json    {"source", "document_ids", "num_tokens", "num_documents"}

Every byte of a shard is covered by a sha256 of a block (its four members with their tar headers and
padding), or by the check that a tar ends in zeros.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from pipeline.data.cache import BlockCache
from pipeline.errors import DataError
from pipeline.runtime.remote import is_address

FORMAT_VERSION = 2
"""Version 1 lacks sources and `vocabulary` (meaning `Vocabulary(size)`). It is still read, so that
runs on such datasets continue."""
INDEX_FILE = "index.json"
MEMBERS = ("tokens.npy", "docs.npy", "words.npy", "meta.json")
SPLITS = ("train", "eval")
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD_ID, UNK_ID, CLS_ID, SEP_ID, MASK_ID = range(5)
NUM_SPECIAL = len(SPECIAL_TOKENS)

_BLOCK_FIELDS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "shard": (np.int32, ()),  # row in `shards`
    "offset": (np.int64, ()),  # first byte of the block in its tar, the first header
    "length": (np.int64, ()),  # bytes up to the end of the last member's padding
    "sha256": (np.uint8, (32,)),  # of those bytes
    "member_offset": (np.int64, (4,)),  # first payload byte of each member
    "member_length": (np.int64, (4,)),
    "member_sha256": (np.uint8, (4, 32)),
    "num_tokens": (np.int64, ()),
    "num_documents": (np.int64, ()),
}


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """Return the smallest unsigned type that holds every token id."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


@dataclass(frozen=True)
class Vocabulary:
    """The facts of a tokenizer for loading and masking; the defaults are this project's own."""

    size: int
    kind: Literal["sentencepiece", "wordpiece", "byte_bpe"] = "sentencepiece"
    pad: int = PAD_ID
    unk: int = UNK_ID
    cls: int = CLS_ID
    sep: int = SEP_ID
    mask: int = MASK_ID
    not_in_text: tuple[tuple[int, int], ...] = ((0, NUM_SPECIAL),)
    """Half-open ranges of ids, rising: special tokens, and ids that the tokenizer never emits."""

    @property
    def special(self) -> tuple[int, int, int, int, int]:
        """The five special ids."""
        return self.pad, self.unk, self.cls, self.sep, self.mask

    @cached_property
    def in_text(self) -> npt.NDArray[np.int64]:
        """(m,) rising ids that text can have."""
        possible = np.ones(self.size, dtype=bool)
        for start, stop in self.not_in_text:
            possible[start:stop] = False
        return np.flatnonzero(possible)


@dataclass(frozen=True)
class Source:
    """A named collection of text."""

    name: str
    weight: float
    """Its share in training relative to its size."""


@dataclass(frozen=True)
class ShardInfo:
    """One tar."""

    file: str
    """Path below the dataset folder."""
    split: str
    num_bytes: int
    sha256: str
    keys: tuple[str, ...]
    """Names of its blocks, in order."""


@dataclass(frozen=True)
class Blocks:
    """One row for each block, in shard order; see `_BLOCK_FIELDS` for shapes."""

    shard: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    sha256: npt.NDArray[np.uint8]
    member_offset: npt.NDArray[np.int64]
    member_length: npt.NDArray[np.int64]
    member_sha256: npt.NDArray[np.uint8]
    num_tokens: npt.NDArray[np.int64]
    num_documents: npt.NDArray[np.int64]

    @classmethod
    def from_rows(cls, rows: list[dict[str, Any]]) -> "Blocks":
        """Stack per-block values; hash may be given as hex text."""
        columns = {}
        for name, (dtype, shape) in _BLOCK_FIELDS.items():
            values = [_from_hex(row[name]) for row in rows]
            columns[name] = np.array(values, dtype=dtype).reshape(len(rows), *shape)
        return cls(**columns)

    def digest(self) -> str:
        """Hash all values, little-endian; a hash of the .npz would change with numpy."""
        # numpy 2.2 and 2.4 write the same arrays as different zip files.
        hasher = hashlib.sha256()
        for name, (dtype, _) in _BLOCK_FIELDS.items():
            values = np.ascontiguousarray(vars(self)[name], dtype=np.dtype(dtype).newbyteorder("<"))
            hasher.update(f"{name} {values.shape}\n".encode() + values.tobytes())
        return hasher.hexdigest()

    def __len__(self) -> int:
        return len(self.shard)


class DataIdentity(Protocol):
    """What a checkpoint keeps of its run's data, and what a resumed run is held to."""

    @property
    def folder(self) -> Path:
        """Holds the data."""

    @property
    def location(self) -> str:
        """Folder, or address in a store, for messages."""

    @property
    def fingerprint(self) -> str:
        """Hash of everything that makes batches."""

    @property
    def content(self) -> bytes:
        """JSON that says what the data is, for a message about what changed."""

    @property
    def tokenizer_file(self) -> str:
        """Name in the folder."""

    @property
    def tokenizer_sha256(self) -> str:
        """Hash of that file."""


class BlockStore(Protocol):
    """Where shards are that are not files of this machine; picklable, and shared by threads."""

    @property
    def address(self) -> str:
        """Address of the dataset."""

    def read(self, file: str, offset: int, length: int) -> npt.NDArray[np.uint8]:
        """Read bytes of a shard (StorageError: they do not come, DataError: there is none)."""

    def size(self, file: str) -> int:
        """Ask how many bytes a shard has now."""


@dataclass(frozen=True)
class DatasetIndex:
    """Everything about a dataset except the tokens themselves."""

    folder: Path
    fingerprint: str
    vocabulary: Vocabulary
    tokenizer_file: str
    tokenizer_sha256: str
    unigram_entropy_nats: float
    """Entropy of the training tokens' frequencies: the loss of a model that knows only these."""
    totals: dict[str, dict[str, int]]
    """split -> {"tokens", "documents", "text_bytes"}."""
    shards: tuple[ShardInfo, ...]
    blocks: Blocks
    sources: tuple[Source, ...]
    """A single source without a name in datasets of format version 1, which do not record it."""
    block_source: npt.NDArray[np.int32]
    """(b,) the number of each block's source."""
    content: bytes = field(repr=False)
    """Content of `index.json` as it was read: the file may be replaced while a run goes on."""
    store: BlockStore | None = None
    """Where shards are read, if not below `folder`."""
    cache: BlockCache | None = None
    """Where this node keeps blocks that were read before."""

    @property
    def location(self) -> str:
        """Where its shards are: a folder, or an address in a store."""
        return str(self.folder) if self.store is None else self.store.address

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.vocabulary.size

    def split_blocks(self, split: str) -> npt.NDArray[np.int64]:
        """Return the rows of one split's blocks."""
        of_split = np.array([shard.split == split for shard in self.shards], dtype=bool)
        return np.flatnonzero(of_split[self.blocks.shard])

    def block_key(self, block: int) -> str:
        """Return the name of a block, with which its members' names start."""
        shard = int(self.blocks.shard[block])
        first = int(np.searchsorted(self.blocks.shard, shard))
        return self.shards[shard].keys[block - first]

    def shard_path(self, shard: int) -> Path:
        """Return the tar of a shard, by its row in `shards`."""
        return self.folder / self.shards[shard].file

    def shard_name(self, shard: int) -> str:
        """Return where a shard is read, for messages."""
        if self.store is not None:
            return f"{self.store.address}/{self.shards[shard].file}"
        return str(self.shard_path(shard))

    def where(self, block: int, member: int | None = None) -> str:
        """Describe shard and member for error messages."""
        file = self.shard_name(int(self.blocks.shard[block]))
        name = self.block_key(block)
        return f"shard {file}, member {name}.{MEMBERS[member] if member is not None else '*'}"


def index_bytes(
    *,
    vocabulary: Vocabulary,
    tokenizer_file: str,
    tokenizer_sha256: str,
    unigram_entropy_nats: float,
    totals: dict[str, dict[str, int]],
    shards: list[ShardInfo],
    blocks: Blocks,
    sources: tuple[Sequence[Source], Sequence[int]],
) -> bytes:
    """Return the content of `index.json`; its fingerprint is the sha256 of all the rest.

    `sources` holds all sources, and the number of each block's source.
    """
    runs = [[source, len(list(group))] for source, group in groupby(sources[1])]
    body = {
        "format_version": FORMAT_VERSION,
        "vocabulary": asdict(vocabulary),
        "vocab_size": vocabulary.size,
        "special_tokens": list(SPECIAL_TOKENS),
        "tokenizer_file": tokenizer_file,
        "tokenizer_sha256": tokenizer_sha256,
        "unigram_entropy_nats": unigram_entropy_nats,
        "totals": totals,
        "blocks_sha256": blocks.digest(),
        "sources": [asdict(source) for source in sources[0]],
        # [source, number of blocks]: the blocks of a source are written one after another.
        "source_runs": runs,
        "shards": [asdict(shard) for shard in shards],
    }
    body["fingerprint"] = _fingerprint(body)
    return (json.dumps(body, indent=1, ensure_ascii=False) + "\n").encode()


def read_index(folder: str | Path) -> DatasetIndex:
    """Read and check `index.json` and `index.npz`.

    Raises:
        DataError: the folder has no complete index, or the index does not match its own hashes.
    """
    if is_address(str(folder)):
        raise DataError(
            f"{folder} is in an object store, and this reads a dataset in a folder: copy it to one"
        )
    folder = Path(folder)
    path = folder / INDEX_FILE
    try:
        content = path.read_bytes()
        body = json.loads(content)
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist: {folder} is not a finished dataset; "
            "run `postnorm prep run CONFIG` to its end, or correct data.dir"
        ) from None
    except ValueError as error:
        raise DataError(f"{path} is damaged (not JSON: {error}); {_REBUILD}") from None
    if body.get("format_version") not in (1, FORMAT_VERSION):
        version = body.get("format_version")
        is_newer = isinstance(version, int) and version > FORMAT_VERSION
        raise DataError(
            f"{path} has format_version {version!r}, expected 1 or {FORMAT_VERSION}; "
            + ("a newer version wrote it: use that one, or " if is_newer else "")
            + "prepare the dataset again with this version, in another folder"
        )
    fingerprint = body.pop("fingerprint", None)
    if fingerprint != _fingerprint(body):
        raise DataError(
            f"{path} was changed: its content does not match its fingerprint; {_REBUILD}"
        )
    shards = tuple(ShardInfo(**{**shard, "keys": tuple(shard["keys"])}) for shard in body["shards"])
    blocks = _read_blocks(folder / "index.npz", body["blocks_sha256"])
    sources = body.get("sources", [{"name": "", "weight": 1.0}])
    runs = body.get("source_runs", [[0, len(blocks)]])
    return DatasetIndex(
        folder=folder,
        fingerprint=fingerprint,
        vocabulary=_read_vocabulary(body),
        tokenizer_file=body["tokenizer_file"],
        tokenizer_sha256=body["tokenizer_sha256"],
        unigram_entropy_nats=body["unigram_entropy_nats"],
        totals=body["totals"],
        shards=shards,
        blocks=blocks,
        sources=tuple(Source(**source) for source in sources),
        block_source=np.repeat(
            np.array([source for source, _ in runs], dtype=np.int32), [count for _, count in runs]
        ),
        content=content,
    )


def _read_vocabulary(body: dict[str, Any]) -> Vocabulary:
    if body["format_version"] == 1:
        return Vocabulary(body["vocab_size"])
    fields = body["vocabulary"]
    ranges = tuple((start, stop) for start, stop in fields["not_in_text"])
    return Vocabulary(**{**fields, "not_in_text": ranges})


_REBUILD = "restore the file or run `postnorm prep run CONFIG` again"


def _read_blocks(path: Path, expected_sha256: str) -> Blocks:
    try:
        # A pickle could run code of whoever made the dataset.
        with np.load(path, allow_pickle=False) as arrays:
            blocks = Blocks(**{name: arrays[name] for name in _BLOCK_FIELDS})
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; {_REBUILD}") from None
    except Exception as error:
        raise DataError(f"{path} is damaged: {error}; {_REBUILD}") from error
    if blocks.digest() != expected_sha256:
        raise DataError(
            f"{path} is damaged: its content has sha256 {blocks.digest()}, index.json expects "
            f"{expected_sha256}; {_REBUILD}"
        )
    return blocks


def _fingerprint(body: dict[str, Any]) -> str:
    # In one form, whatever the layout of the file and the order of its keys.
    text = json.dumps(body, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _from_hex(value: Any) -> Any:
    if isinstance(value, str):
        return np.frombuffer(bytes.fromhex(value), dtype=np.uint8)
    if isinstance(value, list) and value and isinstance(value[0], str):
        return np.stack([_from_hex(item) for item in value])
    return value
