"""Span boundary objective (SpanBERT, Joshi et al. 2020, arXiv 1907.10529, section 3.2).

Beside the MLM loss, each token of a masked span is predicted a second time, from the hidden states
of the two slots beside the span and its place in it, without its own hidden state:

    h = [x_left; x_right; p_place],  y = norm(gelu(W2 norm(gelu(W1 h + b1)) + b2)),
    logits = E y + b, where E are the token embeddings.

Source: facebookresearch/SpanBERT `pretraining/fairseq/models/pair_bert.py`,
BertPairTargetPredictionHead, and `criterions/spanbert_loss.py`. Which slots bound a span is
`pipeline.objectives.parts.find_boundaries`, which says how it differs. Other differences:
the norms are of the model's kind (LayerNorm in BERT's), W2 maps to the embeddings' width, biases
follow `model.bias`, and the loss is divided by the number of targets, there by one more.

Shapes: T slots of a micro-batch, D hidden size, E embedding width, V vocabulary, K targets.
"""

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.config.model import ModelConfig
from pipeline.config.objective import ObjectiveConfig
from pipeline.data.loader import MicroBatch
from pipeline.kernels.loss import vocabulary_loss
from pipeline.model.encoder import MaskedLanguageModel, initialise
from pipeline.model.layers import make_norm
from pipeline.model.layout import Layout, rows
from pipeline.objectives.base import Sum, Sums, weight_tensor
from pipeline.objectives.mlm import MaskedLanguageModeling
from pipeline.objectives.parts import MAX_BOUNDARY_TOKENS

# SpanBERT's, whatever the width of the model.
_PLACE_WIDTH = 200


@dataclass(frozen=True)
class BoundaryTargets:
    """Where K targets are; each (K,) int64, see `Boundaries` of `parts`."""

    index: Tensor
    left: Tensor
    right: Tensor
    place: Tensor


class BoundaryHead(nn.Module):
    """Predicts the tokens of spans from what is beside the spans."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, width = config.hidden_size, config.embedding_width
        self.place = nn.Embedding(MAX_BOUNDARY_TOKENS, _PLACE_WIDTH)
        self.inner = nn.Linear(2 * size + _PLACE_WIDTH, size, bias=config.bias)
        self.inner_norm = make_norm(config, size)
        self.outer = nn.Linear(size, width, bias=config.bias)
        self.outer_norm = make_norm(config, width)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size or 0)) if config.bias else None
        initialise(self, config)

    def forward(
        self, x_TD: Tensor, at: BoundaryTargets, weight_VE: Tensor, targets: Tensor, *, fused: bool
    ) -> tuple[Tensor, Tensor]:
        """Sum losses and hits over (K,) targets, as `vocabulary_loss`."""
        h = torch.cat((x_TD[at.left], x_TD[at.right], self.place(at.place)), -1)
        h_KD = self.inner_norm(F.gelu(self.inner(h)))
        h_KE = self.outer_norm(F.gelu(self.outer(h_KD)))
        return vocabulary_loss(h_KE, weight_VE, self.bias, targets, fused=fused)


class BoundaryModel(MaskedLanguageModel):
    """A masked language model with a boundary head, which is not part of what is exported."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        # Made last, so that everything else starts as in a run without it.
        self.objective = BoundaryHead(config)

    def forward(
        self,
        input_ids: Tensor,
        layout: Layout,
        masked_index: Tensor,
        segments: Tensor | None = None,
        targets: Tensor | None = None,
        boundary: BoundaryTargets | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Do as `MaskedLanguageModel.forward`; sum loss and hits of boundary targets as well.

        Returns:
            With boundary targets, four 0-dimensional tensors: losses and hits of the masked tokens,
            then those of the boundary targets.
        """
        if targets is None or boundary is None:
            return super().forward(input_ids, layout, masked_index, segments, targets)
        x_TD = self.encoder(input_ids, layout, segments=segments)
        x_TD = x_TD.reshape(-1, self.config.hidden_size)
        masked = self.token_loss(x_TD[masked_index], targets)
        spans = self.objective(
            x_TD,
            boundary,
            self.encoder.token_embedding.weight,
            targets[boundary.index],
            fused=self._fuses_loss,
        )
        return *masked, *spans


class SpanBoundaries(MaskedLanguageModeling):
    """MLM's sums, and `sbo`, `sbo_accuracy`: the same of the boundary targets, by their number."""

    def __init__(self, config: ObjectiveConfig) -> None:
        self.losses = {"loss": 1.0, "sbo": config.boundary_weight}

    def make_model(self, config: ModelConfig) -> BoundaryModel:
        """Return an encoder with an MLM head and a boundary head."""
        return BoundaryModel(config)

    def __call__(self, model: nn.Module, batch: MicroBatch) -> Sums:
        """Return the sums over the masked positions and the boundary targets of a micro-batch."""
        inputs = batch.inputs
        # In the model's forward pass, where ZeRO stage 3 has the weights together.
        loss, correct, sbo, sbo_correct = model(
            batch.input_ids,
            rows(batch.documents, batch.positions, batch.cu_seqlens),
            inputs["masked_index"],
            segments=batch.segments,
            targets=inputs["targets"],
            boundary=BoundaryTargets(
                **{each.name: inputs[f"boundary_{each.name}"] for each in fields(BoundaryTargets)}
            ),
        )
        masked, predicted = (weight_tensor(batch.weights[name], loss) for name in self.losses)
        return {
            "loss": Sum(loss, masked),
            "accuracy": Sum(correct, masked),
            "sbo": Sum(sbo, predicted),
            "sbo_accuracy": Sum(sbo_correct, predicted),
        }
