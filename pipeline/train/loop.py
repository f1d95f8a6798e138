"""The training loop: restore, step, log, evaluate, save, stop."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pipeline.checkpoints.state import LossHistory, TrainState
from pipeline.config import schedule
from pipeline.config.data import BatchSpec
from pipeline.config.runs import RunConfig
from pipeline.config.stages import RunStage
from pipeline.data.loader import MicroBatch
from pipeline.data.record import BatchRecord
from pipeline.errors import EXIT_FINISHED, DivergedError, UnsoundStateError
from pipeline.runtime import watchdog
from pipeline.train.batch_log import BatchLog
from pipeline.train.engine import StepResult
from pipeline.train.faults import FaultHandler, SkippedBatches
from pipeline.train.metrics import Meter, StepNumbers
from pipeline.train.replicas import Replicas
from pipeline.train.requests import Wanted
from pipeline.train.run import RunContext
from pipeline.train.run_logger import RunLogger
from pipeline.train.timing import Clock

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt at training a run, from a checkpoint or from step 0; see `build.py`."""

    run: RunContext
    batch_log: BatchLog
    watch: RunLogger
    left_out: SkippedBatches
    rescue: FaultHandler
    replicas: Replicas


def train(attempt: Attempt, state: TrainState) -> int | None:
    """Train from `state` to the end of the run, or until asked to stop.

    Returns:
        An exit code of `pipeline.errors`; None if the run has to go back, because the loss jumped,
        the state is not finite, or ranks differ: the ledger says why, and what is left out then.

    Raises:
        TrainingError: too many steps in a row had no finite gradient, or the loss jumps or the
            state breaks whatever is left out, or ranks differ again and again.
        DivergedError: ranks differ, and there is no checkpoint to go back to.
        CheckpointError: a save failed.
        DataError: a shard is damaged.
    """
    try:
        return _train(attempt, state)
    except UnsoundStateError as error:
        attempt.rescue.go_back(state, error)
    except DivergedError as error:
        attempt.rescue.repeat(state, error)
    return None


def _train(attempt: Attempt, state: TrainState) -> int | None:
    run = attempt.run
    config = run.config.train
    # Where a stage ends the weights are of that one, until the first step of the next.
    stage = run.config.timeline.trained(state.cursor)
    meter = Meter(run.engine, run.objective, stage.train.grad_clip)
    clock = Clock(state.elapsed_s)
    _enter(attempt, stage, meter)
    if state.step == 0:
        _begin(attempt, state)
    steps = run.data.steps_from(state.cursor)
    while not schedule.is_over(state.step, config, state.elapsed_s):
        place = run.config.batches.at(state.cursor)
        if place.stage != stage.number:
            stage = _next_stage(attempt, state, place, meter, clock)
        if place.number in attempt.left_out:
            _leave_out(attempt, state, place, next(steps))
            continue
        due = _due(run.config, state.step + 1, place, stage)
        meter.begin_step()
        watchdog.heartbeat("waiting for data", state.step + 1)
        batches = next(steps)
        meter.have_data(measure_layers=due.log)

        alpha = _set_alpha(attempt, state)
        lr = run.config.timeline.learning_rate(state.step, stage.number, state.elapsed_s)
        result, more = _step(attempt, state, place, batches, lr)
        # Sums over the ranks: above 0 where any of them wants it.
        wanted = Wanted(*map(bool, result.notes))
        state.advance(place.size, applied=result.applied)
        _end_step(attempt, state, result, place, batches, meter)
        if not result.applied:
            _report_skip(attempt, state, result, place, batches)
            continue

        last = False
        meter.last = StepNumbers(place, alpha, lr, result.grad_norm, more)
        if due.log or wanted.saves:
            _close_interval(attempt, state, meter, clock)
            if due.regular and attempt.rescue.detect_spike(state):
                return None
            last = schedule.is_over(state.step, config, state.elapsed_s)
        saves = due.save or last or wanted.saves
        # Before the evaluation and the save, which are worth nothing if copies differ.
        attempt.replicas.compare(state.step, before_save=saves)
        if due.evaluation or last:
            _set_alpha(attempt, state)  # that of the next step, as a checkpoint here has it
            attempt.watch.evaluate(state)
        if saves:
            _save(attempt, state)
        if wanted.save:
            run.saver.publish()
            run.requests.saved()
        # A run that is done at this step ends as done, not as stopped: nothing is left to start
        # again.
        if wanted.ends and not last:
            _finish_saves(attempt, stopping=True)
            return run.requests.end(wanted, state.step)
    _finish_saves(attempt, stopping=False)
    return EXIT_FINISHED


def _begin(attempt: Attempt, state: TrainState) -> None:
    """Evaluate what training starts from, and save it if that is asked for. Collective."""
    _set_alpha(attempt, state)
    attempt.watch.evaluate(state)
    # A run that goes on from step 0 has it already.
    if attempt.run.config.checkpoint.keep_first and not attempt.run.saver.has(state):
        _save(attempt, state)


class _Due(NamedTuple):
    """What a step that is applied brings with it."""

    regular: bool
    """A line of the regular interval."""
    log: bool
    save: bool
    evaluation: bool


def _due(config: RunConfig, step: int, place: BatchSpec, stage: RunStage) -> _Due:
    # So that other stages can begin where this one ends.
    ends_stage = config.timeline.end(stage) == place.cursor + place.size
    regular = step % config.monitor.log_every_steps == 0
    save = step % config.checkpoint.every_steps == 0 or ends_stage
    return _Due(
        regular=regular,
        # A checkpoint holds the losses of all steps before it.
        log=regular or save or step == config.train.num_steps,
        save=save,
        evaluation=step % config.monitor.eval_every_steps == 0 or ends_stage,
    )


