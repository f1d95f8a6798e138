"""Where span boundaries predict tokens, beside the inputs of masked language modelling.

B sequences of S slots each, M slots to be predicted, K of them from the edges of their runs.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.data.dataset import AddTo, Batch, Whole
from pipeline.data.order import Ints

MAX_BOUNDARY_TOKENS = 20
"""Runs of more tokens have no boundary targets."""


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
