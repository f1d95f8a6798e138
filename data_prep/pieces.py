"""File format of a piece: stages ingest and lines write it, and all later stages read it.

A piece is the documents of some consecutive input files of one source. Files of a piece:
    NAME.jsonl.zst        {"id", "source", "text"[, "metadata"]} a line
    NAME.hashes.npy       (d, 2) uint64, 128-bit hash of each text, for deduplication
    NAME.bytes.npy        (d,) int64, UTF-8 bytes of each text
    NAME.ids.jsonl.zst    the documents' ids, a JSON string a line
    NAME.id_hashes.npy    (n,) uint64, hash of the id of every document read, rejected ones included
    NAME.rejected.jsonl.zst  {"id", "reason"[, "detail", "metadata"], "raw"} a line: each rejected
                          document; bytes that are not UTF-8 are under "raw_base64"
Stages that drop whole documents write a mask per piece instead of the texts:
    NAME.keep.npy         (d,) bool, the documents that are left
and deduplication a list for people, {"id", "kept"[, "jaccard"]} a line, that names dropped
documents and, for each, the document that is kept instead, which may be in any piece. At most
`LISTED` are named, the first ones of every piece, which bounds the memory for ids: about 0.7 GB
with ids of 100 characters.
"""

import hashlib
import io
import json
from array import array
from collections.abc import Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt
from backports import zstd

from data_prep import stage
from data_prep.types import Metadata, Rejected
from pipeline.runtime.files import sha256_file

_SUFFIXES = (
    ".jsonl.zst",
    ".hashes.npy",
    ".bytes.npy",
    ".rejected.jsonl.zst",
    ".ids.jsonl.zst",
    ".id_hashes.npy",
)
PIECE_FILES = len(_SUFFIXES)
BATCH_CHARS = 1 << 18
_BATCH_DOCUMENTS = 1 << 12
LISTED = 500_000

Numbers = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


def piece_name(number: int) -> str:
    """Name a piece: the prefix of its files in the folder of every stage."""
    return stage.task_name(number, 5)


def piece_paths(task: stage.StageTask[Any]) -> list[Path]:
    """List the files of the piece that a task writes."""
    return [task.path(suffix) for suffix in _SUFFIXES]


@dataclass
class PieceWriter:
    """Takes documents for the files of a piece."""

    documents: IO[bytes]
    ids: IO[bytes]
    rejected: IO[bytes]
    # Arrays, not lists of objects: a piece of 2 GB may have 20 million documents.
    hashes: bytearray = field(default_factory=bytearray)
    sizes: "array[int]" = field(default_factory=lambda: array("q"))
    id_hashes: "array[int]" = field(default_factory=lambda: array("Q"))
    """The stage that reads the documents fills this."""

    def take(self, document_id: str, source: str, text: str, metadata: Metadata) -> None:
        """Write a document that goes on."""
        encoded = text.encode()
        record: dict[str, Any] = {"id": document_id, "source": source, "text": text}
        if metadata:
            record["metadata"] = metadata
        self.documents.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self.ids.write(json.dumps(document_id).encode() + b"\n")
        self.hashes += hashlib.blake2b(encoded, digest_size=16).digest()
        self.sizes.append(len(encoded))

    # Whole, and compressed: half of 280 GB as plain text would fill a disk; `show --rejected`
    # reads it.
    def reject(self, item: Rejected) -> None:
        """Store a rejected document for people to look at."""
        self.rejected.write(item.to_json().encode() + b"\n")


@contextmanager
def piece_writer(task: stage.StageTask[Any]) -> Iterator[PieceWriter]:
    """Write all files of a piece if the block succeeds, and none if it fails."""
    with ExitStack() as stack:
        files = [
            stack.enter_context(stack.enter_context(stage.replacing(path)).open("wb"))
            for path in piece_paths(task)
        ]
        documents, rejected, ids = (stack.enter_context(_compressed(files[i])) for i in (0, 3, 4))
        writer = PieceWriter(documents, ids, rejected)
        yield writer
        np.save(files[1], np.frombuffer(writer.hashes, dtype="<u8").reshape(-1, 2))
        np.save(files[2], np.array(writer.sizes, dtype=np.int64))
        np.save(files[5], np.array(writer.id_hashes, dtype=np.uint64))


@contextmanager
def _compressed(file: IO[bytes]) -> Iterator[IO[bytes]]:
    # A MB at a time: the compressor's tables and those of normalisation push each other out of the
    # processor's cache if they take turns from document to document.
    compressor = cast("io.RawIOBase", zstd.open(file, "wb", options=_ZSTD))
    with io.BufferedWriter(compressor, 1 << 20) as writer:
        yield cast("IO[bytes]", writer)
    if not file.tell():  # the library writes nothing, and zstdcat does not read that
        file.write(zstd.compress(b"", options=_ZSTD))


# Level 1 would save 0.17 core-hours of 280 GB and make files 26% larger. `backports.zstd`, not
# `zstandard`, which reads a file that was cut short as if it had ended there.
_ZSTD: dict[int, int] = {
    zstd.CompressionParameter.compression_level: 3,
    zstd.CompressionParameter.checksum_flag: 1,
}


def read_documents(path: Path, rows: Container[int] | None = None) -> Iterator[dict[str, Any]]:
    """Read the documents of a `.jsonl.zst`: all, or those in some rows."""
    return read_lines(path, rows)


