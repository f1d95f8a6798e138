"""Whatever the documents, lengths, windows and weights: nothing is lost, nothing comes twice."""

import itertools
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.data import DataConfig, MixConfig, PhaseConfig
from pipeline.config.runs import PretrainConfig
from pipeline.config.train import TrainConfig
from pipeline.data.dataset import PackedSplit
from pipeline.data.format import DatasetIndex, Source
from pipeline.data.order import Locations
from pipeline.data.packing import SPECIALS_PER_PIECE, Packing, pack
from pipeline.data.run_order import RunOrder, Segment
from pipeline.errors import ConfigError


class Case:
    """A dataset of documents' lengths alone: what a run's order is made from."""

    def __init__(self, documents: list[list[int]], of_source: list[int], weights: list[float]):
        self.ends = [np.cumsum(lengths) for lengths in documents]
        self.of_source = np.array(of_source)
        tokens = np.array([ends[-1] for ends in self.ends])
        self.index = SimpleNamespace(
            sources=tuple(Source(f"s{k}", weight) for k, weight in enumerate(weights)),
            block_source=self.of_source,
            blocks=SimpleNamespace(num_tokens=tokens),
        )

    def packing(self, block: int, seq_len: int) -> Packing:
        return pack(self.ends[block], seq_len)

    def open(self, config: PretrainConfig) -> RunOrder:
        split = SimpleNamespace(
            rows=np.arange(len(self.ends)),
            counts={
                length: np.array([pack(ends, length).num_sequences for ends in self.ends])
                for length in config.batches.seq_lens
            },
            packing=self.packing,
            specials=SPECIALS_PER_PIECE,
            once=None,
        )
        index, split = cast(DatasetIndex, self.index), cast(PackedSplit, split)
        return RunOrder(index, config.train_data, split)

    def pieces(self, segment: Segment, places: Locations) -> dict[tuple[int, int], list[Any]]:
        """(block, epoch) -> [start, stop] of all pieces of some places."""
        found = defaultdict(list)
        for epoch, block, sequence, _, left in zip(*places, strict=True):
            packing = segment.leftovers[block] if left else self.packing(block, segment.seq_len)
            rows = packing.pieces(int(sequence))
            slots = 0
            for row in rows:
                start, stop = int(packing.piece_start[row]), int(packing.piece_stop[row])
                document = int(np.searchsorted(self.ends[block], start, side="right"))
                assert packing.piece_doc[row] == document
                assert stop <= self.ends[block][document]
                slots += stop - start + 2
                found[int(block), int(epoch)].append((start, stop))
            assert 0 < slots <= segment.seq_len
        return found


def _config(
    lengths: list[int], tokens: list[float], *, batch: int, window: int, **data: Any
) -> PretrainConfig:
    given = zip(lengths[:-1], tokens, strict=True)
    return PretrainConfig(
        run_dir="unused", train=TrainConfig(global_batch=batch, micro_batch=1),
        data=DataConfig(dir="unused", seq_len=lengths[-1], window_blocks=window, **data),
        phases=tuple(PhaseConfig(tokens=amount, seq_len=length) for length, amount in given),
    )  # fmt: skip


