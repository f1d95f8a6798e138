"""The status of a folder as a person reads it: one model and one renderer for every kind of folder.

Runs, datasets and their jobs know different things; all of them end as a `Summary`: a title, lines
that mostly begin with a label, and warnings.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.runtime.log import duration_text

_LABEL_WIDTH = 12
_BAR_WIDTH = 40

Line = str | tuple[str, str]
"""A whole line, or a label and its text; an empty label continues the line before."""


@dataclass(frozen=True)
class Summary:
    """The status of one folder, the most important first."""

    folder: str
    state: str
    """The state in a few words."""
    lines: Sequence[Line] = ()
    warnings: Sequence[str] = ()

    def text(self) -> str:
        """Render the summary for a terminal."""
        head = f"{short_path(self.folder)}: {self.state}"
        lines = [
            line if isinstance(line, str) else f"{line[0]:<{_LABEL_WIDTH}}{line[1]}"
            for line in self.lines
        ]
        return "\n".join([head, *lines, *(f"warning: {warning}" for warning in self.warnings)])


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Iterator[str]:
    """Align the columns of a table.

    Args:
        rows: rows of cells, the header first.
        right: columns that are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def progress_bar(done: int, total: int, unit: str) -> str:
    """Draw such as `[####----] 50.0%  step 5 of 10`."""
    share = done / total
    filled = int(share * _BAR_WIDTH)
    bar = "#" * filled + "-" * (_BAR_WIDTH - filled)
    return f"[{bar}] {share:.1%}  {unit} {done:,} of {total:,}"


def duration(seconds: float | None) -> str:
    """Write a duration as `HH:MM:SS`; clocks of two machines may make it negative, which is 0."""
    return "unknown" if seconds is None else duration_text(max(0.0, seconds))


def date(unix_s: float) -> str:
    """Write a moment in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def short_path(path: str) -> str:
    """Write a path relative to the current folder, where it is below it."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path
