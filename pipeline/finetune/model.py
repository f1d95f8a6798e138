"""An encoder with the head of a task, and what its training minimises.

Shapes: B rows of S slots, K classes or types, C choices, U examples; X rows of choices.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from pipeline.config.model import ModelConfig
from pipeline.data.loader import MicroBatch
from pipeline.finetune.heads.base import make_head
from pipeline.model.encoder import Encoder, EncoderModel
from pipeline.model.layout import Layout, rows
from pipeline.objectives.base import Sum, Sums, first_loss, weight_tensor
from pipeline.tasks.kinds.table import KINDS
from pipeline.tasks.types import HeadSpec

_HEAD = "task."


class TaskModel(EncoderModel):
    """An encoder and the head of a task, whose parameters begin with `task.`."""

    def __init__(self, config: ModelConfig, spec: HeadSpec) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.task = make_head(config, spec)

    def fuse_loss(self) -> None:
        """Change nothing: no loss is over the vocabulary."""

    def forward(
        self, input_ids: Tensor, layout: Layout, inputs: dict[str, Tensor], *, with_losses: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Score rows.

        Args:
            input_ids: (B, S) int64.
            layout: of one document a row.
            inputs: of `pipeline.finetune.batches.collate`.
            with_losses: whether `inputs` has gold, to compute losses from.

        Returns:
            (B, K) scores of classes, (U, C) of choices, (B, S, K) of tags, (B, K, S, S) of spans or
            (B, S, 2) of starts and ends; and the losses, (B,) or (U,), if asked for.
        """
        scored: tuple[Tensor, Tensor | None] = self.task(
            self.encoder, input_ids, layout, inputs, with_losses=with_losses
        )
        return scored


class TaskObjective:
    """`loss` of a task, the mean over examples; `accuracy` for kinds with one right answer."""

    losses: ClassVar[Mapping[str, float]] = {"loss": 1.0}
    targets: ClassVar[str] = "examples"

    def __init__(self, spec: HeadSpec) -> None:
        self._spec = spec

    def tracked_loss(self, means: Mapping[str, float]) -> float:
        """Return the loss."""
        return first_loss(self.losses, means)

    def make_model(self, config: ModelConfig) -> TaskModel:
        """Return an encoder with the task's head."""
        return TaskModel(config, self._spec)

    def __call__(self, model: nn.Module, batch: MicroBatch) -> Sums:
        """Return the sums over the examples of a micro-batch."""
        scores, losses = model(
            batch.input_ids, layout_of(batch), inputs=batch.inputs, with_losses=True
        )
        loss, right = task_sums(self._spec, scores, losses, batch)
        return {"loss": loss} if right is None else {"loss": loss, "accuracy": right}


def task_sums(
    spec: HeadSpec, scores: Tensor, losses: Tensor, batch: MicroBatch
) -> tuple[Sum, Sum | None]:
    """Return the sums of losses and of right answers; None for kinds without one right answer."""
    [divisor] = batch.weights.values()
    weight = weight_tensor(divisor, scores)
    loss = Sum(losses.sum(), weight)
    if not KINDS[spec.kind].has_one_answer:
        return loss, None
    right = (scores.argmax(-1) == batch.inputs["labels"]).sum().float()
    return loss, Sum(right, torch.full_like(weight, len(scores)))


def layout_of(batch: MicroBatch) -> Layout:
    """Lay out a batch of one document a row."""
    return rows(batch.documents, batch.positions, batch.cu_seqlens)


def head_weights(weights: Mapping[str, Tensor], prefix: str = _HEAD) -> dict[str, Tensor]:
    """Return the tensors of a head below a prefix, as head.safetensors names them."""
    return {
        name.removeprefix(prefix).removeprefix("linear."): tensor
        for name, tensor in weights.items()
        if name.startswith(prefix)
    }


def from_head_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo `head_weights`."""
    return {
        f"{_HEAD}{'linear.' if name.startswith('output.') else ''}{name}": tensor
        for name, tensor in weights.items()
    }
