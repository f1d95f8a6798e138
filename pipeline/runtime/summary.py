"""Text for people who look at a terminal: the summary of a folder, tables, bars, progress.

On a terminal rich draws them, no wider than it is; elsewhere they are plain lines, each complete
when it is written. rich takes a fifth of a second to import, so only a terminal loads it.
"""

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.runtime import log

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

logger = logging.getLogger(__name__)

LABEL_WIDTH = 12
"""Columns of a label and the space behind it."""
_BAR_WIDTH = 40
_LEAST_BAR_WIDTH = 5
_TELL_EVERY_S = 30.0
_REDRAWS_PER_S = 5
_COLOURS = {"finished": "green", "complete": "green", "running": "cyan", "failed": "red",
            "killed": "red", "stopped": "yellow", "not complete": "yellow"}  # fmt: skip
Line = str | tuple[str, str]
"""A whole line, or a label and its text; an empty label continues the line before."""


@dataclass(frozen=True)
class FolderSummary:
    """The status of one folder, a run or a dataset, the most important first."""

    folder: str
    state: str
    """The state in a few words."""
    lines: Sequence[Line] = ()
    warnings: Sequence[str] = ()

    def text(self) -> str:
        """Render the summary for stdout."""
        console = _console()
        if console is None:
            head = f"{short_path(self.folder)}: {self.state}"
            lines = [
                line if isinstance(line, str) else f"{line[0]:<{LABEL_WIDTH}}{line[1]}"
                for line in self.lines
            ]
            return "\n".join([head, *lines, *(f"warning: {text}" for text in self.warnings)])
        return "\n".join(_drawn(console, *self._parts()))

    def _parts(self) -> Iterator[Any]:
        from rich.table import Table
        from rich.text import Text

        colour = _COLOURS.get(self.state.rpartition(", ")[2], "default")
        yield Text.assemble((short_path(self.folder), "bold"), ": ", (self.state, f"bold {colour}"))
        for line in self.lines:
            if isinstance(line, str):
                yield Text(line)
                continue
            pair = Table.grid()
            pair.add_column(width=LABEL_WIDTH)
            pair.add_column(overflow="fold")
            pair.add_row(Text(line[0], "bold"), Text(line[1]))
            yield pair
        yield from (Text(f"warning: {text}", "yellow") for text in self.warnings)


