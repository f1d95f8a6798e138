"""Makes the model's inputs of masked language modelling from packed slots, without torch.

What an objective needs beside them is made by its parts.

B sequences of S slots each, M slots to be predicted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.config import schedule
from pipeline.config.data import DataConfig, EvalDataConfig, TrainDataConfig
from pipeline.config.objective import ObjectiveKind
from pipeline.data.dataset import Batch, Part, Whole
from pipeline.data.format import DatasetIndex, Vocabulary
from pipeline.data.masking import Sequences, mask_tokens
from pipeline.data.order import Ints, Locations
from pipeline.data.packing import PackedSequences
from pipeline.data.pairs import PairRule
from pipeline.data.random import Purpose
from pipeline.data.record import sequence_hashes
from pipeline.data.run_order import TrainSteps
from pipeline.objectives.parts import boundary_inputs, pair_inputs, pair_rule, rtd_inputs

EVAL_MASK_SEED = 0
"""Not the run's seed: the evaluation masks and pairs are the same for every run."""

PARTS: Mapping[ObjectiveKind, tuple[Part, ...]] = {
    "mlm": (),
    "mlm_nsp": (partial(pair_inputs, "nsp"),),
    "mlm_sop": (partial(pair_inputs, "sop"),),
    "mlm_sbo": (boundary_inputs,),
    "rtd": (rtd_inputs,),
}
"""What adds to masked tokens what an objective needs beside them."""


@dataclass(frozen=True)
class MaskedInputs:
    """Masks tokens; `Batch.inputs` has `masked_index` (M,) and `targets` (M,), both int64.

    `masked_index` holds rising flat indices b * S + s of the slots to predict, `targets` their
    original token ids. `parts` add to that.
    """

    data: DataConfig
    vocabulary: Vocabulary
    seed: int
    purpose: Purpose
    parts: tuple[Part, ...] = ()
    pairs: PairRule | None = None

    def __call__(
        self,
        slots: PackedSequences,
        locations: Locations,
        number: int,
        *,
        micro_batch: int,
        places: Ints,
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
            ratio=self.data.mask_prob
            if self.purpose is Purpose.EVAL_MASK
            else schedule.mask_ratio(number, self.data),
        )
        masked_index = np.flatnonzero(selected)
        targets = slots.tokens.reshape(-1)[masked_index]
        num_sequences, seq_len = corrupted.shape
        predicted = {"masked_index": masked_index, "targets": targets}
        hashed: dict[str, npt.NDArray[Any]] = {"documents": slots.documents, "targets": targets}
        key = (self.seed, self.purpose)
        whole = Whole(slots, locations, key, masked_index, predicted, hashed)
        adders = [part(whole) for part in self.parts]
        hashes = sequence_hashes(
            places,
            locations.sample_ids,
            locations.epochs,
            corrupted,
            hashed["documents"],
            masked_index,
            hashed["targets"],
        )
        # All sequences at once until here: a call costs more than a short sequence. Row by row
        # it was 33.9 M tokens a CPU-second at 512 slots, now 53.7 (`python -m benchmarks.loader`).
        firsts = np.arange(0, num_sequences, micro_batch)
        masked_stops = np.searchsorted(masked_index, (firsts + micro_batch) * seq_len).tolist()
        batches, masked_first = [], 0
        for first, masked_stop in zip(firsts.tolist(), masked_stops, strict=True):
            rows, masked = slice(first, first + micro_batch), slice(masked_first, masked_stop)
            documents = slots.documents[rows]
            num_tokens = int(np.count_nonzero(documents))
            of_rows = {name: array[masked] for name, array in predicted.items()}
            of_rows["masked_index"] = of_rows["masked_index"] - first * seq_len
            batch = Batch(
                input_ids=corrupted[rows],
                documents=documents,
                positions=slots.positions[rows],
                segments=None if slots.pairs is None else slots.pairs.segments[rows],
                inputs=of_rows,
                weights={"loss": float(masked_stop - masked_first)},
                counts={"unmasked_documents": int(unmasked_documents[rows].sum())},
                num_tokens=num_tokens,
                # Unsigned sums wrap at 2^64, and so do those over micro-batches and ranks.
                hash=int(hashes[rows].sum()),
            )
            for add in adders:
                add(batch, rows, masked)
            batches.append(batch)
            masked_first = masked_stop
        return batches

    def without_targets(self, batch: Batch) -> Batch:
        """Return the same slots with nothing to predict."""
        nothing = {name: array[:0] for name, array in batch.inputs.items()}
        return batch._replace(inputs=nothing, weights=dict.fromkeys(batch.weights, 0.0))


def train_inputs(config: TrainDataConfig, index: DatasetIndex) -> MaskedInputs:
    """Return the inputs of training: masks and pairs follow from the run's seed."""
    pairs = pair_rule(config.objective, index, config.seed, Purpose.PAIRS)
    given = config.data, index.vocabulary, config.seed, Purpose.MASK
    return MaskedInputs(*given, PARTS[config.objective.kind], pairs)


def eval_inputs(config: EvalDataConfig, index: DatasetIndex) -> MaskedInputs:
    """Return the inputs of evaluations: `mask_prob` of the tokens, whatever training's ratio."""
    pairs = pair_rule(config.objective, index, EVAL_MASK_SEED, Purpose.EVAL_PAIRS)
    given = config.data, index.vocabulary, EVAL_MASK_SEED, Purpose.EVAL_MASK
    return MaskedInputs(*given, PARTS[config.objective.kind], pairs)


def train_steps(
    index: DatasetIndex, config: TrainDataConfig, counts: Mapping[int, Ints] | None = None
) -> TrainSteps:
    """Return the batches of a run, for whoever looks at them outside of training."""
    return TrainSteps(index, config, train_inputs(config, index), counts)
