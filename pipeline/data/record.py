"""The record of a run's data: RUN/batches.tsv, and the hash by which batches are compared.

batches.tsv has one line for every batch, including skipped ones:

    batch  cursor  sequences  seq_len  step     hash
    0      0       256        512      1        2b6821d6e7253864
    1      256     256        512      skipped  90c3f1b28d6a417e

In a run with stages each line ends with the place of its stage in `stages`, from 0.

Runs that saw the same data have files that `diff` finds equal, whatever their ranks and
micro-batches. `pipeline.train.batch_log` writes it.

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

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.data.jit import inlined, kernel
from pipeline.errors import DataError
from pipeline.runtime.run_folder import RunFolder

# An unsigned 64-bit number becomes a float when mixed with a signed one: hence the casts.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_A = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_B = np.uint64(0x94D049BB133111EB)
_SHIFT_A, _SHIFT_B, _SHIFT_C = np.uint64(30), np.uint64(27), np.uint64(31)
_HALF = np.uint64(32)
_PREDICTED = np.uint64(1 << 63)
_ONE = np.uint64(1)


# 618 to 1,750 M slots a CPU-second.
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
        targets: (M,) their original token ids, below 2^32; more that decides the step may stand
            in the 31 bits above.

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


HEADER = b"batch\tcursor\tsequences\tseq_len\tstep\thash\n"
STAGE_HEADER = HEADER[:-1] + b"\tstage\n"
"""Of a run with stages."""
_SKIPPED = -1
_SKIPPED_WORD = tuple(b"skipped")
_S = _SKIPPED_WORD[0]
_TAB, _NEWLINE, _ZERO, _NINE = tuple(b"\t\n09")
_A_AFTER_NINE = ord("a") - ord("9") - 1
# Every number of so many digits fits into 64 bits.
_MOST_DIGITS = 18


class BatchRecord(NamedTuple):
    """One line of batches.tsv."""

    batch: int
    """Number of the batch from 0, skipped ones included."""
    cursor: int
    """Position of its first sequence in the order of the run."""
    sequences: int
    seq_len: int
    step: int | None
    """Number of the optimizer step from 1; None if the batch was skipped."""
    hash: int
    """Hash of the batch, below 2^64; in `BatchLog.add` that of this rank's part."""
    stage: int = 0


def read_batches(run_dir: Path) -> list[BatchRecord]:
    """Read all batches of a run in order, including skipped ones. Not collective.

    While a run repeats steps of an earlier attempt, the file has all lines of that attempt. An
    incomplete last line is left out.

    Raises:
        DataError: the file is missing or damaged.
    """
    path = RunFolder(run_dir).batches
    if not path.is_file():
        raise DataError(
            f"{path} is missing, which every run writes from its first start; check the folder"
        )
    text = path.read_bytes()
    if is_empty(text):
        return []
    numbers, hashes, _ = parse(path, text)
    batch, cursor, sequences, seq_len, step, stage = (column.tolist() for column in numbers.T)
    steps = [None if number == _SKIPPED else number for number in step]
    rows = zip(batch, cursor, sequences, seq_len, steps, hashes.tolist(), stage, strict=True)
    return [BatchRecord(*row) for row in rows]


class CompleteLines(NamedTuple):
    """The complete lines of a file."""

    numbers: npt.NDArray[np.int64]
    """(n, 6) batch, cursor, sequences, seq_len, step, which is -1 for skipped ones, and stage."""
    hashes: npt.NDArray[np.uint64]
    """(n,)"""
    ends: npt.NDArray[np.int64]
    """(n,) bytes of the file up to the end of each line."""


def parse(path: Path, text: bytes) -> CompleteLines:
    """Read and check the complete lines (DataError: names the first line that is wrong)."""
    header = STAGE_HEADER if has_stages(text) else HEADER
    if not text.startswith(header):
        line = text[: len(HEADER)].split(b"\n")[0]
        raise DataError(f"{path}, line 1: {line!r}, expected {HEADER!r}. {how_to_fix(path)}")
    count = text.count(b"\n") - 1
    lines = CompleteLines(
        np.zeros((count, 6), np.int64), np.empty(count, np.uint64), np.empty(count, np.int64)
    )
    good = _read_lines(np.frombuffer(text, np.uint8), len(header), header == STAGE_HEADER, *lines)
    if good < count:
        start = int(lines.ends[good - 1]) if good else len(header)
        line = text[start : text.index(b"\n", start)]
        expected = "values between tabs, as the header names them"
        if good:
            batch, cursor, sequences = lines.numbers[good - 1, :3].tolist()
            expected += f", batch {batch + 1} at cursor {cursor + sequences}"
        raise DataError(
            f"{path}, line {good + 2}: {line[:200]!r}, expected {expected}. {how_to_fix(path)}"
        )
    return lines


