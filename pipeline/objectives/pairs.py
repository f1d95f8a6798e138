"""Masked language modelling with a question about the two segments of each piece.

`nsp`, next-sentence prediction (Devlin et al. 2019, arXiv 1810.04805, section 3.1): does the second
segment follow the first? `sop`, sentence order (Lan et al. 2020, arXiv 1909.11942, section 3.1):
are they in order? How pairs are made is told in `pipeline.data.pairs`.

Both are a linear layer with two outputs on BERT's pooler, tanh(W x + b) of the piece's [CLS]
(google-research/bert, run_pretraining.py, get_next_sentence_output). What is minimised is the mean
over masked tokens plus `objective.pair_weight`, 1 in both sources, times the mean over pairs.

Shapes: D hidden size, M masked positions, P pairs, V vocabulary.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.config.model import ModelConfig
from pipeline.config.objective import PairKind
from pipeline.data.loader import MicroBatch
from pipeline.model.encoder import MaskedLanguageModel, initialise
from pipeline.model.layout import Layout, rows
from pipeline.objectives.base import Sum, Sums, weight_tensor
from pipeline.objectives.mlm import MaskedLanguageModeling


class PairModel(MaskedLanguageModel):
    """An encoder with pooler, an MLM head, and one of two classes on the pooled [CLS]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.objective = nn.Linear(config.hidden_size, 2)
        initialise(self.objective, config)

    def forward(
        self,
        input_ids: Tensor,
        layout: Layout,
        masked_index: Tensor,
        segments: Tensor | None = None,
        targets: Tensor | None = None,
        *,
        pair_first: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Run `MaskedLanguageModel.forward`; with pairs return their logits too.

        Args:
            input_ids: as in `Encoder.forward`.
            layout: as in `Encoder.forward`.
            masked_index: (M,) int64 numbers of tokens, b * S + s in rows.
            segments: as in `Encoder.forward`.
            targets: (M,) int64 original token ids; given wherever pairs are.
            pair_first: (P,) int64 numbers of the [CLS] of pairs.

        Returns:
            With pairs, the sum of losses and the number of hits of the masked tokens, and (P, 2)
            logits in the parameters' dtype.
        """
        if pair_first is None:
            return super().forward(input_ids, layout, masked_index, segments, targets)
        assert targets is not None
        x = self.encoder(input_ids, layout, segments=segments)
        x = x.reshape(-1, self.config.hidden_size)
        logits_P2 = self.objective(self.encoder.pool(x[pair_first]))
        return *self.token_loss(x[masked_index], targets), logits_P2


class PairClassification(MaskedLanguageModeling):
    """`loss` and `accuracy` of masked tokens as `MaskedLanguageModeling`; those of pairs beside.

    `nsp` or `sop`: cross-entropy of the pairs in nats; `nsp_accuracy` or `sop_accuracy`: share
    told right. The weight of both is the number of pairs.
    """

    def __init__(self, kind: PairKind, weight: float) -> None:
        """Take what is asked of pairs, and the factor of their loss."""
        self.losses = {"loss": 1.0, kind: weight}
        self._kind = kind

    def make_model(self, config: ModelConfig) -> PairModel:
        """Return an encoder with both heads."""
        return PairModel(config)

    def __call__(self, model: nn.Module, batch: MicroBatch) -> Sums:
        """Return the sums over the masked positions and over the pairs of a micro-batch."""
        layout = rows(batch.documents, batch.positions, batch.cu_seqlens)
        # In the model's forward pass, where ZeRO stage 3 has the weights together.
        loss, correct, logits_P2 = model(
            batch.input_ids,
            layout,
            batch.inputs["masked_index"],
            segments=batch.segments,
            targets=batch.inputs["targets"],
            pair_first=batch.inputs["pair_first"],
        )
        labels_P = batch.inputs["pair_labels"]
        # At least fp32: a sum of losses in bf16 would keep 8 bits.
        wide_P2 = logits_P2.to(loss.dtype)
        pair_loss = F.cross_entropy(wide_P2, labels_P, reduction="sum")
        told_right = (wide_P2.argmax(-1) == labels_P).sum().to(loss.dtype)
        tokens, pairs = (weight_tensor(batch.weights[name], loss) for name in self.losses)
        return {
            "loss": Sum(loss, tokens),
            "accuracy": Sum(correct, tokens),
            self._kind: Sum(pair_loss, pairs),
            f"{self._kind}_accuracy": Sum(told_right, pairs),
        }
