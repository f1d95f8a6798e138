"""Numbers of sequences and pieces of every block, counted once for a dataset and a length.

They follow from documents' lengths alone, so a file beside the dataset, `packing-SEQLEN.npz`,
serves all runs; objectives with pairs have `packing-SEQLEN-pairs.npz`. If that folder is not
writable, or the dataset is in an object store, the file is in the run's folder, or there is none.
"""

import io
import logging
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline.config.objective import MLM, ObjectiveConfig
from pipeline.data.format import DatasetIndex
from pipeline.data.packing import (
    RULE_VERSION,
    SPECIALS_PER_PIECE,
    Ints,
    counts_file,
    pack,
    specials_per_piece,
)
from pipeline.data.reader import BlockReader
from pipeline.runtime import watchdog
from pipeline.runtime.files import write_atomic

logger = logging.getLogger(__name__)

# Counting costs 0.19 CPU-ms a block; stored counts of 80,000 blocks open in 0.1 CPU-seconds and 48
# MiB.
# More than cores, because they mostly wait for the storage, a few KB at a time.
_THREADS = 16
_PROGRESS_EVERY_S = 10.0


class BlockCounts(NamedTuple):
    """Counts of every block of a dataset, training and evaluation alike; (b,) int64 each."""

    sequences: Ints
    pieces: Ints
    """Documents, and parts of documents, in the sequences."""


def sequences_at(
    index: DatasetIndex,
    seq_lens: Iterable[int],
    run_dir: str | Path | None,
    objective: ObjectiveConfig = MLM,
) -> dict[int, Ints]:
    """Count packed sequences for several lengths, by length; see `packing_counts`."""
    return {
        length: packing_counts(index, length, run_dir, objective).sequences for length in seq_lens
    }


def packing_counts(
    index: DatasetIndex, seq_len: int, run_dir: str | Path | None, objective: ObjectiveConfig = MLM
) -> BlockCounts:
    """Count the sequences and pieces that the blocks of a dataset make at a length.

    An objective with pairs packs fewer tokens into a sequence. The counts are stored in `run_dir`
    if the dataset's folder is not writable.

    Raises:
        DataError: a shard is missing or damaged.
        StorageError: a shard cannot be read at the moment.
    """
    specials = specials_per_piece(objective.pairs)
    folders = [index.folder, *([Path(run_dir)] if run_dir is not None else [])]
    if index.store is not None:
        folders.reverse()  # the next job may be on another node, without this one's copies
    paths = [folder / counts_file(seq_len, specials) for folder in folders]
    for path in paths:
        try:
            return _read(path, index, seq_len, specials)
        except FileNotFoundError:
            continue
        except Exception as error:  # noqa: BLE001 - zipfile and numpy raise many kinds
            logger.warning("%s is not used: %s; counting the sequences again", path, error)
    counts = _count(index, seq_len, specials)
    _keep(counts, paths, index, seq_len, specials)
    return counts


def _read(path: Path, index: DatasetIndex, seq_len: int, specials: int) -> BlockCounts:
    """Read stored counts; raise ValueError and others if they are damaged or for other data."""
    with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
        made_for = str(arrays["made_for"])
        counts = BlockCounts(arrays["sequences_per_block"], arrays["pieces_per_block"])
    expected = _made_for(index, seq_len, specials)
    if made_for != expected:
        raise ValueError(f"it is for {made_for}, expected {expected}")
    for numbers in counts:
        if numbers.dtype != np.int64 or numbers.shape != (len(index.blocks),):
            raise ValueError(
                f"it has {numbers.dtype} numbers of shape {numbers.shape}, expected int64 for "
                f"{len(index.blocks)} blocks"
            )
    longest = seq_len - specials
    tokens, documents = index.blocks.num_tokens, index.blocks.num_documents
    # A file of the right dataset may still be damaged, and the order of a whole run is made of it.
    wrong = np.flatnonzero(
        (counts.sequences * longest < tokens)
        | (counts.sequences > counts.pieces)
        | (counts.pieces > tokens // longest + documents)
    )
    if len(wrong):
        row = wrong[0]
        raise ValueError(
            f"it says {counts.sequences[row]} sequences of {counts.pieces[row]} pieces for "
            f"{tokens[row]} tokens in {documents[row]} documents, which cannot be"
        )
    return counts


def _count(index: DatasetIndex, seq_len: int, specials: int) -> BlockCounts:
    """Pack every block; packing and reading release the interpreter's lock."""
    reader = BlockReader(index)
    total = len(index.blocks)
    logger.info(
        "counting the sequences of %d in %s blocks, once for this dataset", seq_len, f"{total:,}"
    )
    counts = BlockCounts(np.empty(total, np.int64), np.empty(total, np.int64))
    started = reported = time.monotonic()

    def count(row: int) -> tuple[int, int]:
        packing = pack(reader.doc_ends(row), seq_len, specials)
        return packing.num_sequences, len(packing.piece_doc)

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="counts") as pool:
        try:
            for row, found in enumerate(pool.map(count, range(total))):
                counts.sequences[row], counts.pieces[row] = found
                watchdog.heartbeat("counting sequences")
                if time.monotonic() - reported > _PROGRESS_EVERY_S:
                    reported = time.monotonic()
                    logger.info("counted %s of %s blocks", f"{row + 1:,}", f"{total:,}")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    logger.info(
        "%s sequences, counted in %.1f s", f"{counts.sequences.sum():,}", time.monotonic() - started
    )
    return counts


def _keep(
    counts: BlockCounts,
    paths: list[Path],
    index: DatasetIndex,
    seq_len: int,
    specials: int = SPECIALS_PER_PIECE,
) -> None:
    """Store the counts in the first writable folder; without one, the next start counts again."""
    buffer = io.BytesIO()
    np.savez(
        buffer,
        made_for=_made_for(index, seq_len, specials),
        sequences_per_block=counts.sequences,
        pieces_per_block=counts.pieces,
    )
    for path in paths:
        try:
            write_atomic(path, buffer.getvalue())
        except OSError as error:
            logger.info("%s cannot be written: %s", path, os.strerror(error.errno or 0))
        else:
            return
    logger.warning("the counts of sequences are not stored: the next start counts them again")


def _made_for(index: DatasetIndex, seq_len: int, specials: int) -> str:
    of_pairs = "" if specials == SPECIALS_PER_PIECE else " of pairs"
    return f"dataset {index.fingerprint}, {seq_len} slots{of_pairs}, packing rule {RULE_VERSION}"
