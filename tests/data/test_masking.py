"""Masking: exact rates by statistics, independence, whole words, specials untouched."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipeline.config.data import DataConfig
from pipeline.data.masking import mask_tokens
from pipeline.data.philox import Purpose
from pipeline.data.shards import MASK_ID, NUM_SPECIAL, Vocabulary

VOCAB = 1000
VOCABULARY = Vocabulary(VOCAB)
TOKEN = DataConfig(dir="unused", masking="token")
KEY = (11, Purpose.MASK)


def _batch(rows: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    tokens = rng.integers(NUM_SPECIAL, VOCAB, (rows, length))
    starts = rng.random((rows, length)) < 0.6
    starts[:, 0] = True
    maskable = np.ones((rows, length), dtype=bool)
    return tokens, starts, maskable


def _mask(config: DataConfig, ids: np.ndarray, epoch: int = 0, **changes: Any) -> Any:
    tokens, starts, maskable = _batch(len(ids), 256)
    arguments: dict[str, Any] = {
        "tokens": tokens, "word_starts": starts, "maskable": maskable, "sample_ids": ids,
        "epochs": np.full(len(ids), epoch), "config": config, "vocabulary": VOCABULARY, "key": KEY,
    }  # fmt: skip
    arguments.update(changes)
    return (*mask_tokens(**arguments), arguments["tokens"], arguments["word_starts"])


def _within(count: int, total: int, share: float, sigmas: float = 4.5) -> bool:
    """Whether a binomial count is within some standard deviations (4.5: p = 7e-6)."""
    return abs(count - total * share) < sigmas * np.sqrt(total * share * (1 - share))


def test_rates_of_token_masking() -> None:
    corrupted, selected, tokens, _ = _mask(TOKEN, np.arange(4000))
    n = int(selected.sum())
    assert _within(n, tokens.size, 0.15)
    masked = selected & (corrupted == MASK_ID)
    assert _within(int(masked.sum()), n, 0.8)
    changed = selected & ~masked & (corrupted != tokens)
    # A random token is the original by chance once in 995 times.
    assert _within(int(changed.sum()), n, 0.1 * (1 - 1 / (VOCAB - NUM_SPECIAL)))
    assert (corrupted[~selected] == tokens[~selected]).all()


def test_random_tokens_are_uniform_and_never_special() -> None:
    config = replace(TOKEN, replace_mask_prob=0.0, replace_random_prob=1.0, mask_prob=0.5)
    corrupted, selected, _, _ = _mask(config, np.arange(4000))
    drawn = corrupted[selected]
    assert drawn.min() == NUM_SPECIAL
    assert drawn.max() == VOCAB - 1
    counts = np.bincount(drawn - NUM_SPECIAL)
    expected = len(drawn) / (VOCAB - NUM_SPECIAL)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # 994 degrees of freedom: mean 994, standard deviation 44.6.
    assert abs(chi_square - 994) < 4.5 * 44.6


@pytest.mark.parametrize("mode", ["token", "whole_word"])
def test_unmaskable_slots_are_never_selected(mode: str) -> None:
    tokens, _, maskable = _batch(500, 256)
    maskable[:, ::3] = False
    config = replace(TOKEN, masking=mode, mask_prob=0.9)
    corrupted, selected, tokens, _ = _mask(config, np.arange(500), maskable=maskable)
    assert not selected[~maskable].any()
    assert (corrupted[~maskable] == tokens[~maskable]).all()


def test_whole_words_are_selected_together_at_the_same_rate() -> None:
    config = replace(TOKEN, masking="whole_word")
    corrupted, selected, _tokens, starts = _mask(config, np.arange(4000))
    word = np.cumsum(starts.reshape(-1)) - 1
    flat = selected.reshape(-1)
    size = np.bincount(word)
    chosen = np.bincount(word, weights=flat)
    assert set(np.unique(chosen / size)) == {0.0, 1.0}
    assert _within(int((chosen > 0).sum()), len(size), 0.15)
    # All of a word becomes [MASK], or none of it.
    is_mask = np.bincount(word, weights=(corrupted == MASK_ID).reshape(-1))
    assert set(np.unique(is_mask / size)) == {0.0, 1.0}
    assert (size > 1).sum() > 1000


def test_token_masking_ignores_words() -> None:
    _, selected, _, starts = _mask(TOKEN, np.arange(4000))
    inside = ~starts[:, 1:]
    both = selected[:, 1:] & selected[:, :-1] & inside
    assert _within(int(both.sum()), int(inside.sum()), 0.15**2)


def test_masks_do_not_depend_on_the_batch() -> None:
    ids = np.array([17, 3, 900, 2**40])
    tokens, starts, maskable = _batch(4, 256)
    together = mask_tokens(tokens, starts, maskable, ids, np.array([0, 1, 2, 3]), config=TOKEN,
                           vocabulary=VOCABULARY, key=KEY)  # fmt: skip
    for row in range(4):
        alone = mask_tokens(
            tokens[row : row + 1], starts[row : row + 1], maskable[row : row + 1],
            ids[row : row + 1], np.array([row]), config=TOKEN, vocabulary=VOCABULARY, key=KEY,
        )  # fmt: skip
        np.testing.assert_array_equal(together[0][row], alone[0][0])
        np.testing.assert_array_equal(together[1][row], alone[1][0])


@pytest.mark.parametrize(
    "other",
    [
        {"sample_ids": np.arange(2000) + 2000},
        {"sample_ids": np.arange(2000) + 2**32},
        {"epochs": np.ones(2000, dtype=np.int64)},
        {"key": (12, Purpose.MASK)},
        {"key": (11, Purpose.EVAL_MASK)},
    ],
    ids=["sample", "high word of sample", "epoch", "seed", "purpose"],
)
def test_masks_of_other_samples_epochs_and_seeds_are_independent(other: dict[str, Any]) -> None:
    _, first, _, _ = _mask(TOKEN, np.arange(2000))
    _, second, _, _ = _mask(TOKEN, np.arange(2000), **other)
    assert _within(int((first & second).sum()), first.size, 0.15**2)
