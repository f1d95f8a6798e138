"""The files of a source, and their grouping into pieces."""

import codecs
import glob
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path

from data_prep import embedded
from data_prep.config import Encoding, SourceConfig
from data_prep.readers.encodings import UTF_16
from data_prep.readers.text import detect_encoding, opened
from data_prep.types import InputFile, InputPiece
from pipeline.errors import DataError
from pipeline.runtime import remote

FORMATS = {
    ".txt": "txt",
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".wet": "wet",
    ".warc": "wet",
    ".parquet": "parquet",
    ".md": "md",
}
TEXT_SUFFIXES = tuple(FORMATS)
# In a folder of data it is a card about it.
_ONLY_ON_REQUEST = "readme.md"
RECORDS = ("jsonl", "json", "csv", "tsv", "parquet")
"""Formats whose documents are records with fields."""
COMPRESSED_SUFFIXES = (".gz", ".zst", ".xz", ".bz2")
SMALLEST_PIECE_MB = 64
# 30 files each, with every stage: a quota of inodes, and the work of one process at a time.
_MOST_PIECES = 8_000
_HEAD_BYTES = 1 << 12
_ANY = "any"
# Files in a folder that Spark or Dask wrote; train.jsonl/part-00000 has the folder's format.
_PART_NAME = re.compile(r"part-\d+|\d+\.part")
_WIKIEXTRACTOR_NAME = re.compile(r"wiki_\d+")


@dataclass(frozen=True)
class Listing:
    """Files of a source, and what is left out."""

    files: tuple[InputFile, ...]
    ignored: tuple[str, ...]
    """Files in given folders whose suffix says that they are not text."""
    unreadable: tuple[str, ...] = ()
    """Files, folders and links in given folders that cannot be read, with the reason."""


def format_of(path: str, source: SourceConfig) -> str | None:
    """Return a file's format, by the source's settings or else by its name; None if unknown.

    What a .json file holds, an array or an object a line, its first character says.
    """
    if source.format != "auto":
        return source.format
    kind = _format_by_name(path)
    if kind == "jsonl" and plain_name(path).endswith(".json"):
        with opened(path, only_head=True) as stream:
            head = stream.buffer.read(_HEAD_BYTES)
        head = head.translate(None, codecs.BOM_UTF8 + codecs.BOM_UTF16 + b"\0").lstrip()
        return "json" if head.startswith(b"[") else kind
    return kind


def encoding_of(file: InputFile, source: SourceConfig) -> Encoding | None:
    """Return a file's encoding; looks into the file if the source says `auto`.

    Returns:
        None if the file is in no encoding that is known.
    """
    kind = format_of(file.path, source)
    # Parquet and WET are UTF-8 by their definition.
    if source.kind != "files" or source.reader or kind in ("parquet", "wet"):
        return "utf-8"
    found = detect_encoding(file.path) if source.encoding == "auto" else source.encoding
    # So are JSON arrays, if not UTF-16; brackets may be parts of characters in the others.
    return "utf-8" if kind == "json" and found not in UTF_16 else found


def find(source: SourceConfig) -> Listing:
    """List a source's files, sorted by name.

    In folders, files are chosen by their names, unless the source has its own reader. A file given
    by its name or a glob is read as `source.format`, whatever its name is, unless that is `auto`.
    """
    if source.kind == "embedded":
        pairs = embedded.find(source.inputs)
        if not pairs:
            raise DataError(
                f"source {source.name!r}: no file of the embedded corpus is named like "
                f"{list(source.inputs)}; names begin with stdlib/ or packages/"
            )
        return Listing(tuple(input_file(str(path), name) for path, name in pairs), ())
    files: dict[str, InputFile] = {}
    ignored: list[str] = []
    unreadable: list[str] = []
    for text in source.inputs:
        found = matching_files(f"source {source.name!r}", text, unreadable)
        for file, in_folder in found:
            by_name = _format_by_name(file.path)
            wanted = by_name if source.format == "auto" else source.format
            fits = wanted not in (None, _ANY) and (by_name in (wanted, _ANY) or not in_folder)
            is_card = in_folder and plain_name(file.path) == _ONLY_ON_REQUEST
            fits = fits and not (is_card and source.format == "auto")
            if fits or source.reader:
                files.setdefault(_identity(file.path), file)
            elif len(found) == 1 and not in_folder:
                raise DataError(
                    f"source {source.name!r}: {file.path} is of an unknown kind; {_KINDS}"
                )
            else:
                ignored.append(file.path)
    unreadable = list(dict.fromkeys(unreadable))
    if unreadable and source.on_unreadable == "stop":
        raise DataError(
            f"source {source.name!r}: {len(unreadable)} files or folders cannot be read, such as "
            f"{'; '.join(unreadable[:3])}; repair them, or set the source's on_unreadable: skip to "
            "leave them out"
        )
    named = _unique_names(source, list(files.values()))
    ordered = tuple(sorted(named, key=lambda file: file.name))
    return Listing(ordered, tuple(ignored), tuple(unreadable))


