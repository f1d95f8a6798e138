"""What every objective offers; the trainer knows no objective by its name."""

import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pipeline.config.data import EvalDataConfig, TrainDataConfig
from pipeline.config.model import ModelConfig
from pipeline.data.dataset import Inputs
from pipeline.data.format import DatasetIndex
from pipeline.data.loader import MicroBatch
from pipeline.model.encoder import EncoderModel


class Sum(NamedTuple):
    """A sum and its divisor, 0-dimensional tensors on the device: add freely, divide at the end."""

    total: Tensor
    """fp32; fp64 where the model is."""
    weight: Tensor
    """fp32."""


Sums = dict[str, Sum]
"""By the names under which their quotients are logged; equal names in every batch of a run."""


class Objective(Protocol):
    """Turns slots into inputs, and a batch into named sums.

    An objective has no state: alpha belongs to the encoder, the schedules to the loop.
    """

    @property
    def losses(self) -> Mapping[str, float]:
        """The sums that are minimised, each with its factor.

        The minimised loss is the sum over these names of factor * (total / weight), where total and
        weight are added up over the whole global batch first.
        """

    def tracked_loss(self, means: Mapping[str, float]) -> float:
        """Return the loss that is logged and watched for spikes; NaN if nothing was predicted.

        `means` are the quotients of those sums whose weight is not 0.
        """

    @property
    def targets(self) -> str:
        """What a unit of weight of the first loss is called in the log, such as "masked"."""

    def make_model(self, config: ModelConfig) -> EncoderModel:
        """Return the model that the objective trains, initialised from torch's random state."""

    def __call__(self, model: nn.Module, batch: MicroBatch) -> Sums:
        """Run the model on a micro-batch that lies on its device.

        The weights of `losses` are those of `MicroBatch.weights`.
        """


class TextObjective(Objective, Protocol):
    """An objective on packed text, which it corrupts."""

    def train_inputs(self, config: TrainDataConfig, index: DatasetIndex) -> Inputs:
        """Make the inputs of training batches."""

    def eval_inputs(self, config: EvalDataConfig, index: DatasetIndex) -> Inputs:
        """Make the inputs of held-out batches, the same for every run."""


def first_loss(losses: Mapping[str, float], means: Mapping[str, float]) -> float:
    """Return the first loss, or another one that is not finite; NaN without the first one."""
    # Any broken loss shows, or a run could watch a good first loss while a second one is NaN.
    broken = [means[name] for name in losses if not math.isfinite(means.get(name, 0.0))]
    return broken[0] if broken else means.get(next(iter(losses)), math.nan)


def weight_tensor(weight: float, like: Tensor) -> Tensor:
    """Return a weight of `Sum` on the device of a tensor."""
    # Not `torch.tensor` with a device, which copies from pageable memory and waits for the GPU.
    return torch.full((), weight, dtype=torch.float32, device=like.device)


def add_up(parts: list[Sums]) -> Sums:
    """Add the sums of several micro-batches, name by name."""
    return {
        name: Sum(
            torch.stack([part[name].total for part in parts]).sum(),
            torch.stack([part[name].weight for part in parts]).sum(),
        )
        for name in parts[0]
    }


def detached(sums: Sums) -> Sums:
    """Return the same numbers without their graph."""
    return {name: Sum(each.total.detach(), each.weight) for name, each in sums.items()}
