"""The global order: a permutation each epoch, local in blocks, a pure function of position."""

import itertools
from typing import Any

import numpy as np
import pytest

from pipeline.data.order import Locations, Order, OrderStart, SequencePool

COUNTS = np.array([5, 1, 9, 3, 7, 2, 8])
TOTAL = int(COUNTS.sum())


def _order(
    counts: np.ndarray = COUNTS, seed: int = 3, window_blocks: int = 2, **more: Any
) -> Order:
    material = SequencePool(np.arange(len(counts)), counts, np.cumsum(counts) - counts)
    return Order(material, seed=seed, window_blocks=window_blocks, **more)


def _epoch(order: Order, epoch: int) -> list[int]:
    return order.locate(epoch * TOTAL, TOTAL).sample_ids.tolist()


@pytest.mark.parametrize("window_blocks", [1, 2, 3, 7, 50])
def test_every_sequence_comes_once_in_every_epoch(window_blocks: int) -> None:
    order = _order(window_blocks=window_blocks)
    epochs = [_epoch(order, epoch) for epoch in range(3)]
    for ids in epochs:
        assert sorted(ids) == list(range(TOTAL))
    assert len({tuple(ids) for ids in epochs}) == len(epochs)


def test_locations_name_sequences_of_few_blocks_at_a_time() -> None:
    firsts = np.cumsum(COUNTS) - COUNTS
    places = _order().locate(0, 3 * TOTAL)
    np.testing.assert_array_equal(places.epochs, np.arange(3 * TOTAL) // TOTAL)
    assert (places.sequences >= 0).all()
    assert (places.sequences < COUNTS[places.blocks]).all()
    np.testing.assert_array_equal(places.sample_ids, firsts[places.blocks] + places.sequences)
    assert not places.leftover.any()
    blocks = _order(np.full(40, 50), seed=1, window_blocks=4).locate(0, 2000).blocks.tolist()
    for window in range(10):
        assert len(set(blocks[window * 200 : (window + 1) * 200])) == 4
    # Inside a window the blocks are mixed: neighbours are of the same block by chance only.
    assert 0.2 < np.mean([a == b for a, b in itertools.pairwise(blocks)]) < 0.3


def test_an_order_follows_from_seed_source_and_segment_alone() -> None:
    first = _epoch(_order(), 0)
    assert first != _epoch(_order(seed=4), 0)
    assert first != _epoch(_order(source=1), 0)
    assert first != _epoch(_order(segment=1), 0)
    one, other = _order(), _order()
    forward = [_plain(one.locate(p, 1)) for p in range(100)]
    assert forward == [_plain(other.locate(p, 1)) for p in reversed(range(100))][::-1]
    # A range is its positions, over the ends of windows and epochs.
    assert _plain(_order().locate(0, 100)) == [row for rows in forward for row in rows]
    assert _plain(one.locate(7, 0)) == []


def test_a_segment_has_the_windows_of_any_other() -> None:
    for epoch in range(3):
        one, other = (_order(segment=k).locate(epoch * TOTAL, TOTAL).blocks for k in range(2))
        assert len({*one.tolist()}) == len(COUNTS)
        windows = [{*order.tolist()} for order in _in_windows(one)]
        assert windows == [{*order.tolist()} for order in _in_windows(other)]


def _in_windows(blocks: np.ndarray) -> list[np.ndarray]:
    """Cuts an epoch's blocks of sequences into windows of two blocks."""
    parts, first = [], 0
    while first < len(blocks):
        seen: list[int] = []
        stop = first
        while stop < len(blocks) and (blocks[stop] in seen or len(seen) < 2):
            seen += [] if blocks[stop] in seen else [blocks[stop]]
            stop += 1
        parts.append(blocks[first:stop])
        first = stop
    return parts


@pytest.mark.parametrize("position", [*range(TOTAL + 3), 2 * TOTAL - 1])
def test_another_length_goes_on_where_the_first_stopped(position: int) -> None:
    """Here the "other length" has the same counts, so that every sequence can be followed."""
    before = _order()
    start, rest = before.rest_of_window(position)
    whole = before.locate(0, 3 * TOTAL)
    window_end = position + len(rest.blocks)
    assert _plain(rest) == _plain(whole.rows(position, window_end))
    leftover = None
    if len(rest.blocks):
        blocks, counts = np.unique(rest.blocks, return_counts=True)
        leftover = SequencePool(blocks, counts, 10_000 + np.cumsum(counts) - counts)
    after = _order(segment=1, start=OrderStart(start.epoch, start.window, leftover))
    epoch_end = -(-position // TOTAL) * TOTAL if position % TOTAL else position
    found = after.locate(0, epoch_end - position + TOTAL)
    left = found.rows(0, len(rest.blocks))
    assert left.leftover.all()
    assert sorted(left.sample_ids.tolist()) == list(range(10_000, 10_000 + len(rest.blocks)))
    assert (left.epochs == start.epoch).all()
    # The rest of the epoch, then a whole one: each sequence that was not seen yet, once.
    this_epoch = found.rows(len(rest.blocks), epoch_end - position)
    unseen = set(range(TOTAL)) - set(
        whole.sample_ids[position // TOTAL * TOTAL : window_end].tolist()
    )
    assert sorted(this_epoch.sample_ids.tolist()) == sorted(unseen if position % TOTAL else [])
    assert sorted(found.rows(epoch_end - position).sample_ids.tolist()) == list(range(TOTAL))
    assert after.epochs(0) == pytest.approx(before.epochs(position))
    assert after.epochs(epoch_end - position) == pytest.approx(epoch_end / TOTAL)


def test_positions_are_where_locate_finds_a_sequence() -> None:
    start, rest = _order().rest_of_window(9)
    blocks, counts = np.unique(rest.blocks, return_counts=True)
    material = SequencePool(blocks, counts, 10_000 + np.cumsum(counts) - counts)
    order = _order(segment=1, start=OrderStart(start.epoch, start.window, material))
    table = order.locate(0, 3 * TOTAL)
    for block in range(len(COUNTS)):
        for sequence in range(COUNTS[block]):
            for left in (False, True):
                found = np.flatnonzero((table.blocks == block) & (table.sequences == sequence)
                                       & (table.leftover == left))  # fmt: skip
                if left and block not in blocks:
                    continue
                asked = itertools.takewhile(
                    lambda position: position < 3 * TOTAL,
                    order.positions(block, sequence, leftover=left),
                )
                assert list(asked) == found.tolist()


def _plain(places: Locations) -> list[tuple[int, ...]]:
    return list(zip(*(array.tolist() for array in places), strict=True))
