"""The optimizer of a run: AdamW or LAMB, and which parameters decay."""

import logging
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from pipeline.config.train import TrainConfig
from pipeline.train.lamb import Lamb
from pipeline.train.tensor_slice import TensorSlice

logger = logging.getLogger(__name__)


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Over all parameters of a model, in the groups of `decay_groups`; logs their sizes."""
    groups = decay_groups(model, config.weight_decay)
    for group in groups:
        size = sum(parameter.numel() for parameter in group["params"])
        logger.info(
            "%s: weight decay %s on %d tensors of %s parameters",
            config.optimizer, group["weight_decay"], len(group["params"]), f"{size:,}",
        )  # fmt: skip
    betas = (config.adam_beta1, config.adam_beta2)
    if config.optimizer == "adamw":
        # Fused: one pass over weights, gradient and averages instead of one for each operation.
        return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=True)
    assert config.lamb_bias_correction is not None, "checked by the config"
    # As in Google's code, what does not decay is not adapted; bert4keras adapts all.
    groups = [{**group, "adapts": is_matrix(group["params"][0])} for group in groups]
    return Lamb(
        groups, lr=config.lr, betas=betas, eps=config.adam_eps,
        bias_correction=config.lamb_bias_correction,
    )  # fmt: skip


def matrix_slices(
    model: nn.Module, shapes: dict[str, tuple[int, ...]], slices: list[TensorSlice]
) -> tuple[list[str], list[TensorSlice]]:
    """Cuts pieces of parameters into pieces of the matrices that are stored as one parameter.

    Args:
        model: its modules name such parameters, and their numbers of matrices, in `stacked`.
        shapes: of its whole parameters, by name.
        slices: any pieces of them.

    Returns:
        Names of all matrices of the model, and the pieces by these names.
    """
    stacked = {
        f"{prefix}.{name}".removeprefix("."): number
        for prefix, module in model.named_modules()
        for name, number in getattr(module, "stacked", {}).items()
    }
    names, pieces = [], []
    for name, shape in shapes.items():
        number = stacked.get(name, 1)
        size = math.prod(shape) // number
        names += [f"{name}/{which}" for which in range(number)]
        for piece in slices:
            if piece.name == name:
                pieces += _cut(piece, size)
    return names, pieces


def _cut(piece: TensorSlice, size: int) -> list[TensorSlice]:
    """Cuts a piece at multiples of `size` elements of its parameter."""
    end = piece.start + piece.numel
    starts = [piece.start, *range((piece.start // size + 1) * size, end, size)]
    return [
        replace(
            piece, name=f"{piece.name}/{first // size}", start=first, numel=last - first,
            offset=piece.offset + first - piece.start,
        )
        for first, last in pairwise([*starts, end])
    ]  # fmt: skip


def is_matrix(parameter: nn.Parameter) -> bool:
    """Whether a parameter decays and has a trust ratio: no bias, gain or shift."""
    return parameter.ndim >= 2


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Optimizer groups: matrices decay; biases and the gains and shifts of norms do not.

    Source: google-research/bert `optimization.py`, exclude_from_weight_decay.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if is_matrix(each)], "weight_decay": weight_decay},
        {"params": [each for each in parameters if not is_matrix(each)], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