def _enter(attempt: Attempt, stage: RunStage, meter: Meter) -> None:
    """Give model and optimizer what is a stage's own."""
    run = attempt.run
    run.model.go_on_with(stage.model)
    run.engine.go_on_with(stage.train)
    meter.clips_at(stage.train.grad_clip)


def _next_stage(
    attempt: Attempt, state: TrainState, place: BatchSpec, meter: Meter, clock: Clock
) -> RunStage:
    """Begin the stage of a batch."""
    stage = attempt.run.config.timeline.stages[place.stage]
    watchdog.heartbeat("beginning a stage", state.step)
    # Whatever the next stage meets, the end of this one is safe.
    attempt.run.saver.publish()
    # Its last batch may have been left out, and with it what comes with the batch.
    if meter.last:
        _close_interval(attempt, state, meter, clock)
    if not attempt.run.saver.has(state):
        _set_alpha(attempt, state)
        attempt.watch.evaluate(state)
        _save(attempt, state)
        attempt.run.saver.publish()
    attempt.run.work.begin(stage)
    if not attempt.run.config.timeline.same_losses(stage.number):
        state.losses = LossHistory()
    _enter(attempt, stage, meter)
    attempt.watch.entered(state, stage)
    return stage


def _set_alpha(attempt: Attempt, state: TrainState) -> float:
    """Give the model the alpha of the step after `state`; nobody else sets it in training."""
    alpha = schedule.alpha(state.step, attempt.run.config.train.alpha_warmup_steps)
    attempt.run.model.set_alpha(alpha)
    return alpha


def _step(
    attempt: Attempt, state: TrainState, place: BatchSpec, batches: list[MicroBatch], lr: float
) -> tuple[StepResult, Mapping[str, float]]:
    """Train on a batch; return also what its weighing wants to be seen."""
    run = attempt.run
    _seed_dropout(attempt, state.cursor)
    weighing = run.work.weighing(state, place.number)
    notes = run.requests.own()
    result = run.engine.train_step(batches, run.objective, lr, notes, weighing)
    return result, weighing.values if weighing else {}


def _end_step(
    attempt: Attempt,
    state: TrainState,
    result: StepResult,
    place: BatchSpec,
    batches: list[MicroBatch],
    meter: Meter,
) -> None:
    """Count a step and put its batch on record."""
    meter.end_step(result, place.number, batches)
    _log_batch(attempt, place, batches, state.step if result.applied else None)
    if result.applied:
        attempt.watch.stepped(state, result, meter.last_step_s)


def _report_skip(
    attempt: Attempt,
    state: TrainState,
    result: StepResult,
    place: BatchSpec,
    batches: list[MicroBatch],
) -> None:
    """Record a skipped step, and who made its gradient not finite. Collective."""
    run = attempt.run

    def unsound_gradients() -> list[str]:
        _seed_dropout(attempt, place.cursor)
        return run.engine.unsound_gradients(batches, run.objective)

    attempt.rescue.report_skip(state, result, place, run.engine, unsound_gradients)


def _seed_dropout(attempt: Attempt, cursor: int) -> None:
    """Seed dropout as a pure function of (seed, cursor, rank): no random state is restored."""
    words = (attempt.run.config.seed, cursor, attempt.run.process.rank)
    mixed = 0
    for word in words:
        # Two rounds of a 64-bit LCG (Knuth's MMIX constants) keep neighbouring seeds apart.
        mixed = (mixed ^ word) * 6364136223846793005 + 1442695040888963407 & 0xFFFFFFFFFFFFFFFF
    torch.manual_seed(mixed >> 1)


def _leave_out(
    attempt: Attempt, state: TrainState, place: BatchSpec, batches: list[MicroBatch]
) -> None:
    """Pass over a batch: it is read and logged, so that its hash tells which one it was."""
    watchdog.heartbeat("leaving out a batch")
    logger.info("batch %d is left out", place.number)
    state.leave_out(place.size)
    _log_batch(attempt, place, batches, None)


def _log_batch(
    attempt: Attempt, place: BatchSpec, batches: list[MicroBatch], step: int | None
) -> None:
    attempt.batch_log.add(
        BatchRecord(
            batch=place.number,
            cursor=place.cursor,
            sequences=place.size,
            seq_len=place.seq_len,
            step=step,
            hash=sum(batch.hash for batch in batches) % 2**64,
            stage=place.stage,
        )
    )


def _close_interval(attempt: Attempt, state: TrainState, meter: Meter, clock: Clock) -> None:
    """Log the interval since the last line, and publish saves that are written."""
    watchdog.heartbeat("logging")
    attempt.batch_log.flush()
    numbers, is_first = meter.last, attempt.run.process.is_first
    assert numbers is not None, "an interval has an applied step"
    interval = meter.close_interval(clock_s=clock.read_s() if is_first else 0.0)
    state.elapsed_s = interval.clock_s
    for batch, loss in interval.losses:
        spikes, guess = attempt.run.config.spikes, attempt.run.work.uniform_guess
        state.losses.add(batch, loss, spikes, guess)
    attempt.watch.interval(state, numbers.place, interval, numbers)
    attempt.run.saver.poll()
    attempt.watch.saves(attempt.run.saver.take_numbers())


def _save(attempt: Attempt, state: TrainState) -> None:
    watchdog.heartbeat("saving")
    attempt.batch_log.flush()  # it must reach to the checkpoint's cursor
    attempt.run.saver.save(attempt.run.engine, state)


def _finish_saves(attempt: Attempt, *, stopping: bool) -> None:
    watchdog.heartbeat("waiting for saves")
    attempt.run.saver.finish(stopping=stopping)
    attempt.watch.saves(attempt.run.saver.take_numbers())
