"""Packed sequences of one split: the place where pure functions meet shards."""

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pipeline.config.data import DataConfig
from pipeline.data.cache import Arrays, SharedArrays
from pipeline.data.format import DatasetIndex
from pipeline.data.order import Ints, Locations, Once
from pipeline.data.packing import (
    PackedSequences,
    Packing,
    counts_file,
    lay_out,
    pack,
    specials_per_piece,
)
from pipeline.data.pairs import Pair, PairRule, Text, lay_out_pairs, pairs_of, sentence_starts
from pipeline.data.random import Purpose
from pipeline.data.reader import Block, BlockReader
from pipeline.errors import DataError

logger = logging.getLogger(__name__)

_WINDOW, _BLOCK = 1, 2
"""First number of a key of shared arrays."""
# Room in each file for the head of its arrays, and to begin each at a multiple of 64 bytes.
_HEAD_BYTES = 4096
_MORE = 8
"""Blocks or windows beyond those of two windows that are kept."""


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
        self,
        slots: PackedSequences,
        locations: Locations,
        number: int,
        *,
        micro_batch: int,
        places: Ints,
    ) -> list[Batch]:
        """Corrupt sequences and cuts them into micro-batches; a pure function.

        `number` counts the run's batches from 0, skipped ones included. The last micro-batch may
        have fewer sequences. `places` (B,), those of the sequences in the step's batch, are for the
        hash.
        """

    def without_targets(self, batch: Batch) -> Batch:
        """Return the same slots with nothing to predict, so that the batch adds 0 to every sum."""


class Whole(NamedTuple):
    """All sequences of a call of `Inputs`, which `Part` sees before they are cut."""

    slots: PackedSequences
    locations: Locations
    key: tuple[int, Purpose]
    """Seed and purpose of the masks."""
    masked: Ints
    """(M,) rising flat indices b * S + s of the slots to predict."""
    predicted: dict[str, npt.NDArray[Any]]
    """(M,) each: fields of `Batch.inputs`, to which a part may add others."""
    hashed: dict[str, npt.NDArray[Any]]
    """`documents` and `targets` as `sequence_hashes` takes them; a part may put in other arrays."""


AddTo = Callable[[Batch, slice, slice], None]
"""Adds to inputs, weights and counts of a micro-batch: its range of B sequences and of M slots."""


class Part(Protocol):
    """What an objective adds to masked tokens; picklable, without a state, and imports no torch."""

    def __call__(self, whole: Whole) -> AddTo:
        """See all sequences, since a call costs more than a short sequence."""


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
        """(b,) sequences of each block of the split, by length."""
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
        self._shared: SharedArrays | None = None

    def share(self, content: str) -> None:
        """Read blocks, and draw windows, once for all processes of this node with this content.

        The blocks of two windows are kept, for the one that is read ahead. Where that is not
        possible each process reads by itself.
        """
        # Pairs are made of a block's sentences, which are not shared.
        if self._pairs is not None:
            return
        index, kept = self.reader.index, self.block.cache_parameters()["maxsize"]
        blocks = index.blocks
        longest = min(self.counts) - self.specials
        pieces = blocks.num_tokens // longest + blocks.num_documents
        # Four numbers a piece at most, and two of 4 bytes a sequence of a window.
        largest = int((blocks.length + 32 * pieces)[self.rows].max())
        in_window = max(
            int(np.sort(counts)[-self._config.window_blocks :].sum())
            for counts in self.counts.values()
        )
        most = 2 * kept + _MORE
        size = most * (max(largest, 8 * in_window) + _HEAD_BYTES)
        identity = f"{index.fingerprint} {self._config.check_blocks} {content}"
        try:
            self._shared = SharedArrays(identity, size, kept)
        except OSError as error:
            logger.warning("ranks of this node do not share what they read: %s", error)

    @property
    def once(self) -> Once | None:
        """What makes the arrays of an order's window once a node; None: nothing is shared."""
        shared = self._shared
        return None if shared is None else lambda key, make: shared.get((_WINDOW, *key), make)

    def slots(
        self, locations: Locations, seq_len: int, leftovers: Mapping[int, Packing] | None = None
    ) -> PackedSequences:
        """Lay out sequences as they are in the dataset, before an objective corrupts them.

        `leftovers` are packings of the blocks of which `locations` has leftovers.
        """
        slots = PackedSequences.empty(len(locations.blocks), seq_len, pairs=self._pairs is not None)
        # All sequences of a block at once: a call costs more than laying out a short sequence.
        of_kind = 2 * locations.blocks + locations.leftover
        order = np.argsort(of_kind, kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(of_kind[order])) + 1)
        # In their order in the run: where a window follows another, its blocks are those kept.
        for rows in sorted((part for part in parts if len(part)), key=lambda part: int(part[0])):
            position = int(locations.blocks[rows[0]])
            leftover = None
            if locations.leftover[rows[0]]:
                assert leftovers is not None
                leftover = leftovers[position]
            if self._pairs is not None:
                text, packing = self._text(position), leftover or self.packing(position, seq_len)
                lay_out_pairs(slots, rows, text, packing, locations, self._vocabulary, self._pairs)
                continue
            which = rows, locations.sequences[rows]
            if self._shared is None:
                block, packing = self.block(position), leftover or self.packing(position, seq_len)
            else:
                block, packing = self._of_node(self._shared, position, seq_len)
            lay_out(slots, which, block, leftover or packing, self._vocabulary)
        return slots

    def _of_node(self, shared: SharedArrays, position: int, seq_len: int) -> tuple[Block, Packing]:
        """Return a block of the split and its packing, which one process of the node made."""
        row = int(self.rows[position])

        def make() -> Arrays:
            block = self.reader.block(row)
            packing = self._checked(position, seq_len, block.doc_ends)
            return [block.tokens, block.doc_ends, block.word_bits, *vars(packing).values()]

        tokens, doc_ends, word_bits, *rest = shared.get((_BLOCK, row, seq_len), make)
        # Without meta.json: training asks no shared block for its documents' ids.
        return Block(tokens, doc_ends, word_bits, b""), Packing(*rest)

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
        return self._checked(position, seq_len, self.reader.doc_ends(row))

    def _checked(self, position: int, seq_len: int, doc_ends: Ints) -> Packing:
        """Pack a block, and compare with what was counted."""
        row = int(self.rows[position])
        packing = pack(doc_ends, seq_len, self.specials)
        counted = int(self.counts[seq_len][position])
        # Orders are made of the counts: with others, a sequence would be skipped or asked for in
        # vain.
        if packing.num_sequences != counted:
            raise DataError(
                f"{self.reader.index.where(row)} makes {packing.num_sequences} sequences of "
                f"{seq_len} slots, {counted} were counted; delete "
                f"{counts_file(seq_len, self.specials)} in {self.reader.index.folder} and in the "
                "run's folder, and start again"
            )
        return packing
