"""What a run shows: the numbers of each interval and evaluation, and what to make of them.

Straggler: in each of three log intervals in a row, a rank's own work (waiting for data, and forward
and backward passes until the first collective) takes more than 1.25 times the
median of the other ranks, and at least a hundredth of the step longer.
"""

import logging
import math
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from pipeline.checkpoints.save import SaveNumbers
from pipeline.checkpoints.state import TrainState
from pipeline.config import schedule
from pipeline.config.data import BatchSpec
from pipeline.config.stages import RunStage
from pipeline.model.cost import limits
from pipeline.runtime import dist
from pipeline.runtime.files import read_json_lines
from pipeline.runtime.notify import DIVERGED
from pipeline.runtime.summary import ProgressRow, duration, progress
from pipeline.sinks.base import Sinks
from pipeline.sinks.glance import MetricLines
from pipeline.train.doctor import Divergence, Doctor, LastStep, Plateau
from pipeline.train.engine import StepResult
from pipeline.train.metrics import LogInterval, StepNumbers
from pipeline.train.run import RunContext
from pipeline.train.timing import device_name

logger = logging.getLogger(__name__)

_SHORT = {"accuracy": "acc"}
_MOST_MEANS = 6
# How many times the median of the other ranks a slow one takes. Below it, ranks that share a node
# with other work would be named.
_STRAGGLER_FACTOR = 1.25
_SLOW_INTERVALS = 3
_LEAST_SHARE = 0.01


