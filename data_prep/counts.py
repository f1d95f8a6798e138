"""Documents and bytes in, out and rejected by reason: the counts that every stage reports."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

INGEST_STAGES = ("ingest", "normalise", "filter")
"""Names under which the one pass over the input files counts its three parts."""
REPEATED_IDS = "documents with the id of another"


@dataclass
class Counts:
    """Counts of one stage, or of one of its tasks. Bytes are UTF-8 bytes of text."""

    documents_in: int = 0
    bytes_in: int = 0
    documents_out: int = 0
    bytes_out: int = 0
    rejected: dict[str, list[int]] = field(default_factory=dict)
    """reason -> [documents or lines, bytes]."""

    def take(self, num_bytes: int) -> None:
        """Count a document that came in."""
        self.documents_in += 1
        self.bytes_in += num_bytes

    def give(self, num_bytes: int) -> None:
        """Count a document that goes on."""
        self.documents_out += 1
        self.bytes_out += num_bytes

    def reject(self, reason: str, num_bytes: int, count: int = 1) -> None:
        """Count one rejected document, or `count` rejected lines."""
        documents, total = self.rejected.get(reason, [0, 0])
        self.rejected[reason] = [documents + count, total + num_bytes]

    def mask(self, sizes: npt.NDArray[np.int64], keep: npt.NDArray[np.bool_], reason: str) -> None:
        """Count documents of (d,) `sizes` in bytes; those outside (d,) `keep` are rejected."""
        self.documents_in += len(sizes)
        self.bytes_in += int(sizes.sum())
        self.documents_out += int(keep.sum())
        self.bytes_out += int(sizes[keep].sum())
        if not keep.all():
            self.reject(reason, int(sizes[~keep].sum()), int((~keep).sum()))

    def add(self, part: dict[str, Any]) -> None:
        """Add the counts of a task, as `to_json` gave them."""
        for name in ("documents_in", "bytes_in", "documents_out", "bytes_out"):
            setattr(self, name, getattr(self, name) + part[name])
        for reason, (documents, num_bytes) in part["rejected"].items():
            self.reject(reason, num_bytes, documents)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        return asdict(self)

    @classmethod
    def total(cls, parts: Iterable[dict[str, Any]]) -> "Counts":
        """Add up the counts of tasks."""
        total = cls()
        for part in parts:
            total.add(part)
        return total


def table(stages: dict[str, Counts]) -> str:
    """Format one line per stage, with its rejections below it."""
    lines = [
        f"{'stage':<12}{'documents in':>14}{'MB in':>10}{'documents out':>15}{'MB out':>10}"
        f"{'rejected':>10}"
    ]
    for name, counts in stages.items():
        rejected = sum(documents for documents, _ in counts.rejected.values())
        lines.append(
            f"{name:<12}{counts.documents_in:>14,}{counts.bytes_in / 1e6:>10.2f}"
            f"{counts.documents_out:>15,}{counts.bytes_out / 1e6:>10.2f}{rejected:>10,}"
        )
        lines += [
            f"    {reason}: {documents:,} ({num_bytes / 1e6:.2f} MB)"
            for reason, (documents, num_bytes) in sorted(counts.rejected.items())
        ]
    return "\n".join(lines)
