"""Masking: rates by statistics, independence, pinned draws, specials untouched."""

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipeline.config.data import DataConfig
from pipeline.data.format import MASK_ID, NUM_SPECIAL
from pipeline.data.masking import Masked, Sequences, mask_tokens
from pipeline.data.order import Order, SequencePool
from pipeline.data.random import Purpose
from tests.support.mask_reference import VOCABULARY, batch_of, within

TOKEN = DataConfig(dir="unused", masking="token")
WORD = replace(TOKEN, masking="whole_word")
EXACT = replace(TOKEN, mask_selection="exact")
SPAN = replace(EXACT, masking="span")
KEY = (11, Purpose.MASK)


def _mask(config: DataConfig, batch: Sequences, key: tuple[int, Purpose] = KEY) -> Masked:
    return mask_tokens(batch, config=config, vocabulary=VOCABULARY, key=key)


@pytest.mark.parametrize("config", [TOKEN, EXACT], ids=["bernoulli", "exact"])
def test_rates_of_token_masking(config: DataConfig) -> None:
    batch = batch_of(4000, 256)
    corrupted, selected, _ = _mask(config, batch)
    n = int(selected.sum())
    # Exactly 38 of 256, or 15% of all.
    assert n == 4000 * 38 if config is EXACT else within(n, selected.size, 0.15)
    masked = selected & (corrupted == MASK_ID)
    assert within(int(masked.sum()), n, 0.8)
    changed = selected & ~masked & (corrupted != batch.tokens)
    # A random token is the original by chance once in 995 times.
    same = 1 / (VOCABULARY.size - NUM_SPECIAL)
    assert within(int(changed.sum()), n, 0.1 * (1 - same))
    kept = selected & (corrupted == batch.tokens)
    assert within(int(kept.sum()), n, 0.1 * (1 + same))
    assert (corrupted[~selected] == batch.tokens[~selected]).all()


def test_random_tokens_are_uniform_and_never_special() -> None:
    config = replace(TOKEN, replace_mask_prob=0.0, replace_random_prob=1.0, mask_prob=0.5)
    corrupted, selected, _ = _mask(config, batch_of(4000, 256))
    drawn = corrupted[selected]
    assert (drawn.min(), drawn.max()) == (NUM_SPECIAL, VOCABULARY.size - 1)
    counts = np.bincount(drawn - NUM_SPECIAL)
    expected = len(drawn) / (VOCABULARY.size - NUM_SPECIAL)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # 994 degrees of freedom: mean 994, standard deviation 44.6.
    assert abs(chi_square - 994) < 4 * 44.6


@pytest.mark.parametrize("at_least_one", [False, True])
@pytest.mark.parametrize("config", [TOKEN, WORD, EXACT, SPAN])
def test_unmaskable_slots_are_never_selected(config: DataConfig, at_least_one: bool) -> None:
    batch = batch_of(500, 256, document_length=20)
    maskable = batch.maskable.copy()
    maskable[:, ::3] = False  # also within words
    maskable[7] = False  # a whole sequence of padding
    batch = batch._replace(maskable=maskable)
    config = replace(config, mask_prob=0.9, at_least_one=at_least_one)
    corrupted, selected, _ = _mask(config, batch)
    assert selected[maskable].mean() > 0.8
    assert not selected[~maskable].any()
    assert (corrupted[~maskable] == batch.tokens[~maskable]).all()


def test_rates_of_words() -> None:
    """That a word is masked as a whole, row by row: `test_mask_selection`."""
    batch = batch_of(2000, 256)
    corrupted, selected, _ = _mask(WORD, batch)
    chosen, masks = selected[batch.word_starts], (corrupted == MASK_ID)[batch.word_starts]
    assert within(int(chosen.sum()), len(chosen), 0.15)
    assert within(int(masks.sum()), int(chosen.sum()), 0.8)


def _chi_square(first: np.ndarray, second: np.ndarray) -> float:
    """Of the 2 x 2 table of two masks: one degree of freedom, above 16 with p = 6e-5."""
    table = np.array([[(f & s).sum() for s in (second, ~second)] for f in (first, ~first)], float)
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    return float(((table - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("config", [TOKEN, EXACT], ids=["bernoulli", "exact"])
@pytest.mark.parametrize(("changes", "key"), [
    ({"sample_ids": np.arange(2000) + 1}, KEY), ({"sample_ids": np.arange(2000) + 2**32}, KEY),
    ({"epochs": np.ones(2000, dtype=np.int64)}, KEY), ({}, (12, Purpose.MASK)),
    ({}, (11, Purpose.EVAL_MASK)),
], ids=["neighbouring sample", "high word of sample", "next epoch", "seed", "purpose"])  # fmt: skip
def test_masks_are_independent(
    config: DataConfig, changes: dict[str, Any], key: tuple[int, Purpose]
) -> None:
    batch = batch_of(2000, 256)
    first, second = _mask(config, batch), _mask(config, batch._replace(**changes), key)
    assert _chi_square(first.selected, second.selected) < 16
    # What happens to slots that both select, too.
    both = first.selected & second.selected
    assert _chi_square(first.tokens[both] == MASK_ID, second.tokens[both] == MASK_ID) < 16
    # The test can fail: a mask with itself.
    assert _chi_square(first.selected, first.selected) > 1000


def test_ranks_and_neighbouring_slots_are_independent() -> None:
    counts = np.full(40, 100)
    material = SequencePool(np.arange(40), counts, np.cumsum(counts) - counts)
    order = Order(material, seed=11, window_blocks=4)
    ranks = []
    for rank in range(2):
        # Global batches of 16, a half for each rank.
        parts = [order.locate(16 * step + 8 * rank, 8).sample_ids for step in range(250)]
        ids = np.concatenate(parts)
        ranks.append(_mask(TOKEN, batch_of(2000, 256)._replace(sample_ids=ids)).selected)
    assert _chi_square(*ranks) < 16
    assert _chi_square(ranks[0][:, 1:], ranks[0][:, :-1]) < 16


@pytest.mark.parametrize(("name", "config"), [("token", TOKEN), ("whole_word", WORD),
                                              ("exact", EXACT), ("span", SPAN)])  # fmt: skip
def test_masks_stay_the_same_for_good(name: str, config: DataConfig) -> None:
    # Written down once, the first two by the array code: runs that are under way keep their masks.
    for purpose in (Purpose.MASK, Purpose.EVAL_MASK):
        found = _mask(config, batch_of(64, 512, document_length=90), (0, purpose))
        digest = hashlib.sha256(found.tokens.astype("<i8").tobytes() + found.selected.tobytes())
        assert digest.hexdigest()[:16] == PINNED[name, purpose]


PINNED = {
    ("token", Purpose.MASK): "30cf2b1ebf3fc679", ("token", Purpose.EVAL_MASK): "b5e8a63e365bb3d4",
    ("whole_word", Purpose.MASK): "f3b6cdc77ae1b83b",
    ("whole_word", Purpose.EVAL_MASK): "3d47179312b19bad",
    ("exact", Purpose.MASK): "110769e6744ce57b", ("exact", Purpose.EVAL_MASK): "2b257f7046257608",
    ("span", Purpose.MASK): "c24d5fb9d9ef0fe3", ("span", Purpose.EVAL_MASK): "bf9a26acb617378f",
}  # fmt: skip
