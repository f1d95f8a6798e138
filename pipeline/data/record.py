"""RUN/batches.tsv: what every step of a run was given, one line a batch.

    batch  cursor  sequences  seq_len  step     hash
    0      0       256        512      1        2b6821d6e7253864
    1      256     256        512      skipped  90c3f1b28d6a417e

Runs that saw the same data have files that `diff` finds equal, whatever their ranks and
micro-batches (hash: `pipeline.data.batch_hash`). `pipeline.train.batch_log` writes it.

RUN/ledger.jsonl: batches that a run did not train on although it could have, and why.

    {"kind": "non_finite", "batch": 41, ...}   a gradient was not finite: no rank took the step
    {"kind": "rewind", "first_batch": 90, ...} the loss jumped: the run went back and left them out

A run that repeats steps after a kill meets its non-finite batches again and writes them again: the
last line about a batch counts. Lines about rewinds decide what is trained on; they are written
before the run goes back. `batches.tsv` has every batch, with its hash.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.data.jit import kernel
from pipeline.errors import DataError
from pipeline.runtime.files import write_atomic
from pipeline.runtime.run_folder import RunFolder

HEADER = b"batch\tcursor\tsequences\tseq_len\tstep\thash\n"
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


def read_batches(run_dir: Path) -> list[BatchRecord]:
    """Read all batches of a run in order, including skipped ones. Not collective.

    While a run repeats what an earlier attempt did, the file has that attempt's lines to its end.
    A last line that is not complete is left out.

    Raises:
        DataError: the file is missing or damaged.
    """
    path = RunFolder(run_dir).batches
    if not path.is_file():
        raise DataError(
            f"{path} is missing; runs have it from their first start with a version that logs "
            "batches: check the folder"
        )
    text = path.read_bytes()
    if HEADER.startswith(text):
        return []
    numbers, hashes, _ = parse(path, text)
    batch, cursor, sequences, seq_len, step = (column.tolist() for column in numbers.T)
    steps = [None if number == _SKIPPED else number for number in step]
    rows = zip(batch, cursor, sequences, seq_len, steps, hashes.tolist(), strict=True)
    return [BatchRecord(*row) for row in rows]


class Lines(NamedTuple):
    """The complete lines of a file."""

    numbers: npt.NDArray[np.int64]
    """(n, 5) batch, cursor, sequences, seq_len, step, which is -1 for skipped ones."""
    hashes: npt.NDArray[np.uint64]
    """(n,)"""
    ends: npt.NDArray[np.int64]
    """(n,) bytes of the file up to the end of each line."""


def parse(path: Path, text: bytes) -> Lines:
    """Read and check the complete lines.

    Raises:
        DataError: names the first line that is wrong.
    """
    if not text.startswith(HEADER):
        line = text[: len(HEADER)].split(b"\n")[0]
        raise DataError(f"{path}, line 1: {line!r}, expected {HEADER!r}. {how_to_mend(path)}")
    count = text.count(b"\n") - 1
    lines = Lines(
        np.empty((count, 5), np.int64), np.empty(count, np.uint64), np.empty(count, np.int64)
    )
    good = _read_lines(np.frombuffer(text, np.uint8), len(HEADER), *lines)
    if good < count:
        start = int(lines.ends[good - 1]) if good else len(HEADER)
        line = text[start : text.index(b"\n", start)]
        expected = "six values between tabs, as the header names them"
        if good:
            batch, cursor, sequences = lines.numbers[good - 1, :3].tolist()
            expected += f", batch {batch + 1} at cursor {cursor + sequences}"
        raise DataError(f"{path}, line {good + 2}: {line[:200]!r}, expected {expected}. "
                        f"{how_to_mend(path)}")  # fmt: skip
    return lines


@kernel
def _read_lines(
    text: npt.NDArray[np.uint8],
    at: int,
    numbers: npt.NDArray[np.int64],
    hashes: npt.NDArray[np.uint64],
    ends: npt.NDArray[np.int64],
) -> int:
    """Read lines from `at` on that follow each other; return how many there are.

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


