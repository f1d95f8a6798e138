"""From a mix of task files to rows of tokens: reading, decontamination, and what is known."""

import hashlib
import logging
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from pipeline.errors import DataError
from pipeline.finetune.prepare import Prepared, prepare_rows
from pipeline.multitask.balancer import LossBaseline
from pipeline.multitask.config import TaskMix
from pipeline.tasks.readers import TaskData, read_task
from pipeline.tasks.task import load_task
from pipeline.tasks.types import Example
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
    kind, rows = prepared.config.kind, prepared.rows["train"]
    prior = kind.loss_of_prior([row.gold for row in rows.examples])
    return LossBaseline(
        factor * kind.loss_of_zero_scores(prepared.spec, rows) or None,
        factor * prior if prior else None,
    )
