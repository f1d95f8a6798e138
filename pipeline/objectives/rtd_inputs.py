"""Draws of replaced-token detection, beside the inputs of masked language modelling.

The generator's probabilities become tokens at one number in [0, 1) for each masked slot
(`pipeline.objectives.rtd.draw_tokens`). It is drawn here, as the masks are, so that a step needs no
random state: it is the same on any number of ranks and in any micro-batch. The hash covers it, so
that equal records mean equal tokens put in, as far as the generators are equal.

B sequences of S slots each, M slots to be predicted.
"""

import numpy as np

from pipeline.data.dataset import AddTo, Batch, Whole
from pipeline.data.order import Ints, Locations
from pipeline.data.random import Purpose, philox

_DRAW_BITS = 24
"""Bits of a uniform draw: fp32 holds all its values."""
_HALF = 32
"""Bits of half a sample id, and of a target where it is hashed, below its draw."""
_LOW = (1 << _HALF) - 1
_DRAWN_FOR = {Purpose.MASK: Purpose.GENERATOR, Purpose.EVAL_MASK: Purpose.EVAL_GENERATOR}
"""Purposes of their own, so that no draw follows from whether its slot is masked."""


def rtd_inputs(whole: Whole) -> AddTo:
    """Add `uniform` (M,), fp32 in [0, 1), one for each slot to predict.

    The weight of `discriminator` is the number of tokens: it judges all of them, masked or not.
    """
    seq_len = whole.slots.tokens.shape[1]
    draws = _draws(whole.masked, whole.locations, seq_len, whole.key)
    whole.predicted["uniform"] = (draws * 2.0**-_DRAW_BITS).astype(np.float32)
    whole.hashed["targets"] = whole.hashed["targets"] | draws << _HALF
    return _with_weight


def _draws(masked: Ints, locations: Locations, seq_len: int, key: tuple[int, Purpose]) -> Ints:
    """Draw a whole number below 2^24 for each slot to predict.

    Args:
        masked: (M,) int64 flat indices b * S + s.
        locations: of the B sequences. A counter is slot, epoch, and the sample id in two words.
        seq_len: S.
        key: seed and purpose of the masks; the draws have another purpose.

    Returns:
        (M,) int64.
    """
    row, slot = np.divmod(masked, seq_len)
    sample_ids = locations.sample_ids[row]
    counter = (slot, locations.epochs[row], sample_ids & _LOW, sample_ids >> _HALF)
    seed, purpose = key
    words, *_ = philox(counter, (seed, _DRAWN_FOR[purpose]))
    return words.astype(np.int64) >> (_HALF - _DRAW_BITS)


def _with_weight(batch: Batch, rows: slice, masked: slice) -> None:
    """Add the weight alone: a micro-batch has its part of `uniform` as of all that is predicted."""
    batch.weights["discriminator"] = float(batch.num_tokens)
