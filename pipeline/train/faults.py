"""What a run does about steps that must not be taken, and about a loss that jumps."""

import logging
import math
import time
from pathlib import Path

from pipeline.checkpoints.manifest import FOLDER, published, read_manifest, verify
from pipeline.checkpoints.save import Saver
from pipeline.config.batches import BatchPlace
from pipeline.config.runs import PretrainConfig
from pipeline.data.ledger import NonFinite, Rewind, add_to_ledger, read_ledger
from pipeline.data.run_order import RunOrder
from pipeline.errors import CheckpointError, StorageError, TrainingError
from pipeline.runtime import dist
from pipeline.train.batch_log import BatchLog
from pipeline.train.engine import StepResult
from pipeline.train.metrics import Interval
from pipeline.train.state import TrainState
from pipeline.train.watch import Watch

logger = logging.getLogger(__name__)


class Rescue:
    """Decides together: all ranks call, and all ranks do the same."""

    def __init__(
        self,
        config: PretrainConfig,
        order: RunOrder,
        batch_log: BatchLog,
        saver: Saver,
        watch: Watch,
    ) -> None:
        """Nothing was seen yet."""
        self._config = config
        self._run_dir = Path(config.run_dir)
        self._order = order
        self._batch_log = batch_log
        self._saver = saver
        self._watch = watch
        self._warned = False

    def report_skip(self, state: TrainState, result: StepResult, place: BatchPlace) -> None:
        """Records a step that no rank took. Collective.

        Args:
            state: behind the step.
            result: of the step, on this rank.
            place: its batch.

        Raises:
            TrainingError: it was one too many in a row.
            StorageError: the ledger cannot be written.
        """
        is_finite = dist.gather(math.isfinite(float(result.sums.loss)))
        each = place.size // len(is_finite)
        ranks = {
            str(rank): [rank * each, (rank + 1) * each]
            for rank, finite in enumerate(is_finite) if not finite
        }  # fmt: skip
        logger.warning(
            "step %d skipped on all ranks: gradient norm %s, %s; sequences %d to %d are not "
            "trained on, schedules stand still",
            state.step + 1, result.grad_norm,
            f"the loss is no number on rank {', '.join(ranks)}" if ranks else "losses are finite",
            place.cursor, state.cursor - 1,
        )  # fmt: skip
        self._watch.skipped(state)
        places = self._order.segment(place.cursor).locate(place.cursor, place.size)
        self._record(
            NonFinite(
                batch=place.number,
                cursor=place.cursor,
                step=state.step + 1,
                grad_norm=str(result.grad_norm),
                ranks=ranks,
                samples=[[int(e), int(s)] for e, s in zip(
                    places.epochs, places.sample_ids, strict=True)],
                unix_s=time.time(),
            )
        )  # fmt: skip
        limit = self._config.train.max_skipped_in_a_row
        if state.skipped_in_a_row >= limit:
            self._batch_log.flush()
            self._saver.finish()
            raise TrainingError(
                f"{limit} steps in a row had no finite gradient (train.max_skipped_in_a_row); the "
                "newest checkpoint is from before; lower train.lr, or lengthen the warm-ups"
            )

    def must_go_back(self, state: TrainState, interval: Interval, *, decide: bool) -> bool:
        """Follows the losses; on a spike, prepares the way back. Collective.

        Args:
            state: behind the interval's last step; takes the interval's losses.
            interval: over all ranks.
            decide: whether this is a step in which spikes are looked for.

        Raises:
            TrainingError: there is no way back, or it was gone too often.
            StorageError: the ledger cannot be written.
        """
        config = self._config.spikes
        for batch, loss in interval.losses:
            state.losses.add(batch, loss, config)
        if not decide or not state.losses.is_spike(config):
            self._warned = self._warned and bool(state.losses.high)
            return False
        first, loss = state.losses.high[0][0], max(loss for _, loss in state.losses.high)
        limit = state.losses.limit(config)
        text = (
            f"the loss jumped: above {limit:.4f} in {len(state.losses.high)} steps in a row since "
            f"batch {first}, up to {loss:.4f}"
        )
        if not config.rewind:
            if not self._warned:
                logger.warning("%s; spikes.rewind is off: training goes on", text)
            self._warned = True
            return False
        plan = self._config.batches
        start = plan.number(max(0, first - config.skip_before_steps))
        # A save in flight makes room by removing what may be wanted.
        self._saver.finish()
        to_step = dist.on_first(
            lambda: self._step_before(start.cursor, text), "looking for a checkpoint to go back to"
        )
        # What was in flight is trained on, too: a batch log without holes.
        last = plan.at(state.cursor).number - 1
        record = Rewind(
            first_batch=start.number,
            last_batch=last,
            first_cursor=start.cursor,
            stop_cursor=state.cursor,
            high_batches=[batch for batch, _ in state.losses.high],
            loss=loss,
            limit=limit,
            from_step=state.step,
            to_step=to_step,
            unix_s=time.time(),
        )
        self._record(record)
        logger.warning(
            "%s; back to the checkpoint of step %d, batches %d to %d are left out from now on",
            text, to_step, start.number, last,
        )  # fmt: skip
        return True

    def _step_before(self, cursor: int, text: str) -> int:
        """Step of the newest good checkpoint that did not see sequences from `cursor` on."""
        rewinds = read_ledger(self._run_dir).rewinds
        for path in published(self._run_dir / FOLDER):
            try:
                manifest = read_manifest(path)
                if manifest.cursor > cursor:
                    continue
                verify(path, lambda _: dist.get_on("verifying checkpoints"))
            except CheckpointError as error:
                logger.warning("checkpoint rejected: %s", error)
                continue
            times = sum(each.to_step == manifest.step for each in rewinds)
            if times >= self._config.spikes.max_rewinds:
                raise TrainingError(
                    f"{text}; the run went back to step {manifest.step} {times} times before "
                    "(spikes.max_rewinds), whatever batches were left out: it is not the data. "
                    "Lower train.lr, lengthen the warm-ups, or set spikes.rewind=false"
                )
            return manifest.step
        raise TrainingError(
            f"{text}; no good checkpoint is from before sequence {cursor} to go back to. Lower "
            "train.lr, lengthen the warm-ups, or save more often (checkpoint.every_steps, "
            "checkpoint.keep); or leave the batches out from the start with train.skip_batches"
        )

    def _record(self, record: NonFinite | Rewind) -> None:
        """Writes to the ledger on rank 0; it is there when this returns. Collective."""

        def write() -> None:
            try:
                add_to_ledger(self._run_dir, record)
            except OSError as error:
                raise StorageError(
                    f"the ledger of {self._run_dir} cannot be written: {error}; it is as it was. "
                    "Free space, then start the run again"
                ) from error

        dist.on_first(write, "writing the ledger")
