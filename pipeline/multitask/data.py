"""Data of a multi-task run: rows of its task files, and draws of a step, each of its own length."""

import hashlib
import json
import logging
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.config.data import BatchPlan, BatchSpec
from pipeline.data.dataset import Batch
from pipeline.data.loader import MicroBatch, TrainLoader
from pipeline.data.random import Purpose, philox
from pipeline.data.run_order import DataRank
from pipeline.errors import DataError
from pipeline.finetune.batches import TaskStream, rows_hash
from pipeline.finetune.prepare import Prepared, prepare_rows
from pipeline.multitask.balancer import LossBaseline
from pipeline.multitask.config import TaskMix
from pipeline.multitask.draws import Draws
from pipeline.tasks.readers import TaskData, read_task
from pipeline.tasks.task import TaskConfig, load_task
from pipeline.tasks.types import Example
from pipeline.use.folder import TrainedModel

logger = logging.getLogger(__name__)

_TWO_32 = 2.0**32
_KINDS_OF_WORDS = 4
# Letters and digits of a text that is looked for on its own; shorter ones occur by chance.
_SHORTEST = 8


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
    for name, config in mix.tasks.items():
        _add(evaluated, name, _whole(config, ("train", "dev", "test"), read[name]))
    root = () if mix.config.root is None else (f"data.root={json.dumps(mix.config.root)}",)
    for config in (*mix.scored, *(load_task(file, root) for file in mix.config.reported)):
        splits = ("train", "dev", "test") if config.data.hold_out else ("dev", "test")
        _add(evaluated, str(config.name), _whole(config, splits))
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


def _whole(config: TaskConfig, splits: Sequence[str], known: TaskData | None = None) -> TaskData:
    """Read what may be evaluated some day: all rows, whatever a limit leaves of them now."""
    if known is not None and config.data.dev_rows is None and config.data.test_rows is None:
        return known
    data = replace(config.data, dev_rows=None, test_rows=None)
    return read_task(replace(config, data=data), splits)


def _add(evaluated: dict[bytes, str], name: str, data: TaskData) -> None:
    for split in ("dev", "test"):
        for row in data.splits.get(split, ()):
            for key in _keys(row):
                evaluated.setdefault(key, f"{name} {split}")


def _keys(row: Example) -> Iterable[bytes]:
    """Yield digests of the texts of a row, as letters and digits in lower case.

    All texts of a row together count whatever their length, and whatever the order of its choices;
    one choice does not, since rows may well share it.
    """
    # Candidates of a query stand in `choices`, and the first one in `text_b`, too.
    texts = [_plain(text) for text in (row.text, "" if row.text_b in row.choices else row.text_b)]
    whole = "\0".join([*texts, *sorted(map(_plain, row.choices))])
    for text in [*(text for text in texts if len(text) >= _SHORTEST), whole]:
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


