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

from pipeline.data.jit import inlined, kernel

_MULTIPLY_A = np.uint64(0xD2511F53)
_MULTIPLY_B = np.uint64(0xCD9E8D57)
_WEYL_A = np.uint64(0x9E3779B9)
_WEYL_B = np.uint64(0xBB67AE85)
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

Words = npt.NDArray[np.uint32]


# The numbers are keys of the draws: another number would change the order and masks of every run.
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


# Our own, checked against the published known answers: numpy does not promise that the streams of
# a `Generator` stay the same between versions, and a mask must.
def philox(
    counter: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike, npt.ArrayLike], key: tuple[int, int]
) -> tuple[Words, Words, Words, Words]:
    """Draw four 32-bit words for every counter.

    A counter is four words below 2^32, scalars or arrays that broadcast to one shape; a key is two.

    Returns:
        Four uint32 arrays of the broadcast shape.
    """
    shape = np.broadcast_shapes(*(np.shape(word) for word in counter))
    # Words of 32 bits in 64: a product of two then keeps its high half.
    c0, c1, c2, c3 = (np.broadcast_to(np.asarray(word, dtype=np.uint64), shape) for word in counter)
    k0, k1 = np.uint64(key[0]), np.uint64(key[1])
    for _ in range(_ROUNDS):
        product_a = _MULTIPLY_A * c0
        product_b = _MULTIPLY_B * c2
        c0, c1, c2, c3 = (
            (product_b >> _HALF) ^ c1 ^ k0,
            product_b & _LOW,
            (product_a >> _HALF) ^ c3 ^ k1,
            product_a & _LOW,
        )
        k0, k1 = (k0 + _WEYL_A) & _LOW, (k1 + _WEYL_B) & _LOW
    return c0.astype(np.uint32), c1.astype(np.uint32), c2.astype(np.uint32), c3.astype(np.uint32)


def permutation(
    size: int, *, seed: int, purpose: Purpose, epoch: int, window: int = 0, stream: int = 0
) -> npt.NDArray[np.int64]:
    """Return a random order of 0 .. size - 1, a pure function of its arguments.

    It sorts by 64-bit random keys; equal keys (one in 2^64 per pair) keep their order.
    """
    return _sorted_order(_sort_keys(size, epoch, window, stream, seed, int(purpose)))


@inlined
def philox_words(
    c0: np.uint64, c1: np.uint64, c2: np.uint64, c3: np.uint64, k0: np.uint64, k1: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """Draw Philox4x32-10 for one counter and key, all below 2^32, in compiled code."""
    for _ in range(_ROUNDS):
        product_a = _MULTIPLY_A * c0
        product_b = _MULTIPLY_B * c2
        c0 = (product_b >> _HALF) ^ c1 ^ k0
        c1 = product_b & _LOW
        c2 = (product_a >> _HALF) ^ c3 ^ k1
        c3 = product_a & _LOW
        k0 = (k0 + _WEYL_A) & _LOW
        k1 = (k1 + _WEYL_B) & _LOW
    return c0, c1, c2, c3


@kernel
def _sort_keys(
    size: int, epoch: int, window: int, stream: int, seed: int, purpose: int
) -> npt.NDArray[np.uint64]:
    keys = np.empty(size, np.uint64)
    k0, k1 = np.uint64(seed), np.uint64(purpose)
    c1, c2, c3 = np.uint64(epoch), np.uint64(window), np.uint64(stream)
    for number in range(size):
        high, low, _, _ = philox_words(np.uint64(number), c1, c2, c3, k0, k1)
        keys[number] = (high << _HALF) | low
    return keys


@kernel
def _sorted_order(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Sort random keys stably, in a time that grows with their number only."""
    bits = 1
    while 1 << bits < len(keys):
        bits += 1
    shift = np.uint64(64 - bits)
    next_of = np.zeros((1 << bits) + 1, np.int64)
    for key in keys:
        next_of[np.int64(key >> shift) + 1] += 1
    for bucket in range(1, len(next_of)):
        next_of[bucket] += next_of[bucket - 1]
    order = np.empty(len(keys), np.int64)
    for number in range(len(keys)):
        own = np.int64(keys[number] >> shift)
        order[next_of[own]] = number
        next_of[own] += 1
    # Buckets are in order; each has about one key.
    for place in range(1, len(keys)):
        moved, to = order[place], place
        while to and keys[order[to - 1]] > keys[moved]:
            order[to] = order[to - 1]
            to -= 1
        order[to] = moved
    return order
