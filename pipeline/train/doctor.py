"""Detects a run that learns no more than token frequencies or has diverged, and what to change.

A run has diverged if the losses of the last `spikes.steps_in_a_row` steps are all far above its
best: half of what it had learned is lost, counted from the first loss or the uniform guess, and at
least a nat (`checkpoints.state.LossHistory`). It has, too, if they are a nat above the uniform
guess after both warm-ups and 100 more updates. This is told at once, and again when it comes again.

A plateau is told once, at the first log line where all of this holds for a window of steps behind
both warm-ups (learning rate and alpha), also of earlier attempts. The window is the last half of
these steps, and at least `patience_steps`: 100 updates, 20 log intervals and 2% of the run,
whichever is longest, but no more than half of what a short run has, down to ten log lines.

- Level: the mean loss of the window's last half is above 95% of the unigram entropy, the loss of a
  model that knows only the frequencies of tokens. A loss between it and the uniform guess has not
  even learned these; a run that has diverged is no plateau.
- Accuracy: a straight line through the window's accuracies rises by less than 0.01.
- Either the lower layers are cut off, or nothing falls any more.

Cut off: the first layer's gradient norm over the last layer's has a median below a tenth in the
window, and does not come back: that of the window's last half is at most 1.5 times that of its
first. All tokens have become alike on their way up, and no layer below can learn from them (Dong et
al. 2021, arXiv 2103.03404; Noci et al. 2022, arXiv 2206.03126). The loss may still fall then: it is
the head that learns frequencies. The accuracy must only not contradict: its rise less two standard
errors is below the limit. Some runs recover after the warm-ups, so twice `patience_steps` must have
been seen.

Nothing falls: a straight line through the losses, and the held-out loss where the window has two
evaluations, fall by less than 1% of the entropy. Lines through losses of training are uncertain by
their noise, which is large for small batches, so they must prove it: what they fall, and what the
accuracy rises, plus three standard errors is below the limit. The window grows until that can be
said.

`python -m benchmarks.doctor` counts false alarms and missed plateaus over small real runs.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.checkpoints.state import LossHistory
from pipeline.config.runs import RunConfig
from pipeline.runtime.remote import is_address
from pipeline.train.metrics import GroupNorms

_LEAST_UPDATES = 100
_LEAST_INTERVALS = 20
_LEAST_LINES = 10
_SOON = 3
"""Times a length within which something is soon after its beginning."""
_LEAST_JUMP = 1.0
"""Nats from one step to the next."""
_ABOVE_GUESS = 1.0
"""Nats above the uniform guess that no run of ours had behind its warm-ups and learned."""
_SHARE_OF_RUN = 0.02
_LEVEL = 0.95
_LEAST_FALL = 0.01
_LEAST_RISE = 0.01
# 200 updates behind the warm-ups the ratio was at most 2.4% in 32 of 35 stuck runs, often nothing;
# in 37 runs that learned no window's median was below 59%. A run of another corpus fell to 4%
# after 100 updates and came back: hence twice the patience, a tenth, and no way back. Losses and
# accuracy alone found 23, and reported one run that learned. On 24 runs that did not shape the
# rule (width 64, batch 8, another corpus and vocabulary) all 11 stuck ones were found and none of
# 13 others; the first advice freed all 11.
_CUT_OFF = 0.1
_COMES_BACK = 1.5
_CONTRADICTS, _PROVES = -2.0, 3.0
"""Standard errors. A proof is tried at every log line, so by chance two are not rare enough."""
_REPORT_FILE = "report.json"
# (init, residual) with which 24 layers converge without an alpha warm-up: docs/models.md.
_SMALL_STARTS = {("rsqrt_depth", "plain"), ("deepnorm", "deepnorm"), ("unit", "rezero")}
# A rule of thumb, AdamW's and StableAdamW's rate times width: 3e-3 at 48, 2e-4 at 768. Small
# branches bear two and a half times as much (docs/rates.md).
_USUAL_RATE_BY_WIDTH = 0.15
_USUAL_TIMES = 2.0
_SMALL_BATCH_TOKENS = 2048


@dataclass(frozen=True)
class LastStep:
    """The last step's numbers, from which causes are read."""

    step: int
    batch: int
    alpha: float
    lr: float
    grad_norm: float
    layers: dict[str, GroupNorms]
    tokens_per_step: float


