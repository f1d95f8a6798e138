"""The training loop: restore, step, log, evaluate, save, stop."""

import logging
import time
from dataclasses import dataclass

import torch

from pipeline.config.batches import BatchPlace
from pipeline.config.run import PretrainConfig
from pipeline.data.batch import MicroBatch
from pipeline.data.batch_records import BatchRecord
from pipeline.data.loader import EvalLoader, TrainLoader
from pipeline.errors import EXIT_FINISHED, EXIT_PREEMPTED, TrainingError
from pipeline.objectives.mlm import MaskedLanguageModeling
from pipeline.runtime.env import ProcessInfo
from pipeline.train import schedule
from pipeline.train.batch_log import BatchLog
from pipeline.train.checkpoint import CheckpointStore
from pipeline.train.engine import Engine, StepResult
from pipeline.train.evaluate import evaluate
from pipeline.train.metrics import Meter
from pipeline.train.sinks import Sinks, console_line
from pipeline.train.state import Clock, TrainState
from pipeline.train.stop import StopRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """What the loop works with, put together in `build.py`."""

    config: PretrainConfig
    process: ProcessInfo
    engine: Engine
    objective: MaskedLanguageModeling
    train_loader: TrainLoader
    eval_loader: EvalLoader
    store: CheckpointStore
    batch_log: BatchLog
    stop: StopRequest
    sinks: Sinks | None
    """On rank 0."""


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
    meter = Meter(engine.device)
    clock = Clock(state.elapsed_s)
    eta = _Eta(config.num_steps, state.step)
    saved_step = state.step
    steps = parts.train_loader.steps_from(state.cursor)
    while not schedule.is_over(state.step, config, state.elapsed_s):
        waited_from = time.perf_counter()
        batches = next(steps)
        meter.add_wait(time.perf_counter() - waited_from)

        place = parts.config.batches.at(state.cursor)
        alpha = schedule.alpha(state.step, config.alpha_warmup_steps)
        lr = schedule.learning_rate(state.step, config, state.elapsed_s)
        parts.objective.set_alpha(alpha)
        _seed_dropout(parts, state)
        result = engine.train_step(batches, parts.objective, lr)
        state.advance(place.size, applied=result.applied)
        meter.add_step(result.sums, batches, applied=result.applied)
        _log_batch(parts, place, batches, state.step if result.applied else None)
        if not result.applied:
            _report_skip(parts, state, result, place)
            continue

        last = state.step == config.num_steps
        stopping = False
        if state.step % intervals.log_every_steps == 0 or last:
            parts.batch_log.flush()
            interval = meter.close_interval(
                stop_requested=parts.stop.requested,
                first_rank_s=clock.read_s() if parts.process.is_first else 0.0,
            )
            state.elapsed_s = interval.elapsed_s
            last = schedule.is_over(state.step, config, state.elapsed_s)
            stopping = interval.stop_requested and not last
            values = {
                "loss": interval.loss,
                "accuracy": interval.accuracy,
                "lr": lr,
                "alpha": alpha,
                "grad_norm": result.grad_norm,
                "tokens_per_s": interval.tokens_per_s,
                "fill": interval.fill,
                "unmasked_documents": float(interval.unmasked_documents),
                "data_wait": interval.data_wait,
                "skipped_steps": float(state.skipped),
                "batch": float(place.size),
                "seq_len": float(place.seq_len),
                "elapsed_s": state.elapsed_s,
                **_epochs(parts, state),
            }
            _log_line(parts, state, values, eta)
        if state.step % intervals.eval_every_steps == 0 or last:
            _evaluate(parts, state)
        due = state.step % parts.config.checkpoint.every_steps == 0 or last or stopping
        if due and state.step != saved_step:
            _save(parts, state)
            saved_step = state.step
        if stopping:
            logger.warning(
                "stopped at step %d by %s; saved, start again to continue",
                state.step, parts.stop.signal_name or "a signal to another rank",
            )  # fmt: skip
            return EXIT_PREEMPTED
    return EXIT_FINISHED


def _log_line(parts: Parts, state: TrainState, values: dict[str, float], eta: "_Eta") -> None:
    if parts.sinks:
        parts.sinks.write(state.step, "train", values)
    config = parts.config.train
    left_s = min(eta.left_s(state.step), schedule.budget_left_s(config, state.elapsed_s))
    logger.info("%s", console_line(state.step, config.num_steps, values, max(0.0, left_s)))


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


def _epochs(parts: Parts, state: TrainState) -> dict[str, float]:
    """How often the training text was seen, by source where sources have weights."""
    epochs = parts.train_loader.steps.order.epochs(state.cursor)
    if len(epochs) == 1:
        return {"epoch": next(iter(epochs.values()))}
    return {f"epoch_{name}": value for name, value in epochs.items()}


def _report_skip(parts: Parts, state: TrainState, result: StepResult, place: BatchPlace) -> None:
    logger.warning(
        "step %d skipped on all ranks: gradient norm %s; sequences %d to %d are not trained on, "
        "schedules stand still",
        state.step + 1, result.grad_norm, place.cursor, state.cursor - 1,
    )  # fmt: skip
    if parts.sinks:
        parts.sinks.write(state.step, "skip", {"total": float(state.skipped)})
    limit = parts.config.train.max_skipped_in_a_row
    if state.skipped_in_a_row >= limit:
        parts.batch_log.flush()
        raise TrainingError(
            f"{limit} steps in a row had no finite gradient (train.max_skipped_in_a_row); the "
            "newest checkpoint is from before; lower train.lr, or lengthen the warm-ups"
        )


def _evaluate(parts: Parts, state: TrainState) -> None:
    # At the alpha the next step trains with, as the model is now.
    parts.objective.set_alpha(schedule.alpha(state.step, parts.config.train.alpha_warmup_steps))
    result = evaluate(parts.engine, parts.objective, parts.eval_loader)
    if parts.sinks:
        values = {"loss": result.loss, "accuracy": result.accuracy,
                  "num_masked": float(result.num_masked)}  # fmt: skip
        parts.sinks.write(state.step, "eval", values)
    logger.info(
        "step %d  held-out loss %.4f  acc %.3f  over %s masked tokens",
        state.step, result.loss, result.accuracy, f"{result.num_masked:,}",
    )  # fmt: skip


def _save(parts: Parts, state: TrainState) -> None:
    started = time.perf_counter()
    parts.batch_log.flush()  # it must reach to the checkpoint's cursor
    alpha = schedule.alpha(state.step, parts.config.train.alpha_warmup_steps)
    path = parts.store.save(parts.engine, state, alpha)
    logger.info("saved %s in %.1f s", path, time.perf_counter() - started)


class _Eta:
    """Time to the end at the mean speed of this attempt."""

    def __init__(self, num_steps: int, first_step: int) -> None:
        self._num_steps = num_steps
        self._first_step = first_step
        self._start_s = time.perf_counter()

    def left_s(self, step: int) -> float:
        per_step_s = (time.perf_counter() - self._start_s) / (step - self._first_step)
        return per_step_s * (self._num_steps - step)
