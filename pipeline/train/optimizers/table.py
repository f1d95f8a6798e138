"""The optimizers by the names that a config gives them: a new one is a file and a line here."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from pipeline.config.train import Optimizer, TrainConfig
from pipeline.train.optimizers.adamw import AdamW
from pipeline.train.optimizers.base import PartitionedOptimizer
from pipeline.train.optimizers.lamb import Lamb
from pipeline.train.optimizers.muon import Muon
from pipeline.train.optimizers.slices import hidden_matrices
from pipeline.train.optimizers.stable_adamw import StableAdamW

OPTIMIZERS: dict[Optimizer, type[PartitionedOptimizer]] = {
    "adamw": AdamW,
    "lamb": Lamb,
    "muon": Muon,
    "stable_adamw": StableAdamW,
}

logger = logging.getLogger(__name__)


def make_optimizer(
    model: nn.Module, config: TrainConfig, lr_scale: Callable[[str], float] = lambda _: 1.0
) -> PartitionedOptimizer:
    """Make the optimizer of all parameters, in the groups of `parameter_groups`; log their sizes.

    `lr_scale` gives the learning rate of a parameter, by its name, as a share of the run's.
    """
    made = OPTIMIZERS[config.optimizer]
    apart = hidden_matrices(model) if made.hidden_apart else ()
    groups = parameter_groups(model, config.weight_decay, lr_scale, apart=apart)
    for group in groups:
        size = sum(parameter.numel() for parameter in group["params"])
        logger.info(
            "%s%s: weight decay %s on %d tensors of %s parameters",
            config.optimizer,
            " of hidden matrices" if group.get("is_apart") else "",
            group["weight_decay"],
            len(group["params"]),
            f"{size:,}",
        )
    return made(groups, config)


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    lr_scale: Callable[[str], float] = lambda _: 1.0,
    *,
    apart: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """Group the parameters: matrices decay; biases and the gains and shifts of norms do not.

    Parameters of a rate of their own are groups of their own, with `lr_scale`, and so are those
    named in `apart`, whose groups have `is_apart`.

    Source: google-research/bert `optimization.py`, exclude_from_weight_decay.
    """
    names = frozenset(apart)
    groups: dict[tuple[float, bool, bool], list[nn.Parameter]] = {}
    # Every rank needs the same order of groups, by which ZeRO splits.
    for scale in sorted({lr_scale(name) for name, _ in model.named_parameters()}, reverse=True):
        for is_apart, decays in ((True, True), (False, True), (False, False)):
            groups[scale, is_apart, decays] = []
    for name, parameter in model.named_parameters():
        groups[lr_scale(name), name in names, parameter.ndim >= 2].append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if decays else 0.0, "decays": decays}
        | ({"lr_scale": scale} if scale != 1.0 else {})
        | ({"is_apart": True} if is_apart else {})
        for (scale, is_apart, decays), parameters in groups.items()
        if parameters
    ]
