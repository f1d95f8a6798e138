"""Writes the log of a run's batches, whose format `pipeline.data.record` describes.

An attempt that computes a batch again must get the hash of the earlier attempt.

An earlier attempt's lines after the cursor stay in the file until they are written again, and a
batch that differs stops the run before anything is changed; so the next attempt, and one after a
kill, is compared as well. Equal lines are not written again.
"""

import logging
import os
from collections import deque
from pathlib import Path

import numpy as np

from pipeline.data.record import (
    HEADER,
    STAGE_HEADER,
    BatchRecord,
    has_stages,
    how_to_fix,
    is_empty,
    line_of,
    parse,
    record_of,
    with_stages,
)
from pipeline.errors import DataError, not_written
from pipeline.runtime import dist
from pipeline.runtime.files import retry_storage, write_atomic
from pipeline.runtime.run_folder import RunFolder

logger = logging.getLogger(__name__)


class BatchLog:
    """Logs the batches of one attempt. Every rank has one; rank 0 reads and writes the file."""

    def __init__(
        self,
        run_dir: Path,
        cursor: int,
        is_first: bool,
        *,
        staged: bool = False,
        begins: bool = False,
    ) -> None:
        """Open the file or start a new one. Collective.

        With `staged` its lines have a stage. `begins` says that the run begins at the cursor.

        Raises:
            DataError: the file is damaged or ends before the cursor.
            StorageError: it cannot be read or written.
        """
        self._path = RunFolder(run_dir).batches
        self._is_first = is_first
        self._pending: list[BatchRecord] = []
        self._staged, self._begins = staged, begins
        self._end = len(STAGE_HEADER if staged else HEADER)
        """Bytes of the file that this attempt has written or found equal."""
        self._earlier: deque[bytes] = deque()
        """Complete lines of earlier attempts after these bytes."""
        with dist.raise_on_all_ranks():
            try:
                if is_first:
                    self._open(cursor)
            except OSError as error:
                raise not_written(error, f"{self._path} cannot be opened: {error}") from error

    def add(self, record: BatchRecord) -> None:
        """Add a batch with this rank's part of its hash. No synchronisation."""
        if self._pending:
            last = self._pending[-1]
            assert record.batch == last.batch + 1, (record, last)
            assert record.cursor == last.cursor + last.sequences, (record, last)
        self._pending.append(record)

    def flush(self) -> None:
        """Compare and flush to disk the batches added since the last call. Collective.

        Call it before each save, because a file that ends before a checkpoint's cursor counts as
        damaged.

        Raises:
            DataError: a batch differs from that of an earlier attempt; the file is unchanged.
            StorageError: the file cannot be written.
        """
        if not self._pending:
            return
        hashes = dist.sum_modulo_2_64([record.hash for record in self._pending])
        records = [
            record._replace(hash=total) for record, total in zip(self._pending, hashes, strict=True)
        ]
        self._pending = []
        with dist.raise_on_all_ranks():
            try:
                if self._is_first:
                    self._write(records)
            except OSError as error:
                raise not_written(
                    error,
                    f"{self._path} cannot be written: {error}; its content is complete except for "
                    "the last line",
                ) from error

    # Old lines stay until they are passed: cut at the start, a second try would hide a mismatch.
    # Without any checkpoint the file is new: the config may have changed. 3 million lines open in
    # 0.6 CPU-seconds, since nothing is copied.
    def _open(self, cursor: int) -> None:
        text = self._path.read_bytes() if self._path.exists() else b""
        lines = None if is_empty(text) else parse(self._path, text)
        if lines is not None and self._staged and not has_stages(text):
            # The run got stages after it had begun.
            text = with_stages(text)
            write_atomic(self._path, text)
            lines = parse(self._path, text)
        if lines is None or (len(lines.ends) and lines.numbers[0, 1] > cursor):
            if cursor and not self._begins:
                logger.warning(
                    "%s %s: a new one starts at sequence %d, and batches from there are not "
                    "compared with those of earlier attempts",
                    self._path,
                    "begins later" if lines else "is missing",
                    cursor,
                )
            write_atomic(self._path, STAGE_HEADER if self._staged else HEADER)
            return
        self._staged = has_stages(text)
        if not len(lines.ends):
            return
        # The cursor after the header and after each line.
        reached = np.append(lines.numbers[0, 1], lines.numbers[:, 1] + lines.numbers[:, 2])
        known = int(np.searchsorted(reached, cursor, side="right")) - 1
        if reached[known] != cursor:
            after = "the end" if known == len(lines.ends) else f"{reached[known + 1]}"
            raise DataError(
                f"{self._path} has no line that ends at sequence {cursor}, where the checkpoint "
                f"is: line {known + 1} ends at sequence {reached[known]}, followed by {after}. "
                f"{how_to_fix(self._path)}"
            )
        ends = np.append(len(STAGE_HEADER if self._staged else HEADER), lines.ends).tolist()
        self._end = ends[known]
        self._earlier.extend(text[self._end : ends[-1]].splitlines(keepends=True))

    def _write(self, records: list[BatchRecord]) -> None:
        """Compare lines with those of earlier attempts, then append new ones."""
        if not self._staged:
            records = [record._replace(stage=0) for record in records]
        lines = [line_of(record, staged=self._staged) for record in records]
        old = [self._earlier[i] for i in range(min(len(lines), len(self._earlier)))]
        for record, line in zip(records, old, strict=False):
            self._require_same(record_of(line), record)
        for _ in old:
            self._earlier.popleft()
        data = b"".join(lines)
        if data != b"".join(old):
            text = data + b"".join(self._earlier)
            retry_storage(lambda: self._replace_end(text), lambda: f"writing {self._path}")
        self._end += len(data)

    def _replace_end(self, text: bytes) -> None:
        with self._path.open("r+b") as file:
            # Truncated and appended to: a kill can only damage the last line, and the lines
            # before, 150 MB after 3 million batches, are never copied.
            file.truncate(self._end)
            file.seek(self._end)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def _require_same(self, earlier: BatchRecord, now: BatchRecord) -> None:
        # Whether the step was applied depends on the optimizer and not on the data.
        if earlier._replace(step=now.step) == now:
            return
        raise DataError(
            f"batch {now.batch} at sequence {now.cursor} has hash {now.hash:016x} "
            f"({now.sequences} sequences of {now.seq_len}); {self._path} has {earlier.hash:016x} "
            f"(batch {earlier.batch} at sequence {earlier.cursor}, {earlier.sequences} of "
            f"{earlier.seq_len}): this attempt sees other data than an earlier one of the same "
            "run. Check that data.dir holds the same files, that data.* and seed are those of "
            "resolved.yaml, and with data.check_blocks that no block is damaged. If the change is "
            f"intended, move {self._path} away or choose another run_dir; it is unchanged"
        )
