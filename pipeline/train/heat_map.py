"""An array of numbers drawn as an image, with numpy alone."""

import numpy as np
import numpy.typing as npt

_CELL = 16
"""Pixels of a number's side."""
_COLOURS = np.array(
    [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], dtype=np.float64
)
"""Five of matplotlib's viridis, from low to high: readable in grey, and by the colour-blind."""
_NO_NUMBER = (160, 160, 160)


def heat_map(values: npt.NDArray[np.floating], low: float, high: float) -> npt.NDArray[np.uint8]:
    """Draws (rows, columns) numbers, first row on top.

    Args:
        values: those out of range have the colour of the limit; what is no number is grey.
        low: darkest.
        high: brightest.

    Returns:
        (16 * rows, 16 * columns, 3) pixels.
    """
    share = np.clip((np.nan_to_num(values) - low) / max(high - low, 1e-12), 0, 1)
    at = np.linspace(0, 1, len(_COLOURS))
    pixels = np.stack([np.interp(share, at, channel) for channel in _COLOURS.T], axis=-1)
    pixels[~np.isfinite(values)] = _NO_NUMBER
    return np.round(pixels).astype(np.uint8).repeat(_CELL, 0).repeat(_CELL, 1)
