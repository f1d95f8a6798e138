"""From rows of tokens to predictions in the terms of the task's file."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from pipeline.data.loader import MicroBatch
from pipeline.data.run_order import DataRank
from pipeline.errors import DataError
from pipeline.finetune.batches import TaskRows, by_length, collate, labelled
from pipeline.finetune.model import CHOOSES, NAMES, HeadSpec, TaskHead, layout_of
from pipeline.finetune.result import PredictionRow
from pipeline.model.heads import IGNORED
from pipeline.runtime import watchdog
from pipeline.tasks.encode import TokenRow, TokenSpan, text_spans
from pipeline.tasks.readers import Answer, Example
from pipeline.tasks.scores import assign, decode_tags

_ROWS, _ROWS_OF_SPANS = 64, 16
"""Rows of a forward pass; scores of spans grow with the square of the length."""
_NO_CHOICE = -1e9
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "auto": torch.float32}
"""Of weights and computation, by `train.precision` of the task; a finished run's is not auto."""


class Predictor:
    """Runs a task model over a split."""

    def __init__(
        self,
        head: TaskHead,
        forward: nn.Module,
        device: torch.device,
        pad_id: int,
        **more: str,
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
        self._forward.eval()
        decided: dict[int, Any] = {}
        total = 0.0
        most = _ROWS_OF_SPANS if spec.kind == "spans" else _ROWS
        for units in by_length(data, spec.kind, most)[share.rank :: share.world_size]:
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
            of_tokens = scores[batch.inputs["mask"]] if spec.kind in ("tag", "qa") else scores
            if bool(of_tokens.isnan().any()):
                raise DataError("the model's scores are NaN: it has diverged; lower train.lr")
            found = self._head.decode(scores, batch.inputs)
            decided |= {unit[0]: each for unit, each in zip(units, found, strict=True)}
            total += float(losses.sum()) if losses is not None else 0.0
        return decided, total


def predictions(spec: HeadSpec, data: TaskRows, decided: Mapping[int, Any]) -> list[PredictionRow]:
    """Return a prediction of each example, in the order of the file."""
    rows_of: list[list[int]] = [[] for _ in data.examples]
    for number, row in enumerate(data.rows):
        rows_of[row.example].append(number)
    made = []
    for example, rows in zip(data.examples, rows_of, strict=True):
        pairs = [(data.rows[row], decided[row]) for row in rows if row in decided]
        made.append(_prediction(spec, example, pairs))
    if spec.kind == "cloze":
        _assign_groups(data.examples, made)
    return made


def _prediction(
    spec: HeadSpec, example: Example, pairs: Sequence[tuple[TokenRow, Any]]
) -> PredictionRow:
    found: Any
    (row, value), *_ = pairs
    scores: list[float | None] | None = None
    if spec.kind in (*NAMES, "multilabel"):
        scores = [_short(score) for score in value]
        found = spec.labels[int(np.argmax(value))]
        if spec.kind == "multilabel":
            found = [label for label, s in zip(spec.labels, value, strict=True) if s > 0]
    elif spec.kind in CHOOSES:
        found = int(np.argmax(value))
        kept = value[: len(example.choices)]
        scores = [_short(score) if math.isfinite(score) else None for score in kept]
    elif spec.kind == "regress":
        found = _short(value[0])
    elif spec.kind == "qa":
        found = _answer(spec, example, pairs)
    elif spec.kind == "spans":
        spans = [TokenSpan(spec.labels[each.type], each.start, each.end) for each in value]
        found = [list(span) for span in text_spans(row, spans)]
    else:
        found = _tagged(spec, example, row, value)
    return PredictionRow(example.id, _gold(spec, example), found, scores)


def _short(score: float) -> float:
    return float(f"{score:.6g}")


def _gold(spec: HeadSpec, example: Example) -> Any:
    if example.gold is None or not isinstance(example.gold, tuple):
        return example.gold
    if spec.kind in ("tag", "spans"):
        return [list(item) for item in example.gold]  # type: ignore[arg-type]
    return [item.text if isinstance(item, Answer) else item for item in example.gold]


def _tagged(
    spec: HeadSpec, example: Example, row: TokenRow, tags: Sequence[int]
) -> list[list[Any]]:
    """Read entities from tags of slots; an end is that of the word, or of a token of several."""
    slots = labelled(row, example).tolist()
    names = [spec.tags[tags[slot]] if tags[slot] != IGNORED else "O" for slot in slots]
    ends = dict(example.words)
    bounds = []
    for slot in slots:
        start, end = row.offsets[slot].tolist()
        bounds.append((start, max(end, ends.get(start, end))))
    return [
        [kind, bounds[first][0], bounds[last - 1][1]] for kind, first, last in decode_tags(names)
    ]


def _answer(spec: HeadSpec, example: Example, pairs: Sequence[tuple[TokenRow, Any]]) -> str:
    """Take the best answer over all windows, or none if its margin is too small.

    Source: google-research/bert `run_squad.py`, write_predictions.
    """
    row, (first, last, score, _) = max(pairs, key=lambda pair: pair[1][2])
    null = min(decided[3] for _, decided in pairs)
    if not math.isfinite(score):
        return ""
    # Only of tasks with unanswerable questions: else no question is left without an answer.
    if spec.null_threshold is not None and null - score > spec.null_threshold:
        return ""
    return example.text[int(row.offsets[first, 0]) : int(row.offsets[last, 1])]


def _assign_groups(examples: Sequence[Example], made: list[PredictionRow]) -> None:
    """Let the blanks of a group take distinct candidates, which adds about 6 points (kx8739)."""
    groups: dict[str, list[int]] = {}
    for number, example in enumerate(examples):
        if example.group:
            groups.setdefault(example.group, []).append(number)
    for numbers in groups.values():
        rows = [
            [_NO_CHOICE if score is None else score for score in made[number].scores or ()]
            for number in numbers
        ]
        if len(rows) < 2 or len(rows) > len(rows[0]):
            continue
        for number, choice in zip(numbers, assign(np.array(rows)), strict=True):
            made[number] = made[number]._replace(prediction=choice)
