"""Dynamic masking as a pure function of (seed, epoch, sample id, position).

The corruption is BERT's (Devlin et al. 2019, section 3.1): a share of the tokens is selected; of
those 80% become [MASK], 10% a random token, 10% stay. Tokens are selected and treated in units,
except that each random replacement is drawn on its own:

token        one token.
whole_word   all tokens of a word (word starts are stored in the shards).
span         up to ten words of a document (SpanBERT, Joshi et al. 2020, section 3.1).
ngram        n words of a document, n drawn with given weights; each token is then treated on its
             own (ALBERT, google-research/albert, create_pretraining_data.py), or with a table of
             similar tokens all of them together, replaced by these (MacBERT, Cui et al. 2020,
             section 3.2; its code was never released).

A unit's draws belong to its first token: Philox of (position, epoch, sample id) gives one word for
its selection, one for its treatment, one for a random token at that position, one for a span's
length.

Selection `bernoulli`: every unit whose draw is below the ratio. The masks of a smaller ratio are a
subset of those of a larger one.

Selection `exact`: a budget of round(ratio * maskable tokens of the sequence), halves rounded up.
Words are taken in the order of their draws. A word larger than the rest of the budget is passed
over and the next one tried, as in BERT's `create_masked_lm_predictions` (google-research/bert,
create_pretraining_data.py); the unused rest is smaller than any word that was not taken.

Spans: SpanBERT draws a length and a start until the budget is used, and draws again if the start is
masked already. Here the starts come in the order of the words' draws, and masked ones are passed
over. That is the same distribution (each time uniform over the remaining words) without a number of
attempts, so the mask depends on the key and the sequence only. A span ends early at the end of its
document, at a token that is never masked ([UNK]), and before a word that does not fit into the
budget; words that another span took count to its length. Differences: SpanBERT's code picks a
start's token uniformly, so longer words more often, cuts the last word at the budget, which it
rounds up, and treats spans that touch as one.

With `mask_versions` n the draws of epoch e are those of epoch e mod n: a sequence, whose id is the
same in each epoch, has n different masks in the whole run.

`at_least_one` applies to packed documents, not to sequences: a sequence of 512 tokens is
practically never without a mask, and attention does not cross documents. A document's word with the
least draw is the one that a rising ratio would select first, so masks stay nested. With `exact` it
comes on top of the budget.

The compiled loops use whole numbers only, so that masks are equal on every machine. Letters: B
sequences, S slots each; a sequence has W words, which are single tokens in unit `token`.
"""

import math
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.config.data import DataConfig
from pipeline.data.format import Vocabulary
from pipeline.data.jit import kernel
from pipeline.data.random import Purpose, philox_words
from pipeline.errors import DataError

# An unsigned 64-bit number becomes a float when mixed with a signed one: hence the casts.
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUND_UP = np.uint64(1 << 31)
_NOT_CHOSEN = -1
# Lengths of spans are geometric with p = 0.2 on 1 to this, scaled to sum to one, mean 3.80, as in
# SpanBERT's code; with longer ones cut to 10 the mean would be 4.46, not the paper's 3.8.
MAX_SPAN_WORDS = 10


class Sequences(NamedTuple):
    """A batch to be masked."""

    tokens: npt.NDArray[np.int64]
    """(B, S) token ids, specials and padding included."""
    word_starts: npt.NDArray[np.bool_]
    """(B, S), true where a word begins; true at the first token of each piece."""
    maskable: npt.NDArray[np.bool_]
    """(B, S), false at special tokens and padding, which are never selected."""
    documents: npt.NDArray[np.int32]
    """(B, S) number of the packed document; equal neighbours are one document."""
    sample_ids: npt.NDArray[np.int64]
    """(B,) number of each sequence."""
    epochs: npt.NDArray[np.int64]
    """(B,) epoch in which each sequence is seen, below 2^32."""


