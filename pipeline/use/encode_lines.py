"""Vectors of a stream of lines in an .npy file that grows: a killed command goes on where it was.

OUT.partial        the .npy file so far; its header says how many rows only at the end
OUT.partial.json   lines and rows so far, a sha256 of those lines, and what the vectors are of

The second is written after the first, so that rows which it does not know are computed again.
"""

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import DataError
from pipeline.model.heads import Pool
from pipeline.runtime.files import write_json_atomic
from pipeline.use.model import Model, write_header
from pipeline.use.whiten import Vectors, Whitening

logger = logging.getLogger(__name__)

_NAMED = 10
"""Lines that are named each; of more only the number is told."""
_SAVE_EVERY_S, _TELL_EVERY_S = 5.0, 30.0
_BOM = b"\xef\xbb\xbf"


class TextLines:
    """Texts of a stream of bytes, one a line. Lines that are not UTF-8 are named, and counted.

    Args:
        stream: lines with their ends.
        skip_bad: whether such lines are left out; otherwise they are empty texts, whose vectors
            `vectors_of` makes NaN.
    """

    def __init__(self, stream: Iterable[bytes], *, skip_bad: bool) -> None:
        self._stream = iter(stream)
        self._skip_bad = skip_bad
        self._bad_rows: list[int] = []
        self.digest = hashlib.sha256()
        """SHA-256 of the lines so far."""
        self.num_lines = self.num_rows = self.num_bad = 0

    def pass_over(self, num_lines: int, num_rows: int, num_bad: int) -> None:
        """Read lines that were done before, without their texts."""
        for line in islice(self._stream, num_lines):
            self.digest.update(line)
            self.num_lines += 1
        self.num_rows, self.num_bad = num_rows, num_bad

    def __iter__(self) -> Iterator[str]:
        for line in self._stream:
            self.digest.update(line)
            self.num_lines += 1
            try:
                first = self.num_lines == 1
                text = (line.removeprefix(_BOM) if first else line).decode().rstrip("\r\n")
            except UnicodeDecodeError as error:
                self._count_bad(error)
                if self._skip_bad:
                    continue
                self._bad_rows.append(self.num_rows)
                text = ""
            self.num_rows += 1
            yield text

    def vectors_of(self, blocks: Iterable[Vectors]) -> Iterator[Vectors]:
        """Yield blocks of vectors of these texts, NaN where a line was bad.

        A block is made of all texts read so far that no block before it has.
        """
        start = self.num_rows
        for block in blocks:
            block[[row - start for row in self._bad_rows]] = np.nan
            start += len(block)
            self._bad_rows.clear()
            yield block

    def _count_bad(self, error: UnicodeDecodeError) -> None:
        self.num_bad += 1
        done = "left out" if self._skip_bad else "its vector is NaN"
        if self.num_bad <= _NAMED:
            byte = error.object[error.start]
            place = f"byte 0x{byte:02x} at {error.start}"
            logger.warning("line %d is not UTF-8 (%s): %s", self.num_lines, place, done)
        elif self.num_bad == _NAMED + 1:
            logger.warning("further lines that are not UTF-8 are counted alone")


def encode_lines(
    model: Model,
    lines: TextLines,
    out: Path,
    pooling: Pool,
    batch_size: int,
    max_length: int,
    whitening: Whitening | None,
) -> int:
    """Write the vectors of lines to an .npy file; return how many there are.

    What another process wrote of the same lines before it was killed is kept.

    Raises:
        DataError: there is no line, or OUT.partial is of other lines, another model or setting.
        PostnormError: as `Model.encode`.
    """
    partial, record = (out.with_name(f"{out.name}.partial{end}") for end in ("", ".json"))
    width = model.config.hidden_size if whitening is None else whitening.size
    of = {
        "model": model.fingerprint,
        "pooling": pooling,
        "max_length": max_length,
        "whitening": None if whitening is None else _digest(whitening),
    }
    _resume(partial, record, lines, of, width)
    # Its rows are counted from here on, because the file may have more than the record knows.
    with partial.open("r+b" if partial.exists() else "w+b") as file:
        write_header(file, 0, width)
        file.truncate(file.tell() + 4 * width * lines.num_rows)
        file.seek(0, 2)
        blocks = model.iter_encode(lines, pooling, batch_size, max_length, whitening)
        progress = _Progress(record, lines, of, file)
        try:
            for block in lines.vectors_of(blocks):
                block.tofile(file)
                progress.tell()
        finally:
            progress.save()
        file.seek(0)
        write_header(file, lines.num_rows, width)
    record.unlink()
    if not lines.num_rows:
        partial.unlink()
        raise DataError("no text to encode; give one a line on standard input")
    partial.replace(out)
    return lines.num_rows


def _resume(partial: Path, record: Path, lines: TextLines, of: dict[str, Any], width: int) -> None:
    """Pass over the lines whose vectors are there already."""
    if not record.is_file() or not partial.is_file():
        return
    remedy = f"remove {partial} and {record.name} to start over"
    try:
        found = json.loads(record.read_bytes())
        done = [int(found[name]) for name in ("lines", "rows", "bad")]
        known, digest = found["of"], found["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{record} is damaged ({error}); {remedy}") from error
    if known != of:
        differing = ", ".join(name for name in of if known.get(name) != of[name])
        raise DataError(f"{partial} has vectors of another {differing}; {remedy}")
    lines.pass_over(*done)
    if lines.digest.hexdigest() != digest or partial.stat().st_size < 4 * width * done[1]:
        raise DataError(
            f"{partial} has vectors of {done[0]:,} lines that are not the first ones given now; "
            f"give the same lines, or {remedy}"
        )
    logger.info("%s: goes on after line %d", partial, done[0])


class _Progress:
    """Keeps the record of what a file has, and tells how fast it grows."""

    def __init__(self, record: Path, lines: TextLines, of: dict[str, Any], file: Any) -> None:
        self._record, self._lines, self._of, self._file = record, lines, of, file
        self._start_s = self._saved_s = self._told_s = time.monotonic()
        self._first, self._state = lines.num_rows, self._now()

    def tell(self) -> None:
        """Count a block that was written."""
        self._state, now_s = self._now(), time.monotonic()
        if now_s - self._saved_s >= _SAVE_EVERY_S:
            self.save()
            self._saved_s = now_s
        if now_s - self._told_s >= _TELL_EVERY_S:
            rate = (self._lines.num_rows - self._first) / (now_s - self._start_s)
            logger.info("%d texts, %.0f a second", self._lines.num_rows, rate)
            self._told_s = now_s

    def save(self) -> None:
        """Write the record of the last whole block."""
        self._file.flush()
        write_json_atomic(self._record, self._state)

    def _now(self) -> dict[str, Any]:
        lines = self._lines
        counts = {"lines": lines.num_lines, "rows": lines.num_rows, "bad": lines.num_bad}
        return {**counts, "sha256": lines.digest.hexdigest(), "of": self._of}


def _digest(whitening: Whitening) -> str:
    return hashlib.sha256(whitening.mean.tobytes() + whitening.weight.tobytes()).hexdigest()