class RunLogger:
    """Watches one attempt. Rank 0 has sinks to write to."""

    def __init__(self, run: RunContext, sinks: Sinks | None) -> None:
        """Find out who the ranks are. Collective."""
        config, device = run.config, run.engine.device
        self._run, self._config, self._sinks = run, config, sinks
        self._doctor = None
        starts = read_json_lines(run.folder.attempts) if sinks else []
        if sinks:
            self._doctor = Doctor(
                config,
                run.work.indexes[0].location,
                unigram_entropy=run.work.unigram_entropy,
                uniform_guess=run.work.uniform_guess,
            )
            from_step = starts[-1]["resumed_from_step"] or 0
            lines = MetricLines(run.folder).update(starts)
            self._doctor.recall(line for line in lines if line["step"] <= from_step)
        hosts = dist.gather(socket.gethostname())
        self._stragglers = Stragglers(hosts)
        known = limits(device_name(device)) if config.train.precision == "bf16" else None
        self._peak_flops = known.bf16_flops if known else None
        self._pace = _Pace()
        self._row, self._loss = ProgressRow(), ""
        self._restarts = float(sum(not line.get("rewound") for line in starts[1:]))

    @contextmanager
    def bar(self, state: TrainState) -> Iterator[None]:
        """Draw how far the run is, where a person looks at rank 0."""
        total = self._config.train.num_steps
        name = self._config.folder.path.name
        with progress(name, total, "step", done=state.step, logs=False) as self._row:
            yield

    def stepped(self, state: TrainState, result: StepResult, step_s: float) -> None:
        """Move the bar on after an applied step that took `step_s`."""
        self._pace.stepped(state.step, step_s)
        if not self._row.is_drawn:
            return
        if not self._loss:  # before the first log line: this rank's, of the first step alone
            sums = {name: [float(part) for part in each] for name, each in result.sums.items()}
            means = {name: total / weight for name, (total, weight) in sums.items() if weight}
            self._loss = f"loss {self._run.objective.tracked_loss(means):.4f}"
        each_s = self._pace.step_s(state.step)
        speed = f"{1 / each_s:.2f} steps/s" if each_s < 1 else f"{each_s:.2f} s a step"
        self._row.show(state.step, f"{self._loss}  {speed}", self._left_s(state))

    def _left_s(self, state: TrainState) -> float:
        """Return the seconds to the end, of the steps or of the time budget."""
        train = self._config.train
        by_steps_s = self._pace.step_s(state.step) * (train.num_steps - state.step)
        return min(by_steps_s, max(0.0, schedule.budget_left_s(train, state.elapsed_s)))

    def interval(
        self, state: TrainState, place: BatchSpec, interval: LogInterval, step: StepNumbers
    ) -> None:
        """Show what happened since the last log line.

        Args:
            state: after the interval's last step.
            place: batch of that step.
            interval: over all ranks.
            step: that step.
        """
        num_steps = self._config.train.num_steps
        values = self._values(state, place, interval, step)
        if self._sinks:
            self._sinks.write(state.step, "train", values)
        self._loss = f"loss {interval.loss:.4f}"
        left_s = self._left_s(state)
        logger.info("%s", console_line(state.step, num_steps, interval.means, values, left_s))
        self._tell_stragglers(state, interval)
        tokens_per_step = interval.num_tokens / interval.step_s.shape[1]
        last = LastStep(
            state.step,
            place.number,
            step.alpha,
            step.lr,
            step.grad_norm,
            interval.layers,
            tokens_per_step,
        )
        if self._doctor and (found := self._doctor.look(interval.means, last, state.losses)):
            self._tell(state, found)

    def _tell(self, state: TrainState, found: Plateau | Divergence) -> None:
        """Show what the doctor says."""
        kind = "plateau" if isinstance(found, Plateau) else "divergence"
        logger.warning("%s: %s", kind, found.advice)
        if self._sinks:
            numbers = found._asdict()
            self._sinks.write_text(state.step, kind, numbers.pop("advice"))
            self._sinks.write(state.step, kind, numbers)
        if isinstance(found, Divergence):
            self._run.notifier.send(DIVERGED, found.advice.splitlines()[0])

    def entered(self, state: TrainState, stage: RunStage) -> None:
        """Show that a stage begins after a step."""
        changes = "; ".join(self._config.timeline.changes(stage.number))
        text = f"{stage.title} begins after step {state.step}: {changes}"
        self._pace = _Pace()  # its steps take as long as they take
        logger.info("%s", text)
        if self._sinks:
            self._sinks.write_text(state.step, "stage", text)
            self._sinks.write(state.step, "stage", {"number": float(stage.number)})

    def _tell_stragglers(self, state: TrainState, interval: LogInterval) -> None:
        step_s = float(interval.step_s.mean())
        found = self._stragglers.look(interval.wait_s, interval.compute_s, step_s)
        for rank, factor, text in found:
            logger.warning("straggler: %s", text)
            if self._sinks:
                values = {"rank": float(rank), "factor": factor}
                self._sinks.write(state.step, "straggler", values)

    def skipped(self, state: TrainState) -> None:
        """Show that a step was skipped."""
        if self._sinks:
            self._sinks.write(state.step, "skip", {"total": float(state.skipped)})

    def saves(self, found: list[SaveNumbers]) -> None:
        """Show the cost of saves."""
        if self._sinks:
            for numbers in found:
                self._sinks.write(numbers.step, "save", numbers.values)

    def evaluate(self, state: TrainState) -> None:
        """Evaluate at the model's alpha. Collective.

        The loss goes into `state` too, for checkpoints.
        """
        found = self._run.evaluation(state.step, shows=self._sinks is not None)
        if found is None:
            return
        state.held_out_loss, state.held_out_step = found.loss, state.step
        logger.info("step %d  %s", state.step, found.text)
        if not self._sinks:
            return
        if self._doctor:
            self._doctor.evaluated(state.step, found.values["loss"])
        self._sinks.write(state.step, "eval", dict(found.values))
        if found.probes:
            self._sinks.write(state.step, "probe", dict(found.probes))
        for name, image in found.images.items():
            self._sinks.write_image(state.step, name, image)
        for name, text in found.texts.items():
            self._sinks.write_text(state.step, name, text)

    def _values(
        self, state: TrainState, place: BatchSpec, interval: LogInterval, step: StepNumbers
    ) -> dict[str, float]:
        """Put together all numbers of a log line."""
        values = {
            **interval.means,
            "loss": interval.loss,
            "lr": step.lr,
            "alpha": step.alpha,
            "grad_norm": step.grad_norm,
            "tokens_per_s": interval.num_tokens / interval.elapsed_s,
            "fill": interval.num_tokens / interval.num_slots,
            **{name: float(count) for name, count in interval.counts.items()},
            "data_wait": interval.data_wait,
            "skipped_steps": float(state.skipped),
            "left_out_batches": float(state.left_out),
            "rewinds": float(state.rewinds),
            "batch": float(place.size),
            "seq_len": float(place.seq_len),
            **({"stage": float(place.stage)} if self._config.timeline.has_stages else {}),
            "elapsed_s": state.elapsed_s,
            "share_done": schedule.share_done(state.step, self._config.train, state.elapsed_s),
            "restarts": self._restarts,
            **self._epochs(state),
            **self._speed(interval),
            **interval.peak_gb,
            **step.more,
        }
        for name, norms in interval.layers.items():
            values[f"grad_norm_{name}"] = norms.gradient
            values[f"update_ratio_{name}"] = norms.update_ratio
        return values

    def _epochs(self, state: TrainState) -> dict[str, float]:
        """Return how often the training text was seen, by source where sources have weights."""
        epochs = self._run.data.epochs(state.cursor)
        if len(epochs) == 1:
            return {"epoch": next(iter(epochs.values()))}
        return {f"epoch_{name}": value for name, value in epochs.items()}

    def _speed(self, interval: LogInterval) -> dict[str, float]:
        """Return rates of all ranks, the model's FLOP/s of one, and seconds a step."""
        # Of several tasks, all; of one text with several losses, its masked tokens.
        targets = interval.weights.get("loss", sum(interval.weights.values()))
        # Attention counts the squares of the lengths of the pieces that were seen, whatever the
        # kernel goes through; the head counts the `targets` tokens that it predicts.
        seen = targets / interval.num_tokens, interval.squared_lengths / interval.num_tokens
        flops = self._run.work.flops_per_token(*seen) * interval.num_tokens
        per_device = flops / interval.elapsed_s / self._run.engine.world_size
        own_s = interval.wait_s + interval.compute_s
        values = {
            "tokens": float(interval.num_tokens),
            "slots_per_s": interval.num_slots / interval.elapsed_s,
            f"{self._run.objective.targets}_per_s": targets / interval.elapsed_s,
            "model_tflops_per_device": per_device / 1e12,
            "step_s_median": float(np.median(interval.step_s)),
            "step_s_p95": float(np.quantile(interval.step_s, 0.95)),
            "own_s_median": float(np.median(own_s)),
            "own_s_p95": float(np.quantile(own_s, 0.95)),
            "own_s_max": float(own_s.max()),
            "slowest_rank": float(own_s.argmax()),
        }
        return values | ({"mfu": per_device / self._peak_flops} if self._peak_flops else {})


