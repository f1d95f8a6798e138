"""What objectives need beside the inputs of masked language modelling, a part each, without torch.

B sequences of S slots each, M slots to be predicted, K of them from the edges of their runs, P
pairs (`pipeline.data.pairs` says how they are made).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.config.objective import ObjectiveConfig, PairKind
from pipeline.data.dataset import AddTo, Batch, Whole
from pipeline.data.format import DatasetIndex
from pipeline.data.order import Ints, Locations
from pipeline.data.packing import PairFields
from pipeline.data.pairs import PairRule, sentence_marks
from pipeline.data.random import Purpose, philox
from pipeline.tokenizer.load import load_tokenizer

MAX_BOUNDARY_TOKENS = 20
"""Runs of more tokens have no boundary targets."""
# Above the documents' numbers, of which a sequence of 65,536 slots has fewer than 2^16.
_PAIRS_BIT = 24
# Bits of a uniform draw: fp32 holds all its values.
_DRAW_BITS = 24
_HALF = 32
"""Bits of half a sample id, and of a target where it is hashed, below its draw."""
_LOW = (1 << _HALF) - 1
# Purposes of their own, so that no draw follows from whether its slot is masked.
_DRAWN_FOR = {Purpose.MASK: Purpose.GENERATOR, Purpose.EVAL_MASK: Purpose.EVAL_GENERATOR}


# Where span boundaries predict tokens


@dataclass(frozen=True)
class Boundaries:
    """K masked tokens that are to be predicted from the edges of their runs, in rising order."""

    index: Ints
    """(K,) which of the M masked slots each is."""
    left: Ints
    """(K,) flat index b * S + s of the slot before the run."""
    right: Ints
    """(K,) flat index of the slot after the run."""
    place: Ints
    """(K,) place in the run from the left, from 0."""
    too_long: Ints
    """(R,) which of the M masked slots begin runs that are too long to be predicted."""


def find_boundaries(masked: Ints, documents: npt.NDArray[np.int32]) -> Boundaries:
    """Find runs of masked slots side by side in a document, and the slots that bound them.

    Spans that touch are one run, as in SpanBERT's code (facebookresearch/SpanBERT,
    `fairseq/data/masking.py`, merge_intervals): the slot between them is masked, so it cannot be an
    edge. That code predicts the first 15 tokens of a longer run. Here a run is predicted as a whole
    or, if it has more than 20 tokens, not at all. There a run at either end of a text has no
    targets; here [CLS] and [SEP] bound it.

    Args:
        masked: (M,) rising flat indices b * S + s.
        documents: (B, S) as in `Batch`.
    """
    num_slots, of_slot = documents.shape[1], documents.reshape(-1)
    begins = np.ones(len(masked), np.bool_)
    begins[1:] = (
        (np.diff(masked) != 1)
        | (of_slot[masked[1:]] != of_slot[masked[:-1]])
        | (masked[1:] % num_slots == 0)
    )
    starts = np.flatnonzero(begins)
    lengths = np.diff(starts, append=len(masked))
    first, length = np.repeat(masked[starts], lengths), np.repeat(lengths, lengths)
    left, right = first - 1, first + length
    # An edge has to be a slot of the same row and document; [CLS] and [SEP] always are.
    is_inside = (first % num_slots != 0) & (right % num_slots != 0)
    index = np.flatnonzero(is_inside & (length <= MAX_BOUNDARY_TOKENS))
    own = of_slot[masked[index]]
    index = index[(of_slot[left[index]] == own) & (of_slot[right[index]] == own)]
    return Boundaries(
        index,
        left[index],
        right[index],
        (masked - first)[index],
        starts[lengths > MAX_BOUNDARY_TOKENS],
    )


def boundary_inputs(whole: Whole) -> AddTo:
    """Add the fields of `Boundaries` by names such as `boundary_left`; `hashed` implies them.

    `boundary_index` counts the masked slots of the micro-batch, so targets are shared. The weight
    of `sbo` is the number of targets; `long_runs` counts runs that are too long to have any.
    """
    documents = whole.slots.documents
    found, num_slots = find_boundaries(whole.masked, documents), documents.shape[1]

    def add(batch: Batch, rows: slice, masked: slice) -> None:
        first_slot, ends = rows.start * num_slots, (masked.start, masked.stop)
        mine = slice(*np.searchsorted(found.index, ends).tolist())
        inputs = {
            "boundary_index": found.index[mine] - masked.start,
            "boundary_left": found.left[mine] - first_slot,
            "boundary_right": found.right[mine] - first_slot,
            "boundary_place": found.place[mine],
        }
        first_long, stop_long = np.searchsorted(found.too_long, ends).tolist()
        batch.inputs.update(inputs)
        batch.weights["sbo"] = float(len(inputs["boundary_index"]))
        batch.counts["long_runs"] = stop_long - first_long

    return add


# Questions about pairs of segments


def pair_inputs(kind: PairKind, whole: Whole) -> AddTo:
    """Add `pair_first` (P,) and `pair_labels` (P,), both int64; the hash covers the pairs.

    They are rising flat indices b * S + s of the [CLS] of pairs, and 1 if the second segment does
    not follow the first, 0 if it does. The weight of the kind is the number of pairs.
    """
    pairs = whole.slots.pairs
    assert pairs is not None
    whole.hashed["documents"] = _marked(whole.hashed["documents"], pairs)

    def add(batch: Batch, rows: slice, masked: slice) -> None:
        mine = PairFields._make(array[rows] for array in pairs)
        labels = mine.labels.reshape(-1)
        first = np.flatnonzero(labels >= 0)
        inputs = {"pair_first": first, "pair_labels": labels[first].astype(np.int64)}
        in_sentence, too_short, alone = mine.counts.sum(axis=0).tolist()
        counts = {
            "num_pairs": len(first),
            "num_random" if kind == "nsp" else "num_swapped": int(inputs["pair_labels"].sum()),
            "num_cut_in_sentence": in_sentence,
            "num_unpaired": too_short,
        }
        if kind == "nsp":
            counts["num_without_other"] = alone
        batch.inputs.update(inputs)
        batch.weights[kind] = float(len(first))
        batch.counts.update(counts)

    return add


def _marked(documents: npt.NDArray[np.int32], pairs: PairFields) -> npt.NDArray[np.int32]:
    """Put segments and labels above the documents' numbers, so that a hash covers them."""
    # Five at most, three bits above 24: the sign stays free, as the hash needs it.
    marks = pairs.segments + 2 * (pairs.labels.astype(np.int64) + 1)
    return documents | (marks << _PAIRS_BIT).astype(np.int32)


