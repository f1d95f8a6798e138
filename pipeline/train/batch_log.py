"""RUN/batches.tsv: what every step of a run was given, one line a batch.

    batch  cursor  sequences  seq_len  step     hash
    0      0       256        512      1        2b6821d6e7253864
    1      256     256        512      skipped  90c3f1b28d6a417e

Runs that saw the same data have files that `diff` finds equal, whatever their ranks and
micro-batches (hash: `pipeline.data.batch_hash`). A later attempt that computes a batch again must
find the hash of the earlier attempt.

An earlier attempt's lines beyond the cursor stay in the file until they are written again, and a
batch that differs stops the run before anything is changed: so the next attempt, and one after a
kill, is compared as well. A line that comes out equal is not written again. What must change is
cut off with what follows and appended: no kill can leave damage but in the last line, and the
lines before, 150 MB after 3 million batches, are never copied.
"""

import logging
import os
from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.data.jit import kernel
from pipeline.errors import DataError, PostnormError, StorageError
from pipeline.runtime import dist
from pipeline.runtime.files import write_atomic

logger = logging.getLogger(__name__)

BATCHES_FILE = "batches.tsv"
_HEADER = b"batch\tcursor\tsequences\tseq_len\tstep\thash\n"
_SKIPPED = -1
_SKIPPED_WORD = tuple(b"skipped")
_S = _SKIPPED_WORD[0]
_TAB, _NEWLINE, _ZERO, _NINE = tuple(b"\t\n09")
_A_AFTER_NINE = ord("a") - ord("9") - 1
# Whatever has as many fits into 64 bits.
_MOST_DIGITS = 18


class BatchRecord(NamedTuple):
    """One line."""

    batch: int
    """Number of the batch from 0, skipped ones included."""
    cursor: int
    """Position of its first sequence in the order of the run."""
    sequences: int
    seq_len: int
    """Slots a sequence."""
    step: int | None
    """Number of the optimizer step from 1; None if the batch was skipped."""
    hash: int
    """Of the batch, below 2^64; of this rank's part where it is added to a log."""


class BatchLog:
    """Writer of one attempt. Every rank has one; rank 0 reads and writes the file."""

    def __init__(self, run_dir: Path, cursor: int, is_first: bool) -> None:
        """Opens the file, or starts one. Collective.

        Args:
            run_dir: folder of the run.
            cursor: of the next batch.
            is_first: whether this is rank 0.

        Raises:
            DataError: the file is damaged, or does not reach to the cursor.
            StorageError: it cannot be read or written.
        """
        self._path = run_dir / BATCHES_FILE
        self._is_first = is_first
        self._pending: list[BatchRecord] = []
        self._end = len(_HEADER)
        """Bytes of the file that this attempt has written or found equal."""
        self._earlier: deque[bytes] = deque()
        """Complete lines that follow, of earlier attempts."""
        error: PostnormError | None = None
        if is_first:
            try:
                self._open(cursor)
            except DataError as found:
                error = found
            except OSError as found:
                error = StorageError(
                    f"{self._path} cannot be opened: {found}; make it readable and writable, then "
                    "start the run again"
                )
        _raise_of_first(error)

    def add(self, record: BatchRecord) -> None:
        """Takes a batch with this rank's part of its hash. No synchronisation."""
        if self._pending:
            last = self._pending[-1]
            assert record.batch == last.batch + 1, (record, last)
            assert record.cursor == last.cursor + last.sequences, (record, last)
        self._pending.append(record)

    def flush(self) -> None:
        """Compares and writes what was added since the last call, to the disk. Collective.

        To be called before each save too: a file that ends before a checkpoint's cursor is taken
        for damaged.

        Raises:
            DataError: a batch is not that of an earlier attempt; the file is left as it was.
            StorageError: the file cannot be written.
        """
        if not self._pending:
            return
        hashes = dist.sum_modulo_2_64([record.hash for record in self._pending])
        records = [
            record._replace(hash=total) for record, total in zip(self._pending, hashes, strict=True)
        ]
        self._pending = []
        error: PostnormError | None = None
        if self._is_first:
            try:
                self._write(records)
            except DataError as found:
                error = found
            except OSError as found:
                error = StorageError(
                    f"{self._path} cannot be written: {found}; what it holds is complete but for "
                    "the last line. Free space, then start the run again"
                )
        _raise_of_first(error)

    def _open(self, cursor: int) -> None:
        text = self._path.read_bytes() if self._path.exists() else b""
        found = None if _HEADER.startswith(text) else _parse(self._path, text)
        if found is None or (len(found.ends) and found.numbers[0, 1] > cursor):
            if cursor:
                logger.warning(
                    "%s %s: a new one starts at sequence %d, and batches from there are not "
                    "compared with those of earlier attempts",
                    self._path, "begins later" if found else "is missing", cursor,
                )  # fmt: skip
            write_atomic(self._path, _HEADER)
            return
        if not len(found.ends):
            return
        # Sequences up to which the file reaches at the end of the header and of each line.
        reached = np.append(found.numbers[0, 1], found.numbers[:, 1] + found.numbers[:, 2])
        known = int(np.searchsorted(reached, cursor, side="right")) - 1
        if reached[known] != cursor:
            raise DataError(
                f"{self._path} has no place to go on at sequence {cursor}, where the checkpoint "
                f"is: after line {known + 1} it is at sequence {reached[known]}, "
                + ("and ends there" if known == len(found.ends) else f"then {reached[known + 1]}")
                + f". {_mend(self._path)}"
            )
        ends = np.append(len(_HEADER), found.ends).tolist()
        self._end = ends[known]
        self._earlier.extend(text[self._end : ends[-1]].splitlines(keepends=True))

    def _write(self, records: list[BatchRecord]) -> None:
        """Compares, then appends what is not there already."""
        lines = [_line(record) for record in records]
        old = [self._earlier[i] for i in range(min(len(lines), len(self._earlier)))]
        for record, line in zip(records, old, strict=False):
            self._require_same(_record(line), record)
        for _ in old:
            self._earlier.popleft()
        data = b"".join(lines)
        if data != b"".join(old):
            with self._path.open("r+b") as file:
                file.truncate(self._end)
                file.seek(self._end)
                file.write(data + b"".join(self._earlier))
                file.flush()
                os.fsync(file.fileno())
        self._end += len(data)

    def _require_same(self, earlier: BatchRecord, now: BatchRecord) -> None:
        # Whether the step was applied is the optimizer's matter, not the data's.
        if earlier._replace(step=now.step) == now:
            return
        raise DataError(
            f"batch {now.batch} at sequence {now.cursor} has hash {now.hash:016x} "
            f"({now.sequences} sequences of {now.seq_len}); {self._path} has {earlier.hash:016x} "
            f"(batch {earlier.batch} at sequence {earlier.cursor}, {earlier.sequences} of "
            f"{earlier.seq_len}): this attempt sees other data than an earlier one of the same "
            "run. Check that data.dir holds the same files, that data.* and seed are those of "
            "resolved.yaml, and with data.check_blocks that no block is damaged. If the change is "
            f"meant, move {self._path} away or choose another run_dir; it is left as it was"
        )