class Masked(NamedTuple):
    """A corrupted batch."""

    tokens: npt.NDArray[np.int64]
    """(B, S) corrupted token ids."""
    selected: npt.NDArray[np.bool_]
    """(B, S), true where the original is to be predicted."""
    unmasked_documents: npt.NDArray[np.int64]
    """(B,) documents of each sequence that have a maskable token but none selected."""


class Rule(NamedTuple):
    """A masking config in whole numbers; shares are in units of 2^-32, rounded up."""

    by_token: bool
    by_budget: bool
    at_least_one: bool
    select_below: np.uint64
    """A word is selected whose draw is below this; also the share of a budget."""
    mask_below: np.uint64
    random_below: np.uint64
    longer_from: npt.NDArray[np.uint64]
    """(l,) rising; a span has one word, and one more for each of these that its draw reaches."""
    mask_id: int
    in_text: npt.NDArray[np.int64]
    """(m,) ids that random replacements are drawn from."""
    by_slot: bool
    """Whether each token of a unit is treated on its own."""
    similar: npt.NDArray[np.int64]
    """(V, k) tokens that stand in place of [MASK], -1 for none; (0, 0) takes [MASK]."""


def mask_tokens(
    batch: Sequences,
    *,
    config: DataConfig,
    vocabulary: Vocabulary,
    key: tuple[int, Purpose],
    ratio: float | None = None,
) -> Masked:
    """Corrupt a batch.

    The key is (seed, purpose). The ratio, in (0, 1), is by default `config.mask_prob`.
    """
    # Always of these types: numba would compile again for others, for 3 to 4 s.
    batch = Sequences(
        *(np.ascontiguousarray(array, dtype) for array, dtype in zip(batch, _DTYPES, strict=True))
    )
    corrupted = batch.tokens.copy()
    selected = np.zeros(corrupted.shape, dtype=np.bool_)
    # Random replacements are drawn from the ids that text can have: any other id would tell the
    # model that its place is to be predicted.
    rule = _rule(config, vocabulary, config.mask_prob if ratio is None else ratio)
    if config.mask_versions is not None:
        batch = batch._replace(epochs=batch.epochs % config.mask_versions)
    seed, purpose = key
    unmasked = np.empty(len(corrupted), np.int64)
    mask_batch(batch, rule, np.uint64(seed), np.uint64(purpose), corrupted, selected, unmasked)
    return Masked(corrupted, selected, unmasked)


_DTYPES = (np.int64, np.bool_, np.bool_, np.int32, np.int64, np.int64)


def _rule(config: DataConfig, vocabulary: Vocabulary, ratio: float) -> Rule:
    return Rule(
        by_token=config.masking == "token",
        by_budget=config.mask_selection == "exact",
        at_least_one=config.at_least_one,
        select_below=_share(ratio),
        mask_below=_share(config.replace_mask_prob),
        random_below=_share(config.replace_mask_prob + config.replace_random_prob),
        longer_from=_lengths(config),
        mask_id=vocabulary.mask,
        in_text=vocabulary.in_text,
        by_slot=config.masking == "ngram" and config.similar is None,
        similar=_NO_TABLE if config.similar is None else similar_tokens(config.similar, vocabulary),
    )


_NO_TABLE = np.empty((0, 0), np.int64)
# 1 : 1/2 : 1/3 in whole numbers, for one, two and three words.
_ALBERT = (6.0, 3.0, 2.0)


