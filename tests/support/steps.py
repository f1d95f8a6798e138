"""Steps of a run as plain values, put together from the parts that ranks compute."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from pipeline.config.runs import PretrainConfig
from pipeline.data.dataset import Batch
from pipeline.data.format import DatasetIndex
from pipeline.data.loader import EvalLoader, TrainLoader
from pipeline.data.run_order import DataRank, TrainSteps
from pipeline.data.workers import Workers
from pipeline.objectives.inputs import eval_inputs, train_inputs, train_steps


class Row(NamedTuple):
    """A sequence of a step as the model sees it."""

    epoch: int
    sample_id: int
    tokens: bytes
    documents: bytes
    positions: bytes
    masked: tuple[int, ...]
    targets: tuple[int, ...]


def open_steps(dataset: DatasetIndex, config: PretrainConfig) -> TrainSteps:
    return train_steps(dataset, config.train_data)


def train_loader(dataset: DatasetIndex, config: PretrainConfig, *rest: Any) -> TrainLoader:
    """The training loader of a run with masked language modelling; `rest` as `TrainLoader`."""
    return TrainLoader(dataset, config.train_data, train_inputs(config.train_data, dataset), *rest)


def start_workers(
    number: int, dataset: DatasetIndex, config: PretrainConfig, *rest: Any
) -> Workers:
    """Start processes that make a run's batches; `rest` is that of `Workers`."""
    inputs = train_inputs(config.train_data, dataset)
    return Workers(number, dataset, config.train_data, inputs, *rest)


def eval_loader(dataset: DatasetIndex, config: PretrainConfig, *rest: Any) -> EvalLoader:
    """The held-out text of such a run."""
    return EvalLoader(dataset, config.eval_data, eval_inputs(config.eval_data, dataset), *rest)


def rows_of_step(
    steps: TrainSteps, cursor: int, parts: Iterable[Iterable[Batch]]
) -> tuple[list[Row], int]:
    """A step's sequences in order, and its hash, from the micro-batches of its ranks in order.

    Epochs and ids are those of the places, whatever rank computes them.
    """
    place, parts = steps.plan.at(cursor), list(parts)
    ids = steps.order.segment(cursor).locate(cursor, place.size)
    shares = [DataRank(rank, len(parts)) for rank in range(len(parts))]
    places = np.concatenate([steps.located(cursor, share)[1] for share in shares]).tolist()
    rows: list[Row] = []
    total = 0
    for batch in (batch for part in parts for batch in part):
        total += batch.hash
        for row in range(len(batch.input_ids)):
            first = row * place.seq_len
            mine = (batch.inputs["masked_index"] >= first) & (
                batch.inputs["masked_index"] < first + place.seq_len
            )
            number = places[len(rows)]
            rows.append(Row(
                            int(ids.epochs[number]), int(ids.sample_ids[number]),
                            batch.input_ids[row].tobytes(), batch.documents[row].tobytes(),
                            batch.positions[row].tobytes(),
                            tuple((batch.inputs["masked_index"][mine] - first).tolist()),
                            tuple(batch.inputs["targets"][mine].tolist()),
                        ))  # fmt: skip
    assert sorted(places) == list(range(place.size))
    return [row for _, row in sorted(zip(places, rows, strict=True))], total % 2**64


def step_on(steps: TrainSteps, cursor: int, world_size: int) -> tuple[list[Row], int]:
    parts = [steps.micro_batches(cursor, DataRank(rank, world_size)) for rank in range(world_size)]
    return rows_of_step(steps, cursor, parts)
