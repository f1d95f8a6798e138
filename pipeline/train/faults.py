"""Reactions to faults: skipped steps, loss spikes, state that is not finite, batches left out.

Every decision is a function of numbers that are the same on all ranks. Spikes are looked for at
multiples of `monitor.log_every_steps` only, and `state.LossHistory` is saved with every
checkpoint, so a run that was killed decides like one that was not.
"""

import logging
import math
import socket
import time
from collections.abc import Callable, Sequence

from pipeline import errors
from pipeline.checkpoints.background import unsound_parts
from pipeline.checkpoints.manifest import verify
from pipeline.checkpoints.resume import require_usable
from pipeline.checkpoints.save import Saver
from pipeline.checkpoints.state import Checkpointable, TrainState
from pipeline.config.data import BatchSpec
from pipeline.config.runs import RunConfig
from pipeline.data.ledger import Diverged, NonFinite, Record, Rewind, add_to_ledger, read_ledger
from pipeline.data.record import BatchRecord
from pipeline.data.run_order import DataRank
from pipeline.runtime import dist
from pipeline.runtime.checkpoints import FOLDER, Manifest, published, read_manifest, step_of
from pipeline.train.batch_log import BatchLog
from pipeline.train.engine import StepResult
from pipeline.train.run import TrainingData
from pipeline.train.run_logger import RunLogger

logger = logging.getLogger(__name__)

_MOST_TENSORS = 3
"""Most tensors of one rank that a message names."""
_IN_PASSING = (
    "and so are the gradients of all ranks when they are computed again: a device or the network "
    "erred in passing"
)
_JUMPS = "Lower train.lr, lengthen the warm-ups, or set spikes.rewind=false"
_BROKEN = (
    "Where one rank is named each time, look for a faulty device there and leave its node out; "
    "else lower train.lr or lengthen the warm-ups."
)