_KINDS = (
    f"expected {', '.join(TEXT_SUFFIXES)}, of which all but .parquet may be followed by "
    f"{', '.join(COMPRESSED_SUFFIXES)}, or wiki_NN; or set the source's format"
)


def piece_mb(files: Iterable[InputFile], given: int | None) -> int:
    """Choose the size of pieces in MB, if none is given: doubled until they are few enough.

    A corpus that grows keeps its pieces, and what was made of them, until it has doubled.
    """
    total, size = sum(file.num_bytes for file in files), SMALLEST_PIECE_MB
    while total > size * 1_000_000 * _MOST_PIECES:
        size *= 2
    return given or size


def pieces(source: SourceConfig, files: Sequence[InputFile], piece_bytes: int) -> list[InputPiece]:
    """Group files, in order, into pieces of about `piece_bytes`.

    A larger file is split into ranges if its documents can be found from any byte on: plain
    .jsonl, and plain .txt with several documents a file. Other files are one piece.
    """
    groups: list[list[InputFile]] = []
    size = 0
    for file in files:
        for part in _split(source, file, piece_bytes):
            if not groups or size + part.range_bytes > piece_bytes:
                groups.append([])
                size = 0
            groups[-1].append(part)
            size += part.range_bytes
    return [InputPiece(source, tuple(group)) for group in groups]


def refuse_changed(file: InputFile) -> None:
    """Check that a file has the size and time of modification that it had when it was listed."""
    now = input_file(file.path, file.name)
    if (now.num_bytes, now.mtime_ns) != (file.num_bytes, file.mtime_ns):
        raise DataError(
            f"{file.path} changed while it was read: {file.num_bytes} bytes when the run began, "
            f"{now.num_bytes} now; run again when it is no longer written to"
        )


def _split(source: SourceConfig, file: InputFile, piece_bytes: int) -> list[InputFile]:
    kind = format_of(file.path, source)
    splittable = (
        source.kind == "files"
        and not source.reader
        and not file.path.lower().endswith(COMPRESSED_SUFFIXES)
        and (kind == "jsonl" or (kind == "txt" and source.txt_documents != "file"))
    )
    if not splittable or file.num_bytes <= piece_bytes or encoding_of(file, source) in UTF_16:
        return [file]
    count = -(-file.num_bytes // piece_bytes)
    bounds = [file.num_bytes * i // count for i in range(count + 1)]
    return [replace(file, start=start, end=end) for start, end in pairwise(bounds)]


def _format_by_name(path: str) -> str | None:
    plain = plain_name(path)
    if _WIKIEXTRACTOR_NAME.fullmatch(plain):
        return "wikiextractor"
    if _PART_NAME.fullmatch(plain):
        return FORMATS.get(Path(plain_name(str(Path(path).parent))).suffix, _ANY)
    kind = FORMATS.get(Path(plain).suffix)
    return None if kind == "parquet" and plain != Path(path).name.lower() else kind


def plain_name(path: str) -> str:
    """Return a file's name in lower case, without the suffix of a compression."""
    name = Path(path).name.lower()
    for compressed in COMPRESSED_SUFFIXES:
        name = name.removesuffix(compressed)
    return name


def _unique_names(source: SourceConfig, files: list[InputFile]) -> list[InputFile]:
    """Rename files of several inputs that share a name: to their path below a common folder."""
    counts = Counter(file.name for file in files)
    same = [file for file in files if counts[file.name] > 1]
    root = _common_folder([file.path for file in same])
    named = [
        replace(file, name=file.path.removeprefix(root)) if counts[file.name] > 1 else file
        for file in files
    ]
    [(name, times)] = Counter(file.name for file in named).most_common(1) or [("", 0)]
    if times > 1:
        raise DataError(
            f"source {source.name!r}: {times} files are called {name!r} in document ids; give "
            "their common folder as the only input, or make them several sources"
        )
    return named


def _common_folder(paths: Sequence[str]) -> str:
    """Return the folder that all files are below, with a slash; "" if there is none."""
    parents = [path.split("/")[:-1] for path in paths]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*parents, strict=False))
    return "".join(f"{parts[0]}/" for parts in shared)


