"""One vector a row: classes, labels, numbers, and scores of choices."""

from torch import Tensor

from pipeline.finetune.heads.base import LinearOutputs
from pipeline.model import heads
from pipeline.model.encoder import Encoder
from pipeline.model.layout import Layout


class PooledHead(LinearOutputs):
    """A linear layer on the vector of a row."""

    def scores(
        self, encoder: Encoder, input_ids: Tensor, layout: Layout, inputs: dict[str, Tensor]
    ) -> Tensor:
        """(B, K) of classes, or (U, C) of choices."""
        pooled = self.pooled(encoder, input_ids, layout, inputs["mask"])
        if "choices" in inputs:
            return heads.choice_scores(self.linear, pooled, inputs["choices"])
        scores: Tensor = self.linear(pooled)
        return scores

    def losses(self, scores: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """(B,) or (U,), weighted by class where the task asks for it."""
        losses = heads.class_losses(self.kind.loss, scores, inputs["labels"])
        return losses * inputs["row_weights"] if "row_weights" in inputs else losses
