"""Reads documents out of text files, byte by byte exact: nothing is dropped unseen.

Lines are read as bytes and decoded one by one, so that a broken byte costs its line and no more.
"""

import base64
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from backports import zstd

from data_prep.config import SourceConfig
from data_prep.inputs import InputFile, text_suffix
from pipeline.errors import DataError


@dataclass(frozen=True)
class Document:
    """A text and its id, which is the same on every rerun."""

    id: str
    text: str


@dataclass(frozen=True)
class Rejected:
    """A line or document that could not be read, kept aside for people to look at."""

    id: str
    reason: str
    raw: bytes

    def to_json(self) -> str:
        """One line; bytes that are no UTF-8 are given in base64."""
        record: dict[str, Any] = {"id": self.id, "reason": self.reason}
        try:
            record["raw"] = self.raw.decode()
        except UnicodeDecodeError:
            record["raw_base64"] = base64.b64encode(self.raw).decode()
        return json.dumps(record, ensure_ascii=False)


def read_file(
    file: InputFile, source: SourceConfig, max_bytes: int
) -> Iterator[Document | Rejected]:
    """Yields the documents of one file in order.

    Raises:
        DataError: the file is damaged, or one document is longer than `max_bytes`.
    """
    prefix = f"{source.name}/{file.name}"
    try:
        with _open(file.path) as stream:
            lines = _lines(stream, file.path, max_bytes)
            if text_suffix(file.path) == ".txt":
                yield from _txt(lines, prefix, source.txt_documents, file.path, max_bytes)
            else:
                yield from _jsonl(lines, prefix, source)
    except (EOFError, gzip.BadGzipFile, zlib.error, zstd.ZstdError) as error:
        raise DataError(
            f"{file.path} is damaged or cut short: {error}; restore it or remove it from "
            f"sources ({source.name!r})"
        ) from error


def _open(path: str) -> IO[bytes]:
    if path.lower().endswith(".gz"):
        return cast("IO[bytes]", gzip.open(path, "rb"))
    if path.lower().endswith(".zst"):
        # Unlike the package zstandard's reader, this one notices a file that is cut short.
        return io.BufferedReader(cast("io.RawIOBase", zstd.open(path, "rb")), 1 << 20)
    return Path(path).open("rb")


def _lines(stream: IO[bytes], path: str, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := stream.readline(max_bytes + 1):
        number += 1
        if len(line) > max_bytes:
            raise _too_long(path, number, max_bytes)
        yield number, line.rstrip(b"\r\n")


def _too_long(path: str, line: int, max_bytes: int) -> DataError:
    return DataError(
        f"{path}, line {line}: a document is longer than clean.max_document_mb = "
        f"{max_bytes // 1_000_000} MB; split it, or raise clean.max_document_mb "
        "(about 12 times as much memory is needed for it)"
    )


def _txt(
    lines: Iterator[tuple[int, bytes]], prefix: str, ends_at: str, path: str, max_bytes: int
) -> Iterator[Document | Rejected]:
    """Documents of a text file; a line with broken bytes is left out of its document."""
    parts: list[str] = []
    first, size = 1, 0
    for number, raw in lines:
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        try:
            line = raw.decode()
        except UnicodeDecodeError:
            yield Rejected(f"{prefix}:{number}", "invalid UTF-8 line", raw)
            continue
        ended = ends_at == "line" or (ends_at == "blank_line" and not line.strip())
        if line.strip() or not ended:
            first = first if parts else number
            parts.append(line)
            size += len(raw) + 1
            if size > max_bytes:
                raise _too_long(path, first, max_bytes)
        if ended and parts:
            yield Document(f"{prefix}:{first}", "\n".join(parts))
            parts, size = [], 0
    if parts:
        yield Document(f"{prefix}:{first}", "\n".join(parts))


def _jsonl(
    lines: Iterator[tuple[int, bytes]], prefix: str, source: SourceConfig
) -> Iterator[Document | Rejected]:
    for number, raw in lines:
        place = f"{prefix}:{number}"
        if not raw.strip():
            continue
        try:
            record = json.loads(raw.decode("utf-8-sig"))
        except UnicodeDecodeError:
            yield Rejected(place, "invalid UTF-8 line", raw)
            continue
        except (ValueError, RecursionError):
            yield Rejected(place, "invalid JSON line", raw)
            continue
        text = record.get(source.text_field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            yield Rejected(place, f"no text in field {source.text_field!r}", raw)
            continue
        own_id = record.get(source.id_field)
        if isinstance(own_id, (str, int)) and not isinstance(own_id, bool):
            place = f"{source.name}/{own_id}"
        # JSON may hold lone surrogates, which no UTF-8 file can store.
        yield Document(place, text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
