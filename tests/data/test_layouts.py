"""One run, whatever computes it: ranks, micro-batches, workers and restarts change nothing.

The run crosses epochs of two sources of different weight, and changes of batch and length.
"""

import gc
import itertools
import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.config.data import DataConfig, PhaseConfig
from pipeline.config.runs import PretrainConfig
from pipeline.config.train import TrainConfig
from pipeline.data.counts import sequences_at
from pipeline.data.dataset import Batch
from pipeline.data.format import DatasetIndex
from pipeline.data.run_order import DataRank, TrainSteps
from pipeline.data.workers import Workers
from pipeline.errors import DataError, WorkerError
from pipeline.objectives.inputs import train_inputs
from tests.support.grids import first_in_ci
from tests.support.steps import Row, open_steps, rows_of_step, start_workers, step_on


def _grid(in_ci: list[Any], *axes: tuple[Any, ...]) -> list[Any]:
    """All cases of a grid, first those of CI."""
    return first_in_ci(dict.fromkeys([*in_ci, *itertools.product(*axes)]), len(in_ci))


WORLDS = (1, 2, 3, 4, 8)
BATCH = 96  # splits over 1, 2, 3, 4 and 8 ranks with micro-batches of 1, 2 and 4
STEPS = 60


def _config(dataset: DatasetIndex, micro_batch: int = 1, workers: int = 0) -> PretrainConfig:
    """64 slots; then 128, in growing batches; then 64 again; each time within an epoch."""
    return PretrainConfig(
        run_dir="unused",
        seed=5,
        data=DataConfig(dir=str(dataset.folder), seq_len=64, window_blocks=3, workers=workers,
                        mask_prob_end=0.4, mask_prob_steps=20),
        train=TrainConfig(global_batch=BATCH, micro_batch=micro_batch),
        phases=(
            PhaseConfig(tokens=BATCH * 64 * 11),
            PhaseConfig(tokens=BATCH * 128 * 18, seq_len=128, global_batch=3 * BATCH,
                        ramp_from=BATCH),
            PhaseConfig(tokens=BATCH * 128 * 11, seq_len=128, global_batch=3 * BATCH),
        ),
    )  # fmt: skip


@pytest.fixture(scope="module")
def expected(two_sources: DatasetIndex) -> list[tuple[list[Row], int]]:
    """The run on one rank, micro-batches of 1, no workers."""
    steps = open_steps(two_sources, _config(two_sources))
    return [step_on(steps, cursor, 1) for cursor in _cursors(steps)]


def _cursors(steps: TrainSteps) -> list[int]:
    return [place.cursor for place in itertools.islice(steps.plan.batches_from(0), STEPS)]


def test_the_run_itself(two_sources: DatasetIndex, expected: list[tuple[list[Row], int]]) -> None:
    steps = open_steps(two_sources, _config(two_sources))
    assert [segment.seq_len for segment in steps.order.segments] == [64, 128, 64]
    assert all(segment.leftovers for segment in steps.order.segments[1:])
    assert {len(rows) for rows, _ in expected} == {BATCH, 2 * BATCH, 3 * BATCH}
    epochs = steps.order.epochs(_cursors(steps)[-1])
    assert epochs["large"] > 1.5
    assert epochs["small"] / epochs["large"] == pytest.approx(2.5, rel=0.02)
    assert len({total for _, total in expected}) == STEPS
    by_sample: dict[int, list[Row]] = {}
    for rows, _ in expected:
        for row in rows:
            by_sample.setdefault(row.sample_id, []).append(row)
    again = [rows for rows in by_sample.values() if len(rows) > 1]
    assert len(again) > 500
    for rows in again:
        assert len({row.epoch for row in rows}) == len(rows)
        assert len({row.documents for row in rows}) == 1
        long = np.count_nonzero(np.frombuffer(rows[0].documents, np.int32)) > 40
        assert not long or len({row.masked for row in rows}) == len(rows)


@pytest.mark.parametrize(
    ("world_size", "micro_batch"), _grid([(1, 4), (3, 2), (8, 1)], WORLDS, (1, 2, 4))
)
def test_ranks_and_micro_batches_change_nothing(
    two_sources: DatasetIndex, expected: list[tuple[list[Row], int]], world_size: int,
    micro_batch: int,
) -> None:  # fmt: skip
    steps = open_steps(two_sources, _config(two_sources, micro_batch))
    for cursor, wanted in zip(_cursors(steps), expected, strict=True):
        assert step_on(steps, cursor, world_size) == wanted


@pytest.mark.parametrize(
    ("world_size", "sharing"), _grid([(2, False), (8, True)], (1, 2, 8), (False, True))
)
def test_steps_that_are_made_together_are_those_made_alone(
    two_sources: DatasetIndex, expected: list[tuple[list[Row], int]], world_size: int, sharing: bool
) -> None:
    config = _config(two_sources, micro_batch=4).train_data
    steps = TrainSteps(two_sources, config, train_inputs(config, two_sources), sharing=sharing)
    shares = [DataRank(rank, world_size) for rank in range(world_size)]
    cursors, found, together = _cursors(steps), list[tuple[list[Row], int]](), list[int]()
    while len(found) < len(cursors):
        cursor = cursors[len(found)]
        together.append(min({steps.together(cursor, share) for share in shares}))
        ranks = [steps.micro_batches(cursor, share, steps=together[-1]) for share in shares]
        each = [len(batches) // together[-1] for batches in ranks]
        for k, at in enumerate(cursors[len(found) :][: together[-1]]):
            parts = [batches[k * n : (k + 1) * n] for batches, n in zip(ranks, each, strict=True)]
            found.append(rows_of_step(steps, at, parts))
    assert found == expected
    assert together[:20] == [1] * 20, "the ratio of masks grows"
    assert max(together) > 3


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("world_size", "workers"), _grid([(1, 3), (3, 1)], WORLDS, (1, 3)))
def test_workers_change_nothing(
    two_sources: DatasetIndex, expected: list[tuple[list[Row], int]], world_size: int, workers: int
) -> None:
    steps = open_steps(two_sources, _config(two_sources, 2, workers))
    ranks = [_workers(two_sources, workers, 2, rank, world_size) for rank in range(world_size)]
    try:
        for cursor in _cursors(steps):
            for rank in ranks:
                rank.ask(cursor)
        for cursor, wanted in zip(_cursors(steps), expected, strict=True):
            assert rows_of_step(steps, cursor, [rank.take() for rank in ranks]) == wanted
    finally:
        for rank in ranks:
            rank.close()


