"""What readers yield, and how a file that ends too early is told."""

import base64
import json
from dataclasses import dataclass
from typing import Any

from pipeline.errors import DataError

CUT_SHORT = "file cut short"
DAMAGED = "file damaged"


@dataclass(frozen=True)
class Document:
    """A text and its id, which is the same on every rerun and for any size of pieces."""

    id: str
    text: str


@dataclass(frozen=True)
class Rejected:
    """A line or document that could not be read, kept aside for people to look at."""

    id: str
    reason: str
    """What is counted."""
    raw: bytes
    detail: str = ""
    """What was measured and the limit, such as `0.31 > 0.2`."""

    def to_json(self) -> str:
        """One line; bytes that are no UTF-8 are given in base64."""
        record: dict[str, Any] = {"id": self.id, "reason": self.reason}
        if self.detail:
            record["detail"] = self.detail
        try:
            record["raw"] = self.raw.decode()
        except UnicodeDecodeError:
            record["raw_base64"] = base64.b64encode(self.raw).decode()
        return json.dumps(record, ensure_ascii=False)


class BrokenFileError(Exception):
    """A file holds nothing readable from here on; caught by `documents.read_file`."""

    def __init__(self, reason: str, message: str, unfinished: bytes = b"") -> None:
        super().__init__(message)
        self.reason = reason
        """`CUT_SHORT` or `DAMAGED`."""
        self.unfinished = unfinished
        """The beginning of the document that the break goes through."""


@dataclass(frozen=True)
class Place:
    """Where documents come from: gives them their ids."""

    source: str
    path: str
    name: str
    """The file's name in ids."""

    def at(self, offset: int) -> str:
        """Id of what begins at this byte of the decompressed file (parquet: in this row)."""
        return f"{self.source}/{self.name}@{offset}"

    def own(self, value: object, offset: int) -> str:
        """The id that a document brings along, or its place if that is none."""
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
            return self.at(offset)
        return f"{self.source}/{storable(str(value))}"

    def too_long(self, where: str, max_bytes: int) -> DataError:
        """The error for a document at `where` that is longer than `max_bytes`."""
        return DataError(
            f"{self.path}, {where}: a document is longer than clean.max_document_mb = "
            f"{max_bytes // 1_000_000} MB; split it, or raise clean.max_document_mb "
            "(about 25 times as much memory is needed for it)"
        )


def storable(text: str) -> str:
    """Replaces lone surrogates, which JSON may hold and no UTF-8 file can store."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
