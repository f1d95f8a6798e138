"""From a mix of task files to rows of tokens: reading, decontamination, and what is known."""

import hashlib
import logging
import math
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipeline.errors import DataError
from pipeline.finetune.batches import labelled
from pipeline.finetune.model import CHOOSES, NAMES
from pipeline.finetune.run import Prepared, prepare_rows
from pipeline.multitask import balance
from pipeline.multitask.balancer import LossBaseline
from pipeline.multitask.config import TaskMix
from pipeline.tasks.readers import Example, TaskData, read_task
from pipeline.tasks.task import load_task
from pipeline.use.folder import TrainedModel

logger = logging.getLogger(__name__)

_SHORTEST = 8
"""Letters and digits of a text that is looked for on its own; shorter ones occur by chance."""


def read_mix(mix: TaskMix) -> tuple[dict[str, TaskData], dict[str, dict[str, int]]]:
    """Read all tasks, and leave out training rows that share a text with evaluated ones.

    Returns:
        The data by task, and by task how many rows were left out for each evaluated set.

    Raises:
        DataError: see `read_task`; also that nothing is left of a task.
    """
    for name, config in mix.tasks.items():
        if not config.data.train:
            raise DataError(f"tasks.{name}: data.train names no file; a task of a mix needs rows")
    read = {name: read_task(config) for name, config in mix.tasks.items()}
    if not mix.config.decontaminate:
        return read, {}
    evaluated: dict[bytes, str] = {}
    for name, data in read.items():
        _add(evaluated, name, data)
    for file in mix.config.reported:
        config = load_task(file, _root(mix))
        _add(evaluated, str(config.name), read_task(config, ("dev", "test")))
    found: dict[str, dict[str, int]] = {}
    for name, data in read.items():
        kept, dropped = [], Counter[str]()
        for row in data.splits["train"]:
            other = next((evaluated[key] for key in _keys(row) if key in evaluated), None)
            if other is None:
                kept.append(row)
            else:
                dropped[other] += 1
        if not kept:
            raise DataError(
                f"tasks.{name}: every training row shares a text with an evaluated row "
                f"({dict(dropped)}); correct the files, or set decontaminate=false"
            )
        if dropped:
            found[name] = dict(dropped)
            text = "%s: %d of %d training rows left out, which share a text with %s"
            of = ", ".join(f"{other} ({count})" for other, count in dropped.items())
            logger.info(text, name, dropped.total(), len(kept) + dropped.total(), of)
            read[name] = replace(data, splits={**data.splits, "train": tuple(kept)})
    return read, found


def _root(mix: TaskMix) -> tuple[str, ...]:
    return () if mix.config.root is None else (f"data.root={mix.config.root}",)


def _add(evaluated: dict[bytes, str], name: str, data: TaskData) -> None:
    for split in ("dev", "test"):
        for row in data.splits.get(split, ()):
            for key in _keys(row):
                evaluated.setdefault(key, f"{name} {split}")


def _keys(row: Example) -> Iterable[bytes]:
    """Yield digests of the texts of a row, as letters and digits in lower case.

    All texts of a row together count whatever their length.
    """
    texts = [_plain(text) for text in (row.text, row.text_b)]
    for text in [*(text for text in texts if len(text) >= _SHORTEST), "\0".join(texts)]:
        if text.strip("\0"):
            yield hashlib.sha256(text.encode()).digest()


def _plain(text: str) -> str:
    folded = unicodedata.normalize("NFKC", text).casefold()
    return "".join(letter for letter in folded if letter.isalnum())


def prepare_mix(
    mix: TaskMix, read: Mapping[str, TaskData], trained: TrainedModel, tokens: Path
) -> dict[str, Prepared]:
    """Tokenise all tasks for a model.

    Raises:
        PostnormError: see `prepare_rows`.
    """
    prepared = {}
    for name, data in read.items():
        config = mix.tasks[name]
        prepared[name] = prepare_rows(config, name, mix.config.init_from, trained, data, tokens)
    return prepared


def known_losses(prepared: Prepared, factor: float) -> LossBaseline:
    """Reckon what the loss of a task begins with, and what the frequencies of answers give."""
    data, kind = prepared.data, prepared.config.task.kind
    golds = [row.gold for row in data.splits["train"]]
    prior = None
    if kind in NAMES:
        prior = balance.prior_loss(list(Counter(map(str, golds)).values()))
    elif kind == "regress":
        prior = float(np.array(golds, np.float64).var())
    return LossBaseline(
        factor * _without_scores(prepared) or None, factor * prior if prior else None
    )


def _without_scores(prepared: Prepared) -> float:
    """Return the mean loss of a head whose scores are all 0, over train."""
    data, kind, spec = prepared.data, prepared.config.task.kind, prepared.spec
    examples, rows = data.splits["train"], prepared.rows["train"]
    if kind in NAMES:
        return math.log(len(data.labels))
    if kind in CHOOSES:
        return float(np.mean([math.log(sum(row.distinct)) for row in examples]))
    if kind == "regress":
        return float((np.array([row.gold for row in examples], np.float64) ** 2).mean())
    if kind == "multilabel":
        chosen = [len(row.gold) for row in examples if isinstance(row.gold, tuple)]
        return float(np.mean([math.log1p(len(data.labels) - num) + math.log1p(num)
                              for num in chosen]))  # fmt: skip
    sizes = [len(labelled(row, examples[row.example])) for row in rows.rows]
    if kind == "qa":
        return float(np.mean(np.log1p(sizes)))
    if kind == "tag":
        # Of a CRF all tags of a row together are one choice.
        weight = float(np.mean(sizes)) if spec.decoder == "crf" else 1.0
        return weight * math.log(len(spec.tags))
    losses = []
    for row, size in zip(rows.rows, sizes, strict=True):
        of_type = Counter(span.type for span in row.spans)
        for label in data.labels:
            spans = size * (size + 1) // 2
            losses.append(math.log1p(spans - of_type[label]) + math.log1p(of_type[label]))
    return float(np.mean(losses))