class FaultHandler:
    """Decide what to do about skipped steps, spikes and broken state. All ranks call it and agree.

    Methods raise TrainingError if the run must end: too many steps in a row were skipped, there is
    no checkpoint to go back to, or it went back too often; StorageError without a writable ledger.
    """

    def __init__(
        self,
        config: RunConfig,
        data: TrainingData,
        batch_log: BatchLog,
        saver: Saver,
        watch: RunLogger,
    ) -> None:
        self._config = config
        self._run_dir = config.folder.path
        self._data = data
        self._batch_log = batch_log
        self._saver = saver
        self._watch = watch
        self._warned = False

    def report_skip(
        self,
        state: TrainState,
        result: StepResult,
        place: BatchSpec,
        engine: Checkpointable,
        unsound_gradients: Callable[[], list[str]],
    ) -> None:
        """Record a step that was skipped on all ranks. Collective.

        `unsound_gradients` computes the step's gradients again and names those of this rank that
        are not finite, the nearest to the loss first; it is called where no loss tells the rank.

        Raises:
            UnsoundStateError: not the batch is the reason, but the state, which is not finite.
        """
        own = all(math.isfinite(float(each.total)) for each in result.sums.values())
        is_finite = dist.gather(own)
        ranks = {
            str(rank): self._data.positions_in_batch(place, DataRank(rank, len(is_finite)))
            for rank, finite in enumerate(is_finite)
            if not finite
        }
        gradients: list[str] = []
        if ranks:
            cause = f"the loss is NaN or infinite on rank {', '.join(ranks)}"
        else:
            gradients = _of_ranks(_first_of(unsound_gradients()))
            cause = "losses are finite, " + ("; ".join(gradients) or _IN_PASSING)
        logger.warning(
            "step %d skipped on all ranks: gradient norm %s, %s; sequences %d to %d are not "
            "trained on, schedules do not advance",
            state.step + 1,
            result.grad_norm,
            cause,
            place.cursor,
            state.cursor - 1,
        )
        self._watch.skipped(state)
        self._record(
            NonFinite(
                batch=place.number,
                cursor=place.cursor,
                step=state.step + 1,
                grad_norm=str(result.grad_norm),
                ranks=ranks,
                samples=self._data.samples(place),
                unix_s=time.time(),
                gradients=gradients,
            )
        )
        # Skipped steps change no state, so one look at all of it is enough.
        if state.skipped_in_a_row == 1:
            self._require_sound(state, place, engine)
        limit = self._config.train.max_skipped_in_a_row
        if state.skipped_in_a_row >= limit:
            self._batch_log.flush()
            # What is being saved is from before the skipped steps, and the next start needs it.
            self._saver.finish()
            raise errors.TrainingError(
                f"{limit} steps in a row had no finite gradient (train.max_skipped_in_a_row); the "
                "newest checkpoint is from before them; lower train.lr or lengthen the warm-ups"
            )

    def _require_sound(self, state: TrainState, place: BatchSpec, engine: Checkpointable) -> None:
        found = _of_ranks(unsound_parts(engine.state_parts()[0])[:_MOST_TENSORS])
        if found:
            raise errors.UnsoundStateError(
                f"the state after step {state.step} is not finite: {'; '.join(found)}",
                place.cursor,
                found,
            )

    def go_back(self, state: TrainState, error: errors.UnsoundStateError) -> None:
        """Leave out what led to a broken state: the batch before it shows, and, should that not do,
        two more before, then four. Collective.

        Raises:
            TrainingError: it breaks whatever is left out, or there is nothing to go back to.
        """
        if not self._config.spikes.rewind:
            raise errors.TrainingError(f"{error}; spikes.rewind is off. {_BROKEN}") from error
        self._finish_records()
        plan = self._config.batches

        def choose() -> tuple[int, int]:
            newest = max(map(step_of, published(self._run_dir / FOLDER)), default=None)
            rewinds = read_ledger(self._run_dir).rewinds
            firsts = [r.first_batch for r in rewinds if r.unsound and r.to_step == newest]
            end = min([plan.at(error.cursor).number, *firsts])
            first = max(0, end - 2 ** len(firsts))
            return first, self._step_before(plan.number(first).cursor, str(error), _BROKEN)

        first, to_step = dist.on_first(choose, "looking for a checkpoint to go back to")
        self._leave_out(state, plan.number(first), to_step, str(error), unsound=error.found)

    def repeat(self, state: TrainState, error: errors.DivergedError) -> None:
        """Prepare to repeat all steps since the newest good checkpoint: no batch is the reason why
        ranks differ, so none is left out. Collective.

        Raises:
            TrainingError: they differ again and again.
            DivergedError: there is nothing to go back to.
        """
        self._finish_records()

        def choose() -> int:
            manifest = self._newest_before(state.cursor)
            if manifest is None:
                raise errors.DivergedError(
                    f"{error}; no good checkpoint is there to go back to: a new start begins from "
                    "scratch. Look for a faulty device there",
                    error.found,
                ) from error
            records = read_ledger(self._run_dir).diverged
            times = sum(each.to_step == manifest.step for each in records)
            if times >= self._config.spikes.max_rewinds:
                raise errors.TrainingError(
                    f"{error}; the run repeated the steps from {manifest.step} on {times} times "
                    "before (spikes.max_rewinds). Where one rank is named each time, its device "
                    "is faulty: leave its node out. Different kinds of devices in one run round "
                    "differently: use one kind"
                ) from error
            return manifest.step

        to_step = dist.on_first(choose, "looking for a checkpoint to go back to")
        self._record(
            Diverged(from_step=state.step, to_step=to_step, unix_s=time.time(), found=error.found)
        )
        logger.warning("%s; back to the checkpoint of step %d", error, to_step)

    def _finish_records(self) -> None:
        """Write the log of batches, and publish what is being saved if it is good."""
        self._batch_log.flush()
        try:
            self._saver.finish()
        # What was being saved may hold the same values: it is gone, and the run goes back all the
        # same.
        except errors.UnsoundStateError as other:
            logger.warning("%s", other)

    def detect_spike(self, state: TrainState) -> bool:
        """Return whether the run must rewind because its last losses are a spike. Collective.

        Where it may not, or has no checkpoint from before, it goes on: a spike may pass. So does a
        young run that went back too often: before its window is full it may yet come down.
        """
        config, high = self._config.spikes, state.losses.high
        if not state.losses.is_spike(config):
            self._warned = self._warned and bool(high)
            return False
        if self._warned:
            return False
        loss, limit = max(loss for _, loss in high), state.losses.limit(config)
        text = jumped = (
            f"the loss jumped: above {limit:.4f} in {len(high)} steps in a row since "
            f"batch {high[0][0]}, up to {loss:.4f}"
        )
        if config.rewind:
            text += "; no good checkpoint after step 0 is from before it"
            # A save in flight may be about to remove the checkpoint that is needed now.
            self._saver.finish()
            try:
                found = dist.on_first(
                    lambda: self._before_spike(high[0][0], jumped), "looking for a checkpoint"
                )
            except errors.TrainingError as error:
                if len(state.losses.usual) >= config.window_steps:
                    raise
                found, text = None, str(error)
            if found:
                first, to_step = found
                start = self._config.batches.number(first)
                self._leave_out(state, start, to_step, jumped, loss=loss, limit=limit)
                return True
        else:
            text += "; spikes.rewind is off"
        logger.warning("%s: training goes on", text)
        self._warned = True
        return False

    def _before_spike(self, high_batch: int, text: str) -> tuple[int, int] | None:
        """Find the first batch to leave out, and the step to go back to; None without one."""
        wanted = max(0, high_batch - self._config.spikes.skip_before_steps)
        for first in (wanted, high_batch):
            manifest = self._newest_before(self._config.batches.number(first).cursor)
            # From step 0 the same rate and start would lead to the same.
            if manifest is not None and manifest.step:
                # As many before it as the config says, or all since the checkpoint.
                first_left_out = max(wanted, manifest.next_batch)
                return first_left_out, self._not_too_often(manifest.step, text, _JUMPS)
        return None

    # NaN in a moment reaches the weights a step later and the loss another step later: the batch
    # at fault is one of the last, so one is left out, then two more, then four.
    def _leave_out(
        self,
        state: TrainState,
        start: BatchSpec,
        to_step: int,
        text: str,
        *,
        loss: float | None = None,
        limit: float | None = None,
        unsound: Sequence[str] = (),
    ) -> None:
        # Includes all batches up to here, so that the batch log has no holes.
        last = self._config.batches.at(state.cursor).number - 1
        record = Rewind(
            first_batch=start.number,
            last_batch=last,
            first_cursor=start.cursor,
            stop_cursor=state.cursor,
            high_batches=[] if unsound else [batch for batch, _ in state.losses.high],
            loss=loss,
            limit=limit,
            from_step=state.step,
            to_step=to_step,
            unix_s=time.time(),
            unsound=list(unsound),
        )
        self._record(record)
        logger.warning(
            "%s; back to the checkpoint of step %d, batches %d to %d are left out from now on",
            text,
            to_step,
            start.number,
            last,
        )

    def _step_before(self, cursor: int, text: str, remedy: str) -> int:
        """Find the newest good checkpoint from before `cursor` and return its step."""
        manifest = self._newest_before(cursor)
        if manifest is None:
            raise errors.TrainingError(
                f"{text}; no good checkpoint is from before sequence {cursor} to go back to. "
                f"{remedy} Save more often (checkpoint.every_steps, checkpoint.keep); batches can "
                "be left out from the start with train.skip_batches"
            )
        return self._not_too_often(manifest.step, text, remedy)

    def _not_too_often(self, step: int, text: str, remedy: str) -> int:
        """Return a step to go back to, unless the run went there too often."""
        times = sum(each.to_step == step for each in read_ledger(self._run_dir).rewinds)
        if times >= self._config.spikes.max_rewinds:
            raise errors.TrainingError(
                f"{text}; the run went back to step {step} {times} times before "
                "(spikes.max_rewinds) and left out other batches each time, so the data is not "
                f"the cause. {remedy}"
            )
        return step

    def _newest_before(self, cursor: int) -> Manifest | None:
        """Find the newest good checkpoint from before `cursor`."""
        for path in published(self._run_dir / FOLDER):
            try:
                manifest = read_manifest(path)
                # Equal is early enough: a cursor counts what was consumed, so that batch is still
                # to come.
                if manifest.cursor > cursor:
                    continue
                verify(path, lambda _: dist.heartbeat_all("verifying checkpoints"))
                require_usable(path)
            except errors.CheckpointError as error:
                logger.warning("checkpoint rejected: %s", error)
                continue
            return manifest
        return None

    def _record(self, record: Record) -> None:
        """Write a record to the ledger on rank 0 before any rank continues. Collective."""

        def write() -> None:
            try:
                add_to_ledger(self._run_dir, record)
            except OSError as error:
                raise errors.not_written(
                    error,
                    f"the ledger of {self._run_dir} cannot be written: {error}; it is unchanged",
                ) from error

        dist.on_first(write, "writing the ledger")


