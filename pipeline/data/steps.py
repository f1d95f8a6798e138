"""What each rank computes in each step, as arrays: a pure function of the cursor.

A step's batch is the run's places from the cursor on, as many as the batch has. Rank r takes the
r-th contiguous share of them, cut into micro-batches. There is no state; any step can be asked for
at any time. Nothing here needs torch: so worker processes are small, and steps can be looked at
without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.config.data import TrainDataConfig
from pipeline.data.counts import sequences_at
from pipeline.data.dataset import Batch, Inputs, PackedSplit
from pipeline.data.format import DatasetIndex
from pipeline.data.order import Ints
from pipeline.data.run_order import RunOrder


@dataclass(frozen=True)
class Share:
    """Which part of every global batch a rank computes."""

    rank: int
    world_size: int


class TrainSteps:
    """Training batches."""

    def __init__(
        self,
        index: DatasetIndex,
        config: TrainDataConfig,
        inputs: Inputs,
        counts: Mapping[int, Ints] | None = None,
    ) -> None:
        """Opens the training split; see `PackedSplit` and `RunOrder` for what can fail.

        Args:
            index: of the dataset.
            config: of the order and the batches.
            inputs: makes the model's inputs from sequences.
            counts: `sequences_at` of every length of the run; by default it is asked.
        """
        if counts is None:
            counts = sequences_at(index, config.batches.seq_lens, None)
        self.plan = config.batches
        self.split = PackedSplit(index, "train", config.data, counts)
        self.order = RunOrder(index, config, self.split)
        self._inputs = inputs

    def micro_batches(self, cursor: int, share: Share) -> list[Batch]:
        """A rank's micro-batches of the step that starts at a cursor."""
        place = self.plan.at(cursor)
        segment = self.order.segment(cursor)
        per_rank = place.size // share.world_size
        first = share.rank * per_rank
        locations = segment.locate(cursor + first, per_rank)
        slots = self.split.slots(locations, segment.seq_len, segment.leftovers)
        return self._inputs(
            slots, locations, place.number, micro_batch=place.micro_batch, first_place=first
        )
