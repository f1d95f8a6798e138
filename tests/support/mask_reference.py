"""Masking twice more: the array code of the first runs, and the rules word by word, as written."""

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from pipeline.config.data import DataConfig
from pipeline.data.format import NUM_SPECIAL, Vocabulary
from pipeline.data.masking import Sequences
from pipeline.data.random import Purpose, Words, philox

VOCABULARY = Vocabulary(1000)


def uniform(words: Words) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1), each a 32-bit word over 2^32."""
    return words.astype(np.float64) * 2.0**-32


def draws_of(batch: Sequences, key: tuple[int, Purpose]) -> list[npt.NDArray[np.uint32]]:
    """The four words of every slot, (B, S)."""
    positions = np.arange(batch.tokens.shape[1], dtype=np.int64)
    ids = batch.sample_ids[:, None].astype(np.uint64)
    low, high = ids & np.uint64(0xFFFFFFFF), ids >> np.uint64(32)
    return list(philox((positions[None, :], batch.epochs[:, None], low, high), key))


def mask_by_arrays(
    batch: Sequences, config: DataConfig, vocabulary: Vocabulary, key: tuple[int, Purpose]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Tokens and whole words by Bernoulli, with floating-point comparisons."""
    positions = np.arange(batch.tokens.shape[1], dtype=np.int64)
    select, action, replacement, _ = draws_of(batch, key)
    if config.masking == "whole_word":
        first = np.maximum.accumulate(np.where(batch.word_starts, positions, 0), axis=1)
        select = np.take_along_axis(select, first, axis=1)
        action = np.take_along_axis(action, first, axis=1)
    selected = (uniform(select) < config.mask_prob) & batch.maskable
    share = uniform(action)
    to_mask = selected & (share < config.replace_mask_prob)
    either = config.replace_mask_prob + config.replace_random_prob
    to_random = selected & ~to_mask & (share < either)
    random_ids = vocabulary.in_text[replacement % np.uint32(len(vocabulary.in_text))]
    replaced = np.where(to_random, random_ids, batch.tokens)
    return np.where(to_mask, vocabulary.mask, replaced), selected


def span_cdf(longest: int = 10) -> list[Fraction]:
    """P(length <= 1), ..., P(length <= longest): geometric with p = 1/5, scaled to sum to one."""
    weights = [Fraction(1, 5) * Fraction(4, 5) ** (n - 1) for n in range(1, longest + 1)]
    return [sum(weights[:n], Fraction(0)) / sum(weights) for n in range(1, longest + 1)]


def mask_by_words(
    batch: Sequences, config: DataConfig, vocabulary: Vocabulary, key: tuple[int, Purpose]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], int]:
    """Any config, one word after another in plain Python."""
    draws = [array.tolist() for array in draws_of(batch, key)]
    corrupted, selected = batch.tokens.copy(), np.zeros(batch.tokens.shape, dtype=bool)
    unmasked = 0
    for row in range(len(corrupted)):
        treated, missing = _chosen_words(batch, row, config, [array[row] for array in draws])
        unmasked += missing
        table = None if config.similar is None else np.load(config.similar)
        for slots, of_unit in treated:
            selected[row, slots] = True
            for slot in slots:
                by_slot = config.masking == "ngram" and table is None
                action = draws[1][row][slot] if by_slot else of_unit
                if Fraction(action, 2**32) < config.replace_mask_prob:
                    corrupted[row, slot] = vocabulary.mask
                    if table is not None:
                        near = table[batch.tokens[row, slot], draws[2][row][slot] % table.shape[1]]
                        pick = vocabulary.in_text[draws[2][row][slot] % len(vocabulary.in_text)]
                        corrupted[row, slot] = pick if near < 0 else near
                elif action / 2**32 < config.replace_mask_prob + config.replace_random_prob:
                    pick = draws[2][row][slot] % len(vocabulary.in_text)
                    corrupted[row, slot] = vocabulary.in_text[pick]
    return corrupted, selected, unmasked


