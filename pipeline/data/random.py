"""Philox4x32-10: random words as a pure function of a key and a counter.

Order and masks are drawn with it, so that a draw depends on its purpose and place, never on earlier
draws. numpy's own Philox is not used: the methods of its `Generator` may change with the version,
and an upgrade of numpy must not change the order of a run.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; constants and
known-answer vectors as in Random123.
"""

from enum import IntEnum

import numpy as np
import numpy.typing as npt

_MULTIPLY_A = np.uint64(0xD2511F53)
_MULTIPLY_B = np.uint64(0xCD9E8D57)
_WEYL_A = 0x9E3779B9
_WEYL_B = 0xBB67AE85
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

Words = npt.NDArray[np.uint32]


class Purpose(IntEnum):
    """Second key word: keeps draws for different purposes apart under one seed."""

    BLOCK_ORDER = 1
    SEQUENCE_ORDER = 2
    MASK = 3
    EVAL_MASK = 4
    TASK_DRAWS = 5
    TASK_WEIGHTS = 6
    TASK_NOISE = 7
    PAIRS = 8
    EVAL_PAIRS = 9
    GENERATOR = 10
    EVAL_GENERATOR = 11


def philox(
    counter: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike, npt.ArrayLike], key: tuple[int, int]
) -> tuple[Words, Words, Words, Words]:
    """Draw four 32-bit words for every counter.

    A counter is four words below 2^32, scalars or arrays that broadcast to one shape; a key is two.

    Returns:
        Four uint32 arrays of the broadcast shape.
    """
    shape = np.broadcast_shapes(*(np.shape(word) for word in counter))
    c0, c1, c2, c3 = (np.broadcast_to(np.asarray(word, dtype=np.uint64), shape) for word in counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_a = _MULTIPLY_A * c0
        product_b = _MULTIPLY_B * c2
        c0, c1, c2, c3 = (
            (product_b >> _HALF) ^ c1 ^ np.uint64(k0),
            product_b & _LOW,
            (product_a >> _HALF) ^ c3 ^ np.uint64(k1),
            product_a & _LOW,
        )
        k0, k1 = (k0 + _WEYL_A) & 0xFFFFFFFF, (k1 + _WEYL_B) & 0xFFFFFFFF
    return c0.astype(np.uint32), c1.astype(np.uint32), c2.astype(np.uint32), c3.astype(np.uint32)


def permutation(
    size: int, *, seed: int, purpose: Purpose, epoch: int, window: int = 0, stream: int = 0
) -> npt.NDArray[np.int64]:
    """Return a random order of 0 .. size - 1, a pure function of its arguments.

    It sorts by 64-bit random keys; equal keys (one in 2^64 per pair) keep their order.
    """
    high, low, _, _ = philox((np.arange(size), epoch, window, stream), (seed, purpose))
    keys = (high.astype(np.uint64) << _HALF) | low
    return np.argsort(keys, kind="stable")
