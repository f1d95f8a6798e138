"""Items that readers yield: documents and rejected parts; and the error about a broken file."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from data_prep.readers.encodings import Encoding, LongLine, invalid_line
from pipeline.errors import DataError

MOST_BYTES = 1_000_000_000
"""What is read of a document to split or reject it."""
BEGINNING_BYTES = 1000
"""What is kept of a document that is longer, and not read to be split or rejected."""
CUT_SHORT = "file cut short"
DAMAGED = "file damaged"

Metadata = Mapping[str, Any]
"""Values by the names that `sources[].metadata` gives; JSON can hold them."""


@dataclass(frozen=True)
class Document:
    """A text and its id, which is the same on every rerun and for any size of pieces."""

    id: str
    text: str
    metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True)
class Rejected:
    """A line or document that does not go on, stored for people to look at."""

    id: str
    reason: str
    """Counted in reports."""
    raw: bytes
    detail: str = ""
    """Measured value and limit, such as `0.31 > 0.2`, or what is there instead."""
    metadata: Metadata = field(default_factory=dict)
    rows: int = 1
    """Rows that are lost by it; 0 for bytes that are not valid."""
    is_lost: bool = True
    """False where a setting asks for it."""

    def to_json(self) -> str:
        """Return one line of JSON; bytes that are not UTF-8 are given in base64."""
        record: dict[str, Any] = {"id": self.id, "reason": self.reason}
        if self.detail:
            record["detail"] = self.detail
        if self.metadata:
            record["metadata"] = self.metadata
        try:
            record["raw"] = self.raw.decode()
        except UnicodeDecodeError:
            record["raw_base64"] = base64.b64encode(self.raw).decode()
        return json.dumps(record, ensure_ascii=False)


class BrokenFileError(Exception):
    """A file is not readable from here on; `documents.read_file` catches it."""

    def __init__(self, reason: str, message: str, unfinished: bytes = b"") -> None:
        super().__init__(message)
        self.reason = reason
        """`CUT_SHORT` or `DAMAGED`."""
        self.unfinished = unfinished
        """The beginning of the document that the break goes through."""


@dataclass(frozen=True)
class FileOrigin:
    """The file that documents come from: gives them their ids, and has their limit."""

    source: str
    path: str
    name: str
    """The file's name in ids."""
    max_bytes: int
    """Of a document."""
    encoding: Encoding = "utf-8"
    longer: Literal["stop", "split", "reject"] = "stop"
    """What becomes of a document longer than `max_bytes`; only lines of text can be split."""

    def at(self, offset: int) -> str:
        """Make the id of a document at a byte of the decompressed file (parquet: in a row)."""
        return f"{self.source}/{self.name}@{offset}"

    def own(self, value: object, offset: int) -> str:
        """Make the id from the document's own value, or from its place if that is unusable."""
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
            return self.at(offset)
        return f"{self.source}/{storable(str(value))}"

    def invalid_line(self, offset: int, raw: bytes) -> Rejected:
        """Reject a line that cannot be decoded, or is too long."""
        if isinstance(raw, LongLine):
            return self.too_long(self.at(offset), raw, raw.num_bytes)
        return Rejected(self.at(offset), invalid_line(self.encoding), raw, rows=0)

    def too_long(self, document_id: str, beginning: bytes, num_bytes: int = 0) -> Rejected:
        """Reject a document that is longer than `max_bytes`.

        Raises:
            DataError: the run is to stop there.
        """
        if self.longer == "stop":
            raise DataError(
                f"{self.path}: document {document_id} is longer than clean.max_document_mb = "
                f"{self.max_bytes // 1_000_000} MB; set clean.on_long_document to split or reject, "
                "or raise clean.max_document_mb (about 25 times as much memory is needed for it)"
            )
        reason = f"longer than {self.max_bytes // 1_000_000} MB"
        detail = f"{num_bytes:,} bytes" if num_bytes else ""
        beginning = beginning[:BEGINNING_BYTES]
        return Rejected(document_id, reason, beginning, detail, is_lost=False)


def storable(text: str) -> str:
    """Replace lone surrogates, which JSON may hold but UTF-8 cannot store."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
