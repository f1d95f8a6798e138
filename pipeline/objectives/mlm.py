"""Masked language modelling (Devlin et al. 2019, arXiv 1810.04805, section 3.1)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from torch import nn

from pipeline.config.data import EvalDataConfig, TrainDataConfig
from pipeline.config.model import ModelConfig
from pipeline.data.dataset import Inputs
from pipeline.data.format import DatasetIndex
from pipeline.data.loader import MicroBatch
from pipeline.model.encoder import EncoderModel, MaskedLanguageModel
from pipeline.model.layout import rows
from pipeline.objectives import inputs
from pipeline.objectives.base import Sum, Sums, first_loss, weight_tensor


class MaskedLanguageModeling:
    """`loss`: cross-entropy of the masked tokens in nats; `accuracy`: share predicted right.

    The weight of both is the number of masked tokens.
    """

    losses: Mapping[str, float] = MappingProxyType({"loss": 1.0})
    targets: ClassVar[str] = "masked"

    def make_model(self, config: ModelConfig) -> EncoderModel:
        """Return an encoder with an MLM head."""
        return MaskedLanguageModel(config)

    def train_inputs(self, config: TrainDataConfig, index: DatasetIndex) -> Inputs:
        """Make inputs that follow from the run's seed."""
        return inputs.train_inputs(config, index)

    def eval_inputs(self, config: EvalDataConfig, index: DatasetIndex) -> Inputs:
        """Make inputs that are the same for every run."""
        return inputs.eval_inputs(config, index)

    def tracked_loss(self, means: Mapping[str, float]) -> float:
        """Return the loss of masked tokens, which objectives have in common."""
        # Not of all losses: curves of objectives compare, and a plateau is found by the entropy of
        # tokens.
        return first_loss(self.losses, means)

    def __call__(self, model: nn.Module, batch: MicroBatch) -> Sums:
        """Return the sums over the masked positions of a micro-batch."""
        layout = rows(batch.documents, batch.positions, batch.cu_seqlens)
        # In the model's forward pass, where ZeRO stage 3 has the weights together.
        loss, correct = model(
            batch.input_ids,
            layout,
            batch.inputs["masked_index"],
            segments=batch.segments,
            targets=batch.inputs["targets"],
        )
        count = weight_tensor(batch.weights["loss"], loss)
        return {"loss": Sum(loss, count), "accuracy": Sum(correct, count)}
