"""What of the input could not be read, by file, and the share at which a run stops.

Rows are documents, and records without text or that are not valid; bytes are those of lines that
are not valid in their file's encoding. What a setting leaves out is not lost.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from data_prep.config import SourceConfig
from data_prep.types import Document, Rejected
from pipeline.errors import DataError

logger = logging.getLogger(__name__)
_KEPT = 20
_SHOWN = 5


@dataclass
class Losses:
    """Counts of a file, of a piece or of a source."""

    rows: int = 0
    rows_lost: int = 0
    num_bytes: int = 0
    bytes_lost: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Reason, with what was there instead -> items."""

    def take(self, item: Document | Rejected) -> None:
        """Count an item of a reader."""
        if isinstance(item, Document):
            self.rows += 1
            self.num_bytes += len(item.text.encode())
        if isinstance(item, Document) or not item.is_lost:
            return
        self.rows += item.rows
        self.rows_lost += item.rows
        self.num_bytes += len(item.raw)
        self.bytes_lost += 0 if item.rows else len(item.raw)
        what = f"{item.reason}; {item.detail}" if item.detail else item.reason
        if what in self.reasons or len(self.reasons) < _KEPT:
            self.reasons[what] += max(1, item.rows)

    def add(self, other: "Losses") -> None:
        """Add the counts of another part."""
        for name in ("rows", "rows_lost", "num_bytes", "bytes_lost"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.reasons.update(other.reasons)

    @property
    def share(self) -> float:
        """Share that is lost, of rows or of bytes, whichever is larger."""
        return max(self.rows_lost / (self.rows or 1), self.bytes_lost / (self.num_bytes or 1))

    def text(self) -> str:
        """Describe the losses on one line."""
        reasons = "; ".join(f"{n:,}: {what}" for what, n in self.reasons.most_common(_SHOWN))
        return f"{100 * self.share:.1f}% lost ({reasons})"


@dataclass
class FieldUse:
    """Files whose records have a field, and others of the source that have not."""

    files: int = 0
    files_without: int = 0
    rows_without: int = 0
    example: str = ""
    """A file without."""

    def add(self, other: "FieldUse") -> None:
        """Add the counts of another part."""
        self.files += other.files
        self.files_without += other.files_without
        self.rows_without += other.rows_without
        self.example = self.example or other.example


@dataclass
class ReadReport:
    """What was read, of a piece or of a source."""

    total: Losses = field(default_factory=Losses)
    files: dict[str, Losses] = field(default_factory=dict)
    """By path, those that lost most."""
    fields: dict[str, FieldUse] = field(default_factory=dict)

    def add_file(self, path: str, losses: Losses, seen: dict[str, bool]) -> None:
        """Take a file, or a range of one; `seen` says which fields its records had."""
        fields = {
            name: FieldUse(1) if is_there else FieldUse(0, 1, losses.rows, path)
            for name, is_there in seen.items()
        }
        self.add(ReadReport(losses, {path: losses} if losses.share else {}, fields))

    def add(self, other: "ReadReport") -> None:
        """Add another part of the source."""
        self.total.add(other.total)
        for path, losses in other.files.items():
            self.files.setdefault(path, Losses()).add(losses)
            if len(self.files) > _KEPT:
                del self.files[min(self.files, key=lambda name: self.files[name].share)]
        for name, use in other.fields.items():
            self.fields.setdefault(name, FieldUse()).add(use)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        return {
            "total": _plain(self.total),
            "files": {path: _plain(losses) for path, losses in self.files.items()},
            "fields": {name: asdict(use) for name, use in self.fields.items()},
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "ReadReport":
        """Make it from what `to_json` returned."""
        files = {path: _losses(counts) for path, counts in values["files"].items()}
        fields = {name: FieldUse(**use) for name, use in values["fields"].items()}
        return cls(_losses(values["total"]), files, fields)


def _plain(losses: Losses) -> dict[str, Any]:
    # `asdict` would make a Counter of the pairs of a Counter.
    return {**vars(losses), "reasons": dict(losses.reasons)}


def _losses(values: dict[str, Any]) -> Losses:
    return Losses(**{**values, "reasons": Counter(values["reasons"])})


def check(source: SourceConfig, parts: Iterable[dict[str, Any]], *, warns: bool) -> None:
    """Warn of losses and of files with other fields, and stop where too much was lost.

    Raises:
        DataError: more than the source's `max_lost_share` was lost; names the files and reasons.
    """
    reading = ReadReport()
    for part in parts:
        reading.add(ReadReport.from_json(part))
    for name, use in reading.fields.items() if warns else ():
        if use.files and use.files_without:
            text = (
                "source %s: field %r is in none of the %d rows of %d files, such as %s, and in %d "
                "others"
            )
            where = (use.rows_without, use.files_without, use.example, use.files)
            logger.warning(text, source.name, name, *where)
    worst = sorted(reading.files.items(), key=lambda file: -file[1].share)
    named = [f"{path}: {losses.text()}" for path, losses in worst[:_SHOWN]]
    if reading.total.share > source.max_lost_share:
        raise DataError(
            f"source {source.name!r}: {100 * reading.total.share:.1f}% of its rows or bytes could "
            f"not be read, more than max_lost_share = {source.max_lost_share:g} of the source:\n  "
            + "\n  ".join(named)
            + f"\n{_remedies(reading.total)}; or raise max_lost_share, if this may be lost"
        )
    for line in named if warns else ():
        logger.warning("source %s: %s", source.name, line)


def _remedies(total: Losses) -> str:
    reasons = " ".join(total.reasons)
    remedies = {
        "no text in": "set the source's text_field to a field that is there",
        "invalid ": "set the source's encoding (auto finds each file's own) and format",
        "WARC": "give WET files, which have the extracted text",
    }
    fitting = [remedy for word, remedy in remedies.items() if word in reasons]
    return "; ".join(fitting) or "repair these files"
