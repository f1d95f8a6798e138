"""Charts as text: HTML bars and SVG histograms, without scripts and without a plotting library.

Every function is pure and returns well-formed XML. Colours are classes `s0` to `s7` of
`data_prep.datasheet.page_style`. A mark has a title, which browsers show under the mouse, and a
chart a label for those who do not see it.
"""

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

NUM_COLOURS = 7
"""Series with a colour of their own; `OTHER` is grey."""
OTHER = NUM_COLOURS
# What XML 1.0 cannot hold.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 240, 58, 24, 10


def printable(text: str) -> str:
    """The text with a sign in place of each character that a page cannot hold."""
    return _NOT_XML.sub("\ufffd", text)


def escape(text: str) -> str:
    """As content of an element or of an attribute in double quotes."""
    return html.escape(printable(text))


def count(number: float) -> str:
    """A whole number with separators: 1,234,567."""
    return f"{number:,.0f}".replace("-", "−")


def short(number: float, unit: str = "") -> str:
    """A whole number in three digits: `12.3 M`, and `4.56 GB` with the unit B."""
    value, prefixes = float(number), iter(("", "k", "M", "G", "T", "P", "E"))
    prefix = next(prefixes)
    while abs(value) >= 999.5 and (larger := next(prefixes, None)):
        value, prefix = value / 1000, larger
    digits = 0 if abs(value) >= 99.95 or not prefix else 1 if abs(value) >= 9.995 else 2
    shown = f"{value:.{digits}f}".replace("-", "−")
    return f"{shown} {prefix}{unit}".rstrip()


def percent(part: float, whole: float) -> str:
    """`12.3%`; what is not zero is not shown as zero, what is not all not as all."""
    if not whole:
        return "–"
    share = part / whole
    if not part:
        return "0"
    if 0 < share < 0.0005:
        return "<0.1%"
    if 0.9995 <= share < 1:
        return ">99.9%"
    return f"{share:.1%}".replace("-", "−").replace("100.0%", "100%")


@dataclass(frozen=True)
class Part:
    """A part of a bar."""

    colour: int
    value: float
    title: str


def bar(parts: Sequence[Part], whole: float) -> str:
    """A horizontal bar of parts, as long as their share of `whole`."""
    shown = [part for part in parts if part.value > 0]
    marks = "".join(
        f'<i class="s{part.colour}" style="width:{100 * part.value / whole:.3f}%" '
        f'title="{escape(part.title)}"></i>'
        for part in shown
    )
    label = escape("; ".join(part.title for part in shown) or "none")
    return f'<span class="bar" role="img" aria-label="{label}">{marks}</span>'


def legend(names: Sequence[str]) -> str:
    """Names of the series beside their colours; whatever comes behind the colours is grey."""
    items = "".join(
        f'<li><i class="s{min(i, OTHER)}"></i><bdi>{escape(name)}</bdi></li>'
        for i, name in enumerate(names)
    )
    return f'<ul class="legend">{items}</ul>'


def sparkline(counts: Sequence[int], label: str, colour: int = 0) -> str:
    """A histogram the size of a word."""
    peak = max([1, *counts])
    steps = "".join(
        f"M{i} 20V{20 - 20 * number / peak:.2f}h1V20z" for i, number in enumerate(counts) if number
    )
    return (
        f'<svg class="spark" viewBox="0 0 {max(1, len(counts))} 20" preserveAspectRatio="none" '
        f'role="img" aria-label="{escape(label)}"><title>{escape(label)}</title>'
        f'<path class="s{colour}" d="{steps}"/></svg>'
    )


def histogram(
    edges: Sequence[int], series: Sequence[Sequence[int]], titles: Sequence[str], label: str
) -> str:
    """Stacked counts over a logarithmic axis of bytes.

    Args:
        edges: (b + 1,) rising limits of the bins, at least 1; a bin holds its lower limit.
        series: counts, (b,) each; the first is at the bottom, all behind the colours are grey.
        titles: (b,) what is said about each bin.
        label: of the chart.
    """
    peak = max([1, *map(sum, zip(*series, strict=True))])
    ticks = _ticks(peak)
    left, span = math.log10(edges[0]), math.log10(edges[-1] / edges[0])

    def x(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 8) * (math.log10(value) - left) / span

    def y(number: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * number / ticks[-1]

    marks = [_line(_LEFT, y(tick), _WIDTH, y(tick)) for tick in ticks]
    marks += [_text(_LEFT - 6, y(tick) + 4, short(tick), "end") for tick in ticks]
    for value in _round_lengths(edges[0], edges[-1]):
        place = x(value)
        marks.append(_text(place, _HEIGHT - 6, _length(value), "middle"))
        marks.append(_line(place, y(0), place, y(0) + 4))
    for i, title in enumerate(titles):
        low, wide, below = x(edges[i]), x(edges[i + 1]) - x(edges[i]), 0
        for number, counts in enumerate(series):
            if counts[i]:
                top, bottom = y(below + counts[i]), y(below)
                marks.append(_rect(min(number, OTHER), low, top, wide - 0.7, bottom - top))
                below += counts[i]
        # Over the whole height, so that small bars can be pointed at, too.
        hover = f'<rect class="hover" x="{low:.2f}" y="{_TOP}" width="{wide:.2f}" '
        marks.append(
            f'{hover}height="{_HEIGHT - _BOTTOM - _TOP}"><title>{escape(title)}</title></rect>'
        )
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(label)}">{"".join(marks)}</svg>'
    )


def _round_lengths(low: int, high: int) -> list[int]:
    """Powers of ten in a range; of a short one also twice and five times as much."""
    digits = (1, 2, 5) if high < 100 * low else (1,)
    powers = [10**exponent for exponent in range(len(str(low)) - 1, len(str(high)))]
    return [digit * power for power in powers for digit in digits if low <= digit * power <= high]


def _length(num_bytes: int) -> str:
    """A round number of bytes without zeros behind the point."""
    thousands = (len(str(num_bytes)) - 1) // 3
    return f"{num_bytes // 1000**thousands} {('', 'k', 'M', 'G', 'T')[thousands]}B"


def _ticks(peak: int) -> list[int]:
    """Round numbers from zero to at least `peak`, at most six."""
    step = 1
    while peak > 5 * step:
        digit = int(str(step)[0])
        step = step * 5 // 2 if digit == 2 else 2 * step
    return [step * i for i in range(-(-peak // step) + 1)]


def _rect(colour: int, x: float, y: float, width: float, height: float) -> str:
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    return f'<rect class="s{colour}" {place}/>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{escape(text)}</text>'