@kernel
def _read_lines(
    text: npt.NDArray[np.uint8],
    at: int,
    staged: bool,
    numbers: npt.NDArray[np.int64],
    hashes: npt.NDArray[np.uint64],
    ends: npt.NDArray[np.int64],
) -> int:
    """Read lines from `at` on that follow each other; return how many there are.

    Every line ends in a newline, which stops each of the loops.
    """
    for row in range(len(ends)):
        for column in range(5):
            if column == 4 and text[at] == _S:
                for letter in _SKIPPED_WORD:
                    if text[at] != letter:
                        return row
                    at += 1
                numbers[row, column] = _SKIPPED
            else:
                value, first = np.int64(0), at
                while _ZERO <= text[at] <= _NINE:
                    value = 10 * value + np.int64(text[at]) - _ZERO
                    at += 1
                if not 0 < at - first <= _MOST_DIGITS:
                    return row
                numbers[row, column] = value
            if text[at] != _TAB:
                return row
            at += 1
        value_hash = np.uint64(0)
        for _ in range(16):
            digit = np.int64(text[at]) - _ZERO
            if digit > 9:
                # What stands between 9 and a, capital letters among it, is then below 10 and
                # refused.
                digit -= _A_AFTER_NINE
                if digit < 10:
                    return row
            if not 0 <= digit < 16:
                return row
            value_hash = (value_hash << np.uint64(4)) | np.uint64(digit)
            at += 1
        if staged:
            if text[at] != _TAB:
                return row
            stage, first = np.int64(0), at + 1
            at += 1
            while _ZERO <= text[at] <= _NINE:
                stage = 10 * stage + np.int64(text[at]) - _ZERO
                at += 1
            if not 0 < at - first <= _MOST_DIGITS:
                return row
            numbers[row, 5] = stage
        if text[at] != _NEWLINE:
            return row
        at += 1
        hashes[row] = value_hash
        ends[row] = at
        if row:
            before = numbers[row - 1]
            if numbers[row, 0] != before[0] + 1 or numbers[row, 1] != before[1] + before[2]:
                return row
        if numbers[row, 2] == 0:
            return row
    return len(ends)


def is_empty(text: bytes) -> bool:
    """Return whether a file has no line yet, or only a part of its header."""
    return HEADER.startswith(text) or STAGE_HEADER.startswith(text)


def has_stages(text: bytes) -> bool:
    """Return whether the lines of a file have a stage."""
    return text.startswith(STAGE_HEADER)


def with_stages(text: bytes) -> bytes:
    """Return a file of a run without stages as that of one that has got some."""
    complete = text[len(HEADER) : text.rindex(b"\n") + 1]
    return STAGE_HEADER + complete.replace(b"\n", b"\t0\n")


def line_of(record: BatchRecord, *, staged: bool = False) -> bytes:
    """Format a record as a line of the file."""
    step = "skipped" if record.step is None else record.step
    return (
        f"{record.batch}\t{record.cursor}\t{record.sequences}\t{record.seq_len}\t{step}\t"
        f"{record.hash:016x}{f'{chr(9)}{record.stage}' if staged else ''}\n"
    ).encode()


def record_of(line: bytes) -> BatchRecord:
    """Parse a line that was checked."""
    batch, cursor, sequences, seq_len, step, digest, *stage = line.split()
    made = None if step == b"skipped" else int(step)
    return BatchRecord(
        batch=int(batch),
        cursor=int(cursor),
        sequences=int(sequences),
        seq_len=int(seq_len),
        step=made,
        hash=int(digest, 16),
        stage=int(stage[0]) if stage else 0,
    )


def how_to_fix(path: Path) -> str:
    """Return the advice about a damaged file, for messages."""
    return (
        f"Restore {path} from a copy; or move it away, then the run continues with a new file and "
        "without comparing batches with earlier attempts"
    )


def number_of_step(step: int, num_steps: int, records: Sequence[BatchRecord]) -> int:
    """Find the number of the batch of an optimizer step, 1 for the first.

    The batch of a step to come is found as if no further step were skipped.

    Raises:
        DataError: there is no such step.
    """
    if not 1 <= step <= num_steps:
        raise DataError(f"--step {step}: the run has steps 1 to {num_steps} (train.num_steps)")
    for record in reversed(records):
        if record.step is not None and record.step <= step:
            number = record.batch + step - record.step
            if record.step < step:
                # Skipped batches behind the last step that was applied are not steps.
                number += sum(r.step is None and r.batch > record.batch for r in records)
            return number
    return step - 1
