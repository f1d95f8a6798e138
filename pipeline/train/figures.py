"""Draws heat maps with labels: axes, numbers of rows and columns, and a bar that gives the scale.

Pillow draws the text; TensorBoard needs it as well.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

_COLOURS = np.array(
    [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], dtype=np.float64
)
"""Five colours of matplotlib's viridis, low to high: readable in grey and by the colour-blind."""
_NAN_COLOUR = (160, 160, 160)
_SMALLEST, _LARGEST, _SIDE = 16, 48, 288
"""Pixels of a cell's side, and those that the longer side of a small map is to have."""
_MARGIN, _GAP, _BAR = 10, 6, 14
_NUM_TICKS = 5


def cells(
    values: npt.NDArray[np.floating], low: float, high: float, side: int
) -> npt.NDArray[np.uint8]:
    """Draw (rows, columns) numbers as squares of `side` pixels, first row on top.

    Values out of range have the colour of the limit; NaN and infinity are grey.
    """
    share = np.clip((np.nan_to_num(values) - low) / max(high - low, 1e-12), 0, 1)
    at = np.linspace(0, 1, len(_COLOURS))
    pixels = np.stack([np.interp(share, at, channel) for channel in _COLOURS.T], axis=-1)
    pixels[~np.isfinite(values)] = _NAN_COLOUR
    return np.round(pixels).astype(np.uint8).repeat(side, 0).repeat(side, 1)


def heat_map(
    values: npt.NDArray[np.floating],
    low: float,
    high: float,
    *,
    title: Sequence[str],
    row_name: str,
    column_name: str,
    unit: str,
) -> npt.NDArray[np.uint8]:
    """Draw a labelled map of (rows, columns) numbers, numbered from 0, first row on top.

    Args:
        values: to be shown; see `cells`.
        low: value of the darkest colour.
        high: value of the brightest.
        title: lines above the map.
        row_name: what a row is.
        column_name: what a column is.
        unit: of the values, beside the scale.

    Returns:
        (height, width, 3) pixels, with a white margin.
    """
    rows, columns = values.shape
    side = max(_SMALLEST, min(_LARGEST, _SIDE // max(rows, columns)))
    font = ImageFont.load_default(13)
    line = _size("Ay", font)[1] + 2
    ticks = [f"{value:.2f}" for value in np.linspace(low, high, _NUM_TICKS)]
    tick_width = max(_size(tick, font)[0] for tick in ticks)

    left = _MARGIN + line + _GAP + _size(str(rows), font)[0] + _GAP
    top = _MARGIN + len(title) * line + _GAP
    map_height = max(rows * side, _NUM_TICKS * line, _size(row_name, font)[0])
    bar_left = left + max(columns * side, _size(column_name, font)[0]) + 3 * _GAP
    right = bar_left + _BAR + _GAP + tick_width + _GAP + line + _MARGIN
    width = max(right, 2 * _MARGIN + max(_size(text, font)[0] for text in title))
    height = top + map_height + _GAP + 2 * line + _MARGIN

    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for number, text in enumerate(title):
        draw.text((_MARGIN, _MARGIN + number * line), text, "black", font)
    image.paste(Image.fromarray(cells(values, low, high, side)), (left, top))
    for row in range(0, rows, _stride(line, side)):
        middle = top + row * side + side // 2
        draw.text((left - _GAP, middle), str(row), "black", font, anchor="rm")
    below = top + rows * side + _GAP
    for column in range(0, columns, _stride(_size(str(columns), font)[0] + _GAP, side)):
        middle = left + column * side + side // 2
        draw.text((middle, below), str(column), "black", font, anchor="mt")
    draw.text((left, below + line), column_name, "black", font)
    _sideways(image, row_name, (_MARGIN, top), font)

    scale = np.linspace(high, low, map_height)[:, None]
    image.paste(Image.fromarray(cells(scale, low, high, 1).repeat(_BAR, 1)), (bar_left, top))
    for number, tick in enumerate(ticks):
        share = number / (_NUM_TICKS - 1)
        middle = top + line // 2 + round((1 - share) * (map_height - line))
        draw.text((bar_left + _BAR + _GAP, middle), tick, "black", font, anchor="lm")
    _sideways(image, unit, (right - _MARGIN - line, top), font)
    return np.asarray(image)


def _size(text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> tuple[int, int]:
    """Measure a text from its origin: width and height, rounded up."""
    box = font.getbbox(text)
    return int(np.ceil(box[2])), int(np.ceil(box[3]))


def _stride(needed: int, side: int) -> int:
    """Choose which rows or columns get a number, so that numbers do not touch."""
    return next(stride for stride in (1, 2, 5, 10, 20, 50, 100) if stride * side >= needed)


def _sideways(
    image: Image.Image,
    text: str,
    at: tuple[int, int],
    font: ImageFont.ImageFont | ImageFont.FreeTypeFont,
) -> None:
    """Write a text from the bottom to the top; `at` is its upper left corner."""
    label = Image.new("RGB", _size(text, font), "white")
    ImageDraw.Draw(label).text((0, 0), text, "black", font)
    image.paste(label.rotate(90, expand=True), at)
