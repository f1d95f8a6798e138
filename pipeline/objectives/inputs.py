"""Makes the model's inputs of masked language modelling from packed slots, without torch.

B sequences of S slots each, M slots to be predicted.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipeline.config import schedule
from pipeline.config.data import DataConfig, EvalDataConfig, TrainDataConfig
from pipeline.data.dataset import Batch
from pipeline.data.format import DatasetIndex, Vocabulary
from pipeline.data.masking import Sequences, mask_tokens
from pipeline.data.order import Ints, Locations
from pipeline.data.packing import Slots
from pipeline.data.random import Purpose
from pipeline.data.record import sequence_hashes
from pipeline.data.run_order import TrainSteps

EVAL_MASK_SEED = 0
"""Not the run's seed: the evaluation masks are the same for every run."""


@dataclass(frozen=True)
class MaskedInputs:
    """Masks tokens; `Batch.inputs` has `masked_index` (M,) and `targets` (M,), both int64.

    `masked_index` holds rising flat indices b * S + s of the slots to predict, `targets` their
    original token ids.
    """

    data: DataConfig
    vocabulary: Vocabulary
    seed: int
    purpose: Purpose

    def __call__(
        self, slots: Slots, locations: Locations, number: int, *, micro_batch: int, first_place: int
    ) -> list[Batch]:
        """Make micro-batches, as `pipeline.data.dataset.Inputs`."""
        sequences = Sequences(
            slots.tokens,
            slots.word_starts,
            maskable=slots.maskable,
            documents=slots.documents,
            sample_ids=locations.sample_ids,
            epochs=locations.epochs,
        )
        corrupted, selected, unmasked_documents = mask_tokens(
            sequences,
            config=self.data,
            vocabulary=self.vocabulary,
            key=(self.seed, self.purpose),
            ratio=self._ratio(number),
        )
        masked_index = np.flatnonzero(selected)
        targets = slots.tokens.reshape(-1)[masked_index]
        num_sequences, seq_len = corrupted.shape
        hashes = sequence_hashes(
            np.arange(first_place, first_place + num_sequences),
            locations.sample_ids,
            locations.epochs,
            corrupted,
            slots.documents,
            masked_index,
            targets,
        )
        # All sequences at once until here: a call costs more than a short sequence.
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
                    segments=None,
                    inputs={
                        "masked_index": masked_index[masked] - first * seq_len,
                        "targets": targets[masked],
                    },
                    weights={"loss": float(masked_stop - masked_first)},
                    counts={"unmasked_documents": int(unmasked_documents[rows].sum())},
                    num_tokens=int(np.count_nonzero(documents)),
                    hash=int(hashes[rows].sum()),
                )
            )
            masked_first = masked_stop
        return batches

    def without_targets(self, batch: Batch) -> Batch:
        """Return the same slots with nothing to predict."""
        nothing = {name: array[:0] for name, array in batch.inputs.items()}
        return batch._replace(inputs=nothing, weights=dict.fromkeys(batch.weights, 0.0))

    def _ratio(self, number: int) -> float:
        if self.purpose is Purpose.EVAL_MASK:
            return self.data.mask_prob
        return schedule.mask_ratio(number, self.data)


def train_inputs(config: TrainDataConfig, index: DatasetIndex) -> MaskedInputs:
    """Return the inputs of training: masks follow from the run's seed."""
    return MaskedInputs(config.data, index.vocabulary, config.seed, Purpose.MASK)


def eval_inputs(config: EvalDataConfig, index: DatasetIndex) -> MaskedInputs:
    """Return the inputs of evaluations: `mask_prob` of the tokens, whatever training's ratio."""
    return MaskedInputs(config.data, index.vocabulary, EVAL_MASK_SEED, Purpose.EVAL_MASK)


def train_steps(
    index: DatasetIndex, config: TrainDataConfig, counts: Mapping[int, Ints] | None = None
) -> TrainSteps:
    """Return the batches of a run, for whoever looks at them outside of training."""
    return TrainSteps(index, config, train_inputs(config, index), counts)
