"""Dynamic masking as a pure function of (seed, epoch, sample id, position).

The corruption is BERT's (Devlin et al. 2019, section 3.1): a share of the tokens is selected, of
those 80% become [MASK], 10% a random token, 10% stay. What is treated alike, except that each
random replacement is drawn by itself, is a unit:

token        one token.
whole_word   all tokens of a word (word starts are stored in the shards).
span         up to ten words of a document (SpanBERT, Joshi et al. 2020, section 3.1).

A unit is drawn for at its first token: Philox of (position, epoch, sample id) gives one word that
selects, one for its treatment, one for a random token at that position, one for a span's length.

Selection `bernoulli`: each unit whose word is below the ratio, by itself. The masks of a smaller
ratio lie within those of a larger one.

Selection `exact`: a budget of round(ratio * maskable tokens of the sequence), a half up. Words are
taken in the order of their selecting draws. One that is larger than what is left of the budget is
passed over and the next one tried, as in BERT's `create_masked_lm_predictions`
(google-research/bert, create_pretraining_data.py); what stays unused is less than any word that
was not taken has tokens.

Spans: SpanBERT draws a length and a start until the budget is used, and draws again where the start
is masked already. Here the starts come in the order of the words' draws, masked ones passed over.
That is the same distribution (each time uniform over the words that are left) and needs no number
of attempts: the mask depends on the key and the sequence only. Lengths are geometric with p = 0.2
on 1 to 10 words, scaled to sum to one, mean 3.80, as in SpanBERT's code; with longer ones cut to 10
the mean would be 4.46, not the paper's 3.8. A span ends early at the end of its document, at a
token that is never masked ([UNK]), and before a word that does not fit into the budget; words that
another span took count to its length. Differences: SpanBERT's code picks a start's token uniformly,
so longer words more often, cuts the last word at the budget, which it rounds up, and treats spans
that touch as one.

`at_least_one` looks at packed documents, not at sequences: one of 512 tokens is practically never
without a mask, and attention does not cross documents. The word with the least draw of a document
is the one that a rising ratio would select first, so masks stay nested. With `exact` it is taken
on top of the budget.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.config.data import DataConfig
from pipeline.data.mask_kernel import Rule, Sequences, mask_batch
from pipeline.data.philox import Purpose
from pipeline.data.shards import Vocabulary

MAX_SPAN_WORDS = 10


class Masked(NamedTuple):
    """A corrupted batch."""

    tokens: npt.NDArray[np.int64]
    """(b, s) corrupted token ids."""
    selected: npt.NDArray[np.bool_]
    """(b, s), true where the original is to be predicted."""
    unmasked_documents: npt.NDArray[np.int64]
    """(b,) documents of each sequence that have a maskable token, but none selected."""


def mask_tokens(
    batch: Sequences,
    *,
    config: DataConfig,
    vocabulary: Vocabulary,
    key: tuple[int, Purpose],
    ratio: float | None = None,
) -> Masked:
    """Corrupts a batch.

    Args:
        batch: packed sequences.
        config: unit, selection and rates.
        vocabulary: of the tokenizer. Random replacements are drawn from the ids that text can have:
            one that never stands in text would tell that its place is to be predicted.
        key: (seed, purpose).
        ratio: share of tokens to select, in (0, 1); None takes `config.mask_prob`.
    """
    batch = Sequences(
        *(np.ascontiguousarray(array, dtype) for array, dtype in zip(batch, _DTYPES, strict=True))
    )
    corrupted = batch.tokens.copy()
    selected = np.zeros(corrupted.shape, dtype=np.bool_)
    rule = _rule(config, vocabulary, config.mask_prob if ratio is None else ratio)
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
        longer_from=_LONGER_FROM if config.masking == "span" else _LONGER_FROM[:0],
        mask_id=vocabulary.mask,
        in_text=vocabulary.in_text,
    )


def _share(share: float) -> np.uint64:
    """The least number of 32 bits that is not below the share; exact, since 2^32 only scales."""
    threshold: np.uint64 = np.uint64(math.ceil(share * 2**32))
    return threshold


def _longer_from() -> npt.NDArray[np.uint64]:
    """Draws from which on a span has at least 2, 3, ... words: P(length <= n), in units of 2^-32.

    P(length <= n) = (1 - 0.8^n) / (1 - 0.8^10), here as a ratio of whole numbers.
    """
    longest = MAX_SPAN_WORDS
    whole = 5**longest - 4**longest
    shares = [5 ** (longest - n) * (5**n - 4**n) for n in range(1, longest)]
    return np.array([-(-(share << 32) // whole) for share in shares], dtype=np.uint64)


_LONGER_FROM = _longer_from()
