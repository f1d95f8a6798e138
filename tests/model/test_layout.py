"""Spans say the same as the mask, from the queries' and from the keys' side."""

import itertools
from collections.abc import Callable

import pytest
import torch

from pipeline.model.layout import Layout, packed, padded, rows

DOCUMENTS = torch.tensor([[1] * 5 + [2] * 6 + [7] + [0] * 2, [3] * 14])


@pytest.mark.parametrize("make", [
    lambda: rows(DOCUMENTS, torch.zeros(2, 14, dtype=torch.int64)),
    lambda: padded(torch.tensor([3, 8, 1]), 8), lambda: packed(torch.tensor([0, 4, 5, 12]), 7, 12),
], ids=["rows", "padded", "packed"])  # fmt: skip
def test_spans_are_the_mask(make: Callable[[], Layout]) -> None:
    layout = make()
    length, windows = layout.allowed.shape[-1], layout.windows()
    assert windows is not None
    allowed = layout.allowed[:, 0].expand(-1, length, -1)
    bounds = windows.bounds.tolist()
    assert bounds[-1] == len(windows.spans)
    expected = torch.zeros(bounds[-1], bounds[-1], dtype=torch.bool)
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        size = end - start
        assert size <= windows.longest
        expected[start:end, start:end] = allowed[number, :size, :size]
    tokens = torch.arange(bounds[-1])
    for side, mask in ((windows.spans[:, :2], expected), (windows.spans[:, 2:], expected.T)):
        assert torch.equal((tokens >= side[:, :1]) & (tokens < side[:, 1:]), mask)