class MixedStream:
    """The `pipeline.train.run.TrainingData` of a mix; a draw is a sequence of the run's plan."""

    def __init__(
        self,
        streams: Mapping[str, TaskStream | TrainLoader],
        plans: Mapping[str, BatchPlan],
        draws: Draws,
        per_step: int,
    ) -> None:
        """Take the data of each task, in the order in which `draws` numbers them."""
        self._streams, self._plans = list(streams.items()), plans
        self._draws, self._per_step = draws, per_step

    @property
    def description(self) -> str:
        """Its size in words."""
        return "; ".join(f"{name}: {stream.description}" for name, stream in self._streams)

    def steps_from(self, cursor: int) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of endless steps, those of a task side by side."""
        step = cursor // self._per_step
        before = self._draws.before(step).tolist()
        opened: dict[int, Iterator[list[MicroBatch]]] = {}
        while True:
            made: list[MicroBatch] = []
            for task in self._draws.of_step(step).tolist():
                name, stream = self._streams[task]
                if task not in opened:
                    # Not before it is drawn: text is read ahead from then on.
                    opened[task] = stream.steps_from(before[task] * self._plans[name].at(0).size)
                made += [
                    # Under the task's name: the engine tells tasks apart by the loss that has a
                    # weight.
                    replace(batch, weights={name: sum(batch.weights.values())})
                    for batch in next(opened[task])
                ]
            yield made
            step += 1

    def samples(self, place: BatchSpec) -> list[list[int]]:
        """Return [task, epoch, example] of each example of a step."""
        return [
            [task, *pair] for task, drawn in self._drawn(place) for pair in
            self._streams[task][1].samples(drawn)
        ]  # fmt: skip

    def positions_in_batch(self, place: BatchSpec, share: DataRank) -> list[int]:
        """Return which of these examples a rank computes."""
        first, found = 0, list[int]()
        for task, drawn in self._drawn(place):
            found += [
                first + one for one in self._streams[task][1].positions_in_batch(drawn, share)
            ]
            first += drawn.size
        return found

    def examples(self, place: BatchSpec) -> Iterator[tuple[str, int, int, int]]:
        """Yield (task, epoch, example, rows) of each example of a step, in the order of its rows.

        Of text an example is a sequence.
        """
        for task, drawn in self._drawn(place):
            name, stream = self._streams[task]
            for epoch, number in stream.samples(drawn):
                rows = len(stream.rows_of(number)) if isinstance(stream, TaskStream) else 1
                yield name, epoch, number, rows

    def tasks(self, place: BatchSpec) -> list[str]:
        """Return the tasks that a step draws."""
        return [self._streams[task][0] for task, _ in self._drawn(place)]

    def _drawn(self, place: BatchSpec) -> list[tuple[int, BatchSpec]]:
        """Return the tasks of a step, each with the place of its draw in the task's own order."""
        before = self._draws.before(place.number)
        found = []
        for task in self._draws.of_step(place.number).tolist():
            plan = self._plans[self._streams[task][0]]
            found.append((task, plan.number(int(before[task]))))
            before[task] += 1
        return found

    def epochs(self, cursor: int) -> dict[str, float]:
        """Return how often the rows of each task were seen before a cursor."""
        before = self._draws.before(cursor // self._per_step).tolist()
        found = {}
        for (name, stream), count in zip(self._streams, before, strict=True):
            seen = stream.epochs(count * self._plans[name].at(0).size)
            found[name] = sum(seen.values()) / len(seen)
        return found


@dataclass(frozen=True)
class Corruption:
    """Noise in rows of tokens: a pure function of seed, task, epoch and example.

    Targets stay, so that a model must read in spite of it.
    """

    rule: str
    share: float
    seed: int
    task: int
    mask_id: int
    vocab_size: int
    specials: tuple[int, ...]

    def __call__(self, batch: Batch, places: Sequence[tuple[int, int]]) -> Batch:
        """Return a batch with other tokens; `places` are (epoch, example) of its rows."""
        ids = batch.input_ids.copy()
        mask = batch.inputs["mask"]
        for row, (epoch, example) in enumerate(places):
            slots = np.arange(ids.shape[1])
            words = philox((slots, example, epoch, self.task), (self.seed, Purpose.TASK_NOISE))
            draws = np.stack(words[:_KINDS_OF_WORDS])
            if self.rule == "pairs":
                self._pairs(ids[row], int(mask[row].sum()), draws)
            else:
                self._tokens(ids[row], mask[row], draws)
        # The hash anew, since `batches.tsv` is to show what the model saw.
        return batch._replace(input_ids=ids, hash=rows_hash(ids, mask))

    def _tokens(
        self, ids: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_], draws: npt.NDArray[np.uint32]
    ) -> None:
        """Corrupt single tokens, never special ones."""
        chosen = mask & ~np.isin(ids, self.specials) & (draws[0] < self.share * _TWO_32)
        how = draws[1] / _TWO_32
        ids[chosen & (how < 0.8)] = self.mask_id
        is_random = chosen & (how >= 0.8) & (how < 0.9)
        ids[is_random] = draws[2][is_random] % self.vocab_size

    def _pairs(self, ids: npt.NDArray[np.int64], num: int, draws: npt.NDArray[np.uint32]) -> None:
        """Corrupt neighbours together, as RoFormerV2's published code does.

        Of n tokens floor(share n / 2) 2 positions after the first are drawn and sorted; each second
        one and its right neighbour become [MASK] with probability 0.8, else random with 0.9. The
        last [SEP] may be hit, and answers are.
        Source: ZhuiyiTechnology/roformer-v2, multi-task `masked_encode`.
        """
        size = int(self.share * num / 2) * 2
        if size < 2 or num < 3:
            return
        order = np.argsort(draws[0][1 : num - 1], kind="stable")[:size] + 1
        firsts = np.sort(order)[::2]
        how = draws[1][firsts] / _TWO_32
        other = draws[3][firsts] / _TWO_32
        for at, first in enumerate(firsts.tolist()):
            if how[at] < 0.8:
                ids[first : first + 2] = self.mask_id
            elif other[at] < 0.9:
                ids[first : first + 2] = draws[2][first : first + 2] % self.vocab_size