def _first_of(names: list[str]) -> list[str]:
    """Name the first gradient that is not finite, and count the others; empty without any."""
    more = f", and of {len(names) - 1} more" if len(names) > 1 else ""
    return [f"the gradient of {names[0]}{more} is not finite"] if names else []


def _of_ranks(texts: list[str]) -> list[str]:
    """Put together what ranks found, each with its rank and host. Collective."""
    of_ranks = dist.gather([f"on {socket.gethostname()}: {text}" for text in texts])
    return [f"rank {rank} {text}" for rank, texts in enumerate(of_ranks) for text in texts]


def trained_in_spite(config: RunConfig, records: list[BatchRecord], before: int) -> list[int]:
    """List batches of `train.skip_batches` that the run was already trained on.

    `before` is the number of the run's next batch.
    """
    skipped = SkippedBatches(config, [])
    return [
        record.batch
        for record in records
        if record.batch < before and record.step is not None and record.batch in skipped
    ]


class SkippedBatches:
    """Batches that are not trained on: those of `train.skip_batches`, and those of rewinds."""

    def __init__(self, config: RunConfig, rewinds: list[Rewind]) -> None:
        self._ranges = [range(each.first, each.last + 1) for each in config.train.skip_batches]
        self._ranges += [range(each.first_batch, each.last_batch + 1) for each in rewinds]

    def __contains__(self, batch: int) -> bool:
        """Return whether a batch, given by its number, is left out."""
        return any(batch in each for each in self._ranges)