def read_lines(path: Path, rows: Container[int] | None = None) -> Iterator[Any]:
    """Read the values of any of the `.jsonl.zst` files: those of all lines, or of some.

    Raises:
        DataError: before the first value, if the file is not as its task wrote it.
    """
    if (expected := stage.recorded_sha256(path)) is not None:
        stage.require_written(path, sha256_file(path), expected)
    if not path.stat().st_size:
        return  # earlier versions wrote nothing where there was nothing
    try:
        with path.open("rb") as file, zstd.open(file, "rb") as lines:
            for row, line in enumerate(lines):
                if rows is None or row in rows:
                    yield json.loads(line)
    except (zstd.ZstdError, EOFError, ValueError) as error:
        raise stage.not_as_written(path, f"it cannot be read: {error}") from error


def batches(
    documents: Iterable[dict[str, Any]], max_chars: int = BATCH_CHARS
) -> Iterator[list[dict[str, Any]]]:
    """Group documents into lists of about as much text as fits caches."""
    batch: list[dict[str, Any]] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document["text"])
        if size >= max_chars or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def id_hash(document_id: str) -> int:
    """Return the number that stands for a document's id in `.id_hashes.npy`."""
    return int.from_bytes(hashlib.blake2b(document_id.encode(), digest_size=8).digest(), "little")


def hash_share(document_id: str, purpose: str) -> float:
    """Draw a number in [0, 1) by a document's id: the same on every machine and rerun."""
    digest = hashlib.blake2b(f"{purpose}\0{document_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64


@dataclass(frozen=True)
class Pieces:
    """All pieces as one stage left them. Documents are numbered over all pieces, in order."""

    texts: Path
    """Folder of the stage that wrote the texts last: ingest or lines."""
    masks: Path
    """Folder of the stage that wrote masks last; not yet there before stage dedup."""
    names: tuple[str, ...]

    def documents_path(self, name: str) -> Path:
        """Return the file with a piece's documents."""
        return self.texts / f"{name}.jsonl.zst"

    def ids(self, name: str) -> Iterator[str]:
        """Read the ids of a piece's documents."""
        return read_lines(self.texts / f"{name}.ids.jsonl.zst")

    def sizes(self, name: str) -> Numbers:
        """Load the (d,) UTF-8 bytes of a piece's documents."""
        return cast("Numbers", np.load(self.texts / f"{name}.bytes.npy"))

    def keep(self, name: str) -> Mask:
        """Load the (d,) mask of a piece."""
        return cast("Mask", np.load(self.masks / f"{name}.keep.npy"))

    def kept_rows(self, name: str) -> Numbers:
        """Return the rows of the documents that are left of a piece."""
        return np.flatnonzero(self.keep(name))

    def kept_sizes(self, name: str) -> Numbers:
        """Return the UTF-8 bytes of the documents that are left of a piece."""
        return self.sizes(name)[self.kept_rows(name)]

    @cached_property
    def ends(self) -> Numbers:
        """(pieces,) the number behind each piece's last document."""
        sizes = [len(np.load(self.texts / f"{n}.bytes.npy", mmap_mode="r")) for n in self.names]
        return np.cumsum(sizes, dtype=np.int64)

    @cached_property
    def starts(self) -> list[int]:
        """The number of each piece's first document."""
        return [0, *self.ends[:-1].tolist()]

    def split(self, documents: Numbers) -> list[tuple[int, Numbers]]:
        """Group rising numbers of documents by piece: (number of the piece, its documents)."""
        pieces = np.searchsorted(self.ends, documents, side="right")
        cuts = np.flatnonzero(np.diff(pieces)) + 1
        firsts = pieces[np.concatenate([[0], cuts])].tolist() if len(documents) else []
        return list(zip(firsts, np.split(documents, cuts), strict=False))


def listed_per_piece(pieces: Pieces) -> int:
    """Return the number of dropped documents that are named per piece."""
    return max(1, LISTED // len(pieces.names))


def list_bytes(num_documents: float) -> float:
    """Estimate the memory for the ids in the lists of dropped documents."""
    return 1400 * min(num_documents / 5, LISTED)


def write_dropped(
    path: tuple[Path, str],
    pieces: Pieces,
    documents: Numbers,
    kept: Numbers,
    jaccard: npt.NDArray[np.float64] | None = None,
) -> list[Path]:
    """Write the list of dropped documents of every piece.

    Args:
        path: folder and suffix of the lists.
        pieces: all pieces.
        documents: (M,) dropped ones, rising.
        kept: (M,) the document that is kept instead of each.
        jaccard: (M,) estimated similarity of the two; None for equal documents.
    """
    ids = _ids(pieces, np.union1d(documents, kept))
    cuts = np.searchsorted(documents, pieces.ends).tolist()
    paths = [path[0] / f"{name}{path[1]}" for name in pieces.names]
    for place, low, high in zip(paths, [0, *cuts], cuts, strict=False):
        with stage.replacing(place) as temporary, temporary.open("w", encoding="utf-8") as file:
            for row in range(low, high):
                record: dict[str, Any] = {"id": ids[documents[row]], "kept": ids[kept[row]]}
                if jaccard is not None:
                    record["jaccard"] = round(float(jaccard[row]), 3)
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return paths


def _ids(pieces: Pieces, documents: Numbers) -> dict[int, str]:
    ids: dict[int, str] = {}
    for piece, wanted in pieces.split(documents):
        rows = set((wanted - pieces.starts[piece]).tolist())
        found = read_lines(pieces.texts / f"{pieces.names[piece]}.ids.jsonl.zst", rows)
        ids.update(zip(wanted.tolist(), found, strict=True))
    return ids
