"""What the stages of data preparation hand on: input files, documents and rejected parts.

Of this package it imports the config alone, so that all other modules can import it.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from data_prep.config import SourceConfig

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


@dataclass(frozen=True)
class InputFile:
    """A file, or a range of its bytes, and its name in document ids.

    The name does not depend on the file's folder. A range stands for the documents that begin in
    it, which may end behind it.
    """

    path: str
    """Absolute, or an address in a store; a link as it is called, since names tell formats."""
    name: str
    num_bytes: int
    """Size of the whole file."""
    mtime_ns: int
    """Time of modification, or the version that a store gives."""
    start: int = 0
    end: int | None = None
    """First byte behind the range; None for the end of the file."""

    @property
    def range_bytes(self) -> int:
        """Length of the range."""
        return (self.num_bytes if self.end is None else self.end) - self.start


@dataclass(frozen=True)
class InputPiece:
    """Consecutive files of one source: the unit of work of ingestion."""

    source: SourceConfig
    files: tuple[InputFile, ...]