@lru_cache(maxsize=4)
def similar_tokens(
    path: str, vocabulary: Vocabulary, tokenizer_sha256: str | None = None
) -> npt.NDArray[np.int64]:
    """Read a table of `postnorm similar`, or (V, k) ids in an .npy file, which name no tokenizer.

    Raises:
        DataError: there is none, or it is of another vocabulary.
    """
    try:
        table = np.load(path)
        made_for = tokenizer_sha256
        if not isinstance(table, np.ndarray):
            table, made_for = table["similar"], str(table["tokenizer_sha256"])
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"data.similar={path} cannot be read: {error}") from None
    if tokenizer_sha256 not in (None, made_for):  # a vocabulary of the same size, for example
        raise DataError(
            f"data.similar={path} is for the tokenizer {str(made_for)[:12]}, this dataset has "
            f"{str(tokenizer_sha256)[:12]}: make it with the model of this vocabulary, "
            "`postnorm similar`"
        )
    size = vocabulary.size
    if table.ndim != 2 or len(table) < size or table.dtype.kind != "i" or table.max() >= size:
        raise DataError(
            f"data.similar={path} is of {table.dtype} {table.shape}; expected ids below {size} in "
            f"({size}, k): make it with the model of this vocabulary, `postnorm similar`"
        )
    return np.ascontiguousarray(table, np.int64)


def _lengths(config: DataConfig) -> npt.NDArray[np.uint64]:
    if config.masking == "span":
        return _LONGER_FROM
    if config.masking != "ngram":
        return _LONGER_FROM[:0]
    weights = [Fraction(weight) for weight in config.ngram_weights or _ALBERT]
    shares = [sum(weights[:n], Fraction(0)) / sum(weights) for n in range(1, len(weights))]
    return np.array([math.ceil(share * 2**32) for share in shares], np.uint64)


# 64 bits, because a share of 1 is 2^32, above every draw.
def _share(share: float) -> np.uint64:
    """Return the smallest 32-bit number not below the share; exact, since 2^32 only scales."""
    threshold: np.uint64 = np.uint64(math.ceil(share * 2**32))
    return threshold