def _identity(path: str) -> str:
    """Return what all names of a file share."""
    return path if remote.is_address(path) else os.path.realpath(path)


def matching_files(owner: str, text: str, unreadable: list[str]) -> list[tuple[InputFile, bool]]:
    """List the files of one input of `owner`: a folder, glob or file, or an address of one.

    Links are followed, and folders that fit a glob are read. What cannot be read there is added to
    `unreadable`.

    Returns:
        Each file, and whether it was found in a folder, in which there may be other files, too.
    """
    if remote.is_address(text):
        listed = remote.list_files(text)
        if not listed:
            raise DataError(f"{owner}: input {text!r} matches no file; correct the address")
        return [
            (InputFile(at.address, name, at.num_bytes, at.version), in_folder)
            for at, name, in_folder in listed
        ]
    path = Path(text).expanduser()
    if path.is_dir():
        return [(file, True) for file in _folder(path, path, unreadable)]
    if path.is_file():
        return [(input_file(str(path), path.name), False)]
    hits = _hits(path)
    if not hits:
        raise DataError(
            f"{owner}: input {text!r} matches no file; correct the path "
            "(relative paths start at the current folder)"
        )
    # Names start below the glob's fixed part, so that a/x.txt and b/x.txt stay apart.
    fixed = Path(*takewhile(lambda part: not glob.has_magic(part), path.parts))
    folders: list[Path] = []
    for hit in hits:  # sorted: a folder comes before what is in it, as with `**`
        if hit.is_dir() and not (folders and hit.is_relative_to(folders[-1])):
            folders.append(hit)
    named = [
        input_file(str(hit), hit.relative_to(fixed).as_posix())
        for hit in hits
        if not hit.is_dir() and _can_be_read(hit, unreadable)
    ]
    found = {file.path: (file, False) for file in named}
    for folder in folders:
        for file in _folder(folder, fixed, unreadable):
            found.setdefault(file.path, (file, True))
    return list(found.values())


def refuse_inside(output: Path, texts: Iterable[str]) -> None:
    """Check that a folder to write to is not inside one of the inputs, which would read its files.

    Raises:
        DataError: it is.
    """
    for text in texts:
        if not remote.is_address(text):
            for hit in _hits(Path(text).expanduser()):
                if hit.is_dir() and output.resolve().is_relative_to(hit.resolve()):
                    raise DataError(
                        f"output_dir={output} is inside the input {str(hit)!r}, whose files are "
                        "read: choose an output_dir outside of it"
                    )


def _hits(path: Path) -> list[Path]:
    """List what a path or glob names."""
    if path.exists():
        return [path]
    return [Path(hit) for hit in sorted(glob.glob(str(path), recursive=True))]


def _folder(folder: Path, root: Path, unreadable: list[str]) -> list[InputFile]:
    """List the files below a folder, with their names below `root`."""
    below = sorted(_files_below(folder, unreadable))
    return [input_file(str(path), path.relative_to(root).as_posix()) for path in below]


def _can_be_read(path: Path, unreadable: list[str]) -> bool:
    """Open a file; if that fails, or it is a socket or the like, add it to `unreadable`."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would wait for a writer
            unreadable.append(f"{path} (not a file: a pipe, socket or device)")
            return False
        with path.open("rb"):
            return True
    except OSError as error:
        unreadable.append(f"{path} ({error.strerror})")
        return False


def _files_below(folder: Path, unreadable: list[str]) -> Iterator[Path]:
    """Yield the files below a folder; a link to a folder above it is not followed."""

    def failed(error: OSError) -> None:
        unreadable.append(f"{error.filename} ({error.strerror})")

    for parent, folders, files in os.walk(folder, onerror=failed, followlinks=True):
        here = Path(parent)
        above = {each.resolve() for each in (here, *here.parents)}
        folders[:] = [
            name
            for name in folders
            if not (here / name).is_symlink() or (here / name).resolve() not in above
        ]
        yield from (here / name for name in files if _can_be_read(here / name, unreadable))


def input_file(path: str, name: str) -> InputFile:
    """Describe a whole file as it is now."""
    if remote.is_address(path):
        file = remote.stat(path)
        return InputFile(path, name, file.num_bytes, file.version)
    path = os.path.abspath(path)
    try:
        path.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{path!a}: names of files become part of ids and reports; rename it to UTF-8"
        ) from None
    status = os.stat(path)
    return InputFile(path, name, status.st_size, status.st_mtime_ns)