def pair_rule(
    objective: ObjectiveConfig, index: DatasetIndex, seed: int, purpose: Purpose
) -> PairRule | None:
    """Return what makes the pairs of a split; None: the objective has none."""
    if objective.pairs is None:
        return None
    tokenizer = load_tokenizer(index.folder / index.tokenizer_file)
    marks = sentence_marks(tokenizer.piece(token) for token in range(index.vocab_size))
    return PairRule(objective.pairs, seed, purpose, marks)


# Draws of replaced-token detection


def rtd_inputs(whole: Whole) -> AddTo:
    """Add `uniform` (M,), fp32 in [0, 1), one for each slot to predict.

    The generator's probabilities become tokens at these numbers (`pipeline.objectives.rtd`).

    The weight of `discriminator` is the number of tokens: it judges all of them, masked or not.
    """
    seq_len = whole.slots.tokens.shape[1]
    # Drawn here, as the masks are, a step needs no random state: it is the same on any number of
    # ranks and in any micro-batch.
    draws = _draws(whole.masked, whole.locations, seq_len, whole.key)
    whole.predicted["uniform"] = (draws * 2.0**-_DRAW_BITS).astype(np.float32)
    # Equal records mean equal tokens put in, as far as the generators are equal.
    whole.hashed["targets"] = whole.hashed["targets"] | draws << _HALF
    return _with_weight


def _draws(masked: Ints, locations: Locations, seq_len: int, key: tuple[int, Purpose]) -> Ints:
    """Draw a whole number below 2^24 for each slot to predict.

    Args:
        masked: (M,) int64 flat indices b * S + s.
        locations: of the B sequences. A counter is slot, epoch, and the sample id in two words.
        seq_len: S.
        key: seed and purpose of the masks; the draws have another purpose.

    Returns:
        (M,) int64.
    """
    row, slot = np.divmod(masked, seq_len)
    sample_ids = locations.sample_ids[row]
    counter = (slot, locations.epochs[row], sample_ids & _LOW, sample_ids >> _HALF)
    seed, purpose = key
    words, *_ = philox(counter, (seed, _DRAWN_FOR[purpose]))
    return words.astype(np.int64) >> (_HALF - _DRAW_BITS)


def _with_weight(batch: Batch, rows: slice, masked: slice) -> None:
    """Add the weight alone: a micro-batch has its part of `uniform` as of all that is predicted."""
    batch.weights["discriminator"] = float(batch.num_tokens)