def _longer_from() -> npt.NDArray[np.uint64]:
    """Return the draws from which a span has at least 2, 3, ... words: P(length <= n) * 2^32.

    P(length <= n) = (1 - 0.8^n) / (1 - 0.8^10), here as a ratio of whole numbers.
    """
    longest = MAX_SPAN_WORDS
    whole = 5**longest - 4**longest
    shares = [5 ** (longest - n) * (5**n - 4**n) for n in range(1, longest)]
    return np.array([-(-(share << 32) // whole) for share in shares], dtype=np.uint64)


_LONGER_FROM = _longer_from()


class _Words(NamedTuple):
    """Scratch memory for one sequence."""

    first: npt.NDArray[np.int64]
    """(S + 1,) first slot of each word, and S after the last."""
    before: npt.NDArray[np.int64]
    """(S + 1,) number of maskable tokens before each word, and all of them after the last."""
    select: npt.NDArray[np.uint32]
    """(S,) draws of each word, 32 bits each."""
    action: npt.NDArray[np.uint32]
    length: npt.NDArray[np.uint32]
    chosen: npt.NDArray[np.int64]
    """(S + 1,) chosen words, rising; entries after them mean nothing."""
    source: npt.NDArray[np.int64]
    """(S,) word whose action a chosen word takes, -1 if it is not chosen."""


# 222 M tokens a CPU-second for whole words, Philox included (numpy 11 to 16), 90 with `exact`, 126
# for spans; 3 to 4 s to compile once, 0.1 s from the cache. `python -m benchmarks.masking`
@kernel
def mask_batch(
    batch: Sequences,
    rule: Rule,
    k0: np.uint64,
    k1: np.uint64,
    corrupted: npt.NDArray[np.int64],
    selected: npt.NDArray[np.bool_],
    unmasked: npt.NDArray[np.int64],
) -> None:
    """Mask `corrupted`, a copy of the tokens, and mark `selected`, all false before.

    Fills `unmasked`, (B,), with the numbers of documents that have a maskable token but none
    selected.
    """
    rows, slots = batch.tokens.shape
    words = _Words(
        np.empty(slots + 1, np.int64),
        np.empty(slots + 1, np.int64),
        np.empty(slots, np.uint32),
        np.empty(slots, np.uint32),
        np.empty(slots, np.uint32),
        np.empty(slots + 1, np.int64),
        np.empty(slots, np.int64),
    )
    ranked = np.empty(slots, np.uint64)
    is_masked = np.empty(slots + 1, np.bool_)
    unmasked[:] = 0
    for row in range(rows):
        epoch = np.uint64(batch.epochs[row])
        low = np.uint64(batch.sample_ids[row]) & _LOW
        high = np.uint64(batch.sample_ids[row]) >> _HALF
        documents, maskable = batch.documents[row], batch.maskable[row]
        count = _find_words(batch.word_starts[row], maskable, rule.by_token, words)
        for word in range(count):
            position = np.uint64(words.first[word])
            draws = philox_words(position, epoch, low, high, k0, k1)
            words.select[word] = draws[0]
            words.action[word] = draws[1]
            words.length[word] = draws[3]
        if rule.by_budget:
            num_chosen = _choose_by_budget(words, count, documents, rule, ranked)
        else:
            num_chosen = _choose_each(words, count, rule.select_below)
        if not _every_document_is_masked(words, num_chosen, documents, is_masked):
            unmasked[row] = _settle_documents(words, count, documents, rule.at_least_one)
            num_chosen = _list_chosen(words, count)
        for i in range(num_chosen):
            word = words.chosen[i]
            action = np.uint64(words.action[words.source[word]])
            for slot in range(words.first[word], words.first[word + 1]):
                if not maskable[slot]:
                    continue
                selected[row, slot] = True
                if not rule.by_slot and not len(rule.similar) and action < rule.mask_below:
                    corrupted[row, slot] = rule.mask_id
                elif rule.by_slot or action < rule.random_below:
                    draws = philox_words(np.uint64(slot), epoch, low, high, k0, k1)
                    how = draws[1] if rule.by_slot else action
                    if how < rule.mask_below:
                        if not len(rule.similar):
                            corrupted[row, slot] = rule.mask_id
                            continue
                        near = rule.similar[
                            batch.tokens[row, slot], draws[2] % np.uint64(rule.similar.shape[1])
                        ]
                        if near >= 0:
                            corrupted[row, slot] = near
                            continue
                    elif how >= rule.random_below:
                        continue
                    # The bias of a remainder of 32 bits is below m / 2^32, 1 in 65,536 at most.
                    choice = draws[2] % np.uint64(len(rule.in_text))
                    corrupted[row, slot] = rule.in_text[choice]


@kernel
def _find_words(
    starts: npt.NDArray[np.bool_], maskable: npt.NDArray[np.bool_], by_token: bool, words: _Words
) -> int:
    """Fill `first` and `before`; return the number of words."""
    slots = len(starts)
    count, seen = 0, 0
    for slot in range(slots):
        # Written for every slot, kept where a word starts: a branch would be mispredicted.
        words.first[count] = slot
        words.before[count] = seen
        # Slot 0 always begins a word, or the slots before the first start would belong to none.
        count += by_token | starts[slot] | (slot == 0)
        seen += maskable[slot]
    words.first[count] = slots
    words.before[count] = seen
    return count


@kernel
def _choose_each(words: _Words, count: int, select_below: np.uint64) -> int:
    """Choose each word by its own draw; list the chosen ones and return their number."""
    chosen = 0
    for word in range(count):
        # Written for every word, kept where it is chosen: a branch would be mispredicted.
        words.chosen[chosen] = word
        is_chosen = (np.uint64(words.select[word]) < select_below) & (
            words.before[word + 1] > words.before[word]
        )
        words.source[word] = word if is_chosen else _NOT_CHOSEN
        chosen += is_chosen
    return chosen


@kernel
def _list_chosen(words: _Words, count: int) -> int:
    """List the words that have a source and return their number."""
    chosen = 0
    for word in range(count):
        words.chosen[chosen] = word
        chosen += words.source[word] != _NOT_CHOSEN
    return chosen


@kernel
def _choose_by_budget(
    words: _Words,
    count: int,
    documents: npt.NDArray[np.int32],
    rule: Rule,
    ranked: npt.NDArray[np.uint64],
) -> int:
    """Choose words by rank of their draws, each with the span that it starts, while they fit.

    Lists the chosen ones and returns their number.
    """
    words.source[:count] = _NOT_CHOSEN
    # round(ratio * tokens), halves up, in whole numbers: equal on every machine.
    left = np.int64((np.uint64(words.before[count]) * rule.select_below + _ROUND_UP) >> _HALF)
    # The lowest draws mostly use up the budget, so only a few of all draws are sorted.
    low, high = np.uint64(0), rule.select_below + (rule.select_below >> np.uint64(2))
    while left > 0 and low <= _LOW:
        candidates = 0
        for word in range(count):
            draw = np.uint64(words.select[word])
            # Of equal draws the earlier word comes first.
            ranked[candidates] = (draw << _HALF) | np.uint64(word)
            is_maskable = words.before[word + 1] > words.before[word]
            candidates += (low <= draw) & (draw < high) & is_maskable
        ranked[:candidates].sort()
        for rank in range(candidates):
            start = np.int64(ranked[rank] & _LOW)
            if left > 0 and words.source[start] == _NOT_CHOSEN:
                left = _take_span(words, np.int64(count), start, left, documents, rule.longer_from)
        # The budget is not used up: draws were few, or words too long for the rest. The next range
        # is as wide as all before it.
        low, high = high, high << np.uint64(1)
    return _list_chosen(words, count)


@kernel
def _take_span(
    words: _Words,
    count: np.int64,
    start: np.int64,
    left: np.int64,
    documents: npt.NDArray[np.int32],
    longer_from: npt.NDArray[np.uint64],
) -> np.int64:
    """Choose the span that starts at a word, as far as it fits; return the rest of the budget."""
    stop = start + 1
    for limit in longer_from:
        stop += np.uint64(words.length[start]) >= limit
    document = documents[words.first[start]]
    for word in range(start, min(stop, count)):
        size = words.before[word + 1] - words.before[word]
        if size == 0 or documents[words.first[word]] != document:
            break
        if words.source[word] == _NOT_CHOSEN:
            if size > left:
                break
            words.source[word] = start
            left -= size
    return left


@kernel
def _every_document_is_masked(
    words: _Words,
    num_chosen: int,
    documents: npt.NDArray[np.int32],
    is_masked: npt.NDArray[np.bool_],
) -> bool:
    """Return whether surely all documents 1, 2, ... have a chosen word; False if that is not clear.

    Nearly always all have one, and this check is cheaper than to visit all words.
    """
    highest = np.int32(0)
    for document in documents:
        highest = max(highest, document)
    if highest >= len(is_masked):
        return False
    is_masked[: highest + 1] = False
    for i in range(num_chosen):
        document = documents[words.first[words.chosen[i]]]
        if document < 0:
            return False
        is_masked[document] = True
    return bool(is_masked[1 : highest + 1].all())


@kernel
def _settle_documents(
    words: _Words, count: int, documents: npt.NDArray[np.int32], at_least_one: bool
) -> int:
    """Find documents without a chosen word; choose their least draw or counts them."""
    unmasked = 0
    stop = 0
    while stop < count:
        document = documents[words.first[stop]]
        least, is_masked = _NOT_CHOSEN, False
        while stop < count and documents[words.first[stop]] == document:
            if words.before[stop + 1] > words.before[stop]:
                is_masked |= words.source[stop] != _NOT_CHOSEN
                if least == _NOT_CHOSEN or words.select[stop] < words.select[least]:
                    least = stop
            stop += 1
        if least != _NOT_CHOSEN and not is_masked:
            if at_least_one:
                words.source[least] = least
            else:
                unmasked += 1
    return unmasked
