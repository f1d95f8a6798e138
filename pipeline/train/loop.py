"""The training loop: restore, step, log, evaluate, save, stop."""

import logging
from dataclasses import dataclass

import torch

from pipeline.config.batches import BatchPlace
from pipeline.config.run import PretrainConfig
from pipeline.data.batch import MicroBatch
from pipeline.data.batch_records import BatchRecord
from pipeline.data.loader import TrainLoader
from pipeline.errors import EXIT_FINISHED, EXIT_PREEMPTED
from pipeline.objectives.mlm import MaskedLanguageModeling
from pipeline.runtime.env import ProcessInfo
from pipeline.train import schedule
from pipeline.train.batch_log import BatchLog
from pipeline.train.engine import Engine
from pipeline.train.metrics import Meter
from pipeline.train.rescue import Rescue
from pipeline.train.saving import Saver
from pipeline.train.spikes import LeftOut
from pipeline.train.state import Clock, TrainState
from pipeline.train.stop import StopRequest
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
    saver: Saver
    batch_log: BatchLog
    stop: StopRequest
    watch: Watch
    left_out: LeftOut
    rescue: Rescue


def train(parts: Parts, state: TrainState) -> int | None:
    """Trains from `state` to the end of the run, or until asked to stop.

    Returns:
        An exit code of `pipeline.errors`; None if the loss jumped and the run has to go back: the
        ledger says which batches are left out then, and checkpoints that saw them are gone.

    Raises:
        TrainingError: too many steps in a row had no finite gradient, or the loss jumps whatever
            is left out.
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
        batches = next(steps)
        meter.have_data(measure_layers=log)

        alpha = schedule.alpha(state.step, config.alpha_warmup_steps)
        lr = schedule.learning_rate(state.step, config, state.elapsed_s)
        parts.objective.set_alpha(alpha)
        _seed_dropout(parts, state)
        result = engine.train_step(batches, parts.objective, lr)
        state.advance(place.size, applied=result.applied)
        meter.end_step(result, place.number, batches)
        _log_batch(parts, place, batches, state.step if result.applied else None)
        if not result.applied:
            parts.rescue.report_skip(state, result, place)
            continue

        last = stopping = False
        if log:
            parts.batch_log.flush()
            interval = meter.close_interval(
                result.grad_norm,
                stop_requested=parts.stop.requested,
                clock_s=clock.read_s() if parts.process.is_first else 0.0,
            )
            state.elapsed_s = interval.clock_s
            last = schedule.is_over(state.step, config, state.elapsed_s)
            stopping = interval.stop_requested and not last
            numbers = StepNumbers(alpha, lr, result.grad_norm)
            parts.watch.interval(state, place, interval, numbers)
            parts.saver.poll()
            parts.watch.saves(parts.saver.take_numbers())
            if parts.rescue.must_go_back(state, interval, decide=regular):
                return None
        if state.step % intervals.eval_every_steps == 0 or last:
            parts.watch.evaluate(state)
        if (save or last or stopping) and state.step != saved_step:
            _save(parts, state)
            saved_step = state.step
        if stopping:
            parts.saver.finish(stopping=True)
            parts.watch.saves(parts.saver.take_numbers())
            logger.warning(
                "stopped at step %d by %s; saved, start again to continue",
                state.step, parts.stop.signal_name or "a signal to another rank",
            )  # fmt: skip
            return EXIT_PREEMPTED
    parts.saver.finish()
    parts.watch.saves(parts.saver.take_numbers())
    return EXIT_FINISHED


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


def _save(parts: Parts, state: TrainState) -> None:
    parts.batch_log.flush()  # it must reach to the checkpoint's cursor
    alpha = schedule.alpha(state.step, parts.config.train.alpha_warmup_steps)
    parts.saver.save(parts.engine, state, alpha)