def read_batches(run_dir: Path) -> list[BatchRecord]:
    """All batches of a run in order, skipped ones too. Not collective.

    While a run repeats what an earlier attempt did, the file has that attempt's lines to its end.
    A last line that is not complete is left out.

    Raises:
        DataError: the file is missing or damaged.
    """
    path = run_dir / BATCHES_FILE
    if not path.is_file():
        raise DataError(
            f"{path} is missing; runs have it from their first start with a version that logs "
            "batches: check the folder"
        )
    text = path.read_bytes()
    if _HEADER.startswith(text):
        return []
    numbers, hashes, _ = _parse(path, text)
    batch, cursor, sequences, seq_len, step = (column.tolist() for column in numbers.T)
    steps = [None if number == _SKIPPED else number for number in step]
    rows = zip(batch, cursor, sequences, seq_len, steps, hashes.tolist(), strict=True)
    return [BatchRecord(*row) for row in rows]


class _Lines(NamedTuple):
    numbers: npt.NDArray[np.int64]
    """(n, 5) batch, cursor, sequences, seq_len, step, which is -1 for skipped ones."""
    hashes: npt.NDArray[np.uint64]
    """(n,)"""
    ends: npt.NDArray[np.int64]
    """(n,) bytes of the file up to the end of each line."""


def _parse(path: Path, text: bytes) -> _Lines:
    """Reads and checks the complete lines.

    Raises:
        DataError: names the first line that is wrong.
    """
    if not text.startswith(_HEADER):
        line = text[: len(_HEADER)].split(b"\n")[0]
        raise DataError(f"{path}, line 1: {line!r}, expected {_HEADER!r}. {_mend(path)}")
    count = text.count(b"\n") - 1
    lines = _Lines(
        np.empty((count, 5), np.int64), np.empty(count, np.uint64), np.empty(count, np.int64)
    )
    good = _read_lines(np.frombuffer(text, np.uint8), len(_HEADER), *lines)
    if good < count:
        start = int(lines.ends[good - 1]) if good else len(_HEADER)
        line = text[start : text.index(b"\n", start)]
        expected = "six values between tabs, as the header names them"
        if good:
            batch, cursor, sequences = lines.numbers[good - 1, :3].tolist()
            expected += f", batch {batch + 1} at cursor {cursor + sequences}"
        raise DataError(f"{path}, line {good + 2}: {line[:200]!r}, expected {expected}. "
                        f"{_mend(path)}")  # fmt: skip
    return lines


@kernel
def _read_lines(
    text: npt.NDArray[np.uint8],
    at: int,
    numbers: npt.NDArray[np.int64],
    hashes: npt.NDArray[np.uint64],
    ends: npt.NDArray[np.int64],
) -> int:
    """Reads lines from `at` on that follow each other; returns how many there are.

    Every line that is asked for ends in a newline, which stops each of the loops.
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
                value, first = 0, at
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
                digit -= _A_AFTER_NINE
                if digit < 10:
                    return row
            if not 0 <= digit < 16:
                return row
            value_hash = (value_hash << np.uint64(4)) | np.uint64(digit)
            at += 1
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


def _line(record: BatchRecord) -> bytes:
    step = "skipped" if record.step is None else record.step
    return (
        f"{record.batch}\t{record.cursor}\t{record.sequences}\t{record.seq_len}\t{step}\t"
        f"{record.hash:016x}\n"
    ).encode()


def _record(line: bytes) -> BatchRecord:
    """Of a line that was checked."""
    *numbers, step, digest = line.split()
    batch, cursor, sequences, seq_len = map(int, numbers)
    made = None if step == b"skipped" else int(step)
    return BatchRecord(batch, cursor, sequences, seq_len, made, int(digest, 16))


def _mend(path: Path) -> str:
    return (
        f"Restore {path} from a copy; or move it away, then the run goes on with a new one and "
        "does not compare with earlier attempts"
    )


def _raise_of_first(error: PostnormError | None) -> None:
    """Raises rank 0's error on every rank."""
    shared = dist.from_first(error)
    if shared is not None:
        raise shared
