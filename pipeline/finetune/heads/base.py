"""`TaskHead`: the layers of a task on an encoder; a module beside this one has those of a kind.

Shapes: B rows of S slots, K classes or types, C choices, U examples; X rows of choices.
"""

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config.model import ModelConfig
from pipeline.model import heads
from pipeline.model.encoder import Encoder
from pipeline.model.layers import Trace
from pipeline.model.layout import Layout
from pipeline.tasks.kinds.table import KINDS
from pipeline.tasks.types import HeadSpec


class TaskHead(nn.Module, ABC):
    """The layers of a task on top of an encoder, its losses, and what its scores say."""

    def __init__(self, config: ModelConfig, spec: HeadSpec) -> None:
        super().__init__()
        self.spec, self.kind = spec, KINDS[spec.kind]

    def forward(
        self,
        encoder: Encoder,
        input_ids: Tensor,
        layout: Layout,
        inputs: dict[str, Tensor],
        *,
        with_losses: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Score rows by an encoder; see `pipeline.finetune.model.TaskModel.forward`."""
        scores = self.scores(encoder, input_ids, layout, inputs)
        return scores, self.losses(scores, inputs) if with_losses else None

    @abstractmethod
    def scores(
        self, encoder: Encoder, input_ids: Tensor, layout: Layout, inputs: dict[str, Tensor]
    ) -> Tensor:
        """Score rows; `inputs` are those of the kind, and `mask` (B, S) bool."""

    @abstractmethod
    def losses(self, scores: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Return the loss of each unit; `inputs` also have the kind's targets."""

    @torch.no_grad()
    def decode(self, scores: Tensor, inputs: dict[str, Tensor]) -> list[Any]:
        """Return what each unit's scores say, for `Kind.prediction`: here the scores (lists)."""
        return scores.float().tolist()  # type: ignore[no-any-return]

    def pooled(
        self, encoder: Encoder, input_ids: Tensor, layout: Layout, mask_BS: Tensor
    ) -> Tensor:
        """Return (B, D) a vector of each row."""
        pool: Any = self.spec.pool
        trace = Trace(keep_probabilities=False) if pool == "first_last_avg" else None
        x_BSD = encoder(input_ids, layout, trace=trace)
        hidden = [x_BSD] if trace is None else trace.hidden
        return heads.pool(pool, hidden, heads.masked_documents(mask_BS), encoder)


class LinearOutputs(TaskHead):
    """A linear layer."""

    def __init__(self, config: ModelConfig, spec: HeadSpec) -> None:
        super().__init__(config, spec)
        num_outputs = len(self.kind.outputs(spec))
        self.linear = heads.LinearHead(config, num_outputs, spec.dropout)


class OnTokens(LinearOutputs):
    """A linear layer on each token."""

    def scores(
        self, encoder: Encoder, input_ids: Tensor, layout: Layout, inputs: dict[str, Tensor]
    ) -> Tensor:
        """Return (B, S, K)."""
        scores: Tensor = self.linear(encoder(input_ids, layout))
        return scores


def make_head(config: ModelConfig, spec: HeadSpec) -> TaskHead:
    """Return the head of a task with new weights: class `NameHead` of the module `name`."""
    name = KINDS[spec.kind].head
    module = import_module(f"pipeline.finetune.heads.{name}")
    head: TaskHead = getattr(module, f"{name.title()}Head")(config, spec)
    return head