def table(
    rows: Sequence[Sequence[str]], right: Sequence[int] = (), label_width: int = 0
) -> Iterator[str]:
    """Align the columns of a table for stdout, the header first; those of `right` to the right.

    `label_width` columns of the terminal stand before each line.
    """
    console = _console()
    if console is not None:
        yield from _fitted(console, console.width - label_width, rows, right)
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _fitted(
    console: "Console", room: int, rows: Sequence[Sequence[str]], right: Sequence[int]
) -> Iterator[str]:
    """Break the cells of columns for which there is no room into lines."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    for number in range(len(rows[0])):
        grid.add_column(justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*map(Text, row))
    console.width = room
    yield from _drawn(console, grid)


def progress_bar(done: int, total: int, unit: str) -> str:
    """Draw such as `[####----] 50.0%  step 5 of 10`."""
    share = done / total
    text = f" {share:.1%}  {unit} {done:,} of {total:,}"
    console = _console()
    width = console.width - len(text) - 2 if console else _BAR_WIDTH
    width = max(_LEAST_BAR_WIDTH, min(_BAR_WIDTH, width))
    filled = int(share * width)
    return f"[{'#' * filled}{'-' * (width - filled)}]{text}"


class ProgressRow:
    """How far a loop is, where nobody looks."""

    is_drawn = False

    def __call__(self, number: int) -> None:
        """Count new items."""

    def show(self, done: int, facts: str, eta_s: float | None) -> None:
        """Show how many items are done in all, a few words, and the seconds left."""


class _DrawnRow(ProgressRow):
    is_drawn = True

    def __init__(self, bars: "Progress", title: str, total: int, unit: str, done: int) -> None:
        self._bars, self._unit, self._done, self._total = bars, unit, done, total
        self._has_facts = False
        self._task = bars.add_task(
            title, total=total, completed=done, count=self._count(), facts="", eta_s=None
        )

    def __call__(self, number: int) -> None:
        self._done += number
        self._bars.update(self._task, completed=self._done, count=self._count())

    def show(self, done: int, facts: str, eta_s: float | None) -> None:
        self._done = done
        fields: dict[str, Any] = {"count": self._count(), "facts": facts, "eta_s": eta_s}
        # The first words at once, however long the next item takes.
        self._bars.update(self._task, completed=done, refresh=not self._has_facts, **fields)
        self._has_facts = True

    def remove(self) -> None:
        self._bars.remove_task(self._task)

    def _count(self) -> str:
        from rich.filesize import decimal

        form = decimal if self._unit == "B" else "{:,}".format
        return f"{form(self._done)}/{form(self._total)}"


_bars: "Progress | None" = None
"""What is drawn on the terminal now; loops inside a loop have their rows below its own."""


@contextmanager
def progress(
    title: str, total: int, unit: str, *, done: int = 0, stays: bool = False, logs: bool = True
) -> Iterator[ProgressRow]:
    """Show on stderr how far a loop is; it calls what this yields with the number of new items.

    Without a terminal a line is logged now and then, and if it `stays` one at the end; nothing
    unless it `logs`.
    """
    global _bars
    if not log.draws_bars() or not logger.isEnabledFor(logging.INFO):
        lines = _ProgressLines(title, total, unit, done) if logs else ProgressRow()
        yield lines
        if stays and isinstance(lines, _ProgressLines):
            lines.tell()
        return
    if _bars is not None:
        row = _DrawnRow(_bars, title, total, unit, done)
        try:
            yield row
        finally:
            row.remove()
        return
    with _opened(stays=stays) as _bars:
        try:
            yield _DrawnRow(_bars, title, total, unit, done)
        finally:
            _bars = None


def _opened(*, stays: bool) -> "Progress":
    from rich import progress as bars
    from rich.console import Console
    from rich.table import Column
    from rich.text import Text

    class TimeLeft(bars.TimeRemainingColumn):
        def render(self, task: bars.Task) -> Text:
            eta_s = task.fields["eta_s"]
            return super().render(task) if eta_s is None else Text(f"ETA {duration(eta_s)}")

    columns = [
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(bar_width=None),
        bars.TextColumn("{task.fields[count]}", markup=False),
        bars.TextColumn("{task.fields[facts]}", markup=False),
        TimeLeft(compact=True, table_column=Column(no_wrap=True)),
    ]
    # What is printed meanwhile stands above the bar; in a file it stays what it is.
    return bars.Progress(
        *columns,
        console=Console(stderr=True),
        transient=not stays,
        refresh_per_second=_REDRAWS_PER_S,
        redirect_stdout=sys.stdout.isatty(),
    )


class _ProgressLines(ProgressRow):
    """Logs how far a loop is, seldom."""

    def __init__(self, title: str, total: int, unit: str, done: int) -> None:
        self._title, self._total, self._unit, self._done = title, total, unit, done
        self._told_s = time.monotonic()

    def __call__(self, number: int) -> None:
        self._done += number
        if time.monotonic() - self._told_s > _TELL_EVERY_S and self._done < self._total:
            self.tell()

    def tell(self) -> None:
        self._told_s = time.monotonic()
        of = f"{self._done:,} of {self._total:,} {self._unit}{'s' * (self._unit != 'B')}"
        logger.info("%s: %s", self._title, of)


def _console() -> "Console | None":
    """Open stdout as a terminal; None if it is not one."""
    if not sys.stdout.isatty():
        return None
    from rich.console import Console

    return Console()


def _drawn(console: "Console", *parts: Any) -> list[str]:
    with console.capture() as drawn:
        for part in parts:
            console.print(part)
    return [line.rstrip() for line in drawn.get().splitlines()]


def counted(number: int, noun: str) -> str:
    """Write such as `1 rank` and `2 ranks`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def duration(seconds: float | None) -> str:
    """Write such as `2d 03:04:05`; None is `unknown`."""
    if seconds is None:
        return "unknown"
    # Clocks of two machines may make a duration negative.
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
