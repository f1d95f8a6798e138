"""The global order: a permutation each epoch, local in blocks, a pure function of position."""

import itertools

import numpy as np
import pytest

from pipeline.data.order import Order

COUNTS = np.array([5, 1, 9, 3, 7, 2, 8])


def _epoch(order: Order, epoch: int) -> list[int]:
    first = epoch * order.num_sequences
    return [order.locate(first + i).sample_id for i in range(order.num_sequences)]


@pytest.mark.parametrize("window_blocks", [1, 2, 3, 7, 50])
def test_every_sequence_comes_once_in_every_epoch(window_blocks: int) -> None:
    order = Order(COUNTS, seed=3, window_blocks=window_blocks)
    epochs = [_epoch(order, epoch) for epoch in range(3)]
    for ids in epochs:
        assert sorted(ids) == list(range(COUNTS.sum()))
    assert epochs[0] != epochs[1] != epochs[2]


def test_location_names_the_sequence() -> None:
    order = Order(COUNTS, seed=3, window_blocks=2)
    firsts = np.cumsum(COUNTS) - COUNTS
    for position in range(3 * COUNTS.sum()):
        place = order.locate(position)
        assert place.epoch == position // COUNTS.sum()
        assert 0 <= place.sequence < COUNTS[place.block]
        assert place.sample_id == firsts[place.block] + place.sequence


def test_order_does_not_depend_on_what_was_asked_before() -> None:
    one, other = (Order(COUNTS, seed=3, window_blocks=2) for _ in range(2))
    positions = list(range(100))
    forward = [one.locate(p) for p in positions]
    backward = [other.locate(p) for p in reversed(positions)]
    assert forward == backward[::-1]


def test_few_blocks_are_open_at_a_time() -> None:
    order = Order(np.full(40, 50), seed=1, window_blocks=4)
    blocks = [order.locate(p).block for p in range(order.num_sequences)]
    for window in range(10):
        assert len(set(blocks[window * 200 : (window + 1) * 200])) == 4
    # Inside a window the blocks are mixed: neighbours are of the same block by chance only.
    same = np.mean([a == b for a, b in itertools.pairwise(blocks)])
    assert 0.2 < same < 0.3


def test_seed_changes_the_order() -> None:
    first = _epoch(Order(COUNTS, seed=3, window_blocks=2), 0)
    assert first != _epoch(Order(COUNTS, seed=4, window_blocks=2), 0)
