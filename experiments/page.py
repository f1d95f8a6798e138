"""One writer of results: Markdown, JSON and figures; the same numbers give the same bytes."""

import io
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.inspect.curves import COLOURS
from pipeline.runtime.files import write_atomic

SIDE_BY_SIDE = 0.5
"""Share of the room between two places over which their marks are spread."""
_MARKS = "osD^vPX*"
_LOG_FROM = 4
"""Numbers of which the largest is so many times the smallest have a logarithmic axis."""
_PLACES = 5
"""Places of numbers that marks are spread for at least."""
_LETTERS = 26
"""Of a line of a category's name."""
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


def svg(
    rows: int,
    columns: int,
    inches: tuple[float, float],
    note: str,
    draw: Callable[[Any], None],
    *,
    has_legend: bool = True,
) -> bytes:
    """Draw panels as SVG, with the legend of the first one below; the same numbers, same bytes.

    Args:
        rows: of panels.
        columns: of panels.
        inches: width and height.
        note: what marks and bars are, below the panels.
        draw: gets the panels, as `pyplot.subplots` returns them, in rows.
        has_legend: whether lines are named below.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    with mpl.rc_context({**_SMALL, "svg.hashsalt": "postnorm", "svg.fonttype": "none"}):
        drawn, axes = pyplot.subplots(
            rows, columns, figsize=inches, squeeze=False, layout="constrained"
        )
        draw(axes)
        lines = axes[0][0].get_legend_handles_labels() if has_legend else ([], [])
        # Its title is the note, so that neither lies over the other.
        below: dict[str, Any] = {"title": note, "title_fontsize": 7, "frameon": False}
        drawn.legend(*lines, loc="outside lower center", ncols=2, **below)
        text = io.BytesIO()
        drawn.savefig(text, format="svg", metadata={"Date": None}, bbox_inches="tight")
        pyplot.close(drawn)
    # Matplotlib leaves blanks at line ends.
    return b"\n".join(line.rstrip() for line in text.getvalue().splitlines()) + b"\n"


class Point(NamedTuple):
    """A mean at a place, with what is known of its chance."""

    place: str
    mean: float
    limits: tuple[float, float] | None
    """Interval; None without one."""
    seeds: tuple[float, ...] = ()
    """Values that it is the mean of, to be shown."""


def style(number: int) -> dict[str, Any]:
    """Return colour and mark of the line of a number."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": _MARKS[number % len(_MARKS)]}


def numbers_of(places: Sequence[str]) -> tuple[str, list[float]] | None:
    """Read places that differ in a number alone, such as `2 layers`; None for categories.

    Returns:
        What the numbers are of, and the numbers.
    """
    read = [re.fullmatch(r"(\D*?) ?(\d+(?:\.\d+)?) ?(\D*)", place) for place in places]
    if len(places) < 2 or None in read or len({(of[1], of[3]) for of in read if of}) > 1:
        return None
    before, after = next((of[1], of[3]) for of in read if of)
    name = ", ".join(filter(None, (re.sub(r" x$", ", times", before), after)))
    return name, [float(of[2]) for of in read if of]


def draw_points(
    panel: Any, lines: Mapping[str, list[Point]], labels: Sequence[str], places: Sequence[str]
) -> None:
    """Draw means, intervals and seeds in the colours of their labels, side by side at a place.

    Numbers lie on the axis below and are joined by lines; categories are rows from above.
    """
    numbers = numbers_of(places)
    at = [float(number) for number in range(len(places))] if numbers is None else numbers[1]
    if numbers is not None and min(at) > 0 and max(at) >= _LOG_FROM * min(at):
        at = [math.log2(number) for number in at]
    room = min((abs(b - a) for a, b in pairwise(sorted(at))), default=1.0)
    if numbers is not None:
        room = min(room, (max(at) - min(at)) / _PLACES)
    for label, given_points in lines.items():
        points = sorted(given_points, key=lambda point: at[places.index(point.place)])
        spots = []
        for place, *_ in points:
            here = [n for n in labels if any(of.place == place for of in lines.get(n, []))]
            shift = (here.index(label) + 0.5) / len(here) - 0.5
            spots.append(at[places.index(place)] + SIDE_BY_SIDE * room * shift)
        shape, means = style(labels.index(label)), [of.mean for of in points]
        limits = [of.limits or (math.nan, math.nan) for of in points]
        bars = None
        if any(of.limits for of in points):
            bars = [
                [of.mean - low for of, (low, _) in zip(points, limits, strict=True)],
                [high - of.mean for of, (_, high) in zip(points, limits, strict=True)],
            ]
        seeds = [(s, value) for s, of in zip(spots, points, strict=True) for value in of.seeds]
        small: dict[str, Any] = {"ls": "", "ms": 2, "alpha": 0.6, **shape}
        given: dict[str, Any] = {"label": label, "ms": 4, "lw": 1, "capsize": 2, **shape}
        if numbers is None:
            panel.errorbar(means, spots, xerr=bars, ls="", **given)
            panel.plot([value for _, value in seeds], [s for s, _ in seeds], **small)
        else:
            panel.errorbar(spots, means, yerr=bars, **given)
            panel.plot([s for s, _ in seeds], [value for _, value in seeds], **small)
    if numbers is None:
        names = [textwrap.fill(place, _LETTERS, break_on_hyphens=False) for place in places]
        panel.set_yticks(at, names)
        panel.set_ylim(len(places) - 0.5, -0.5)
        panel.locator_params(axis="x", nbins=5)
    else:
        panel.set_xticks(at, [f"{number:g}" for number in numbers[1]])