def line_of(record: BatchRecord) -> bytes:
    """Format a record as a line of the file."""
    step = "skipped" if record.step is None else record.step
    return (
        f"{record.batch}\t{record.cursor}\t{record.sequences}\t{record.seq_len}\t{step}\t"
        f"{record.hash:016x}\n"
    ).encode()


def record_of(line: bytes) -> BatchRecord:
    """Parse a line that was checked."""
    *numbers, step, digest = line.split()
    batch, cursor, sequences, seq_len = map(int, numbers)
    made = None if step == b"skipped" else int(step)
    return BatchRecord(batch, cursor, sequences, seq_len, made, int(digest, 16))


def how_to_mend(path: Path) -> str:
    """Return the advice about a damaged file, for messages."""
    return (
        f"Restore {path} from a copy; or move it away, then the run goes on with a new one and "
        "does not compare with earlier attempts"
    )


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """A step that was not taken."""

    batch: int
    """Its number from 0, in `batches.tsv`."""
    cursor: int
    """Its first sequence in the run's order."""
    step: int
    """The step that it would have been, from 1."""
    grad_norm: str
    """Over all ranks: `inf` or `nan`, which JSON has no numbers for."""
    ranks: dict[str, list[int]]
    """Ranks whose loss was no number -> [first, stop) of their sequences in the batch.

    Empty if all losses were finite, and a gradient was not.
    """
    samples: list[list[int]]
    """[epoch, sample id] of every sequence of the batch; `pipeline inspect --batch` shows them."""
    unix_s: float


@dataclass(frozen=True, kw_only=True)
class Rewind:
    """A spike of the loss, and what was done about it."""

    first_batch: int
    """First batch that is left out."""
    last_batch: int
    first_cursor: int
    """First sequence of the first one."""
    stop_cursor: int
    """One past the last sequence of the last one."""
    high_batches: list[int]
    """Batches with a loss above the limit."""
    loss: float
    """The largest of these steps, nats."""
    limit: float
    """The loss above which a step was high."""
    from_step: int
    """Steps applied when the run turned round."""
    to_step: int
    """Step of the checkpoint that it went back to."""
    unix_s: float


_KINDS: dict[str, type[NonFinite] | type[Rewind]] = {"non_finite": NonFinite, "rewind": Rewind}


@dataclass(frozen=True)
class Ledger:
    """What a run's ledger holds."""

    non_finite: dict[int, NonFinite]
    """By batch."""
    rewinds: list[Rewind]
    """In order."""

    def is_spoiled(self, cursor: int, rewinds: int) -> bool:
        """Return whether a checkpoint was trained on batches that were left out later.

        Args:
            cursor: of the checkpoint.
            rewinds: how many the run had made when it was saved.
        """
        return any(cursor > each.first_cursor for each in self.rewinds[rewinds:])


def read_ledger(run_dir: Path) -> Ledger:
    """Read a run's ledger; without a file it is empty.

    Raises:
        DataError: a line is damaged.
    """
    ledger, path = Ledger({}, []), RunFolder(run_dir).ledger
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            values = json.loads(line)
            record = _KINDS[values.pop("kind")](**values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path}, line {number}: {line[:200]!r}, expected the fields of a record of the "
                f"kinds {', '.join(_KINDS)} ({error!r}). It decides which batches are left out: "
                "restore the file from a copy"
            ) from error
        if isinstance(record, Rewind):
            ledger.rewinds.append(record)
        else:
            ledger.non_finite[record.batch] = record
    return ledger


def add_to_ledger(run_dir: Path, record: NonFinite | Rewind) -> None:
    """Add a record and flush it to disk; a kill leaves the file unchanged.

    Raises:
        OSError: the file cannot be written.
    """
    path = RunFolder(run_dir).ledger
    [kind] = [name for name, cls in _KINDS.items() if isinstance(record, cls)]
    line = json.dumps({"kind": kind, **asdict(record)}) + "\n"
    write_atomic(path, (path.read_bytes() if path.exists() else b"") + line.encode())
