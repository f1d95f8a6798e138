"""Dynamic masking as a pure function of (seed, epoch, sample id, position).

The corruption is BERT's (Devlin et al. 2019, section 3.1): a share of the tokens is selected, of
those 80% become [MASK], 10% a random token, 10% stay. Whole-word masking selects all tokens of a
word together (word starts are stored in the shards) and treats them alike, except that each random
replacement is drawn by itself.
"""

import numpy as np
import numpy.typing as npt

from pipeline.config.data import DataConfig
from pipeline.data.philox import Purpose, philox, uniform
from pipeline.data.shards import Vocabulary


def mask_tokens(
    tokens: npt.NDArray[np.int64],
    word_starts: npt.NDArray[np.bool_],
    maskable: npt.NDArray[np.bool_],
    sample_ids: npt.NDArray[np.int64],
    epochs: npt.NDArray[np.int64],
    *,
    config: DataConfig,
    vocabulary: Vocabulary,
    key: tuple[int, Purpose],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Corrupts a batch.

    Args:
        tokens: (b, s) int64 token ids, specials and padding included.
        word_starts: (b, s) bool, true where a word begins; true at the first token of each piece.
        maskable: (b, s) bool, false at special tokens and padding, which are never selected.
        sample_ids: (b,) int64 number of each sequence.
        epochs: (b,) int64 epoch in which each sequence is seen.
        config: rates and unit.
        vocabulary: of the tokenizer. Random replacements are drawn from the ids that text can have:
            one that never stands in text would tell that its place is to be predicted.
        key: (seed, purpose).

    Returns:
        Corrupted token ids (b, s) int64, and (b, s) bool, true where the original is to be
        predicted.
    """
    positions = np.arange(tokens.shape[1], dtype=np.int64)
    ids = sample_ids[:, None].astype(np.uint64)
    select, action, replacement, _ = philox(
        (positions[None, :], epochs[:, None], ids & np.uint64(0xFFFFFFFF), ids >> np.uint64(32)),
        key,
    )
    if config.masking == "whole_word":
        # Every token takes the draws of its word's first token.
        first = np.maximum.accumulate(np.where(word_starts, positions, 0), axis=1)
        select = np.take_along_axis(select, first, axis=1)
        action = np.take_along_axis(action, first, axis=1)
    selected = (uniform(select) < config.mask_prob) & maskable
    action_share = uniform(action)
    to_mask = selected & (action_share < config.replace_mask_prob)
    to_random = (
        selected & ~to_mask
        & (action_share < config.replace_mask_prob + config.replace_random_prob)
    )  # fmt: skip
    # The bias of a remainder of 32 bits is below vocabulary.size / 2^32, one in 65,536 at most.
    random_ids = vocabulary.in_text[replacement % np.uint32(len(vocabulary.in_text))]
    corrupted = np.where(to_mask, vocabulary.mask, np.where(to_random, random_ids, tokens))
    return corrupted, selected
