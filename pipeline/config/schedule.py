"""The three schedules of a step as pure functions: learning rate, alpha and mask ratio.

Learning rate and alpha are functions of the optimizer steps already applied: a skipped step is not
applied, so neither advances on it. A time budget depends on elapsed time as well: two such runs
differ, and so do a run and its repetition.
"""

import math
from bisect import bisect_right

from pipeline.config.data import DataConfig
from pipeline.config.train import TrainConfig

_S_PER_HOUR = 3600


def learning_rate(step: int, config: TrainConfig, elapsed_s: float = 0.0) -> float:
    """Learning rate of the update after `step` applied ones.

    The first update takes lr / warmup_steps. With `linear` the last one before num_steps is one
    step above min_lr_ratio * lr.

    Only a time budget looks at `elapsed_s`, which is the same on all ranks.
    """
    factor = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if config.schedule == "piecewise":
        return config.lr * factor * _through_points(step, config)
    if config.schedule == "time_budget":
        # Time may run out in the warm-up already: then the lower of the two lines.
        return config.lr * min(factor, _above_minimum(_left(step, config, elapsed_s), config))
    if step < config.warmup_steps:
        return config.lr * factor
    shape = {"linear": _left, "cosine": _cosine, "wsd": _stable_then_down}[config.schedule]
    return config.lr * _above_minimum(shape(step, config), config)


def alpha(step: int, warmup_steps: int) -> float:
    """Scale of the residual branches after `step` applied updates: 0 at first, then linear to 1.

    Source: Su 2020, kexue.fm/archives/8620; the length of the warm-up is not published.
    """
    return 1.0 if step >= warmup_steps else step / warmup_steps


def mask_ratio(number: int, config: DataConfig) -> float:
    """Share of the tokens of batch `number` (from 0) to predict: linear, then constant."""
    # Of the batch's number, because batches are made before it is known which steps are skipped.
    if config.mask_prob_end is None or number == 0:
        return config.mask_prob
    if number >= config.mask_prob_steps:
        return config.mask_prob_end
    change = config.mask_prob_end - config.mask_prob
    return config.mask_prob + change * number / config.mask_prob_steps


def is_over(step: int, config: TrainConfig, elapsed_s: float) -> bool:
    """Return whether a run ends after `step` applied updates."""
    return step >= config.num_steps or budget_left_s(config, elapsed_s) <= 0


def budget_left_s(config: TrainConfig, elapsed_s: float) -> float:
    """Seconds until a time budget is used; infinite without one."""
    if config.budget_hours is None:
        return math.inf
    return config.budget_hours * _S_PER_HOUR - elapsed_s


def share_done(step: int, config: TrainConfig, elapsed_s: float) -> float:
    """Share of a run that is done: the larger of those of its steps and of its time budget."""
    share = step / config.num_steps
    if config.budget_hours is not None:
        share = max(share, elapsed_s / (config.budget_hours * _S_PER_HOUR))
    return min(1.0, share)


def _above_minimum(factor: float, config: TrainConfig) -> float:
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * factor


def _left(step: int, config: TrainConfig, elapsed_s: float = 0.0) -> float:
    """1 at the end of the warm-up, 0 at the end of the run.

    Under a time budget (Izsak et al. 2021, arXiv 2104.07705) the share of the run that is done is
    the larger of the shares of its steps and of its time.
    """
    decaying = config.num_steps - config.warmup_steps
    left = max(0, config.num_steps - step) / decaying
    if config.budget_hours is not None:
        time_left = max(0.0, 1.0 - elapsed_s / (config.budget_hours * _S_PER_HOUR))
        # Over the same length as the steps: where both go alike, both are 1 as the warm-up ends.
        left = min(left, time_left * config.num_steps / decaying)
    return min(1.0, left)


def _cosine(step: int, config: TrainConfig) -> float:
    """Half a cosine; Loshchilov and Hutter 2016, arXiv 1608.03983, without restarts."""
    return 0.5 * (1.0 + math.cos(math.pi * (1.0 - _left(step, config))))


def _stable_then_down(step: int, config: TrainConfig) -> float:
    """1 until the decay, 0 at its end; 1 - sqrt: Haegele et al. 2024, arXiv 2405.18392."""
    assert config.decay_steps is not None, "checked by the config"
    into = step - (config.num_steps - config.decay_steps)
    done = min(1.0, max(0.0, into / config.decay_steps))
    return 1.0 - (math.sqrt(done) if config.decay_shape == "1-sqrt" else done)


def _through_points(step: int, config: TrainConfig) -> float:
    points = config.lr_points
    after = bisect_right(points, step, key=lambda point: point.step)
    if after in (0, len(points)):
        return points[max(0, after - 1)].factor
    first, second = points[after - 1], points[after]
    share = (step - first.step) / (second.step - first.step)
    return first.factor + (second.factor - first.factor) * share
