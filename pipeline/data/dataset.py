"""Packed sequences of one split: the place where pure functions meet shards."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pipeline.config.data import DataConfig
from pipeline.data.format import DatasetIndex
from pipeline.data.order import Ints, Locations
from pipeline.data.packing import (
    Packing,
    Slots,
    counts_file,
    lay_out,
    pack,
    specials_per_piece,
)
from pipeline.data.pairs import Pair, PairRule, Text, lay_out_pairs, pairs_of, sentence_starts
from pipeline.data.reader import Block, BlockReader
from pipeline.errors import DataError


class Batch(NamedTuple):
    """A micro-batch as arrays: B sequences of S slots, and the inputs that the objective made."""

    input_ids: npt.NDArray[np.int64]
    """(B, S) token ids as the model sees them."""
    documents: npt.NDArray[np.int32]
    """(B, S) number of the document piece in the sequence from 1, 0 at padding."""
    positions: npt.NDArray[np.int64]
    """(B, S) position within the piece, 0 at its [CLS]."""
    segments: npt.NDArray[np.int64] | None
    """(B, S) segment ids; None: all are 0."""
    inputs: dict[str, npt.NDArray[Any]]
    """What the objective needs beside the slots, by its own names."""
    weights: dict[str, float]
    """Divisor of each of the objective's losses: how many targets this micro-batch has."""
    counts: dict[str, int]
    """What the objective wants to see in the log, as sums."""
    num_tokens: int
    """Slots that are not padding."""
    hash: int
    """Below 2^64; those of the parts of a step's batch add up to that of the whole."""


class Inputs(Protocol):
    """Makes the model's inputs from slots: the part of an objective that runs in data workers.

    An implementation is picklable and imports no torch.
    """

    @property
    def pairs(self) -> PairRule | None:
        """How pieces become pairs of segments before that; None: they do not."""

    def __call__(
        self, slots: Slots, locations: Locations, number: int, *, micro_batch: int, places: Ints
    ) -> list[Batch]:
        """Corrupt sequences and cuts them into micro-batches; a pure function.

        `number` counts the run's batches from 0, skipped ones included. The last micro-batch may
        have fewer sequences. `places` (B,), those of the sequences in the step's batch, are for the
        hash.
        """

    def without_targets(self, batch: Batch) -> Batch:
        """Return the same slots with nothing to predict, so that the batch adds 0 to every sum."""


class PackedSplit:
    """The train or the eval split; threads may share it."""

    def __init__(
        self,
        index: DatasetIndex,
        split: str,
        config: DataConfig,
        counts: Mapping[int, Ints],
        pairs: PairRule | None = None,
    ) -> None:
        """Look at the split's shards.

        `counts` are of the whole dataset: length -> (b,) sequences of each block. With a rule for
        pairs, `slots` lays each piece out as two segments.

        Raises:
            DataError: a shard is damaged or missing, or the split is empty.
        """
        self.rows = index.split_blocks(split)
        if not len(self.rows):
            raise DataError(
                f"{index.folder} has no blocks of the split {split!r}; prepare it again"
            )
        shards = np.unique(index.blocks.shard[self.rows]).tolist()
        self.reader = BlockReader(index, shards, config.check_blocks)
        self.counts = {length: of_all[self.rows] for length, of_all in counts.items()}
        """By length, (b,) sequences of each block of the split."""
        self.specials = specials_per_piece(None if pairs is None else pairs.kind)
        """Special tokens that packing keeps room for in each piece."""
        self._pairs = pairs
        self._config = config
        self._vocabulary = index.vocabulary
        # Sequences of one window are taken from all its blocks by turns. Where sources are mixed
        # each has at least one block in turn.
        kept = config.window_blocks + len(index.sources)
        self.block = lru_cache(maxsize=kept)(self._block)
        self.packing = lru_cache(maxsize=kept)(self._packing)
        self._text = lru_cache(maxsize=kept)(self._found_text)

    def slots(
        self, locations: Locations, seq_len: int, leftovers: Mapping[int, Packing] | None = None
    ) -> Slots:
        """Lay out sequences as they are in the dataset, before an objective corrupts them.

        `leftovers` are packings of the blocks of which `locations` has leftovers.
        """
        slots = Slots.empty(len(locations.blocks), seq_len, pairs=self._pairs is not None)
        # All sequences of a block at once: a call costs more than laying out a short sequence.
        of_kind = 2 * locations.blocks + locations.leftover
        order = np.argsort(of_kind, kind="stable")
        stops = [*(np.flatnonzero(np.diff(of_kind[order])) + 1).tolist(), len(order)]
        for start, stop in zip([0, *stops], stops, strict=False):
            rows = order[start:stop]
            position = int(locations.blocks[rows[0]])
            if locations.leftover[rows[0]]:
                assert leftovers is not None
                packing = leftovers[position]
            else:
                packing = self.packing(position, seq_len)
            if self._pairs is not None:
                text = self._text(position)
                lay_out_pairs(slots, rows, text, packing, locations, self._vocabulary, self._pairs)
                continue
            block = self.block(position)
            lay_out(slots, rows, block, packing, locations.sequences[rows], self._vocabulary)
        return slots

    def pairs(self, one: Locations, packing: Packing) -> list[Pair] | None:
        """Return how the pieces of a single sequence become pairs; None: they do not."""
        if self._pairs is None:
            return None
        return pairs_of(self._text(int(one.blocks[0])), packing, one, self._pairs)

    def _block(self, position: int) -> Block:
        """Read a block of the split; the last ones are kept."""
        return self.reader.block(int(self.rows[position]))

    def _found_text(self, position: int) -> Text:
        """Find the sentences of a block of the split; the last ones are kept."""
        assert self._pairs is not None
        block = self.block(position)
        return Text.of(block, sentence_starts(block, self._pairs.marks))

    def _packing(self, position: int, seq_len: int) -> Packing:
        """Return the packing of a block of the split; the last ones are kept."""
        row = int(self.rows[position])
        packing = pack(self.reader.doc_ends(row), seq_len, self.specials)
        counted = int(self.counts[seq_len][position])
        if packing.num_sequences != counted:
            raise DataError(
                f"{self.reader.index.where(row)} makes {packing.num_sequences} sequences of "
                f"{seq_len} slots, {counted} were counted; delete "
                f"{counts_file(seq_len, self.specials)} in {self.reader.index.folder} and in the "
                "run's folder, and start again"
            )
        return packing
