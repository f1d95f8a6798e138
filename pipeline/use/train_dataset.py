"""`postnorm.TrainDataset`: the batches of training, for a loop that is not ours."""

import json
import os
from collections.abc import Iterator
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from pipeline.config.data import BatchPlan, DataConfig, TrainDataConfig
from pipeline.config.load import build
from pipeline.config.objective import ObjectiveConfig, ObjectiveKind
from pipeline.config.runs import data_identity
from pipeline.data.counts import sequences_at
from pipeline.data.loader import MicroBatch, TrainLoader
from pipeline.data.objects import open_index
from pipeline.data.run_order import DataRank, TrainSteps
from pipeline.errors import ConfigError, DataError
from pipeline.objectives.choose import make_objective

Item = dict[str, Tensor]
_AGAIN = (
    "a DataLoader with workers began a second time: it would give the batches of the first time "
    "again, since workers count on copies. Call data.load_state_dict(data.state_dict(num_taken)) "
    "before it, with the items taken so far (0: the same again); or set num_workers=0 and "
    "TrainDataset(..., workers=N), which goes on"
)


class TrainDataset(IterableDataset[Item]):
    """Endless micro-batches of one rank: those of a run with the same settings, bit for bit.

    An item is a dictionary of tensors, with b = micro_batch rows of S = seq_len slots:

        input_ids     (b, S) int64, masked as the model sees them
        positions     (b, S) int64, from 0 in each document
        segments      (b, S) int64, all 0 where the objective has none
        documents     (b, S) int32, number of the document in its row from 1, 0 at padding; tokens
                      may attend to tokens of the same number
        cu_seqlens    (d,) int32, bounds of documents end to end, for flash attention
        masked_index  (m,) int64, flat places r * S + s to predict
        targets       (m,) int64, their original ids

    With `objective="mlm_nsp"` or `"mlm_sop"` each document is `[CLS] A [SEP] B [SEP]`, and there is

        pair_first    (p,) int64, flat places of the [CLS] of pairs
        pair_labels   (p,) int64, 1 if B does not follow A, 0 if it does

    Epochs follow each other without end, each in another order and with other masks; all follows
    from the arguments and a cursor. A `torch.utils.data.DataLoader` takes it with
    `batch_size=None`.

    Example:
        >>> data = postnorm.TrainDataset("data/mine", seq_len=128)  # doctest: +SKIP
        >>> next(iter(data))["input_ids"].shape  # doctest: +SKIP
        torch.Size([512, 128])
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        seq_len: int = 512,
        global_batch: int = 512,
        rank: int = 0,
        world_size: int = 1,
        micro_batch: int | None = None,
        *,
        seed: int = 1,
        objective: ObjectiveKind = "mlm",
        **data: Any,
    ) -> None:
        """Open the training split.

        Args:
            folder: written by `postnorm prep run`, or an address such as s3://bucket/data, with
                `stage_dir`.
            seq_len: slots of a packed sequence.
            global_batch: sequences of a step, over all ranks.
            rank: of this process.
            world_size: number of ranks; changes no step, only who has which part of it.
            micro_batch: sequences of an item; None: all that the rank has of a step.
            seed: of order and masks.
            objective: what the batches are for, as `objective.kind` of a run's config.
            **data: further fields of a config's `data:`, such as `masking="span"`,
                `mask_prob=0.3`, or `workers=2`, processes that make batches ahead.

        Raises:
            ConfigError: an argument is unknown or out of range, or a step does not split evenly.
            DataError: the dataset is missing or damaged.
        """
        super().__init__()
        given = {"global_batch": global_batch, "rank": rank, "world_size": world_size,
                 "micro_batch": micro_batch or 1, "seed": seed}  # fmt: skip
        if wrong := {name: of for name, of in given.items() if not isinstance(of, Integral)}:
            raise ConfigError(f"{wrong} must be whole numbers")
        if not 0 <= seed < 2**32:
            raise ConfigError(f"seed={seed} must be at least 0 and below 2**32")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank} must be at least 0 and below world_size={world_size}")
        if global_batch < 1 or (micro_batch is not None and micro_batch < 1):
            raise ConfigError(
                f"global_batch={global_batch} and micro_batch={micro_batch} must be at least 1"
            )
        micro_batch = micro_batch or max(1, global_batch // world_size)
        values = {"dir": os.fspath(folder), "seq_len": seq_len, **data}
        config = build(DataConfig, values, "arguments of TrainDataset")
        plan = BatchPlan((), seq_len=seq_len, global_batch=global_batch, micro_batch=micro_batch)
        kind = build(ObjectiveConfig, {"kind": objective}, "objective of TrainDataset")
        self._config = TrainDataConfig(seed=seed, data=config, batches=plan, objective=kind)
        self._index = open_index(config)
        self._inputs = make_objective(kind).train_inputs(self._config, self._index)
        self._counts = sequences_at(self._index, plan.seq_lens, None, kind)
        self._share = DataRank(rank, world_size)
        self._parts = global_batch // (micro_batch * world_size)
        """Items of a step."""
        self._loader()  # finds now what is wrong
        self._cursor = self._part = 0
        self._set = 0, 0
        """Cursor and part of the last state that was loaded."""
        # Shared with the workers of a DataLoader, which work on copies of the rest.
        self._in_workers = torch.zeros((), dtype=torch.bool).share_memory_()  # type: ignore[no-untyped-call]

    @property
    def num_sequences(self) -> int:
        """Sequences of an epoch, over all ranks."""
        steps = self._loader().steps
        counts = steps.split.counts[self._config.data.seq_len]
        return int(sum(counts[group.blocks].sum() for group in steps.order.groups))

    def __iter__(self) -> Iterator[Item]:
        """Yield items from the state on; in a DataLoader each worker makes its part of them."""
        worker = get_worker_info()
        if worker is not None:
            if worker.id == 0:  # the one that every DataLoader has
                if bool(self._in_workers):
                    raise DataError(_AGAIN)
                self._in_workers.fill_(True)
            yield from self._every(worker.id, worker.num_workers)
            return
        first = self._part
        for batches in self._loader().steps_from(self._cursor):
            for part, batch in enumerate(batches):
                if part >= first:
                    self._advance(1)
                    yield _item(batch)
            first = 0

    def state_dict(self, num_taken: int | None = None) -> dict[str, Any]:
        """Return what `load_state_dict` goes on from: plain values.

        Args:
            num_taken: items that were taken since the state was last set; None: as counted, which
                is not known where a DataLoader's workers iterate, ahead of the loop.

        Raises:
            DataError: `num_taken` is needed, or below 0.
        """
        if num_taken is not None and num_taken < 0:
            raise DataError(f"num_taken={num_taken} must be at least 0: items taken since then")
        cursor, part = self._cursor, self._part
        if num_taken is not None:
            cursor, part = self._after(num_taken, *self._set)
        elif bool(self._in_workers):
            raise DataError(
                "the workers of a DataLoader are ahead of what the loop has taken: give "
                "state_dict(num_taken) the number of items taken since the dataset was made or "
                "load_state_dict called; or set num_workers=0 and TrainDataset(..., workers=N)"
            )
        return {**self._identity(), "data": self._data(), "cursor": cursor, "part": part}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state: the next iteration begins there. The world size may be another.

        Raises:
            DataError: the state is of other data or settings, or lies within a step that is now
                divided in another way.
        """
        # States of masked language modelling say nothing of the objective.
        own, saved = ({"objective": "mlm", **each} for each in (self._identity(), state))
        differing = [
            f"{name} was {saved.get(name)!r}, is {value!r}"
            for name, value in own.items()
            # Within a step, ranks must have the parts that they had.
            if saved.get(name, value if name == "ranks" else None) != value
            and (name not in ("parts", "ranks") or state.get("part"))
        ]
        data = state.get("data", {})  # earlier versions did not save it
        differing += [
            f"data.{name} was {data[name]!r}, is {value!r}"
            for name, value in self._data().items()
            if name in data and data[name] != value and name not in own
        ]
        if differing:
            raise DataError(
                f"this state is of another dataset: {'; '.join(differing)}; make the TrainDataset "
                "as it was then"
            )
        self._config.batches.at(state["cursor"])
        self._cursor, self._part = self._set = state["cursor"], state["part"]
        self._in_workers.fill_(False)

    def _data(self) -> dict[str, Any]:
        """Settings that move the order or the masks, as they are after a way through JSON."""
        values: dict[str, Any] = json.loads(json.dumps(data_identity(self._config.data)))
        return values

    def _identity(self) -> dict[str, Any]:
        """Name what else decides what a cursor means."""
        config = self._config
        kind = config.objective.kind
        return {
            **({} if kind == "mlm" else {"objective": kind}),
            "fingerprint": self._index.fingerprint,
            "seed": config.seed,
            "seq_len": config.data.seq_len,
            "global_batch": config.batches.at(0).size,
            "window_blocks": config.data.window_blocks,
            "parts": self._parts,
            "ranks": self._share.world_size,
        }

    def _loader(self) -> TrainLoader:
        return TrainLoader(self._index, self._config, self._inputs, self._share, self._counts)

    def _after(self, count: int, cursor: int, part: int) -> tuple[int, int]:
        """Return cursor and part of the item that comes `count` later."""
        steps, part = divmod(part + count, self._parts)
        return cursor + steps * self._config.batches.at(cursor).size, part

    def _advance(self, count: int) -> None:
        self._cursor, self._part = self._after(count, self._cursor, self._part)

    def _every(self, first: int, step: int) -> Iterator[Item]:
        """Make every `step`-th item by itself, for a worker: a DataLoader takes them by turns."""
        steps = TrainSteps(self._index, self._config, self._inputs, self._counts)
        self._advance(first)
        while True:
            [batch] = steps.micro_batches(self._cursor, self._share, self._part)
            self._advance(step)
            yield _item(MicroBatch.of(batch))


def _item(batch: MicroBatch) -> Item:
    segments = torch.zeros_like(batch.input_ids) if batch.segments is None else batch.segments
    return {
        "input_ids": batch.input_ids,
        "positions": batch.positions,
        "segments": segments,
        "documents": batch.documents,
        "cu_seqlens": batch.cu_seqlens,
        **batch.inputs,
    }
