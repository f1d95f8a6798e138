"""Schedules as pure functions of the number of optimizer steps already applied.

A skipped step is not applied, so none of them advances on it.
"""

from pipeline.config.train import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """Learning rate of the update after `step` applied ones: linear up, then linear down.

    The first update takes lr / warmup_steps; the last one before num_steps is one step above
    min_lr_ratio * lr.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    left = max(0, config.num_steps - step) / (config.num_steps - config.warmup_steps)
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)


def alpha(step: int, warmup_steps: int) -> float:
    """Scale of the residual branches after `step` applied updates: 0 at first, then linear to 1.

    Source: Su 2020, kexue.fm/archives/8620; the length of the warm-up is not published.
    """
    return 1.0 if step >= warmup_steps else step / warmup_steps