def _chosen_words(
    batch: Sequences, row: int, config: DataConfig, draws: list[list[int]]
) -> tuple[list[tuple[list[int], int]], int]:
    """Chosen words as (maskable slots, draw of the action), and documents that have none."""
    slots = batch.tokens.shape[1]
    starts = [s for s in range(slots) if s == 0 or config.masking == "token"
              or batch.word_starts[row, s]]  # fmt: skip
    words = [
        [slot for slot in range(a, b) if batch.maskable[row, slot]]
        for a, b in zip(starts, [*starts[1:], slots], strict=True)
    ]
    document = [int(batch.documents[row, start]) for start in starts]
    select = [draws[0][start] for start in starts]
    action: dict[int, int] = {}
    if config.mask_selection == "bernoulli":
        for w, start in enumerate(starts):
            if words[w] and select[w] / 2**32 < config.mask_prob:
                action[w] = draws[1][start]
    else:
        threshold = Fraction(math.ceil(Fraction(config.mask_prob) * 2**32), 2**32)
        left = math.floor(threshold * sum(map(len, words)) + Fraction(1, 2))
        for w in sorted(range(len(words)), key=lambda w: (select[w], w)):
            if w in action or not words[w]:
                continue
            length = 1
            drawn = Fraction(draws[3][starts[w]], 2**32)
            if config.masking == "span":
                length = 1 + sum(drawn >= share for share in span_cdf())
            elif config.masking == "ngram":
                weights = config.ngram_weights or (1, Fraction(1, 2), Fraction(1, 3))
                whole = sum(map(Fraction, weights))
                below = Fraction(0)
                for weight in weights[:-1]:
                    below += Fraction(weight) / whole
                    length += drawn >= below
            for v in range(w, min(w + length, len(words))):
                if not words[v] or document[v] != document[w]:
                    break
                if v not in action and len(words[v]) > left:
                    break
                if v not in action:
                    action[v] = draws[1][starts[w]]
                    left -= len(words[v])
    missing = 0
    for number in dict.fromkeys(document):
        members = [w for w in range(len(words)) if document[w] == number and words[w]]
        if members and not set(members) & set(action):
            least = min(members, key=lambda w: select[w])
            missing += not config.at_least_one
            if config.at_least_one:
                action[least] = draws[1][starts[least]]
    return [(words[w], drawn) for w, drawn in action.items()], missing


def batch_of(
    rows: int, length: int, *, document_length: int = 0, start_share: float = 0.6
) -> Sequences:
    """Random ids and words, drawn with Philox so that they are the same with every numpy.

    With a document length every document has a [CLS], a [SEP] and now and then an [UNK], which are
    words of their own and not maskable, and the last tenth is padding.
    """
    slot, row = np.arange(length)[None, :], np.arange(rows)[:, None]
    ids, starts, unknown, _ = philox((slot, row, 7, 0), (3, 99))
    tokens = NUM_SPECIAL + (ids % np.uint32(VOCABULARY.size - NUM_SPECIAL)).astype(np.int64)
    word_starts = uniform(starts) < start_share
    maskable = np.ones((rows, length), dtype=bool)
    documents = np.ones((rows, length), dtype=np.int32)
    if document_length:
        documents[:] = 1 + slot // document_length
        text = length - length // 10
        documents[:, text:] = 0
        edge = (slot % document_length == 0) | (slot % document_length == document_length - 1)
        maskable = ~(edge | (slot >= text) | (uniform(unknown) < 0.02))
        word_starts |= ~maskable
        word_starts[:, 1:] |= ~maskable[:, :-1]
        tokens[~maskable] = 2
    word_starts[:, 0] = True
    return Sequences(tokens, word_starts, maskable, documents, np.arange(rows),
                     np.zeros(rows, dtype=np.int64))  # fmt: skip


def within(count: float, total: float, share: float, errors: float = 4.0) -> bool:
    """Whether a binomial count is within some standard errors (4: p = 6e-5)."""
    return abs(count - total * share) < errors * np.sqrt(total * share * (1 - share))
