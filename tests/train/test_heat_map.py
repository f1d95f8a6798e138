"""Images of arrays."""

import numpy as np

from pipeline.train.observe import heat_map


def test_cells_lie_as_in_the_array_and_brighten() -> None:
    values = np.array([[0.0, 1.0, 2.0], [3.0, 9.0, np.nan]])
    pixels = heat_map(values, 0.0, 3.0)
    assert pixels.shape == (32, 48, 3)
    assert pixels.dtype == np.uint8
    cells = pixels[8::16, 8::16].astype(int)
    assert (pixels[:16, :16] == cells[0, 0]).all()
    grey = cells @ (0.3, 0.59, 0.11)
    assert grey[0, 0] < grey[0, 1] < grey[0, 2] < grey[1, 0] == grey[1, 1]
    assert cells[0, 0].tolist() == [68, 1, 84]
    assert cells[1, 2].tolist() == [160, 160, 160]
