"""Tables of similar tokens."""

import numpy as np

from pipeline.use.vectors import nearest


def test_nearest_are_those_of_all_cosines_within_a_group() -> None:
    vectors = np.random.default_rng(2).normal(size=(1500, 8)).astype(np.float32)
    pieces = [("##" if number % 3 == 0 else "") + str(number) for number in range(1500)]
    table = nearest(vectors, pieces, np.arange(5, 1500), 4)
    assert (table[:5] == -1).all()
    centred = vectors[5:] - vectors[5:].mean(0)
    cosines = centred @ centred.T / np.outer(*[np.linalg.norm(centred, axis=1)] * 2)
    for token in (5, 6, 700, 1499):
        group = [other for other in range(5, 1500)
                 if other != token and (other % 3 == 0) == (token % 3 == 0)]  # fmt: skip
        best = sorted(group, key=lambda other: -cosines[token - 5, other - 5])[:4]
        assert table[token].tolist() == best
    vectors = np.eye(4, dtype=np.float32)
    table = nearest(vectors, ["a", "b", "##c", "##d"], np.arange(4), 3)
    assert table.tolist() == [[1, -1, -1], [0, -1, -1], [3, -1, -1], [2, -1, -1]]
