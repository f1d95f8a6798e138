"""Makes the model's inputs of masked language modelling from packed slots, without torch.

Replaced-token detection also needs one draw for each slot to predict.

B sequences of S slots each, M slots to be predicted, P pairs of segments.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.config import schedule
from pipeline.config.data import DataConfig, EvalDataConfig, TrainDataConfig
from pipeline.config.objective import MLM, ObjectiveConfig, PairKind
from pipeline.data.dataset import Batch
from pipeline.data.format import DatasetIndex, Vocabulary
from pipeline.data.masking import Sequences, mask_tokens
from pipeline.data.order import Ints, Locations
from pipeline.data.packing import PackedSequences, PairFields
from pipeline.data.pairs import PairRule, sentence_marks
from pipeline.data.random import Purpose, philox
from pipeline.data.record import sequence_hashes
from pipeline.data.run_order import TrainSteps
from pipeline.tokenizer.load import load_tokenizer

EVAL_MASK_SEED = 0
"""Not the run's seed: the evaluation masks and pairs are the same for every run."""
_PAIRS_BIT = 24
"""Above the documents' numbers, of which a sequence of 65,536 slots has fewer than 2^16."""

_DRAW_BITS = 24
"""Bits of a uniform draw: fp32 holds all its values."""
_HALF = 32
_LOW = (1 << _HALF) - 1


MAX_BOUNDARY_TOKENS = 20
"""Runs of more tokens have no boundary targets."""


@dataclass(frozen=True)
class Boundaries:
    """K masked tokens that are to be predicted from the edges of their runs, in rising order."""

    index: npt.NDArray[np.int64]
    """(K,) which of the M masked slots each is."""
    left: npt.NDArray[np.int64]
    """(K,) flat index b * S + s of the slot before the run."""
    right: npt.NDArray[np.int64]
    """(K,) flat index of the slot after the run."""
    place: npt.NDArray[np.int64]
    """(K,) place in the run from the left, from 0."""
    too_long: npt.NDArray[np.int64]
    """(R,) which of the M masked slots begin runs that are too long to be predicted."""


def find_boundaries(
    masked_index: npt.NDArray[np.int64], documents: npt.NDArray[np.int32]
) -> Boundaries:
    """Find runs of masked slots side by side in a document, and the slots that bound them.

    Spans that touch are one run, as in SpanBERT's code (facebookresearch/SpanBERT,
    `fairseq/data/masking.py`, merge_intervals): the slot between them is masked, so it cannot be an
    edge. That code predicts the first 15 tokens of a longer run. Here a run is predicted as a whole
    or, if it has more than 20 tokens, not at all. There a run at either end of a text has no
    targets; here [CLS] and [SEP] bound it.

    Args:
        masked_index: (M,) rising flat indices b * S + s.
        documents: (B, S) as in `Batch`.
    """
    num_slots, of_slot = documents.shape[1], documents.reshape(-1)
    begins = np.ones(len(masked_index), np.bool_)
    begins[1:] = (
        (np.diff(masked_index) != 1)
        | (of_slot[masked_index[1:]] != of_slot[masked_index[:-1]])
        | (masked_index[1:] % num_slots == 0)
    )
    starts = np.flatnonzero(begins)
    lengths = np.diff(starts, append=len(masked_index))
    first, length = np.repeat(masked_index[starts], lengths), np.repeat(lengths, lengths)
    left, right = first - 1, first + length
    # An edge has to be a slot of the same row and document; [CLS] and [SEP] always are.
    is_inside = (first % num_slots != 0) & (right % num_slots != 0)
    index = np.flatnonzero(is_inside & (length <= MAX_BOUNDARY_TOKENS))
    own = of_slot[masked_index[index]]
    index = index[(of_slot[left[index]] == own) & (of_slot[right[index]] == own)]
    return Boundaries(
        index,
        left[index],
        right[index],
        (masked_index - first)[index],
        starts[lengths > MAX_BOUNDARY_TOKENS],
    )


