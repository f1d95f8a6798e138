"""Which files a source consists of, and how they are grouped into pieces."""

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep import embedded
from data_prep.config import SourceConfig
from pipeline.errors import DataError

TEXT_SUFFIXES = (".txt", ".jsonl", ".json")
COMPRESSED_SUFFIXES = (".gz", ".zst")


@dataclass(frozen=True)
class InputFile:
    """A file and the name it has in document ids, which does not depend on where it lies."""

    path: str
    name: str
    num_bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class Piece:
    """Consecutive files of one source: the unit of work of ingestion."""

    source: SourceConfig
    files: tuple[InputFile, ...]


@dataclass(frozen=True)
class Found:
    """Files of a source, and what was passed over."""

    files: tuple[InputFile, ...]
    ignored: tuple[str, ...]
    """Files in given folders whose suffix says that they are no text."""


def text_suffix(path: str) -> str | None:
    """`.txt`, `.jsonl` or `.json`, behind which there may be `.gz` or `.zst`; None for others."""
    name = path.lower()
    for compressed in COMPRESSED_SUFFIXES:
        name = name.removesuffix(compressed)
    return next((suffix for suffix in TEXT_SUFFIXES if name.endswith(suffix)), None)


def find(source: SourceConfig) -> Found:
    """Lists a source's files, sorted by name.

    Raises:
        DataError: an input does not exist, or a file named one by one is of an unknown kind.
    """
    if source.kind == "embedded":
        pairs = embedded.find()
        return Found(tuple(_input_file(path, name) for path, name in pairs), ())
    files: dict[str, InputFile] = {}
    ignored: list[str] = []
    for text in source.inputs:
        matches = _matches(source, text)
        for path, name in matches:
            if text_suffix(str(path)) is not None:
                files.setdefault(str(path.resolve()), _input_file(path, name))
            elif len(matches) == 1 and not Path(text).is_dir():
                raise DataError(f"source {source.name!r}: {path} is of an unknown kind; {_KINDS}")
            else:
                ignored.append(str(path))
    return Found(tuple(sorted(files.values(), key=lambda file: file.name)), tuple(ignored))


_KINDS = f"expected {', '.join(TEXT_SUFFIXES)}, optionally followed by .gz or .zst"


def pieces(source: SourceConfig, files: Sequence[InputFile], piece_bytes: int) -> list[Piece]:
    """Groups files, in order, into pieces of about `piece_bytes`; a large file is one by itself."""
    groups: list[list[InputFile]] = []
    size = 0
    for file in files:
        if not groups or size + file.num_bytes > piece_bytes:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.num_bytes
    return [Piece(source, tuple(group)) for group in groups]


def _matches(source: SourceConfig, text: str) -> list[tuple[Path, str]]:
    """Files that one input stands for, with their names in ids."""
    path = Path(text).expanduser()
    if path.is_dir():
        found = [p for p in sorted(path.rglob("*")) if p.is_file()]
        return [(p, p.relative_to(path).as_posix()) for p in found]
    if path.is_file():
        return [(path, path.name)]
    hits = [Path(hit) for hit in sorted(glob.glob(str(path), recursive=True))]
    if not hits:
        raise DataError(
            f"source {source.name!r}: input {text!r} matches no file; correct the path "
            "(relative paths start at the current folder)"
        )
    # Names start below the glob's fixed part, so that a/x.txt and b/x.txt stay apart.
    fixed = Path(*_until_wildcard(path.parts))
    return [(hit, hit.relative_to(fixed).as_posix()) for hit in hits if hit.is_file()]


def _until_wildcard(parts: Sequence[str]) -> list[str]:
    kept: list[str] = []
    for part in parts:
        if glob.has_magic(part):
            break
        kept.append(part)
    return kept


def _input_file(path: Path, name: str) -> InputFile:
    status = path.stat()
    return InputFile(str(path.resolve()), name, status.st_size, status.st_mtime_ns)
