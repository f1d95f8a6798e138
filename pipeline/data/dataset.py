"""Packed, masked sequences of one split: the place where pure functions meet shards."""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.config.data import DataConfig
from pipeline.data.batch_hash import sequence_hashes
from pipeline.data.format import DatasetIndex
from pipeline.data.masking import Sequences, mask_tokens
from pipeline.data.order import Ints, Locations
from pipeline.data.packing import Packing, pack
from pipeline.data.random import Purpose
from pipeline.data.reader import Block, BlockReader
from pipeline.data.slots import Slots, lay_out
from pipeline.errors import DataError


class Masks(NamedTuple):
    """What decides which tokens are masked, besides the sequences."""

    seed: int
    purpose: Purpose
    ratio: float
    """Share of tokens to predict."""


class Batch(NamedTuple):
    """B packed, masked sequences of S slots as arrays; M of the slots are to be predicted."""

    input_ids: npt.NDArray[np.int64]
    """(B, S) corrupted token ids."""
    documents: npt.NDArray[np.int32]
    """(B, S) number of the document piece in the sequence from 1, 0 at padding."""
    positions: npt.NDArray[np.int64]
    """(B, S) position within the piece, 0 at its [CLS]."""
    masked_index: npt.NDArray[np.int64]
    """(M,) rising flat indices b * S + s of the slots to predict."""
    targets: npt.NDArray[np.int64]
    """(M,) their original token ids."""
    num_tokens: int
    """Slots that are no padding."""
    unmasked_documents: int
    """Pieces with text of which no slot is to be predicted."""
    hash: int
    """Below 2^64; those of the parts of a step's batch add up to that of the whole."""


class PackedSplit:
    """The train or the eval split; threads may share it."""

    def __init__(
        self,
        index: DatasetIndex,
        split: str,
        config: DataConfig,
        counts: Mapping[int, Ints],
    ) -> None:
        """Looks at the split's shards.

        Args:
            index: of the dataset.
            split: "train" or "eval".
            config: of the masks.
            counts: length -> (b,) sequences of each block of the whole dataset.

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
        self._config = config
        self._vocabulary = index.vocabulary
        # Sequences of one window are taken from all its blocks by turns. Where sources are mixed
        # each has at least one block in turn.
        kept = config.window_blocks + len(index.sources)
        self.block = lru_cache(maxsize=kept)(self._block)
        self.packing = lru_cache(maxsize=kept)(self._packing)

    def slots(
        self, locations: Locations, seq_len: int, leftovers: Mapping[int, Packing] | None = None
    ) -> Slots:
        """Lays out sequences, not masked yet.

        Args:
            locations: the sequences.
            seq_len: their length.
            leftovers: packings of the blocks of which `locations` has leftovers.
        """
        slots = Slots.empty(len(locations.blocks), seq_len)
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
            block = self.block(position)
            lay_out(slots, rows, block, packing, locations.sequences[rows], self._vocabulary)
        return slots

    def masked(
        self,
        slots: Slots,
        locations: Locations,
        masks: Masks,
        *,
        micro_batch: int,
        first_place: int = 0,
    ) -> list[Batch]:
        """Masks sequences and cuts them into batches.

        Args:
            slots: of the sequences; only read.
            locations: of the same.
            masks: what is masked.
            micro_batch: sequences of a batch; the last one may have fewer.
            first_place: of the first sequence in the step's batch, for the hash.
        """
        sequences = Sequences(
            slots.tokens,
            slots.word_starts,
            maskable=slots.maskable,
            documents=slots.documents,
            sample_ids=locations.sample_ids,
            epochs=locations.epochs,
        )
        corrupted, selected, unmasked_documents = mask_tokens(
            sequences, config=self._config, vocabulary=self._vocabulary,
            key=(masks.seed, masks.purpose), ratio=masks.ratio,
        )  # fmt: skip
        masked_index = np.flatnonzero(selected)
        targets = slots.tokens.reshape(-1)[masked_index]
        num_sequences, seq_len = corrupted.shape
        hashes = sequence_hashes(
            np.arange(first_place, first_place + num_sequences), locations.sample_ids,
            locations.epochs, corrupted, slots.documents, masked_index, targets,
        )  # fmt: skip
        # All at once until here: a call costs more than a short sequence.
        firsts = np.arange(0, num_sequences, micro_batch)
        masked_stops = np.searchsorted(masked_index, (firsts + micro_batch) * seq_len).tolist()
        batches, masked_first = [], 0
        for first, masked_stop in zip(firsts.tolist(), masked_stops, strict=True):
            rows, masked = slice(first, first + micro_batch), slice(masked_first, masked_stop)
            documents = slots.documents[rows]
            batches.append(
                Batch(
                    input_ids=corrupted[rows],
                    documents=documents,
                    positions=slots.positions[rows],
                    masked_index=masked_index[masked] - first * seq_len,
                    targets=targets[masked],
                    num_tokens=int(np.count_nonzero(documents)),
                    unmasked_documents=int(unmasked_documents[rows].sum()),
                    hash=int(hashes[rows].sum()),
                )
            )
            masked_first = masked_stop
        return batches

    def _block(self, position: int) -> Block:
        """Reads a block of the split; the last ones are kept."""
        return self.reader.block(int(self.rows[position]))

    def _packing(self, position: int, seq_len: int) -> Packing:
        """The packing of a block of the split; the last ones are kept."""
        row = int(self.rows[position])
        packing = pack(self.reader.doc_ends(row), seq_len)
        counted = int(self.counts[seq_len][position])
        if packing.num_sequences != counted:
            raise DataError(
                f"{self.reader.index.where(row)} makes {packing.num_sequences} sequences of "
                f"{seq_len} slots, {counted} were counted; delete packing-{seq_len}.npz in "
                f"{self.reader.index.folder} and in the run's folder, and start again"
            )
        return packing
