"""Text for people who look at a terminal: the summary of a folder, tables, bars, durations."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_LABEL_WIDTH = 12
_BAR_WIDTH = 40
Line = str | tuple[str, str]
"""A whole line, or a label and its text; an empty label continues the line before."""


@dataclass(frozen=True)
class Summary:
    """The status of one folder, a run or a dataset, the most important first."""

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
    """Align the columns of a table, the header first; those of `right` to the right."""
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
    """Write such as `2d 03:04:05`; None is `unknown`.

    Clocks of two machines may make a duration negative, which is shown as 0.
    """
    if seconds is None:
        return "unknown"
    days, rest = divmod(round(max(0.0, seconds)), 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}d {clock}" if days else clock


def number(value: float | None, form: str) -> str:
    """Format a number; None is `unknown`."""
    return "unknown" if value is None else format(value, form)


def date(unix_s: float) -> str:
    """Write a moment in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))


def short_path(path: str) -> str:
    """Write a path relative to the current folder, where it is below it."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path