class _Line(NamedTuple):
    """What the rule reads of a log line."""

    step: int
    loss: float
    accuracy: float
    reach: float
    """The first layer's gradient norm over the last layer's."""


class Plateau(NamedTuple):
    """What the doctor says of a run."""

    since: int
    """First step of the window."""
    loss: float
    """Mean of the window's log lines, nats a masked token."""
    unigram_entropy: float
    """Nats."""
    limit: float
    """Nats; a loss below it has learned more than frequencies."""
    advice: str
    """What to change, in Markdown."""


class Divergence(NamedTuple):
    """What the doctor says of a run whose losses are far above its best."""

    since_batch: int
    """Number of the first batch with a high loss; the last one's where none ever was low."""
    loss: float
    """Median of the last steps, nats."""
    best: float
    """Least median of as many steps in a row, nats."""
    limit: float
    """Nats; a loss below it is one of a run that has not diverged."""
    uniform_guess: float
    """Nats; NaN where it is not known."""
    advice: str
    """What to change, in Markdown."""


class Doctor:
    """Follows one attempt's losses, log lines and evaluations, and warns."""

    def __init__(
        self,
        config: RunConfig,
        dataset: str,
        *,
        unigram_entropy: float | None,
        uniform_guess: float | None,
    ) -> None:
        """Take what is known of the losses, in nats; without an entropy there are no plateaus."""
        train = config.train
        self._config, self._dataset = config, dataset
        self._entropy = unigram_entropy
        self._guess = uniform_guess
        self._has_diverged = False
        self._warm_ups = max(train.warmup_steps, train.alpha_warmup_steps)
        self._begin: int | None = None
        """Steps before the first line that was seen."""
        self._first_batch: int | None = None
        """Of the attempt."""
        self._lines: list[_Line] = []
        self._held_out: list[tuple[int, float]] = []
        self._told = False
        interval = config.monitor.log_every_steps
        patience = max(
            _LEAST_UPDATES, _LEAST_INTERVALS * interval, round(_SHARE_OF_RUN * train.num_steps)
        )
        half = (train.num_steps - self._warm_ups) // 2
        self.patience_steps = min(patience, max(_LEAST_LINES * interval, half))

    def recall(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take lines of metrics.jsonl that earlier attempts left, so that restarts hide nothing."""
        for line in lines:
            step, loss = line["step"], line.get("loss")
            if line["kind"] == "divergence":
                self._lines, self._held_out, self._begin = [], [], step
            elif line["kind"] == "plateau":
                self._told = True
            elif line["kind"] == "eval" and loss is not None:
                self.evaluated(step, loss)
            elif line["kind"] == "train":
                if self._begin is None:
                    self._begin = step - self._config.monitor.log_every_steps
                if loss is None or step <= self._warm_ups:
                    continue
                norms = {
                    name.removeprefix("grad_norm_"): GroupNorms(value or 0.0, 0.0)
                    for name, value in line.items()
                    if name.startswith("grad_norm_layer_")
                }
                accuracy = line.get("accuracy")
                self._lines.append(
                    _Line(step, loss, math.nan if accuracy is None else accuracy, reach(norms))
                )

    def evaluated(self, step: int, loss: float) -> None:
        """Note the loss of the evaluation set after a step, nats a masked token."""
        is_new = not self._held_out or step > self._held_out[-1][0]
        if step > self._warm_ups and math.isfinite(loss) and is_new:
            self._held_out.append((step, loss))

    def look(
        self, means: Mapping[str, float], last: LastStep, losses: LossHistory
    ) -> Plateau | Divergence | None:
        """Return what to say when a rule first holds; None at all other times.

        Args:
            means: of the interval that ends with `last`: `loss` in nats a masked token, `accuracy`.
            last: the interval's last step.
            losses: of all steps up to it.
        """
        interval = self._config.monitor.log_every_steps
        if self._begin is None:
            self._begin = last.step - interval
        if self._first_batch is None:
            self._first_batch = last.batch + 1 - interval
        had_diverged, self._has_diverged = self._has_diverged, self._diverges(last, losses)
        if self._has_diverged:
            # What comes after it is another curve.
            self._lines, self._held_out, self._begin = [], [], last.step
            return None if had_diverged else self._divergence(last, losses)
        return self._plateau(means, last) if self._entropy is not None else None

    def _diverges(self, last: LastStep, losses: LossHistory) -> bool:
        spikes = self._config.spikes
        if losses.has_diverged(spikes):
            return True
        recent = losses.last(spikes)
        if self._guess is None or len(recent) < spikes.steps_in_a_row:
            return False
        is_late = last.step > self._warm_ups + _LEAST_UPDATES
        return is_late and min(recent) > self._guess + _ABOVE_GUESS

    def _divergence(self, last: LastStep, losses: LossHistory) -> Divergence:
        spikes = self._config.spikes
        loss, best = float(np.median(losses.last(spikes))), losses.best
        assert best is not None, "a run that has losses has a best one"
        limit = losses.ceiling
        if not losses.has_diverged(spikes):
            assert self._guess is not None, "the other rule needs it"
            limit = self._guess + _ABOVE_GUESS
        since = losses.high[0][0] if losses.high else last.batch
        guess = math.nan if self._guess is None else self._guess
        advice = self._advice_diverged(last, losses, loss, since)
        return Divergence(since, loss, best, limit, guess, advice)

    def _plateau(self, means: Mapping[str, float], last: LastStep) -> Plateau | None:
        loss, accuracy = means["loss"], means["accuracy"]
        assert self._entropy is not None
        assert self._begin is not None
        if self._told or last.step <= self._warm_ups or not math.isfinite(loss):
            return None
        self._lines.append(_Line(last.step, loss, accuracy, reach(last.layers)))
        seen = last.step - max(self._warm_ups, self._begin)
        num_steps = max(self.patience_steps, seen // 2)
        # The lines of a step are never read again once the window has passed it.
        self._lines = [line for line in self._lines if line.step > last.step - num_steps]
        self._held_out = [each for each in self._held_out if each[0] > last.step - num_steps]
        if seen < self.patience_steps or not self._is_stuck(num_steps, seen):
            return None
        self._told = True
        since, mean = self._lines[0].step, float(np.mean([line.loss for line in self._lines]))
        return Plateau(
            since, mean, self._entropy, _LEVEL * self._entropy, self._advice(since, mean, last)
        )

    def _is_stuck(self, num_steps: int, seen: int) -> bool:
        assert self._entropy is not None
        # Intervals without an applied step have no loss.
        if len(self._lines) < _LEAST_LINES:
            return False
        steps, losses, accuracies, _ = np.array(self._lines, np.float64).T
        level = losses[len(losses) // 2 :].mean()
        if level <= _LEVEL * self._entropy:
            return False
        if self._guess is not None and level > self._guess + _ABOVE_GUESS:
            return False
        rise, error = _rise(steps, accuracies, num_steps)
        if seen >= 2 * self.patience_steps and self._is_cut_off():
            return rise + _CONTRADICTS * error < _LEAST_RISE
        if rise + _PROVES * error >= _LEAST_RISE:
            return False
        least = _LEAST_FALL * self._entropy
        if len(self._held_out) > 1:
            (first, before), (final, after) = self._held_out[0], self._held_out[-1]
            if (before - after) * num_steps / (final - first) >= least:
                return False
        fall, error = _rise(steps, -losses, num_steps)
        return fall + _PROVES * error < least

    def _is_cut_off(self) -> bool:
        reach = [line.reach for line in self._lines]
        before, after = np.median(reach[: len(reach) // 2]), np.median(reach[len(reach) // 2 :])
        return bool(np.median(reach) < _CUT_OFF and after <= _COMES_BACK * before)

    def _advice_diverged(self, last: LastStep, losses: LossHistory, loss: float, since: int) -> str:
        guess = f"a uniform guess has {self._guess:.3f}, " if self._guess is not None else ""
        causes = sorted(self._causes_diverged(last, losses, since), reverse=True)
        before = losses.usual[-1] if losses.usual else losses.start
        return "\n".join(
            [
                f"The run has diverged: the loss is {loss:.3f} at step {last.step}, and high since "
                f"batch {since}; {guess}the best was {losses.best:.3f}, the last before it "
                f"{before:.3f}. Likely causes, the likeliest first:",
                "",
                *(f"{place}. {text}" for place, (_, text) in enumerate(causes, 1)),
                "",
                f"Gradient norm {last.grad_norm:.3g}, learning rate {last.lr:.3g}, alpha "
                f"{last.alpha:.3f}.",
            ]
        )

    def _causes_diverged(
        self, last: LastStep, losses: LossHistory, since: int
    ) -> list[tuple[float, str]]:
        """Return what may have made the loss rise, as `_causes`."""
        train, spikes = self._config.train, self._config.spikes
        assert self._first_batch is not None
        into = since - self._first_batch
        is_new = self._first_batch > 0 and into <= _SOON * spikes.steps_in_a_row
        # A rate that was good for long is seldom the cause; one that has just become high is.
        is_young = last.step <= max(_SOON * self._warm_ups, _LEAST_UPDATES)
        weight, rate = self._rate(last)
        before = losses.usual[-1] if losses.usual else math.inf
        jumps = bool(losses.high) and losses.high[0][1] - before > _LEAST_JUMP
        found = [
            (weight + is_young, f"{rate}; train.grad_clip={train.grad_clip:g}"),
            (
                (1.0 if jumps else 0.5) - 0.4 * is_young,
                f"a bad batch: `postnorm inspect {self._config.folder.path} --batch {since}` shows "
                "what was trained on; train.skip_batches leaves batches out",
            ),
            (
                3.0 if is_new else 0.1,
                "the state that this attempt began with: `postnorm checkpoint verify`, and the "
                f"changes since its checkpoint in {self._config.folder.attempts.name}",
            ),
            (
                0.3 if train.precision == "bf16" else 0.0,
                f"numbers: train.precision={train.precision}; go on from a checkpoint from before "
                "it with fp32 for some steps: if the loss stays low there, it is the precision",
            ),
        ]
        if self._entropy is not None:
            found.append(
                (self._weight_of_start() * (1.0 if is_young else 0.2), self._start_of(last))
            )
        return [each for each in found if each[0] > 0]

    def _advice(self, since: int, mean: float, last: LastStep) -> str:
        assert self._entropy is not None
        causes = sorted(self._causes(last), reverse=True)
        learned = (
            "the model has learned how frequent tokens are, and nothing from their context"
            if mean < self._entropy * (2 - _LEVEL)
            else "the model has not even learned how frequent tokens are"
        )
        norms = ", ".join(f"{name} {each.gradient:.2g}" for name, each in last.layers.items())
        return "\n".join(
            [
                f"The loss has stayed at {mean:.3f} from step {since} to {last.step}, the unigram "
                f"entropy is {self._entropy:.3f} nats: {learned}. What to change, the likeliest "
                "first:",
                "",
                *(f"{place}. {text}" for place, (_, text) in enumerate(causes, 1)),
                "",
                f"Gradient norm {last.grad_norm:.3g}, by layer: {norms or 'unknown'}. "
                + self._seen(),
            ]
        )

    def _seen(self) -> str:
        ratio = float(np.median([line.reach for line in self._lines]))
        if math.isinf(ratio):
            return ""
        seen = f"The first layer's is {ratio:.2g} of the last layer's (median since then)"
        if ratio >= _CUT_OFF:
            return f"{seen}: the gradient reaches all layers."
        return (
            f"{seen}: tokens become alike on their way up, and the lower layers learn nothing "
            "from them."
        )

    def _causes(self, last: LastStep) -> list[tuple[float, str]]:
        """Return what may be the cause, each with a weight: 1 and more is a likely one."""
        return [
            (self._weight_of_start(), self._start_of(last)),
            self._rate(last),
            (
                min(1.0, _SMALL_BATCH_TOKENS / last.tokens_per_step / 2),
                f"batch: {last.tokens_per_step:,.0f} tokens a step; a small one has a noisy "
                "gradient: raise train.global_batch, or lower train.lr",
            ),
            (0.2, f"duplicates: {_duplicates(self._dataset)}"),
        ]

    def _rate(self, last: LastStep) -> tuple[float, str]:
        """Compare the peak learning rate with what is usual, as `_causes`."""
        model, train = self._config.model, self._config.train
        # A stage may have a higher one than the run.
        rate = max(train.lr, last.lr)
        of_stage = "" if rate == train.lr else f", {rate:g} at step {last.step}"
        text = f"learning rate: train.lr={train.lr:g}{of_stage}"
        if self._entropy is None:
            return 0.8, f"{text}: lower it threefold, or double train.warmup_steps"
        if train.optimizer not in ("adamw", "stable_adamw"):
            return 0.5, f"{text} with {train.optimizer}: try a third of it, and three times it"
        usual = _USUAL_RATE_BY_WIDTH / model.hidden_size
        times = rate / usual
        change = "this is not far from it"
        if times > _USUAL_TIMES:
            change = "lower it threefold, or double train.warmup_steps"
        elif times < 1 / _USUAL_TIMES:
            change = "raise it threefold"
        weight = times / 2 if times >= 1 else 0.2 / times
        return weight, f"{text}, {usual:.1g} is usual at width {model.hidden_size}; {change}"

    def _weight_of_start(self) -> float:
        model, train = self._config.model, self._config.train
        if (model.init, model.residual) in _SMALL_STARTS:
            return 0.1
        return model.num_layers / (12 if train.alpha_warmup_steps else 6)

    def _start_of(self, last: LastStep) -> str:
        model, train = self._config.model, self._config.train
        begin = (
            f"start: {model.num_layers} layers with model.init={model.init}, "
            f"model.residual={model.residual}, model.score_residual={model.score_residual} and "
            f"train.alpha_warmup_steps={train.alpha_warmup_steps} (alpha is {last.alpha:.3f}): "
        )
        return begin + self._advice_on_start()

    def _advice_on_start(self) -> str:
        model = self._config.model
        if (model.init, model.residual) in _SMALL_STARTS:
            return "24 layers converge with these"
        small = (
            "each sub-layer adds as much as its input, and deep models make all tokens alike: set "
            "model.init=deepnorm and model.residual=deepnorm, or model.init=rsqrt_depth"
        )
        return f"{small}, or lengthen the alpha warm-up; then start a new run"


def reach(layers: Mapping[str, GroupNorms]) -> float:
    """Return the first layer's gradient norm over the last one's; infinity where it is unknown."""
    names = sorted(name for name in layers if name.startswith("layer_"))
    if not names:
        return math.inf
    first, last = layers[names[0]].gradient, layers[names[-1]].gradient
    # Both underflow where all tokens are alike from the start.
    return first / last if last else 0.0


def _rise(
    steps: np.ndarray[tuple[int], np.dtype[np.float64]],
    values: np.ndarray[tuple[int], np.dtype[np.float64]],
    num_steps: int,
) -> tuple[float, float]:
    """Return what a straight line rises in `num_steps`, and its standard error (least squares)."""
    centred = steps - steps.mean()
    spread = float(centred @ centred)
    slope = float(centred @ values) / spread
    residual = values - values.mean() - slope * centred
    error = math.sqrt(float(residual @ residual) / (len(steps) - 2) / spread)
    return slope * num_steps, error * num_steps


def _duplicates(dataset: str) -> str:
    """Describe the duplicates that the dataset's report counts."""
    if is_address(dataset):
        return f"{dataset}/{_REPORT_FILE} counts what was dropped by the stages dedup and near"
    path = Path(dataset, _REPORT_FILE)
    try:
        stages = json.loads(path.read_text(encoding="utf-8"))["stages"]
        done = {name: counts for name, counts in stages.items() if name in ("dedup", "near")}
        parts = [
            f"{1 - counts['documents_out'] / counts['documents_in']:.1%} of the documents were "
            f"dropped by stage {name}"
            for name, counts in done.items()
            if counts["documents_in"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return f"unknown, {path} is missing or in another format; check the text for copies"
    if "near" not in done:
        parts.append(
            "near duplicates were not searched for (dedup.near_duplicates): copies may be left"
        )
    return "; ".join(parts)
