"""The hash of a batch: against whole numbers of Python, its parts, and every kind of change."""

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.record import sequence_hashes

MASK = 2**64 - 1


class Batch(NamedTuple):
    places: Any
    sample_ids: Any
    epochs: Any
    input_ids: Any
    documents: Any
    masked_index: Any
    targets: Any

    def changed(self, name: str, at: Any, value: Any) -> "Batch":
        array = getattr(self, name).copy()
        array[at] = value
        return self._replace(**{name: array})

    def rows(self, start: int, stop: int) -> "Batch":
        slots = self.input_ids.shape[1]
        first, end = np.searchsorted(self.masked_index, [start * slots, stop * slots])
        return Batch(
            *(array[start:stop] for array in self[:5]),
            self.masked_index[first:end] - start * slots,
            self.targets[first:end],
        )


def batch_hash(*batch: Any) -> int:
    """Hash of a batch or of a part of it."""
    return int(sequence_hashes(*batch).sum())


def _batch(rows: int, slots: int, seed: int = 0, share: float = 0.15) -> Batch:
    draw = np.random.default_rng(seed)
    masked_index = np.flatnonzero(draw.random(rows * slots) < share)
    return Batch(np.arange(rows), draw.integers(0, 2**40, rows), draw.integers(0, 2**32, rows),
                 draw.integers(0, 50_000, (rows, slots)),
                 np.sort(draw.integers(0, 5, (rows, slots)), axis=1).astype(np.int32), masked_index,
                 draw.integers(0, 50_000, len(masked_index)))  # fmt: skip


def _next_of_splitmix64(state: int) -> int:
    """As written in the paper's figure: advance by the golden ratio, then mix."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def _by_definition(batch: Batch) -> int:
    """The same number, slot by slot, in Python's unbounded whole numbers."""
    rows, slots = batch.input_ids.shape
    predicted = dict(zip(batch.masked_index.tolist(), batch.targets.tolist(), strict=True))
    total = 0
    for row in range(rows):
        content = 0
        for slot in range(slots):
            counter = slot * 0x9E3779B97F4A7C15
            word = int(batch.input_ids[row, slot]) + int(batch.documents[row, slot]) * 2**32
            content += _next_of_splitmix64(word + counter)
            target = predicted.get(row * slots + slot)
            if target is not None:
                content += _next_of_splitmix64(target + 2**63 + counter)
        key = 0
        for value in (batch.places[row], batch.epochs[row], batch.sample_ids[row], slots):
            key = _next_of_splitmix64(key + int(value))
        total += _next_of_splitmix64(key + content - 0x9E3779B97F4A7C15)
    return total & MASK


def test_the_generator_is_splitmix64() -> None:
    """Known answers for seed 1234567, as in Rosetta Code's and Vigna's splitmix64.c."""
    state, found = 1234567, []
    for _ in range(3):
        found.append(_next_of_splitmix64(state))
        state += 0x9E3779B97F4A7C15
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(
    rows=st.integers(0, 5),
    slots=st.integers(1, 70),
    share=st.sampled_from([0.0, 0.15, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(deadline=None, max_examples=150)
def test_it_is_what_its_definition_says(rows: int, slots: int, share: float, seed: int) -> None:
    batch = _batch(rows, slots, seed, share)
    assert batch_hash(*batch) == _by_definition(batch)


def test_it_never_changes_and_ignores_strides_and_types() -> None:
    """Files of finished runs hold such numbers; the largest are hashed as they are."""
    top = 2**32 - 1
    batch = Batch(np.array([2**31]), np.array([2**63 - 1]), np.array([top]), np.full((1, 3), top),
                  np.full((1, 3), 2**31 - 1, np.int32), np.array([0, 2]),
                  np.array([top, 0]))  # fmt: skip
    assert batch_hash(*batch) == _by_definition(batch)
    ids = np.arange(24, dtype=np.int64).reshape(2, 12)
    documents = np.repeat(np.array([[1, 2, 0], [1, 1, 0]], np.int32), 4, axis=1)
    batch = Batch(np.array([0, 1]), np.array([7, 2**33]), np.array([0, 3]), ids, documents,
                  np.array([1, 5, 13]), np.array([100, 200, 300]))  # fmt: skip
    assert f"{batch_hash(*batch):016x}" == "2b6821d6e7253864"
    assert batch_hash(*(array[:0] for array in batch)) == 0
    batch = _batch(4, 20)
    wide = np.zeros((4, 40), np.int64)
    wide[:, ::2] = batch.input_ids
    changed = batch._replace(input_ids=wide[:, ::2], documents=np.asfortranarray(batch.documents),
                             sample_ids=batch.sample_ids.astype(">i8"),
                             epochs=batch.epochs.astype(np.uint32))  # fmt: skip
    assert batch_hash(*changed) == batch_hash(*batch)


@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_parts_add_up_however_a_batch_is_split(data: st.DataObject) -> None:
    batch = _batch(12, 33, data.draw(st.integers(0, 100)))
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, 12), max_size=5))), 12]
    parts = [batch_hash(*batch.rows(start, stop)) for start, stop in itertools.pairwise(edges)]
    assert sum(parts) & MASK == batch_hash(*batch)


