"""Counts of the values that documents have in the fields that `sources[].metadata` names.

Counts of tasks add up in any order to the same numbers.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from data_prep.readers.items import Metadata

_MOST_VALUES = 1000
"""Different values that are counted; URLs have more."""
_MOST_CHARS = 60


@dataclass
class FieldCounts:
    """What is known of one field."""

    documents: int = 0
    """Number of documents that have the field."""
    values: dict[str, int] | None = field(default_factory=dict)
    """Value -> documents; None if there are more than `_MOST_VALUES`."""
    first: str = ""
    last: str = ""
    """The smallest and the largest value as text, such as of dates."""

    def add(self, value: str) -> None:
        """Count a document with a value."""
        self.first = min(self.first, value) if self.documents else value
        self.last = max(self.last, value)
        self.documents += 1
        if self.values is not None:
            self.values[value] = self.values.get(value, 0) + 1
            if len(self.values) > _MOST_VALUES:
                self.values = None

    def merge(self, other: "FieldCounts") -> None:
        """Add the counts of another task."""
        ends = [end for each in (self, other) if each.documents for end in (each.first, each.last)]
        if ends:
            self.first, self.last = min(ends), max(ends)
        self.documents += other.documents
        both = None
        if self.values is not None and other.values is not None:
            both = dict(Counter(self.values) + Counter(other.values))
        self.values = None if both is None or len(both) > _MOST_VALUES else both


def count(counts: dict[str, FieldCounts], metadata: Metadata) -> None:
    """Count the values of one document, cut to what a table can show."""
    for name, value in metadata.items():
        counts.setdefault(name, FieldCounts()).add(str(value)[:_MOST_CHARS])


def merged(of_tasks: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, FieldCounts]:
    """Add up the counts of tasks, as `asdict` made plain values of them."""
    whole: dict[str, FieldCounts] = {}
    for counts in of_tasks:
        for name, values in counts.items():
            whole.setdefault(name, FieldCounts()).merge(FieldCounts(**values))
    return dict(sorted(whole.items()))


def shown(counts: FieldCounts, most: int = 3) -> str:
    """List the most frequent values, or where all differ the first and the last."""
    if counts.values is None or len(counts.values) == counts.documents > most:
        return f"{counts.first} to {counts.last}"
    common = Counter(counts.values).most_common(most)
    texts = [f"{value} ({100 * n / counts.documents:.1f}%)" for value, n in common]
    more = len(counts.values) - len(common)
    return ", ".join(texts) + (f" and {more:,} more" if more else "")
