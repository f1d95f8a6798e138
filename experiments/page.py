"""One writer of results: Markdown, JSON and figures; the same numbers give the same bytes."""

import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.runtime.files import write_atomic

MARKED: dict[str, Any] = {"marker": "o", "ms": 3, "capsize": 2}
SIDE_BY_SIDE = 0.4
"""Share of the room between two places over which their lines' intervals are spread."""
_SMALL = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
_RULES = {"l": "---", "r": "---:"}


def write(
    folder: Path, name: str, body: Any, lines: Iterable[str], figures: Mapping[str, bytes]
) -> None:
    """Write NAME.json, NAME.md and figures by their file name into a folder, each complete."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(plain(body), indent=1, allow_nan=False) + "\n"
    write_atomic(folder / f"{name}.json", text.encode())
    for file, picture in figures.items():
        write_atomic(folder / file, picture)
    write_atomic(folder / f"{name}.md", ("\n".join(lines) + "\n").encode())


def table(align: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lay out a Markdown table; `align` has `l` or `r` for each column."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'|'.join(_RULES[side] for side in align)}|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def plain(value: Any) -> Any:
    """Replace what JSON does not have: NaN by null, keys that are numbers by text."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def svg(rows: int, columns: int, inches: tuple[float, float], draw: Callable[[Any], None]) -> bytes:
    """Draw panels as SVG, with the legend of the first one below; the same numbers, same bytes.

    Args:
        rows: of panels.
        columns: of panels.
        inches: width and height.
        draw: gets the panels, as `pyplot.subplots` returns them, in rows.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    with mpl.rc_context({**_SMALL, "svg.hashsalt": "postnorm", "svg.fonttype": "none"}):
        drawn, axes = pyplot.subplots(
            rows, columns, figsize=inches, squeeze=False, layout="constrained"
        )
        draw(axes)
        handles, labels = axes[0][0].get_legend_handles_labels()
        if handles:
            drawn.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
        text = io.BytesIO()
        drawn.savefig(text, format="svg", metadata={"Date": None})
        pyplot.close(drawn)
    # Matplotlib leaves blanks at line ends.
    return b"\n".join(line.rstrip() for line in text.getvalue().splitlines()) + b"\n"


class Point(NamedTuple):
    """A number of a line, with its interval."""

    place: str
    mean: float
    below: float
    above: float
    """Lengths of the two halves of its interval."""


def draw_lines(panel: Any, lines: Mapping[str, list[Point]], labels: Sequence[str]) -> None:
    """Draw lines in the colours of their labels, side by side where they share a place."""
    places = list(dict.fromkeys(point.place for points in lines.values() for point in points))
    for label, points in lines.items():
        number = labels.index(label)
        shift = SIDE_BY_SIDE * ((number + 0.5) / len(labels) - 0.5)
        at = [places.index(point.place) + shift for point in points]
        means, intervals = [each.mean for each in points], [each[2:] for each in points]
        halves = list(zip(*intervals, strict=True))
        panel.errorbar(at, means, halves, label=label, color=f"C{number}", **MARKED)
    panel.set_xticks(range(len(places)), places)
