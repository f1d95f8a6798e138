"""Packed, masked sequences of one split, by number: the place where pure functions meet shards."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from pipeline.config.data import DataConfig
from pipeline.data.assemble import Slots, lay_out
from pipeline.data.batch import MicroBatch
from pipeline.data.counts import sequences_per_block
from pipeline.data.mask_kernel import Sequences
from pipeline.data.masking import mask_tokens
from pipeline.data.order import Location
from pipeline.data.packing import Packing, pack
from pipeline.data.philox import Purpose
from pipeline.data.reader import Block, BlockReader
from pipeline.data.shards import DatasetIndex
from pipeline.errors import DataError


class PackedSplit:
    """Sequences of the train or the eval split at one sequence length."""

    def __init__(
        self,
        index: DatasetIndex,
        split: str,
        config: DataConfig,
        counts: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Opens the split's shards.

        Args:
            index: of the dataset.
            split: "train" or "eval".
            config: length of the sequences and masks.
            counts: (b,) int64, what `sequences_per_block` gives for the whole dataset; by default
                it is asked.

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
        self._config = config
        self._vocabulary = index.vocabulary
        # Sequences of one window are taken from all its blocks by turns.
        self._packed = lru_cache(maxsize=config.window_blocks)(self._packed_uncached)
        if counts is None:
            counts = sequences_per_block(index, config.seq_len, run_dir=None)
        self.sequences_per_block = counts[self.rows]

    def batch(
        self, locations: Sequence[Location], key: tuple[int, Purpose], ratio: float | None = None
    ) -> MicroBatch:
        """Builds a micro-batch.

        Args:
            locations: the sequences, by block position within this split.
            key: (seed, purpose) of the masks.
            ratio: share of tokens to predict; None takes `mask_prob` of the config.
        """
        slots = self._slots(locations)
        sequences = Sequences(
            slots.tokens,
            slots.word_starts,
            maskable=slots.maskable,
            documents=slots.documents,
            sample_ids=np.array([location.sample_id for location in locations]),
            epochs=np.array([location.epoch for location in locations]),
        )
        corrupted, selected, unmasked_documents = mask_tokens(
            sequences, config=self._config, vocabulary=self._vocabulary, key=key, ratio=ratio
        )
        masked_index = np.flatnonzero(selected)
        return MicroBatch(
            input_ids=torch.from_numpy(corrupted),
            documents=torch.from_numpy(slots.documents),
            positions=torch.from_numpy(slots.positions),
            masked_index=torch.from_numpy(masked_index),
            targets=torch.from_numpy(slots.tokens.reshape(-1)[masked_index]),
            num_tokens=int(np.count_nonzero(slots.documents)),
            unmasked_documents=unmasked_documents,
        )

    def _slots(self, locations: Sequence[Location]) -> Slots:
        """The sequences before they are masked."""
        slots = Slots.empty(len(locations), self._config.seq_len)
        for row, location in enumerate(locations):
            block, packing = self._packed(location.block)
            lay_out(slots, row, block, packing, location.sequence, self._vocabulary)
        return slots

    def _packed_uncached(self, position: int) -> tuple[Block, Packing]:
        row = int(self.rows[position])
        block = self.reader.block(row)
        packing = pack(block.doc_ends, self._config.seq_len)
        counted = int(self.sequences_per_block[position])
        if packing.num_sequences != counted:
            length = self._config.seq_len
            raise DataError(
                f"{self.reader.index.where(row)} makes {packing.num_sequences} sequences of "
                f"{length} slots, {counted} were counted; delete packing-{length}.npz in "
                f"{self.reader.index.folder} and in the run's folder, and start again"
            )
        return block, packing
