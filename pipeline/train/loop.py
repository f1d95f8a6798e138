"""The training loop: restore, step, log, evaluate, save, stop."""

import logging
import time
from dataclasses import dataclass

import torch

from pipeline.config.batches import BatchPlace
from pipeline.config.run import PretrainConfig
from pipeline.data.batch import MicroBatch
from pipeline.data.batch_records import BatchRecord
from pipeline.data.loader import TrainLoader
from pipeline.errors import EXIT_FINISHED, TrainingError
from pipeline.objectives.mlm import MaskedLanguageModeling
from pipeline.runtime import watchdog
from pipeline.runtime.env import ProcessInfo
from pipeline.train import schedule
from pipeline.train.batch_log import BatchLog
from pipeline.train.checkpoint import CheckpointStore
from pipeline.train.engine import Engine, StepResult
from pipeline.train.metrics import Meter
from pipeline.train.requests import Requests, Wanted
from pipeline.train.state import Clock, TrainState
from pipeline.train.watch import StepNumbers, Watch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """What the loop works with, put together in `build.py`."""

    config: PretrainConfig
    process: ProcessInfo
    engine: Engine
    objective: MaskedLanguageModeling
    train_loader: TrainLoader
    store: CheckpointStore
    batch_log: BatchLog
    requests: Requests
    watch: Watch


def train(parts: Parts, state: TrainState) -> int:
    """Trains from `state` to the end of the run, or until asked to stop.

    Returns:
        An exit code of `pipeline.errors`.

    Raises:
        TrainingError: too many steps in a row had no finite gradient.
        CheckpointError: a save failed.
        DataError: a shard is damaged.
    """
    config, engine = parts.config.train, parts.engine
    intervals = parts.config.monitor
    meter = Meter(engine, parts.process, config.grad_clip)
    clock = Clock(state.elapsed_s)
    saved_step = state.step
    if state.step == 0:
        parts.watch.evaluate(state)
    steps = parts.train_loader.steps_from(state.cursor)
    while not schedule.is_over(state.step, config, state.elapsed_s):
        next_step = state.step + 1
        log = next_step % intervals.log_every_steps == 0 or next_step == config.num_steps
        meter.begin_step()
        watchdog.beat("waiting for data", next_step)
        batches = next(steps)
        meter.have_data(measure_layers=log)

        place = parts.config.batches.at(state.cursor)
        alpha = schedule.alpha(state.step, config.alpha_warmup_steps)
        lr = schedule.learning_rate(state.step, config, state.elapsed_s)
        parts.objective.set_alpha(alpha)
        _seed_dropout(parts, state)
        result = engine.train_step(batches, parts.objective, lr, parts.requests.own())
        wanted = Wanted(*map(bool, result.notes))
        state.advance(place.size, applied=result.applied)
        meter.end_step(result, batches)
        _log_batch(parts, place, batches, state.step if result.applied else None)
        if not result.applied:
            _report_skip(parts, state, result, place)
            continue

        last = False
        if log or wanted.ends:
            watchdog.beat("logging")
            parts.batch_log.flush()
            interval = meter.close_interval(
                result.grad_norm, clock_s=clock.read_s() if parts.process.is_first else 0.0
            )
            state.elapsed_s = interval.clock_s
            last = schedule.is_over(state.step, config, state.elapsed_s)
            numbers = StepNumbers(alpha, lr, result.grad_norm)
            parts.watch.interval(state, place, interval, numbers)
        if state.step % intervals.eval_every_steps == 0 or last:
            parts.watch.evaluate(state)
        ending = wanted.ends and not last
        due = state.step % parts.config.checkpoint.every_steps == 0 or last
        if (due or ending or wanted.save) and state.step != saved_step:
            _save(parts, state)
            saved_step = state.step
        if wanted.save:
            parts.requests.saved()
        if ending:
            return parts.requests.end(wanted, state.step)
    return EXIT_FINISHED


def _seed_dropout(parts: Parts, state: TrainState) -> None:
    """Dropout is a pure function of (seed, cursor, rank): there is no random state to restore."""
    words = (parts.config.seed, state.cursor, parts.process.rank)
    mixed = 0
    for word in words:
        # Two rounds of a 64-bit LCG (Knuth's MMIX constants) keep neighbouring seeds apart.
        mixed = (mixed ^ word) * 6364136223846793005 + 1442695040888963407 & 0xFFFFFFFFFFFFFFFF
    torch.manual_seed(mixed >> 1)


def _log_batch(
    parts: Parts, place: BatchPlace, batches: list[MicroBatch], step: int | None
) -> None:
    parts.batch_log.add(
        BatchRecord(
            batch=place.number, cursor=place.cursor, sequences=place.size, seq_len=place.seq_len,
            step=step, hash=sum(batch.hash for batch in batches) % 2**64,
        )
    )  # fmt: skip


def _report_skip(parts: Parts, state: TrainState, result: StepResult, place: BatchPlace) -> None:
    logger.warning(
        "step %d skipped on all ranks: gradient norm %s; sequences %d to %d are not trained on, "
        "schedules stand still",
        state.step + 1, result.grad_norm, place.cursor, state.cursor - 1,
    )  # fmt: skip
    parts.watch.skipped(state)
    limit = parts.config.train.max_skipped_in_a_row
    if state.skipped_in_a_row >= limit:
        parts.batch_log.flush()
        raise TrainingError(
            f"{limit} steps in a row had no finite gradient (train.max_skipped_in_a_row); the "
            "newest checkpoint is from before; lower train.lr, or lengthen the warm-ups"
        )


def _save(parts: Parts, state: TrainState) -> None:
    started = time.perf_counter()
    watchdog.beat("saving")
    parts.batch_log.flush()  # it must reach to the checkpoint's cursor
    alpha = schedule.alpha(state.step, parts.config.train.alpha_warmup_steps)
    path = parts.store.save(parts.engine, state, alpha)
    logger.info("saved %s in %.1f s", path, time.perf_counter() - started)
