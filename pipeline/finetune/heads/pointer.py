"""A score for each span of each type (GlobalPointer), so that entities may nest."""

from typing import Any

import torch
from torch import Tensor

from pipeline.config.model import ModelConfig
from pipeline.finetune.heads.base import TaskHead
from pipeline.model import heads
from pipeline.model.encoder import Encoder
from pipeline.model.layout import Layout
from pipeline.tasks.types import HeadSpec


class PointerHead(TaskHead):
    """Queries and keys of each type."""

    def __init__(self, config: ModelConfig, spec: HeadSpec) -> None:
        super().__init__(config, spec)
        num_types = len(self.kind.outputs(spec))
        self.pointer = heads.GlobalPointer(config, num_types, dropout=spec.dropout)

    def scores(
        self, encoder: Encoder, input_ids: Tensor, layout: Layout, inputs: dict[str, Tensor]
    ) -> Tensor:
        """(B, K, S, S) of spans from row to column."""
        x_BSD = encoder(input_ids, layout)
        scores: Tensor = self.pointer(x_BSD, layout.positions, inputs["text"])
        return scores

    def losses(self, scores: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """(B,)."""
        row, label, start, last = inputs["spans"].unbind(-1)
        gold = torch.zeros_like(scores, dtype=torch.bool)
        gold[row, label, start, last] = True
        return heads.span_losses(scores, gold)

    @torch.no_grad()
    def decode(self, scores: Tensor, inputs: dict[str, Tensor]) -> list[Any]:
        """Return the `heads.TypedSpan`s of each row."""
        return list(heads.decode_spans(scores.float()))
