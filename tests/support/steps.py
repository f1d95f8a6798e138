"""Steps of a run as plain values, put together from the parts that ranks compute."""

from collections.abc import Iterable
from typing import NamedTuple

from pipeline.config.runs import PretrainConfig
from pipeline.data.dataset import Batch
from pipeline.data.format import DatasetIndex
from pipeline.data.steps import Share, TrainSteps


class Row(NamedTuple):
    """A sequence of a step as the model sees it."""

    epoch: int
    sample_id: int
    tokens: bytes
    documents: bytes
    masked: tuple[int, ...]
    targets: tuple[int, ...]


def open_steps(dataset: DatasetIndex, config: PretrainConfig) -> TrainSteps:
    """What every rank opens."""
    return TrainSteps(dataset, config.train_data)


def rows_of_step(
    steps: TrainSteps, cursor: int, parts: Iterable[Iterable[Batch]]
) -> tuple[list[Row], int]:
    """A step's sequences in order, and its hash, from the micro-batches of its ranks in order."""
    place = steps.plan.at(cursor)
    ids = steps.order.segment(cursor).locate(cursor, place.size)
    rows: list[Row] = []
    total = 0
    for batch in (batch for part in parts for batch in part):
        total += batch.hash
        for row in range(len(batch.input_ids)):
            first = row * place.seq_len
            mine = (batch.masked_index >= first) & (batch.masked_index < first + place.seq_len)
            number = len(rows)
            rows.append(
                Row(
                    int(ids.epochs[number]),
                    int(ids.sample_ids[number]),
                    batch.input_ids[row].tobytes(),
                    batch.documents[row].tobytes(),
                    tuple((batch.masked_index[mine] - first).tolist()),
                    tuple(batch.targets[mine].tolist()),
                )
            )
    assert len(rows) == place.size
    return rows, total % 2**64


def step_on(steps: TrainSteps, cursor: int, world_size: int) -> tuple[list[Row], int]:
    """A step computed by so many ranks."""
    parts = [steps.micro_batches(cursor, Share(rank, world_size)) for rank in range(world_size)]
    return rows_of_step(steps, cursor, parts)
