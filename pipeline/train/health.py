"""A run that learns nothing but how frequent tokens are: seen early, and told with its own numbers.

Rule: behind both warm-ups (learning rate and alpha) the logged loss has been within 5% of the
unigram entropy, the loss of a model that knows frequencies alone, in every log line of
`patience_steps`: 2% of the run's steps, but at least 20 log intervals.

Finds ranks that all others wait for.

Rule: in each of three log intervals in a row, a rank's own work (waiting for data, and forward and
backward passes until the first collective) took more than `monitor.straggler_factor` times the
median of the other ranks, by at least a hundredth of the step.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.config.runs import PretrainConfig
from pipeline.train.layer_norms import GroupNorms

_NEAR = 0.05
_LEAST_INTERVALS = 20
_SHARE_OF_RUN = 0.02
_REPORT_FILE = "report.json"
# (init, residual) with which 24 layers converge without an alpha warm-up: docs/models.md.
_SMALL_STARTS = {("rsqrt_depth", "plain"), ("deepnorm", "deepnorm"), ("unit", "rezero")}


@dataclass(frozen=True)
class LastStep:
    """What the causes are read from."""

    step: int
    alpha: float
    lr: float
    grad_norm: float
    layers: dict[str, GroupNorms]
    tokens_per_step: float


class PlateauDoctor:
    """Follows the logged losses of one attempt."""

    def __init__(self, config: PretrainConfig, unigram_entropy: float) -> None:
        """Nothing was seen yet."""
        train = config.train
        self._config = config
        self._entropy = unigram_entropy
        self._warm_ups = max(train.warmup_steps, train.alpha_warmup_steps)
        self._since: int | None = None
        self._told = False
        self.patience_steps = max(
            _LEAST_INTERVALS * config.monitor.log_every_steps,
            round(_SHARE_OF_RUN * train.num_steps),
        )

    def look(self, loss: float, last: LastStep) -> str | None:
        """Return the warning in Markdown when the rule first holds; None at all other times.

        Args:
            loss: of the interval that ends with the last step.
            last: that step.
        """
        is_near = abs(loss - self._entropy) <= _NEAR * self._entropy
        if last.step <= self._warm_ups or not is_near:
            self._since = None
            return None
        if self._since is None:
            self._since = last.step
        if self._told or last.step - self._since < self.patience_steps:
            return None
        self._told = True
        return self._advice(loss, self._since, last)

    def _advice(self, loss: float, since: int, last: LastStep) -> str:
        train = self._config.train
        return "\n".join(
            [
                f"The loss has been within {_NEAR:.0%} of the unigram entropy "
                f"({self._entropy:.3f} nats) from step {since} to {last.step}; it is {loss:.3f}. "
                "The model knows how frequent tokens are and nothing of their context. "
                "Likely causes, with this run's numbers:",
                "",
                f"- learning rate: {last.lr:.2e} now, peak train.lr={train.lr:g}, warm-up "
                f"{train.warmup_steps:,} steps; a Post-LN encoder that got too much too soon may "
                "stay here: halve train.lr or double train.warmup_steps, and start afresh",
                *self._start(last.alpha),
                f"- batch: {last.tokens_per_step:,.0f} tokens a step; a small one has "
                "a noisy gradient: raise train.global_batch",
                f"- gradient norm {last.grad_norm:.3g}, by layer: {_by_layer(last.layers)}; "
                "lower layers near 0 beside the head's mean that nothing passes through the norms",
                f"- duplicates: {_duplicates(Path(self._config.data.dir))}",
            ]
        )

    def _start(self, alpha: float) -> list[str]:
        """Describe alpha, and the initialisation if deep models fail with it."""
        model, steps = self._config.model, self._config.train.alpha_warmup_steps
        pace = f"from 0 to 1 in {steps:,} steps" if steps else "1 from the start"
        advice = (
            f"model.init={model.init} with model.residual={model.residual} needs no warm-up"
            if (model.init, model.residual) in _SMALL_STARTS
            else "a deeper model may need it slower: lengthen train.alpha_warmup_steps"
        )
        told = [f"- alpha: {alpha:.3f}, {pace} (train.alpha_warmup_steps={steps}); {advice}"]
        if model.init == "unit" and model.residual == "plain":
            told.append(
                f"- initialisation: model.init=unit with {model.num_layers} layers and "
                f"model.score_residual={model.score_residual}; sub-layers then add as much as "
                "there is, and deep models make all tokens alike, with carried scores even through "
                "an alpha warm-up: set model.init=deepnorm and model.residual=deepnorm, or "
                "model.init=rsqrt_depth, and start afresh"
            )
        return told


def _by_layer(layers: dict[str, GroupNorms]) -> str:
    return ", ".join(f"{name} {norms.gradient:.2g}" for name, norms in layers.items()) or "unknown"


def _duplicates(dataset: Path) -> str:
    """Describe the duplicates that the dataset's report counts."""
    path = dataset / _REPORT_FILE
    try:
        stages = json.loads(path.read_text(encoding="utf-8"))["stages"]
        found = {name: counts for name, counts in stages.items() if name in ("dedup", "near")}
        parts = [
            f"{1 - counts['documents_out'] / counts['documents_in']:.1%} of the documents were "
            f"dropped by stage {name}"
            for name, counts in found.items()
            if counts["documents_in"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return f"unknown, {path} is missing or of another form; check the text for copies"
    if "near" not in found:
        parts.append(
            "near duplicates were not looked for (dedup.near_duplicates): copies may be left"
        )
    return "; ".join(parts)


_PATIENCE = 3
_LEAST_SHARE = 0.01


class Stragglers:
    """Follows the ranks of one attempt."""

    def __init__(self, hosts: list[str], factor: float) -> None:
        """Nothing was seen yet.

        Args:
            hosts: of each rank.
            factor: see the rule.
        """
        self._hosts = hosts
        self._factor = factor
        self._slow = [0] * len(hosts)
        """Intervals in a row in which a rank was slow."""

    def look(
        self, wait_s: npt.NDArray[np.float64], compute_s: npt.NDArray[np.float64], step_s: float
    ) -> list[tuple[int, float, str]]:
        """Return the ranks to warn about, each with its factor and the text of the warning.

        Told once, until the rank has been as fast as the others for an interval.

        Args:
            wait_s: (ranks,) waiting for data in a step, mean of the interval.
            compute_s: (ranks,) passes until the first collective, likewise.
            step_s: of a whole step.
        """
        if len(self._hosts) < 2:
            return []
        own_s = wait_s + compute_s
        found = []
        for rank, slow in enumerate(self._slow):
            others_s = float(np.median(np.delete(own_s, rank)))
            late_s = float(own_s[rank]) - others_s
            is_slow = late_s > (self._factor - 1) * others_s and late_s > _LEAST_SHARE * step_s
            self._slow[rank] = slow + 1 if is_slow else 0
            if self._slow[rank] == _PATIENCE:
                factor = float(own_s[rank]) / others_s if others_s else float("inf")
                cause = "waiting for data" if wait_s[rank] > compute_s[rank] else "computing"
                found.append((
                    rank, factor,
                    f"rank {rank} on {self._hosts[rank]} needs {factor:.2f} times as long as the "
                    f"median of the other ranks, most of it {cause}: {own_s[rank] * 1e3:.1f} ms a "
                    f"step against {others_s * 1e3:.1f} ms, {_PATIENCE} log intervals in a row. "
                    f"The others wait for it: about {late_s / step_s:.0%} of the run's time. Look "
                    "at the temperature, clock, other processes and storage of that node, or leave "
                    "it out",
                ))  # fmt: skip
        return found
