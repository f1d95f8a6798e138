"""Packed, masked sequences of one split, by number: the place where pure functions meet shards."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from pipeline.config.data import DataConfig
from pipeline.data.assemble import Slots, lay_out
from pipeline.data.batch import MicroBatch
from pipeline.data.masking import mask_tokens
from pipeline.data.order import Location
from pipeline.data.packing import Packing, pack
from pipeline.data.philox import Purpose
from pipeline.data.reader import Block, BlockReader
from pipeline.data.shards import DatasetIndex
from pipeline.errors import DataError


class PackedSplit:
    """Sequences of the train or the eval split at one sequence length."""

    def __init__(self, index: DatasetIndex, split: str, config: DataConfig) -> None:
        """Opens the split's shards and counts the sequences of every block.

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
        self.sequences_per_block = np.array(
            [pack(self.reader.doc_ends(int(row)), config.seq_len).num_sequences
             for row in self.rows], dtype=np.int64
        )  # fmt: skip

    def batch(self, locations: Sequence[Location], key: tuple[int, Purpose]) -> MicroBatch:
        """Builds a micro-batch.

        Args:
            locations: the sequences, by block position within this split.
            key: (seed, purpose) of the masks.
        """
        slots = self._slots(locations)
        corrupted, selected = mask_tokens(
            slots.tokens,
            slots.word_starts,
            slots.maskable,
            sample_ids=np.array([location.sample_id for location in locations]),
            epochs=np.array([location.epoch for location in locations]),
            config=self._config,
            vocabulary=self._vocabulary,
            key=key,
        )
        masked_index = np.flatnonzero(selected)
        return MicroBatch(
            input_ids=torch.from_numpy(corrupted),
            documents=torch.from_numpy(slots.documents),
            positions=torch.from_numpy(slots.positions),
            masked_index=torch.from_numpy(masked_index),
            targets=torch.from_numpy(slots.tokens.reshape(-1)[masked_index]),
            num_tokens=int(np.count_nonzero(slots.documents)),
        )

    def _slots(self, locations: Sequence[Location]) -> Slots:
        """The sequences before they are masked."""
        slots = Slots.empty(len(locations), self._config.seq_len)
        for row, location in enumerate(locations):
            block, packing = self._packed(location.block)
            lay_out(slots, row, block, packing, location.sequence, self._vocabulary)
        return slots

    def _packed_uncached(self, position: int) -> tuple[Block, Packing]:
        block = self.reader.block(int(self.rows[position]))
        return block, pack(block.doc_ends, self._config.seq_len)