_LENGTHS = st.one_of(st.integers(1, 40), st.integers(1, 3_000), st.integers(1, 1_000_000))


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_within_an_epoch_every_token_comes_once(data: st.DataObject) -> None:
    num_sources = data.draw(st.integers(1, 4))
    documents = data.draw(st.lists(st.lists(_LENGTHS, min_size=1, max_size=8), min_size=num_sources,
                                   max_size=12))  # fmt: skip
    total = sum(map(sum, documents))
    of_source = [k % num_sources for k in range(len(documents))]
    weights = data.draw(st.lists(st.sampled_from([0.3, 1.0, 1.0, 2.5]), min_size=num_sources,
                                 max_size=num_sources))  # fmt: skip
    shortest = max(8, total // 3_000)  # else millions of sequences are looked at one by one
    lengths = data.draw(st.lists(st.integers(shortest, 8 * shortest), min_size=1, max_size=4))
    tokens = data.draw(st.lists(st.floats(1, 2.0 * total), min_size=len(lengths) - 1,
                                max_size=len(lengths) - 1))  # fmt: skip
    config = _config(lengths, tokens, batch=data.draw(st.integers(1, 50)),
                     window=data.draw(st.integers(1, 5)))  # fmt: skip
    case = Case(documents, of_source, weights)
    order = case.open(config)
    # The phases, and as much again as two epochs of the whole mix.
    last = order.segments[-1]
    stop = last.first + int(2.2 * sum(o.num_sequences for o in last.orders)) + 3
    seen: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    ids: set[tuple[int, int]] = set()
    ends = [*(segment.first for segment in order.segments[1:]), stop]
    for segment, end in zip(order.segments, ends, strict=True):
        places = segment.locate(segment.first, end - segment.first)
        for key, pieces in case.pieces(segment, places).items():
            seen[key] += pieces
        keys = set(zip(places.epochs.tolist(), places.sample_ids.tolist(), strict=True))
        assert len(keys) == len(places.blocks)
        assert not keys & ids, "two sequences have the same masks"
        ids |= keys
    _check_epochs(order, case, seen, stop)


def _check_epochs(
    order: RunOrder, case: Case, seen: dict[tuple[int, int], list[tuple[int, int]]], stop: int
) -> None:
    epochs = order.epochs(stop)
    for group in order.groups:
        for block in group.blocks.tolist():
            whole = case.ends[block][-1]
            for epoch in range(int(epochs[group.name]) + 1):
                pieces = sorted(seen.pop((block, epoch), []))
                overlap = [a for a, b in itertools.pairwise(pieces) if b[0] < a[1]]
                assert not overlap, "a token comes twice"
                covered = sum(b - a for a, b in pieces)
                assert covered == whole or epoch == int(epochs[group.name]), "a token is lost"
    assert not seen, "an epoch begins before the one before it is over"


@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.floats(0.01, 50), min_size=2, max_size=6),
    sizes=st.lists(st.integers(1, 60), min_size=6, max_size=6),
    cursor=st.integers(0, 3_000),
)
def test_sources_follow_weights(weights: list[float], sizes: list[int], cursor: int) -> None:
    case = Case([[62] * size for size in sizes], [k % len(weights) for k in range(6)], weights)
    order = case.open(_config([64], [], batch=1, window=2))
    epochs = order.epochs(cursor)
    if len(epochs) == 1:  # equal weights: shuffled together
        return
    amounts = {g.name: float(g.weight) * order.segments[0].orders[k].num_sequences
               for k, g in enumerate(order.groups)}  # fmt: skip
    for k, group in enumerate(order.groups):
        sequences = epochs[group.name] * order.segments[0].orders[k].num_sequences
        assert abs(sequences - cursor * amounts[group.name] / sum(amounts.values())) < 2


def test_sources_of_weight_two_and_of_none() -> None:
    case = Case([[62] * 500, [62] * 300], [0, 1], [1.0, 2.0])
    places = case.open(_config([64], [], batch=1, window=1)).segments[0].locate(0, 1100)
    again = int(np.flatnonzero((places.blocks == 1) & (places.epochs == 1))[0])
    assert abs(again - int(np.flatnonzero(places.blocks == 0)[250])) <= 4
    assert (np.bincount(places.blocks) == [500, 600]).all()
    case = Case([[62] * 50, [62] * 30, [62] * 20], [0, 1, 2], [1.0, 1.0, 1.0])
    mix = (MixConfig(source="s1", weight=0.0),)
    order = case.open(_config([64], [], batch=1, window=4, mix=mix))
    assert set(order.segments[0].locate(0, 200).blocks.tolist()) == {0, 2}
    assert order.epochs(70) == {"s0 + s2": 1.0}
    assert list(order.places(1, range(62), 500)) == []
    only = (MixConfig(source="s0", weight=0.0), MixConfig(source="s2", weight=0.0))
    case.of_source[1] = 0
    with pytest.raises(ConfigError, match="training text"):
        case.open(_config([64], [], batch=1, window=4, mix=only))


def test_places_are_where_a_documents_tokens_are_seen() -> None:
    rng = np.random.default_rng(0)
    case = Case([rng.integers(1, 400, 12).tolist() for _ in range(6)], [0, 1] * 3, [1.0, 2.5])
    order = case.open(_config([64, 128, 32], [5e3, 9e3], batch=4, window=2))
    stop = order.segments[-1].first + 800
    pieces: dict[int, list[tuple[int, Any]]] = defaultdict(list)
    for place in range(stop):
        segment = order.segment(place)
        for (block, _), found in case.pieces(segment, segment.locate(place, 1)).items():
            pieces[block].append((place, found))
    for block, ends in enumerate(case.ends):
        for start, end in itertools.pairwise([0, *ends.tolist()]):
            expected = [place for place, found in pieces[block]
                        if any(a < end and b > start for a, b in found)]  # fmt: skip
            assert list(order.places(block, range(start, end), stop)) == expected
