"""Images of arrays, and their labels."""

import numpy as np
import pytest

from pipeline.train.look import cells, heat_map


def test_cells_lie_as_in_the_array_and_brighten() -> None:
    pixels = cells(np.array([[0.0, 1.0, 2.0], [3.0, 9.0, np.nan]]), 0.0, 3.0, 16)
    assert pixels.shape == (32, 48, 3)
    assert pixels.dtype == np.uint8
    centres = pixels[8::16, 8::16].astype(int)
    assert (pixels[:16, :16] == centres[0, 0]).all()
    grey = centres @ (0.3, 0.59, 0.11)
    assert grey[0, 0] < grey[0, 1] < grey[0, 2] < grey[1, 0] == grey[1, 1]
    assert centres[0, 0].tolist() == [68, 1, 84]
    assert centres[1, 2].tolist() == [160, 160, 160]


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 2), (12, 12), (48, 4), (3, 128)])
def test_labels_are_whole_and_touch_nothing(rows: int, columns: int) -> None:
    values = np.linspace(0, 5, rows * columns).reshape(rows, columns)
    title = ("Attention entropy at step 1,000,000", "0: attention to one token")

    def draw(**changes: object) -> np.ndarray:
        names = {"title": title, "row_name": "layer", "column_name": "head", "unit": "nats"}
        return heat_map(values, 0.0, 5.0, **(names | changes))

    pixels = draw()
    assert (pixels[:4] == 255).all()
    assert (pixels[-4:] == 255).all()
    assert (pixels[:, :4] == 255).all()
    assert (pixels[:, -4:] == 255).all()
    # What a label takes away when it is not drawn is black on white: it covers no cell.
    for name in ("row_name", "column_name", "unit"):
        without = draw(**{name: " " * 5})
        assert without.shape == pixels.shape
        changed = (without != pixels).any(-1)
        assert changed.any(), name
        assert (without[changed] == 255).all(), name
    # The map is there as a whole, in its own colours.
    expected = cells(values, 0.0, 5.0, max(16, min(48, 288 // max(rows, columns))))
    height, width = expected.shape[:2]
    starts = np.argwhere((pixels == expected[0, 0]).all(-1))
    parts = (pixels[y : y + height, x : x + width] for y, x in starts[:200])
    assert any(np.array_equal(part, expected) for part in parts)
