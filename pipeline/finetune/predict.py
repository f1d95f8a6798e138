"""From rows of tokens to predictions in the terms of the task's file."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pipeline.data.loader import MicroBatch
from pipeline.data.run_order import DataRank
from pipeline.errors import DataError
from pipeline.finetune.batches import by_length, collate
from pipeline.finetune.heads.base import TaskHead
from pipeline.finetune.model import layout_of
from pipeline.runtime import watchdog
from pipeline.tasks.kinds.table import KINDS
from pipeline.tasks.types import HeadSpec, PredictionRow, TaskRows, plain

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "auto": torch.float32}
"""Of weights and computation, by `train.precision` of the task; a finished run's is not auto."""


class Predictor:
    """Runs a task model over a split."""

    def __init__(
        self, head: TaskHead, forward: nn.Module, device: torch.device, pad_id: int, **more: str
    ) -> None:
        """Take a model on its device.

        Args:
            head: of the task.
            forward: the model, or what wraps it in training.
            device: of the model.
            pad_id: token of padding.
            more: for the model's forward pass.
        """
        self._head, self._device, self._pad_id = head, device, pad_id
        self._forward, self._more = forward, more

    @torch.no_grad()
    def decode(self, data: TaskRows, share: DataRank) -> tuple[dict[int, Any], float]:
        """Return this rank's decisions by the number of a unit's first row, and its sum of losses.

        The sum has the units whose examples all have gold in their batch. Not collective.
        """
        spec = self._head.spec
        # A training step turns dropout on again.
        self._forward.eval()
        decided: dict[int, Any] = {}
        total = 0.0
        for units in by_length(data, self._head.kind)[share.rank :: share.world_size]:
            watchdog.heartbeat("evaluating")
            golds = [data.examples[data.rows[unit[0]].example].gold for unit in units]
            with_gold = all(gold is not None for gold in golds)
            made = collate(spec, data, units, pad_id=self._pad_id, with_gold=with_gold)
            batch = MicroBatch.of(made).to(self._device)
            scores, losses = self._forward(
                batch.input_ids,
                layout_of(batch),
                inputs=batch.inputs,
                with_losses=with_gold,
                **self._more,
            )
            # What stands at padding means nothing.
            of_tokens = scores[batch.inputs["mask"]] if self._head.kind.scores_tokens else scores
            if bool(of_tokens.isnan().any()):
                raise DataError("the model's scores are NaN: it has diverged; lower train.lr")
            answers = self._head.decode(scores, batch.inputs)
            decided |= {unit[0]: answer for unit, answer in zip(units, answers, strict=True)}
            total += float(losses.sum()) if losses is not None else 0.0
        return decided, total


def predictions(spec: HeadSpec, data: TaskRows, decided: Mapping[int, Any]) -> list[PredictionRow]:
    """Return a prediction of each example, in the order of the file."""
    kind = KINDS[spec.kind]
    rows_of: list[list[int]] = [[] for _ in data.examples]
    for number, row in enumerate(data.rows):
        rows_of[row.example].append(number)
    made = []
    for example, rows in zip(data.examples, rows_of, strict=True):
        pairs = [(data.rows[row], decided[row]) for row in rows if row in decided]
        answer, scores = kind.prediction(spec, example, pairs)
        made.append(PredictionRow(example.id, plain(example.gold), answer, scores))
    kind.settle(data.examples, made)
    return made
