"""Questions about pairs of segments, beside the inputs of masked language modelling.

How pairs are made is told in `pipeline.data.pairs`. B sequences of S slots each, P pairs.
"""

import numpy as np
import numpy.typing as npt

from pipeline.config.objective import ObjectiveConfig, PairKind
from pipeline.data.dataset import AddTo, Batch, Whole
from pipeline.data.format import DatasetIndex
from pipeline.data.packing import PairFields
from pipeline.data.pairs import PairRule, sentence_marks
from pipeline.data.random import Purpose
from pipeline.tokenizer.load import load_tokenizer

_PAIRS_BIT = 24
"""Above the documents' numbers, of which a sequence of 65,536 slots has fewer than 2^16."""


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
