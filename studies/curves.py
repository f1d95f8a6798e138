"""Curves drawn as SVG with the standard library alone: panels side by side, one legend."""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

# Okabe and Ito's colours, told apart by the colour-blind, and black.
_COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999",
)  # fmt: skip
_WIDTH, _HEIGHT = 330, 240
_LEFT, _TOP, _GAP = 56, 34, 40
_ROW = 18


@dataclass(frozen=True)
class Line:
    """One curve; all of one name have one colour and one entry in the legend."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    lines: Sequence[Line]


def draw(
    panels: Sequence[Panel], *, x_name: str, y_name: str, dotted: dict[str, float], top: float
) -> str:
    """An SVG document; all panels have the same axes.

    Args:
        panels: in rows of three.
        x_name: below each panel.
        y_name: beside each row.
        dotted: horizontal lines with their names.
        top: points above it are left out.
    """
    x_high = max(x for panel in panels for line in panel.lines for x, _ in line.points)
    panels = [
        Panel(
            panel.title,
            [Line(line.name, [at for at in line.points if at[1] <= top]) for line in panel.lines],
        )
        for panel in panels
    ]
    lines = [line for panel in panels for line in panel.lines]
    names = list(dict.fromkeys(line.name for line in lines))
    count = len(_COLOURS)
    # Beyond the colours there are dashes.
    styles = {name: (_COLOURS[i % count], "5 3" * (i // count)) for i, name in enumerate(names)}
    ys = [y for line in lines for _, y in line.points] + list(dotted.values())
    axes = _Axes(0.0, x_high, min(ys) - 0.1, max(ys) + 0.1)
    columns = min(3, len(panels))
    num_rows = -(-len(panels) // columns)
    width = _LEFT + columns * (_WIDTH + _GAP)
    legend_top = num_rows * (_HEIGHT + _TOP + 40) + 10
    height = legend_top + _ROW * -(-len(names) // columns) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for number, panel in enumerate(panels):
        left = _LEFT + number % columns * (_WIDTH + _GAP)
        top = _TOP + number // columns * (_HEIGHT + _TOP + 40)
        parts.append(f'<g transform="translate({left},{top})">')
        parts += axes.frame(panel.title, x_name, y_name if number % columns == 0 else "")
        for name, y in dotted.items():
            parts.append(axes.path([(axes.x_low, y), (axes.x_high, y)], "#555555", "4 3"))
            parts.append(f'<text x="{_WIDTH - 4}" y="{axes.y(y) - 4:.1f}" text-anchor="end" '
                         f'fill="#555555" font-size="10">{escape(name)}</text>')  # fmt: skip
        parts += [axes.path(line.points, *styles[line.name]) for line in panel.lines]
        parts.append("</g>")
    for number, name in enumerate(names):
        x = _LEFT + number % columns * (_WIDTH + _GAP)
        y = legend_top + number // columns * _ROW
        parts.append(
            f'<path d="M{x} {y}h24" stroke="{styles[name][0]}" stroke-width="3" '
            f'stroke-dasharray="{styles[name][1] or "none"}"/>'
            f'<text x="{x + 30}" y="{y + 4}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


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
        """Border, ticks, names."""
        parts = [
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#999999"/>',
            f'<text x="{_WIDTH / 2}" y="-8" text-anchor="middle" font-weight="bold">'
            f"{escape(title)}</text>",
            f'<text x="{_WIDTH / 2}" y="{_HEIGHT + 32}" text-anchor="middle">'
            f"{escape(x_name)}</text>",
            f'<text transform="translate(-38,{_HEIGHT / 2}) rotate(-90)" text-anchor="middle">'
            f"{escape(y_name)}</text>",
        ]
        parts += [
            f'<text x="{self.x(value):.1f}" y="{_HEIGHT + 15}" text-anchor="middle">{value:g}'
            "</text>"
            for value in _ticks(self.x_low, self.x_high)
        ]
        for value in _ticks(self.y_low, self.y_high):
            y = self.y(value)
            parts.append(
                f'<path d="M0 {y:.1f}h{_WIDTH}" stroke="#eeeeee"/>'
                f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
            )
        return parts


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers between two."""
    step = next(
        base * 10.0**power
        for power in range(-6, 12) for base in (1, 2, 5)
        if (high - low) / (base * 10.0**power) <= 6
    )  # fmt: skip
    first = int(-(-low // step))
    return [round(number * step, 9) for number in range(first, int(high // step) + 1)]
