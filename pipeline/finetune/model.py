"""An encoder with the head of a task: scores, losses and decisions of every kind of task.

Shapes: B rows of S slots, K classes or types, C choices, U examples; X rows of choices.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pipeline.config.model import ModelConfig
from pipeline.data.loader import MicroBatch
from pipeline.model import heads
from pipeline.model.encoder import Encoder, EncoderModel
from pipeline.model.layers import Trace
from pipeline.model.layout import Layout, rows
from pipeline.objectives.base import Sum, Sums, first_loss, weight_tensor
from pipeline.tasks.task import TaskConfig

CHOOSES = ("choice", "cloze")
"""Kinds with a row for each choice of an example."""
_HEAD = "task."
NAMES = ("classify", "pair", "coref")
"""Kinds whose answer is one of some names."""


@dataclass(frozen=True)
class HeadSpec:
    """What a model needs to know of its task; stands in its config.json under `task`."""

    name: str
    kind: str
    labels: tuple[str, ...]
    pool: str
    dropout: float
    decoder: str
    scheme: str
    max_length: int
    max_answer: int
    null_threshold: float | None
    """None: every question has an answer."""

    @classmethod
    def from_task(cls, name: str, config: TaskConfig, labels: tuple[str, ...]) -> "HeadSpec":
        """Read it from a task file."""
        kind, head = config.task.kind, config.head
        usual = "pointer" if kind in ("spans", "qa") else "softmax"
        return cls(
            name, kind, labels, head.pool, head.dropout, head.decoder or usual, head.scheme,
            config.input.max_length, head.max_answer, head.null_threshold,
        )  # fmt: skip

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "HeadSpec":
        """Read what `to_dict` wrote."""
        return cls(**{**values, "labels": tuple(values["labels"])})

    def to_dict(self) -> dict[str, Any]:
        """Return values for JSON."""
        return {**asdict(self), "labels": list(self.labels)}

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags of kind tag: `O`, then those of each type."""
        prefixes = "BIES" if self.scheme == "bioes" else "BI"
        return ("O", *(f"{prefix}-{label}" for label in self.labels for prefix in prefixes))

    @property
    def num_outputs(self) -> int:
        """Width of the linear layer; of kind spans the number of types."""
        if self.kind == "tag":
            return len(self.tags)
        if self.kind == "qa":
            return 2
        return len(self.labels) if self.kind in (*NAMES, "multilabel", "spans") else 1


class TaskHead(nn.Module):
    """The layers of a task on top of an encoder, and its decisions."""

    def __init__(self, config: ModelConfig, spec: HeadSpec) -> None:
        super().__init__()
        self.spec = spec
        if spec.kind == "spans":
            self.pointer = heads.GlobalPointer(config, spec.num_outputs, dropout=spec.dropout)
        else:
            self.linear = heads.LinearHead(config, spec.num_outputs, spec.dropout)
        if spec.decoder == "crf":
            self.crf = heads.Crf(spec.num_outputs)

    def forward(
        self,
        encoder: Encoder,
        input_ids: Tensor,
        layout: Layout,
        inputs: dict[str, Tensor],
        *,
        with_losses: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Score rows by an encoder; see `TaskModel.forward`."""
        pool: Any = self.spec.pool
        trace = Trace(keep_probabilities=False) if pool == "first_last_avg" else None
        x_BSD = encoder(input_ids, layout, trace=trace)
        mask_BS, kind = inputs["mask"], self.spec.kind
        if kind == "spans":
            scores: Tensor = self.pointer(x_BSD, layout.positions, inputs["text"])
        elif kind in ("tag", "qa"):
            scores = self.linear(x_BSD)
        else:
            hidden = [x_BSD] if trace is None else trace.hidden
            pooled = heads.pool(pool, hidden, heads.masked_documents(mask_BS), encoder)
            if kind in CHOOSES:
                scores = heads.choice_scores(self.linear, pooled, inputs["choices"])
            else:
                scores = self.linear(pooled)
        return scores, self._losses(scores, inputs) if with_losses else None

    def _losses(self, scores: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        kind = self.spec.kind
        if kind == "tag":
            if self.spec.decoder == "crf":
                return self.crf.losses(scores, inputs["tags"])
            return heads.token_losses(scores, inputs["tags"])
        if kind == "spans":
            row, label, start, last = inputs["spans"].unbind(-1)
            gold = torch.zeros_like(scores, dtype=torch.bool)
            gold[row, label, start, last] = True
            return heads.span_losses(scores, gold)
        if kind == "qa":
            return heads.answer_losses(scores, inputs["text"], inputs["start"], inputs["last"])
        form: heads.Kind = "single_label"
        if kind == "multilabel":
            form = "multi_label"
        elif kind == "regress":
            form = "regression"
        losses = heads.class_losses(form, scores, inputs["labels"])
        return losses * inputs["row_weights"] if "row_weights" in inputs else losses

    @torch.no_grad()
    def decode(self, scores: Tensor, inputs: dict[str, Tensor]) -> list[Any]:
        """Return what each row says, before it is put into the terms of the file.

        Returns:
            Scores of classes or choices (lists), tags of slots (lists of int, `heads.IGNORED` where
            there is none), spans (`heads.TypedSpan`), or (start, last, score, null) of an answer.
        """
        kind, scores = self.spec.kind, scores.float()
        if kind == "spans":
            return heads.decode_spans(scores)
        if kind == "qa":
            found = heads.best_answers(
                scores, inputs["starts"], inputs["text"], self.spec.max_answer
            )
            return list(zip(*(each.tolist() for each in found), strict=True))
        if kind == "tag":
            labelled = inputs["text"]
            if self.spec.decoder == "crf":
                return self.crf.decode(scores, labelled).tolist()  # type: ignore[no-any-return]
            tags = scores.argmax(-1).masked_fill(~labelled, heads.IGNORED)
            return tags.tolist()  # type: ignore[no-any-return]
        return scores.tolist()  # type: ignore[no-any-return]


class TaskModel(EncoderModel):
    """An encoder and the head of a task, whose parameters begin with `task.`."""

    def __init__(self, config: ModelConfig, spec: HeadSpec) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.task = TaskHead(config, spec)

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
        found: tuple[Tensor, Tensor | None] = self.task(
            self.encoder, input_ids, layout, inputs, with_losses=with_losses
        )
        return found


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
    if spec.kind not in (*CHOOSES, *NAMES):
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
