"""A 64-bit hash of the data of a step, by which runs and attempts are compared.

The hash of a sequence is a pure function of its place in the global batch, its epoch, its number
and all its slots. That of a batch is their sum modulo 2^64, so it is the sum of its parts, however
they are split into ranks and micro-batches; the place makes it depend on the order.

Each slot is one output of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
generators"; the finaliser is Stafford's variant 13 of Appleby's for MurmurHash3): its content is
added to the generator's counter at that slot. Two batches that differ have equal hashes by chance
once in 2^64; it guards against accidents, not against an attacker.
Whole numbers only, so equal on every machine.

Letters: B sequences, S slots each, M slots to be predicted.
"""

import numpy as np
import numpy.typing as npt

from pipeline.data.jit import inlined, kernel

# An unsigned 64-bit number becomes a float when mixed with a signed one: hence the casts.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_A = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_B = np.uint64(0x94D049BB133111EB)
_SHIFT_A, _SHIFT_B, _SHIFT_C = np.uint64(30), np.uint64(27), np.uint64(31)
_HALF = np.uint64(32)
_PREDICTED = np.uint64(1 << 63)
_ONE = np.uint64(1)


def sequence_hashes(
    places: npt.NDArray[np.int64],
    sample_ids: npt.NDArray[np.int64],
    epochs: npt.NDArray[np.int64],
    input_ids: npt.NDArray[np.int64],
    documents: npt.NDArray[np.int32],
    predicted: npt.NDArray[np.int64],
    targets: npt.NDArray[np.int64],
) -> npt.NDArray[np.uint64]:
    """Hash sequences.

    Args:
        places: (B,) place of each sequence in the step's global batch, from 0.
        sample_ids: (B,) number of each sequence in the run.
        epochs: (B,) epoch in which each is seen.
        input_ids: (B, S) corrupted token ids, below 2^32.
        documents: (B, S) number of the document piece in the sequence from 1, 0 at padding.
        predicted: (M,) rising flat indices b * S + s of the slots to predict.
        targets: (M,) their original token ids, below 2^32.

    Returns:
        (B,) uint64. Their sum modulo 2^64 is the batch's hash, and that of the sums of its parts.
    """
    assert input_ids.ndim == 2
    assert documents.shape == input_ids.shape
    assert len(places) == len(sample_ids) == len(epochs) == len(input_ids)
    assert len(targets) == len(predicted)
    # The first slot to predict of each sequence, and M after the last.
    firsts = np.searchsorted(predicted, np.arange(len(input_ids) + 1) * input_ids.shape[1])
    assert firsts[-1] - firsts[0] == len(predicted), "an index is not of this batch"
    return _hash_batch(
        np.ascontiguousarray(places, np.int64),
        np.ascontiguousarray(sample_ids, np.int64),
        np.ascontiguousarray(epochs, np.int64),
        np.ascontiguousarray(input_ids, np.int64),
        np.ascontiguousarray(documents, np.int32),
        firsts.astype(np.int64),
        np.ascontiguousarray(predicted, np.int64),
        np.ascontiguousarray(targets, np.int64),
    )


@inlined
def _mixed(word: np.uint64) -> np.uint64:
    """Apply splitmix64's finaliser, which is one to one."""
    word = (word ^ (word >> _SHIFT_A)) * _MULTIPLY_A
    word = (word ^ (word >> _SHIFT_B)) * _MULTIPLY_B
    mixed: np.uint64 = word ^ (word >> _SHIFT_C)
    return mixed


@kernel
def _hash_batch(
    places: npt.NDArray[np.int64],
    sample_ids: npt.NDArray[np.int64],
    epochs: npt.NDArray[np.int64],
    input_ids: npt.NDArray[np.int64],
    documents: npt.NDArray[np.int32],
    firsts: npt.NDArray[np.int64],
    predicted: npt.NDArray[np.int64],
    targets: npt.NDArray[np.int64],
) -> npt.NDArray[np.uint64]:
    rows, slots = input_ids.shape
    hashes = np.empty(rows, np.uint64)
    for row in range(rows):
        content = np.uint64(0)
        for slot in range(slots):
            word = np.uint64(input_ids[row, slot]) | (np.uint64(documents[row, slot]) << _HALF)
            content += _mixed(word + (np.uint64(slot) + _ONE) * _STEP)
        start = np.uint64(row) * np.uint64(slots)
        for i in range(firsts[row], firsts[row + 1]):
            # Documents are below 2^31: no slot's content has this bit.
            word = np.uint64(targets[i]) | _PREDICTED
            content += _mixed(word + (np.uint64(predicted[i]) - start + _ONE) * _STEP)
        # Each value is mixed separately, so that a change of one cannot cancel that of another.
        key = _mixed(np.uint64(places[row]) + _STEP)
        key = _mixed(key + np.uint64(epochs[row]) + _STEP)
        key = _mixed(key + np.uint64(sample_ids[row]) + _STEP)
        key = _mixed(key + np.uint64(slots) + _STEP)
        hashes[row] = _mixed(key + content)
    return hashes
