"""Packed, masked sequences of one split, by number: the place where pure functions meet shards."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from pipeline.config.data import DataConfig
from pipeline.data.batch import MicroBatch
from pipeline.data.mask_kernel import Sequences
from pipeline.data.masking import mask_tokens
from pipeline.data.order import Location
from pipeline.data.packing import Packing, pack
from pipeline.data.philox import Purpose
from pipeline.data.reader import BlockReader
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
        self.reader = BlockReader(index, np.unique(index.blocks.shard[self.rows]).tolist())
        self._config = config
        self._vocabulary = index.vocabulary
        self._packing = lru_cache(maxsize=2 * config.window_blocks)(self._packing_uncached)
        self.sequences_per_block = np.array(
            [pack(self.reader.doc_ends(int(row)), config.seq_len).num_sequences
             for row in self.rows], dtype=np.int64
        )  # fmt: skip

    def batch(
        self, locations: Sequence[Location], key: tuple[int, Purpose], ratio: float | None = None
    ) -> MicroBatch:
        """Builds a micro-batch.

        Args:
            locations: the sequences, by block position within this split.
            key: (seed, purpose) of the masks.
            ratio: share of tokens to predict; None takes `mask_prob` of the config.
        """
        shape = (len(locations), self._config.seq_len)
        vocabulary = self._vocabulary
        tokens = np.full(shape, vocabulary.pad, dtype=np.int64)
        documents = np.zeros(shape, dtype=np.int32)
        positions = np.zeros(shape, dtype=np.int64)
        word_starts = np.zeros(shape, dtype=bool)
        for row, location in enumerate(locations):
            self._fill(location, tokens[row], documents[row], positions[row], word_starts[row])
        sequences = Sequences(
            tokens,
            word_starts,
            maskable=np.logical_and.reduce([tokens != token for token in vocabulary.special]),
            documents=documents,
            sample_ids=np.array([location.sample_id for location in locations]),
            epochs=np.array([location.epoch for location in locations]),
        )
        corrupted, selected, unmasked_documents = mask_tokens(
            sequences, config=self._config, vocabulary=vocabulary, key=key, ratio=ratio
        )
        masked_index = np.flatnonzero(selected)
        return MicroBatch(
            input_ids=torch.from_numpy(corrupted),
            documents=torch.from_numpy(documents),
            positions=torch.from_numpy(positions),
            masked_index=torch.from_numpy(masked_index),
            targets=torch.from_numpy(tokens.reshape(-1)[masked_index]),
            num_tokens=int(np.count_nonzero(documents)),
            unmasked_documents=unmasked_documents,
        )

    def _fill(
        self,
        location: Location,
        tokens: npt.NDArray[np.int64],
        documents: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int64],
        word_starts: npt.NDArray[np.bool_],
    ) -> None:
        """Lays the pieces of one sequence side by side into (s,) rows."""
        block = self.reader.block(int(self.rows[location.block]))
        packing = self._packing(location.block)
        slot = 0
        for number, piece in enumerate(packing.pieces(location.sequence), start=1):
            start, stop = int(packing.piece_start[piece]), int(packing.piece_stop[piece])
            end = slot + stop - start + 2
            tokens[slot] = self._vocabulary.cls
            tokens[slot + 1 : end - 1] = block.tokens[start:stop]
            tokens[end - 1] = self._vocabulary.sep
            documents[slot:end] = number
            positions[slot:end] = np.arange(end - slot)
            word_starts[slot + 1 : end - 1] = block.word_starts(start, stop)
            # [CLS], a piece's first token and [SEP] bound words: none reaches across a piece.
            word_starts[[slot, slot + 1, end - 1]] = True
            slot = end
        word_starts[slot:] = True

    def _packing_uncached(self, block: int) -> Packing:
        return pack(self.reader.block(int(self.rows[block])).doc_ends, self._config.seq_len)