@dataclass(frozen=True)
class MaskedInputs:
    """Masks tokens; `Batch.inputs` has `masked_index` (M,) and `targets` (M,), both int64.

    `masked_index` holds rising flat indices b * S + s of the slots to predict, `targets` their
    original token ids.
    With rtd there is also `uniform` (M,), fp32 in [0, 1): the draws that turn the generator's
    probabilities into tokens. The weight of `discriminator` is the number of tokens.
    With pairs it also has `pair_first` (P,) and `pair_labels` (P,), both int64: rising flat indices
    of the [CLS] of pairs, and 1 if the second segment does not follow the first, 0 if it does.
    With mlm_sbo there are the fields of `Boundaries`, by names such as `boundary_left`;
    `boundary_index` counts the masked slots of the micro-batch, so targets are shared.
    `long_runs` counts runs that are too long to have boundary targets.
    """

    data: DataConfig
    vocabulary: Vocabulary
    seed: int
    purpose: Purpose
    objective: ObjectiveConfig = MLM
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
            ratio=self._ratio(number),
        )
        masked_index = np.flatnonzero(selected)
        targets = slots.tokens.reshape(-1)[masked_index]
        num_sequences, seq_len = corrupted.shape
        predicted = {"masked_index": masked_index, "targets": targets}
        hashed = targets
        if self.objective.kind == "rtd":
            draws = self._draws(masked_index, locations, seq_len)
            predicted["uniform"] = (draws * 2.0**-_DRAW_BITS).astype(np.float32)
            hashed = targets | draws << _HALF
        hashes = sequence_hashes(
            places,
            locations.sample_ids,
            locations.epochs,
            corrupted,
            slots.documents if slots.pairs is None else _marked(slots.documents, slots.pairs),
            masked_index,
            hashed,
        )
        boundaries = None
        if self.objective.kind == "mlm_sbo":
            # They follow from what is hashed above.
            boundaries = find_boundaries(masked_index, slots.documents)
        # All sequences at once until here: a call costs more than a short sequence.
        firsts = np.arange(0, num_sequences, micro_batch)
        masked_stops = np.searchsorted(masked_index, (firsts + micro_batch) * seq_len).tolist()
        batches, masked_first = [], 0
        for first, masked_stop in zip(firsts.tolist(), masked_stops, strict=True):
            rows, masked = slice(first, first + micro_batch), slice(masked_first, masked_stop)
            documents = slots.documents[rows]
            num_tokens = int(np.count_nonzero(documents))
            of_rows = {name: array[masked] for name, array in predicted.items()}
            of_rows["masked_index"] = of_rows["masked_index"] - first * seq_len
            weights = {"loss": float(masked_stop - masked_first)}
            if self.objective.kind == "rtd":
                weights["discriminator"] = float(num_tokens)
            batch = Batch(
                input_ids=corrupted[rows],
                documents=documents,
                positions=slots.positions[rows],
                segments=None,
                inputs=of_rows,
                weights=weights,
                counts={"unmasked_documents": int(unmasked_documents[rows].sum())},
                num_tokens=num_tokens,
                hash=int(hashes[rows].sum()),
            )
            if self.pairs is not None and slots.pairs is not None:
                mine = PairFields._make(array[rows] for array in slots.pairs)
                batch = _with_pairs(batch, mine, self.pairs.kind)
            if boundaries is not None:
                batch = _with_boundaries(batch, boundaries, masked, first * seq_len)
            batches.append(batch)
            masked_first = masked_stop
        return batches

    def without_targets(self, batch: Batch) -> Batch:
        """Return the same slots with nothing to predict."""
        nothing = {name: array[:0] for name, array in batch.inputs.items()}
        return batch._replace(inputs=nothing, weights=dict.fromkeys(batch.weights, 0.0))

    def _draws(
        self, masked_index: npt.NDArray[np.int64], locations: Locations, seq_len: int
    ) -> npt.NDArray[np.int64]:
        """Draw a whole number below 2^24 for each slot to predict."""
        row, slot = np.divmod(masked_index, seq_len)
        sample_ids = locations.sample_ids[row]
        counter = (slot, locations.epochs[row], sample_ids & _LOW, sample_ids >> _HALF)
        words, *_ = philox(counter, (self.seed, _DRAWN_FOR[self.purpose]))
        return words.astype(np.int64) >> (_HALF - _DRAW_BITS)

    def _ratio(self, number: int) -> float:
        if self.purpose is Purpose.EVAL_MASK:
            return self.data.mask_prob
        return schedule.mask_ratio(number, self.data)


