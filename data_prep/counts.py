"""Documents and bytes in, out and rejected by reason: what every stage reports."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass
class Counts:
    """Counts of one stage, or of one task of it. Bytes are UTF-8 bytes of text."""

    documents_in: int = 0
    bytes_in: int = 0
    documents_out: int = 0
    bytes_out: int = 0
    rejected: dict[str, list[int]] = field(default_factory=dict)
    """reason -> [documents or lines, bytes]."""

    def take(self, num_bytes: int) -> None:
        """Counts a document that came in."""
        self.documents_in += 1
        self.bytes_in += num_bytes

    def give(self, num_bytes: int) -> None:
        """Counts a document that goes on."""
        self.documents_out += 1
        self.bytes_out += num_bytes

    def reject(self, reason: str, num_bytes: int, count: int = 1) -> None:
        """Counts something that does not go on: one document, or `count` lines."""
        documents, total = self.rejected.get(reason, [0, 0])
        self.rejected[reason] = [documents + count, total + num_bytes]

    def mask(self, sizes: npt.NDArray[np.int64], keep: npt.NDArray[np.bool_], reason: str) -> None:
        """Counts documents of (d,) `sizes` in bytes; those that (d,) `keep` leaves out go."""
        self.documents_in += len(sizes)
        self.bytes_in += int(sizes.sum())
        self.documents_out += int(keep.sum())
        self.bytes_out += int(sizes[keep].sum())
        if not keep.all():
            self.reject(reason, int(sizes[~keep].sum()), int((~keep).sum()))

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def total(cls, parts: Iterable[dict[str, Any]]) -> "Counts":
        """Adds up the counts of tasks."""
        total = cls()
        for part in parts:
            total.documents_in += part["documents_in"]
            total.bytes_in += part["bytes_in"]
            total.documents_out += part["documents_out"]
            total.bytes_out += part["bytes_out"]
            for reason, (documents, num_bytes) in part["rejected"].items():
                old = total.rejected.get(reason, [0, 0])
                total.rejected[reason] = [old[0] + documents, old[1] + num_bytes]
        return total


def table(stages: dict[str, Counts]) -> str:
    """One line a stage, with its rejections below it."""
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