def test_every_single_change_changes_it() -> None:
    """All bits of all values, each slot's mask, and swaps: no two of the hashes are equal."""
    rows, slots = 3, 40
    batch = _batch(rows, slots, seed=4)
    hashes = {batch_hash(*batch)}
    tried = 1

    def add(changed: Batch) -> None:
        nonlocal tried
        tried += 1
        hashes.add(batch_hash(*changed))

    bits = {"places": 32, "sample_ids": 63, "epochs": 32, "input_ids": 32, "targets": 32,
            "documents": 31}  # fmt: skip
    for name, count in bits.items():
        array = getattr(batch, name)
        for at in np.ndindex(array.shape):
            for bit in range(count):
                add(batch.changed(name, at, array[at] ^ array.dtype.type(1 << bit)))
    chosen = set(batch.masked_index.tolist())
    for flat in range(rows * slots):
        if flat in chosen:
            keep = batch.masked_index != flat
            add(batch._replace(masked_index=batch.masked_index[keep], targets=batch.targets[keep]))
        else:  # one more is predicted, as what it is
            at = np.searchsorted(batch.masked_index, flat)
            targets = np.insert(batch.targets, at, batch.input_ids.flat[flat])
            masked = np.insert(batch.masked_index, at, flat)
            add(batch._replace(masked_index=masked, targets=targets))
    for i, flat in enumerate(batch.masked_index.tolist()):
        if flat + 1 not in chosen and flat + 1 < rows * slots:
            add(batch.changed("masked_index", i, flat + 1))  # next slot, or next sequence
    flat_ids = batch.input_ids.reshape(-1)
    for i, j in itertools.combinations(range(rows * slots), 2):
        if flat_ids[i] != flat_ids[j]:
            swapped = flat_ids.copy()
            swapped[[i, j]] = swapped[[j, i]]
            add(batch._replace(input_ids=swapped.reshape(rows, slots)))
    bare = batch._replace(masked_index=batch.masked_index[:0], targets=batch.targets[:0])
    for order in itertools.permutations(range(rows)):
        # What the places hold changes; the places themselves stay 0 .. 2.
        add(Batch(bare.places, *(array[list(order)] for array in bare[1:5]), *bare[5:]))
    assert tried > 15_000
    # 2 * 10^4 numbers of 64 bits have two equal ones by chance once in 10^11 times.
    assert len(hashes) == tried


def test_bits_of_hashes_of_similar_batches_are_even() -> None:
    """Each of the 64 bits is set in half of 4,096 batches, within 5 standard deviations."""
    batch = _batch(1, 16)
    hashes = [batch_hash(*batch.changed("places", 0, place)) for place in range(2048)]
    hashes += [batch_hash(*batch.changed("input_ids", (0, 3), token)) for token in range(2048)]
    for bit in range(64):
        assert abs(sum(value >> bit & 1 for value in hashes) - 2048) < 5 * 32, bit


@pytest.mark.parametrize("index", [-1, 32])
def test_an_index_outside_the_batch_is_a_bug(index: int) -> None:
    batch = _batch(2, 16, share=0.0)
    with pytest.raises(AssertionError, match="not of this batch"):
        batch_hash(*batch._replace(masked_index=np.array([index]), targets=np.array([5])))