_DRAWN_FOR = {Purpose.MASK: Purpose.GENERATOR, Purpose.EVAL_MASK: Purpose.EVAL_GENERATOR}


def _marked(documents: npt.NDArray[np.int32], pairs: PairFields) -> npt.NDArray[np.int32]:
    """Put segments and labels above the documents' numbers, so that a hash covers them."""
    marks = pairs.segments + 2 * (pairs.labels.astype(np.int64) + 1)
    return documents | (marks << _PAIRS_BIT).astype(np.int32)


def _with_pairs(batch: Batch, pairs: PairFields, kind: PairKind) -> Batch:
    """Add what the loss of pairs needs, and what the log says of them."""
    labels = pairs.labels.reshape(-1)
    first = np.flatnonzero(labels >= 0)
    inputs = {"pair_first": first, "pair_labels": labels[first].astype(np.int64)}
    in_sentence, too_short, alone = pairs.counts.sum(axis=0).tolist()
    counts = {
        "num_pairs": len(first),
        "num_random" if kind == "nsp" else "num_swapped": int(inputs["pair_labels"].sum()),
        "num_cut_in_sentence": in_sentence,
        "num_unpaired": too_short,
    }
    if kind == "nsp":
        counts["num_without_other"] = alone
    return batch._replace(
        segments=pairs.segments,
        inputs=batch.inputs | inputs,
        weights=batch.weights | {kind: float(len(first))},
        counts=batch.counts | counts,
    )


def _pair_rule(
    objective: ObjectiveConfig, index: DatasetIndex, seed: int, purpose: Purpose
) -> PairRule | None:
    if objective.pairs is None:
        return None
    tokenizer = load_tokenizer(index.folder / index.tokenizer_file)
    marks = sentence_marks(tokenizer.piece(token) for token in range(index.vocab_size))
    return PairRule(objective.pairs, seed, purpose, marks)


def _with_boundaries(batch: Batch, whole: Boundaries, masked: slice, first_slot: int) -> Batch:
    """Add what a micro-batch has of the boundaries; `masked` are its masked slots."""
    ends = (masked.start, masked.stop)
    mine = slice(*np.searchsorted(whole.index, ends).tolist())
    inputs = {
        "boundary_index": whole.index[mine] - masked.start,
        "boundary_left": whole.left[mine] - first_slot,
        "boundary_right": whole.right[mine] - first_slot,
        "boundary_place": whole.place[mine],
    }
    first_long, stop_long = np.searchsorted(whole.too_long, ends).tolist()
    return batch._replace(
        inputs=batch.inputs | inputs,
        weights=batch.weights | {"sbo": float(len(inputs["boundary_index"]))},
        counts=batch.counts | {"long_runs": stop_long - first_long},
    )


def train_inputs(config: TrainDataConfig, index: DatasetIndex) -> MaskedInputs:
    """Return the inputs of training: masks and pairs follow from the run's seed."""
    pairs = _pair_rule(config.objective, index, config.seed, Purpose.PAIRS)
    return MaskedInputs(
        config.data, index.vocabulary, config.seed, Purpose.MASK, config.objective, pairs
    )


def eval_inputs(config: EvalDataConfig, index: DatasetIndex) -> MaskedInputs:
    """Return the inputs of evaluations: `mask_prob` of the tokens, whatever training's ratio."""
    pairs = _pair_rule(config.objective, index, EVAL_MASK_SEED, Purpose.EVAL_PAIRS)
    given = config.data, index.vocabulary, EVAL_MASK_SEED, Purpose.EVAL_MASK
    return MaskedInputs(*given, config.objective, pairs)


def train_steps(
    index: DatasetIndex, config: TrainDataConfig, counts: Mapping[int, Ints] | None = None
) -> TrainSteps:
    """Return the batches of a run, for whoever looks at them outside of training."""
    return TrainSteps(index, config, train_inputs(config, index), counts)