@pytest.mark.usefixtures("processes")
def test_50_kills(two_sources: DatasetIndex, expected: list[tuple[list[Row], int]]) -> None:
    layouts = itertools.cycle([(1, 4), (8, 1), (3, 2), (2, 4), (4, 2), (3, 4), (2, 1)])
    cursors = _cursors(open_steps(two_sources, _config(two_sources)))
    context = multiprocessing.get_context("fork")
    for step in range(50):
        world_size, micro_batch = next(layouts)
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_run_from, args=(theirs, two_sources, micro_batch, world_size, cursors[step])
        )
        process.start()
        theirs.close()
        # The step that it resumes at and the next one, then it is killed while it goes on.
        assert [ours.recv(), ours.recv()] == expected[step : step + 2], step
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL


def _run_from(
    pipe: Connection, dataset: DatasetIndex, micro_batch: int, world_size: int, cursor: int
) -> None:
    steps = open_steps(dataset, _config(dataset, micro_batch))
    for place in steps.plan.batches_from(cursor):
        pipe.send(step_on(steps, place.cursor, world_size))


def _workers(
    dataset: DatasetIndex, number: int, micro_batch: int = 4, rank: int = 0, world_size: int = 1
) -> Workers:
    config = _config(dataset, micro_batch, number)
    counts = sequences_at(dataset, config.batches.seq_lens, None)
    return start_workers(number, dataset, config, DataRank(rank, world_size), counts)


@pytest.fixture
def workers(two_sources: DatasetIndex) -> Iterator[Workers]:
    """Two workers that have made a step each."""
    found = _workers(two_sources, 2)
    for cursor in (0, BATCH):
        found.ask(cursor)
    for _ in range(2):
        found.take()
    yield found
    found.close()


@pytest.mark.usefixtures("processes")
def test_a_killed_worker_is_an_error_that_says_so(workers: Workers) -> None:
    os.kill(workers.processes[1].pid or 0, signal.SIGKILL)
    workers.processes[1].join()
    workers.ask(0)
    workers.ask(BATCH)
    assert workers.take()
    with pytest.raises(WorkerError, match=r"data worker 1 of rank 0 .* signal 9 \(SIGKILL\)"):
        workers.take()


@pytest.mark.usefixtures("processes")
def test_memory_of_workers_is_used_again_but_never_under_an_array(workers: Workers) -> None:
    def taken(cursor: int) -> list[Batch]:
        workers.ask(cursor)
        return workers.take()

    last = torch.from_numpy(taken(2 * BATCH)[-1].input_ids)[1:].flatten()
    kept, expected = taken(3 * BATCH)[0].documents[2:, 5:], last.clone()
    copy = kept.copy()
    for cursor in range(4 * BATCH, 11 * BATCH, BATCH):
        taken(cursor)
        gc.collect()
    assert torch.equal(last, expected)
    np.testing.assert_array_equal(kept, copy)
    maps = Path("/proc/self/maps").read_text().count("postnorm-step")
    assert maps == 4, "each of two workers has one file that is kept and one for the others"


@pytest.mark.usefixtures("processes")
def test_workers_outlive_signals_and_not_their_end(workers: Workers) -> None:
    for process in workers.processes:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
            os.kill(process.pid or 0, number)
    workers.ask(0)
    workers.ask(BATCH)
    assert workers.take()
    assert workers.take()
    processes = list(workers.processes)
    workers.ask(0)
    workers.close()
    assert all(process.exitcode is not None for process in processes)


@pytest.mark.usefixtures("processes")
def test_workers_end_when_their_parent_is_killed(two_sources: DatasetIndex) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    parent = context.Process(target=_start_workers, args=(theirs, two_sources))
    parent.start()
    numbers = ours.recv()
    assert parent.pid is not None
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    # On a busy machine a worker may still be importing when its pipe is closed.
    for _ in range(600):
        if not any(Path(f"/proc/{number}").exists() for number in numbers):
            return
        signal.sigtimedwait([], 0.1)
    pytest.fail(f"workers {numbers} outlive the process that started them")


def _start_workers(pipe: Connection, dataset: DatasetIndex) -> None:
    workers = _workers(dataset, 2)
    for cursor in range(0, 20 * BATCH, BATCH):
        workers.ask(cursor)  # they are busy, and block when they hand over what they have made
    pipe.send([process.pid for process in workers.processes])
    signal.pause()


@pytest.mark.usefixtures("processes")
def test_an_error_in_a_worker_is_the_ranks(two_sources: DatasetIndex, tmp_path: Path) -> None:
    sequences_at(two_sources, _config(two_sources).batches.seq_lens, None)  # they are kept
    shutil.copytree(two_sources.folder, tmp_path / "data")
    shutil.rmtree(tmp_path / "data" / "shards")
    workers = _workers(replace(two_sources, folder=tmp_path / "data"), 1)
    workers.ask(0)
    with pytest.raises(DataError, match="does not exist"):
        workers.take()
    workers.close()
