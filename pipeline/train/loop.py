"""The training loop: restore, step, log, evaluate, save, stop."""

import logging
from dataclasses import dataclass

import torch

from pipeline.checkpoints.save import Saver
from pipeline.checkpoints.state import TrainState
from pipeline.config import schedule
from pipeline.config.data import BatchPlace
from pipeline.config.runs import PretrainConfig
from pipeline.data.loader import MicroBatch, TrainLoader
from pipeline.data.record import BatchRecord
from pipeline.errors import EXIT_FINISHED
from pipeline.model.encoder import Encoder
from pipeline.objectives.base import Objective
from pipeline.runtime import watchdog
from pipeline.runtime.env import ProcessInfo
from pipeline.train.batch_log import BatchLog
from pipeline.train.engine import Engine
from pipeline.train.faults import LeftOut, Rescue
from pipeline.train.metrics import Interval, Meter
from pipeline.train.requests import Requests, Wanted
from pipeline.train.timing import Clock
from pipeline.train.watch import StepNumbers, Watch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """What the loop works with, put together in `build.py`."""

    config: PretrainConfig
    process: ProcessInfo
    engine: Engine
    encoder: Encoder
    objective: Objective
    train_loader: TrainLoader
    saver: Saver
    batch_log: BatchLog
    requests: Requests
    watch: Watch
    left_out: LeftOut
    rescue: Rescue


def train(parts: Parts, state: TrainState) -> int | None:
    """Trains from `state` to the end of the run, or until asked to stop.

    Returns:
        An exit code of `pipeline.errors`; None if the loss jumped and the run has to go back: the
        ledger says which batches are left out then.

    Raises:
        TrainingError: too many steps in a row had no finite gradient, or the loss jumps whatever
            is left out.
        CheckpointError: a save failed.
        DataError: a shard is damaged.
    """
    config, engine = parts.config.train, parts.engine
    intervals = parts.config.monitor
    meter = Meter(engine, parts.process, parts.objective, config.grad_clip)
    clock = Clock(state.elapsed_s)
    if state.step == 0:
        _set_alpha(parts, state)
        parts.watch.evaluate(state)
    steps = parts.train_loader.steps_from(state.cursor)
    while not schedule.is_over(state.step, config, state.elapsed_s):
        place = parts.config.batches.at(state.cursor)
        if place.number in parts.left_out:
            _leave_out(parts, state, place, next(steps))
            continue
        next_step = state.step + 1
        regular = next_step % intervals.log_every_steps == 0
        save = next_step % parts.config.checkpoint.every_steps == 0
        # A checkpoint holds the losses of all steps before it.
        log = regular or save or next_step == config.num_steps
        meter.begin_step()
        watchdog.beat("waiting for data", next_step)
        batches = next(steps)
        meter.have_data(measure_layers=log)

        alpha = _set_alpha(parts, state)
        lr = schedule.learning_rate(state.step, config, state.elapsed_s)
        _seed_dropout(parts, state)
        result = engine.train_step(batches, parts.objective, lr, parts.requests.own())
        wanted = Wanted(*map(bool, result.notes))
        state.advance(place.size, applied=result.applied)
        meter.end_step(result, place.number, batches)
        _log_batch(parts, place, batches, state.step if result.applied else None)
        if not result.applied:
            parts.rescue.report_skip(state, result, place)
            continue

        last = False
        if log or wanted.saves:
            numbers = StepNumbers(alpha, lr, result.grad_norm)
            interval = _close_interval(parts, state, place, numbers, meter, clock)
            if parts.rescue.must_go_back(state, interval, decide=regular):
                return None
            last = schedule.is_over(state.step, config, state.elapsed_s)
        if state.step % intervals.eval_every_steps == 0 or last:
            _set_alpha(parts, state)  # that of the next step, as a checkpoint here has it
            parts.watch.evaluate(state)
        if save or last or wanted.saves:
            _save(parts, state)
        if wanted.save:
            parts.saver.publish()
            parts.requests.saved()
        if wanted.ends and not last:
            _finish_saves(parts, stopping=True)
            return parts.requests.end(wanted, state.step)
    _finish_saves(parts, stopping=False)
    return EXIT_FINISHED


def _set_alpha(parts: Parts, state: TrainState) -> float:
    """Gives the encoder the alpha of the step after `state`; nobody else sets it in training."""
    alpha = schedule.alpha(state.step, parts.config.train.alpha_warmup_steps)
    parts.encoder.set_alpha(alpha)
    return alpha


def _seed_dropout(parts: Parts, state: TrainState) -> None:
    """Dropout is a pure function of (seed, cursor, rank): there is no random state to restore."""
    words = (parts.config.seed, state.cursor, parts.process.rank)
    mixed = 0
    for word in words:
        # Two rounds of a 64-bit LCG (Knuth's MMIX constants) keep neighbouring seeds apart.
        mixed = (mixed ^ word) * 6364136223846793005 + 1442695040888963407 & 0xFFFFFFFFFFFFFFFF
    torch.manual_seed(mixed >> 1)


def _leave_out(
    parts: Parts, state: TrainState, place: BatchPlace, batches: list[MicroBatch]
) -> None:
    """Passes over a batch: it is read and logged, so that its hash tells what it was."""
    watchdog.beat("leaving out a batch")
    logger.info("batch %d is left out", place.number)
    state.leave_out(place.size)
    _log_batch(parts, place, batches, None)


def _log_batch(
    parts: Parts, place: BatchPlace, batches: list[MicroBatch], step: int | None
) -> None:
    parts.batch_log.add(
        BatchRecord(
            batch=place.number, cursor=place.cursor, sequences=place.size, seq_len=place.seq_len,
            step=step, hash=sum(batch.hash for batch in batches) % 2**64,
        )
    )  # fmt: skip


def _close_interval(
    parts: Parts,
    state: TrainState,
    place: BatchPlace,
    numbers: StepNumbers,
    meter: Meter,
    clock: Clock,
) -> Interval:
    """Writes down what happened since the last time, and publishes saves that are written."""
    watchdog.beat("logging")
    parts.batch_log.flush()
    interval = meter.close_interval(
        numbers.grad_norm, clock_s=clock.read_s() if parts.process.is_first else 0.0
    )
    state.elapsed_s = interval.clock_s
    parts.watch.interval(state, place, interval, numbers)
    parts.saver.poll()
    parts.watch.saves(parts.saver.take_numbers())
    return interval


def _save(parts: Parts, state: TrainState) -> None:
    watchdog.beat("saving")
    parts.batch_log.flush()  # it must reach to the checkpoint's cursor
    alpha = schedule.alpha(state.step, parts.config.train.alpha_warmup_steps)
    parts.saver.save(parts.engine, state, alpha)


def _finish_saves(parts: Parts, *, stopping: bool) -> None:
    watchdog.beat("waiting for saves")
    parts.saver.finish(stopping=stopping)
    parts.watch.saves(parts.saver.take_numbers())
