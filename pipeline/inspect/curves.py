"""Draws curves as SVG with the standard library alone: panels side by side, one legend."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from unicodedata import east_asian_width
from xml.sax.saxutils import escape

COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999",
)  # fmt: skip
"""Okabe and Ito's, which the colour-blind tell apart, black and grey."""
_WIDTH, _HEIGHT = 330, 240
_LEFT, _TOP, _GAP, _BELOW = 66, 34, 40, 40
_ROW = 18
_FONT = 12
_MARKED = 8
"""Points of a line that have a mark, at most."""
_CROSS = "m-1.5 -5h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5v-3h3.5z"
_MARKS = "m-4 -4h8v8h-8z", "m0 -5l5 5l-5 5l-5 -5z", "m0 -5l5 9h-10z", "m0 5l5 -9h-10z", _CROSS
"""Square, diamond, triangles and cross, as paths around a point."""


@dataclass(frozen=True)
class Line:
    """One curve; all of one name have one colour and one entry in the legend."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One pair of axes; panels with the same name below have the same range."""

    title: str
    lines: Sequence[Line]
    x_name: str


def draw(
    panels: Sequence[Panel], *, y_name: str, dotted: Mapping[str, float], top: float = inf
) -> str:
    """Draw an SVG document; all panels have the same vertical range.

    Args:
        panels: in rows of three.
        y_name: beside each row.
        dotted: horizontal lines with their names.
        top: points above it are left out, as are those that are not finite.
    """
    panels = [
        replace(panel, lines=[Line(line.name, _shown(line, top)) for line in panel.lines])
        for panel in panels
    ]
    lines = [line for panel in panels for line in panel.lines]
    names = list(dict.fromkeys(line.name for line in lines))
    count = len(COLOURS)
    # Beyond the colours there are dashes.
    styles = {name: (COLOURS[i % count], "5 3" * (i // count)) for i, name in enumerate(names)}
    ys = [y for line in lines for _, y in line.points] + list(dotted.values()) or [0.0]
    columns = min(3, len(panels))
    cell = _WIDTH + _GAP
    num_rows = -(-len(panels) // columns)
    # A long name takes the place of several columns.
    entry = cell * -(-(30 + max(map(_text_width, names), default=0)) // cell)
    in_row = max(1, columns * cell // entry)
    width = max(_LEFT + columns * cell, _LEFT + entry)
    legend_top = num_rows * (_HEIGHT + _TOP + _BELOW) + 10
    height = legend_top + _ROW * -(-len(names) // in_row) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="{_FONT}">'
        '<rect width="100%" height="100%" fill="white"/>'
    ]
    for number, panel in enumerate(panels):
        left = _LEFT + number % columns * cell
        down = _TOP + number // columns * (_HEIGHT + _TOP + _BELOW)
        same = [line for each in panels if each.x_name == panel.x_name for line in each.lines]
        x_high = max((x for line in same for x, _ in line.points), default=0) or 1.0
        axes = _Axes(0.0, x_high, min(ys) - 0.1, max(ys) + 0.1)
        parts.append(f'<g transform="translate({left},{down})">')
        parts += axes.frame(panel.title, panel.x_name, y_name if number % columns == 0 else "")
        for name, y in dotted.items():
            parts.append(axes.path([(axes.x_low, y), (axes.x_high, y)], "#555555", "4 3"))
            parts.append(f'<text x="{_WIDTH - 4}" y="{axes.y(y) - 4:.1f}" text-anchor="end" '
                         f'fill="#555555" font-size="10">{escape(name)}</text>')  # fmt: skip
        for line in panel.lines:
            parts.append(axes.path(line.points, *styles[line.name]))
            number, apart = names.index(line.name), -(-len(line.points) // _MARKED)
            # Lines have theirs at other points, so that none hides another.
            seen = line.points[number % len(_MARKS) * apart // len(_MARKS) :: apart]
            parts += [_mark(axes.x(x), axes.y(y), number) for x, y in seen]
        parts.append("</g>")
    for number, name in enumerate(names):
        x = _LEFT + number % in_row * entry
        y = legend_top + number // in_row * _ROW
        parts.append(
            f'<path d="M{x} {y}h24" stroke="{styles[name][0]}" stroke-width="3" '
            f'stroke-dasharray="{styles[name][1] or "none"}"/>{_mark(x + 12, y, number)}'
            f'<text x="{x + 30}" y="{y + 4}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _shown(line: Line, top: float) -> list[tuple[float, float]]:
    return [(x, y) for x, y in line.points if isfinite(y) and y <= top]


def _mark(x: float, y: float, number: int) -> str:
    """Draw the mark of a line, by its number."""
    path, colour = _MARKS[number % len(_MARKS)], COLOURS[number % len(COLOURS)]
    return f'<path d="M{x:.1f} {y:.1f}{path}" fill="{colour}"/>'


def _text_width(text: str) -> int:
    """Estimate the pixels of a text, on the safe side: the font is the reader's."""
    return sum(_FONT if east_asian_width(letter) in "WF" else 8 for letter in text)


@dataclass(frozen=True)
class _Axes:
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return (value - self.x_low) / (self.x_high - self.x_low) * _WIDTH

    def y(self, value: float) -> float:
        return (self.y_high - value) / (self.y_high - self.y_low) * _HEIGHT

    def path(self, points: Sequence[tuple[float, float]], colour: str, dashes: str = "") -> str:
        places = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        return (
            f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.5" '
            f'stroke-dasharray="{dashes or "none"}"/>'
        )

    def frame(self, title: str, x_name: str, y_name: str) -> list[str]:
        """Draw the border, the ticks and the names."""
        parts = [
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#999999"/>',
            f'<text x="{_WIDTH / 2}" y="-8" text-anchor="middle" font-weight="bold">'
            f"{escape(title)}</text>",
            f'<text x="{_WIDTH / 2}" y="{_HEIGHT + 32}" text-anchor="middle">'
            f"{escape(x_name)}</text>",
        ]
        if y_name:
            parts.append(
                f'<text transform="translate(-48,{_HEIGHT / 2}) rotate(-90)" '
                f'text-anchor="middle">{escape(y_name)}</text>'
            )
        parts += [
            f'<text x="{self.x(value):.1f}" y="{_HEIGHT + 15}" text-anchor="middle">'
            f"{_number(value)}</text>"
            for value in _ticks(self.x_low, self.x_high)
        ]
        for value in _ticks(self.y_low, self.y_high):
            y = self.y(value)
            parts.append(
                f'<path d="M0 {y:.1f}h{_WIDTH}" stroke="#eeeeee"/>'
                f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>'
            )
        return parts


def _number(value: float) -> str:
    """Write such as `250`, `20k` and `1.5M`."""
    for unit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * unit or (abs(value) >= unit and unit > 1e3):
            return f"{value / unit:g}{prefix}"
    return f"{value:g}"


def _ticks(low: float, high: float) -> list[float]:
    """List about five round numbers between two."""
    step = next(
        base * 10.0**power
        for power in range(-6, 15) for base in (1, 2, 5)
        if (high - low) / (base * 10.0**power) <= 6
    )  # fmt: skip
    first = int(-(-low // step))
    return [round(number * step, 9) for number in range(first, int(high // step) + 1)]