def console_line(
    step: int, num_steps: int, means: dict[str, float], values: dict[str, float], eta_s: float
) -> str:
    """One line for people; `means` are the objective's, `values` all numbers of the line."""
    return (
        f"step {step:>{len(str(num_steps))}}/{num_steps}  {means_text(values['loss'], means)}  "
        f"lr {values['lr']:.2e}  alpha {values['alpha']:.3f}  "
        f"norm {values['grad_norm']:.2f}  {values['tokens_per_s']:,.0f} tok/s  "
        f"wait {values['data_wait']:.1%}  skipped {values['skipped_steps']:.0f}  "
        f"ETA {duration(eta_s)}"
    )


def means_text(loss: float, means: dict[str, float]) -> str:
    """Return the minimised loss and the objective's other means, as `loss 3.1204  acc 0.421`."""
    others = [
        f"{_SHORT.get(name, name)} {mean:.3f}"
        for name, mean in means.items()
        if name != "loss" and not math.isnan(mean)
    ]
    if len(others) > _MOST_MEANS:
        others[_MOST_MEANS:] = [f"and {len(others) - _MOST_MEANS} more"]
    return "  ".join([f"loss {loss:.4f}", *others])


class _Pace:
    """Seconds a step of this attempt, evaluations and saves included.

    The first step, which compiles kernels, counts as long as it is the only one.
    """

    def __init__(self) -> None:
        self._first_step: int | None = None
        self._first_s = self._began_s = self._now_s = 0.0

    def stepped(self, step: int, step_s: float) -> None:
        self._now_s = time.perf_counter()
        if self._first_step is None:
            self._first_step, self._first_s, self._began_s = step, step_s, self._now_s

    def step_s(self, step: int) -> float:
        since = step - (self._first_step or 0)
        return (self._now_s - self._began_s) / since if since else self._first_s


class Stragglers:
    """Follows the ranks of one attempt, and warns of slow ones."""

    def __init__(self, hosts: list[str]) -> None:
        self._hosts = hosts
        self._slow = [0] * len(hosts)
        """Number of intervals in a row in which each rank was slow."""

    def look(
        self, wait_s: npt.NDArray[np.float64], compute_s: npt.NDArray[np.float64], step_s: float
    ) -> list[tuple[int, float, str]]:
        """Return the ranks to warn about, each with its factor and the text of the warning.

        A rank is in the list once, until it was as fast as the others for an interval.

        Times are (ranks,) seconds of a step: waiting for data, and passes until the first
        collective.
        """
        if len(self._hosts) < 2:
            return []
        own_s = wait_s + compute_s
        stragglers = []
        for rank, slow in enumerate(self._slow):
            others_s = float(np.median(np.delete(own_s, rank)))
            late_s = float(own_s[rank]) - others_s
            is_slow = late_s > (_STRAGGLER_FACTOR - 1) * others_s and late_s > _LEAST_SHARE * step_s
            self._slow[rank] = slow + 1 if is_slow else 0
            if self._slow[rank] == _SLOW_INTERVALS:
                factor = float(own_s[rank]) / others_s if others_s else float("inf")
                cause = "waiting for data" if wait_s[rank] > compute_s[rank] else "computing"
                text = (
                    f"rank {rank} on {self._hosts[rank]} needs {factor:.2f} times as long as the "
                    f"median of the other ranks, most of it {cause}: {own_s[rank] * 1e3:.1f} ms a "
                    f"step against {others_s * 1e3:.1f} ms, {_SLOW_INTERVALS} log intervals in a "
                    f"row. The others wait for it about {late_s / step_s:.0%} of the run's time. "
                    "Check the temperature, clock, other processes and storage of that node, or "
                    "exclude it"
                )
                stragglers.append((rank, factor, text))
        return stragglers
