"""Linear probes in pre-training: how well the frozen encoder's vectors tell the classes of tasks.

At each evaluation a ridge regression on one-hot classes is fitted to mean-pooled vectors of the
last layer, on a sample of train, and scored on a sample of dev. All of it is a function of the
weights: nothing is drawn, and the run's bits do not change. Source of the idea: Alain and Bengio
2016 (arXiv 1610.01644).

Shapes: R rows of this rank, T tokens end to end, D hidden size, K classes, C candidates of the
penalty.
"""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.config.runs import RunConfig
from pipeline.data.format import DatasetIndex
from pipeline.data.run_order import DataRank
from pipeline.errors import DataError
from pipeline.model.encoder import EncoderModel
from pipeline.model.layers import Trace
from pipeline.model.layout import packed
from pipeline.runtime import dist, watchdog
from pipeline.tasks.readers import encode, limited, read_task
from pipeline.tasks.task import TaskConfig
from pipeline.tokenizer.load import DatasetTokenizer, load_tokenizer

logger = logging.getLogger(__name__)

_TRAIN_ROWS, _DEV_ROWS = 2000, 1000
_MOST_TIME = 0.02
_PENALTIES = (-4.0, 1.0, 11)
"""Candidates, powers of ten: first, last, number. Features have variance 1."""
# A feature whose variance is at most this share of its mean square tells nothing.
_CONSTANT = 1e-12


class Rows(NamedTuple):
    """Tokens of a task, the same on every rank; those of train stand first."""

    num_classes: int
    ids: list[list[int]]
    labels: list[int]
    num_train: int
    majority: float
    """Accuracy of the commonest class of dev."""


class _Pass(NamedTuple):
    """What one forward pass of this rank reads."""

    ids_T: Tensor
    ends: Tensor
    """0, then the end of each row."""
    longest: int
    num_rows: int
    """The first so many count; the others are there because every rank needs a pass."""


class _Task(NamedTuple):
    """A task, and this rank's part of it."""

    rows: Rows
    passes: list[_Pass]
    own: list[int]
    """Numbers of this rank's rows, in the order of the passes."""


class Probes:
    """The probes of a run. Rows are tokenised once, and shared among the ranks."""

    def __init__(
        self,
        config: RunConfig,
        tasks: dict[str, TaskConfig],
        model: EncoderModel,
        index: DatasetIndex,
        share: DataRank,
        device: torch.device,
    ) -> None:
        """Read the tasks on rank 0 and take this rank's part. Collective.

        Raises:
            DataError: a file is damaged, or a row does not fit; names the file and the line.
        """
        self._model, self._device = model, device
        self._every_steps = config.monitor.eval_every_steps
        length = max(config.batches.seq_lens)
        tokenizer = load_tokenizer(index.folder / index.tokenizer_file)
        read = dist.on_first(
            lambda: {
                name: _read(name, _cut(task, length), tokenizer) for name, task in tasks.items()
            },
            "reading the rows of probes",
        )
        budget = config.train.micro_batch * config.batches.stretches[-1].seq_len
        self._tasks = {name: _own(rows, budget, share) for name, rows in read.items()}
        self._last: tuple[int, float] | None = None
        self._has_warned = False

    def __call__(self, step: int) -> dict[str, float]:
        """Probe the model at its alpha and return accuracies and baselines by name. Collective."""
        began_s = time.perf_counter()
        values: dict[str, float] = {}
        texts = []
        was_training = self._model.training
        self._model.eval()
        for name, task in self._tasks.items():
            accuracy = self._accuracy(task)
            values |= {f"accuracy_{name}": accuracy, f"majority_{name}": task.rows.majority}
            texts.append(f"{name} {accuracy:.3f} (majority {task.rows.majority:.3f})")
        self._model.train(was_training)
        ended_s = time.perf_counter()
        values["probe_s"] = ended_s - began_s
        logger.info("step %d  probes: %s  %.1f s", step, ", ".join(texts), values["probe_s"])
        if self._last is not None and step - self._last[0] == self._every_steps:
            self._warn(values["probe_s"], began_s - self._last[1])
        self._last = step, ended_s
        return values

    def _warn(self, probe_s: float, training_s: float) -> None:
        if self._has_warned or probe_s <= _MOST_TIME * training_s:
            return
        self._has_warned = True
        logger.warning(
            "probes took %.1f s, %.1f%% of the %.0f s since the last evaluation: raise "
            "monitor.eval_every_steps, or take tasks out of monitor.probes",
            probe_s,
            100 * probe_s / training_s,
            training_s,
        )

    def _accuracy(self, task: _Task) -> float:
        """Fit on train and score on dev; NaN where the vectors are not finite."""
        rows = task.rows
        x_RD = torch.cat([self._vectors(each) for each in task.passes]).double()
        labels = [rows.labels[number] for number in task.own]
        own_R, labels_R = torch.tensor([task.own, labels]).long().to(self._device)
        train_R = own_R < rows.num_train
        y_RK = F.one_hot(labels_R, rows.num_classes).double()
        table = torch.cat((torch.ones_like(x_RD[:, :1]), x_RD, y_RK), dim=1)
        products = dist.sum_over_ranks(table[train_R].T @ table[train_R])
        weights = fit_ridge(products, rows.num_classes)
        scores = table[~train_R, : -rows.num_classes] @ weights
        hits = (scores.argmax(1) == labels_R[~train_R]).sum()
        # Every rank has the same products, so that none leaves before this sum.
        share = float(dist.sum_over_ranks(hits)) / (len(rows.ids) - rows.num_train)  # sync
        return share if bool(weights.isfinite().all()) else math.nan

    @torch.no_grad()
    def _vectors(self, each: _Pass) -> Tensor:
        """(R, D) fp32 means over the tokens of rows, [CLS] and [SEP] included."""
        watchdog.heartbeat("probing")
        ends = each.ends.to(self._device)
        layout = packed(ends, each.longest, len(each.ids_T))
        # Passes with a trace are not compiled: lengths vary, and each could be a new graph.
        trace = Trace(keep_probabilities=False)
        x_TD: Tensor = self._model.encoder(each.ids_T.to(self._device), layout, trace=trace)
        # Not by index_add: on GPUs its order of addition changes from call to call.
        x_PSD = layout.to_rows(x_TD.float()[:, None])[:, 0]
        return (x_PSD.sum(1) / ends.diff()[:, None])[: each.num_rows]


def fit_ridge(products: Tensor, num_classes: int) -> Tensor:
    """Fit one-hot classes by ridge regression on standardised features.

    The penalty is the one of eleven that generalised cross-validation (Golub, Heath and Wahba 1979)
    finds best: leaving one row out, for any rotation of the rows, from the products alone.

    Args:
        products: (1 + D + K, 1 + D + K) fp64 sums over rows of the outer products of (1, x, y).
        num_classes: K.

    Returns:
        (1 + D, K) weights of (1, x); NaN where `products` are not finite.
    """
    num_rows = products[0, 0]
    mean = products[0] / num_rows
    covariance = products / num_rows - mean[:, None] * mean
    x, y = slice(1, -num_classes), slice(-num_classes, None)
    variance_D = covariance.diagonal()[x]
    is_constant_D = variance_D <= _CONSTANT * products.diagonal()[x] / num_rows
    scale_D = torch.where(is_constant_D, 0, variance_D.clamp(min=0).rsqrt())

    correlation_DD = covariance[x, x] * scale_D[:, None] * scale_D
    unknown = torch.full_like(products[:-num_classes, y], math.nan)
    if not bool(products.isfinite().all()):
        return unknown
    try:
        values_D, basis_DD = torch.linalg.eigh(correlation_DD)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return unknown  # a run does not end because a number is not known
    values_D = values_D.clamp(min=0)
    target_DK = basis_DD.T @ (covariance[x, y] * scale_D[:, None])
    penalties_C = torch.logspace(*_PENALTIES, dtype=products.dtype, device=products.device)
    shrink_CD = 1 / (values_D + penalties_C[:, None])
    kept_CD = values_D * shrink_CD
    explained_C = (shrink_CD * (2 - kept_CD)) @ target_DK.square().sum(1)
    residual_C = covariance.diagonal()[y].sum() - explained_C
    freedom_C = 1 + kept_CD.sum(1)
    best = (residual_C / (1 - freedom_C / num_rows).square()).argmin()

    weights_DK = scale_D[:, None] * (basis_DD @ (shrink_CD[best][:, None] * target_DK))
    return torch.cat((mean[None, y] - mean[None, x] @ weights_DK, weights_DK))


def _cut(task: TaskConfig, length: int) -> TaskConfig:
    """Cut rows at the longest sequence of the run: beyond it no position is trained."""
    longest = min(task.input.max_length, length)
    return replace(task, input=replace(task.input, max_length=longest))


def _read(name: str, task: TaskConfig, tokenizer: DatasetTokenizer) -> Rows:
    """Read and tokenise the same sample of train and dev whenever the run starts."""
    dist.heartbeat_all(f"reading the rows of probe {name}")
    data = read_task(task, ("train", "dev"))
    train, dev = (
        limited(list(data.splits[split]), most)
        for split, most in (("train", _TRAIN_ROWS), ("dev", _DEV_ROWS))
    )
    if len({row.gold for row in train}) < 2 or not dev:
        raise DataError(
            f"monitor.probes: {name} has {len(train)} rows of train and {len(dev)} of dev to use; "
            "expected rows in both, of two classes or more in train"
        )
    dist.heartbeat_all(f"tokenising the rows of probe {name}")
    rows, _ = encode(task, tokenizer, [*train, *dev])
    golds = [row.gold for row in dev]
    baseline = task.kind.majority(golds, labels=data.labels)["accuracy"]
    logger.info(
        "probe %s: %d classes, chance %.3f, majority %.3f; learns from %s of %s rows of train, is "
        "scored on %s of %s of dev, cut at %d tokens",
        name,
        len(data.labels),
        task.kind.chance(golds, labels=data.labels)["accuracy"],
        baseline,
        *(f"{len(each):,}" for each in (train, data.splits["train"], dev, data.splits["dev"])),
        task.input.max_length,
    )
    numbers: dict[Any, int] = {label: number for number, label in enumerate(data.labels)}
    return Rows(
        num_classes=len(data.labels),
        ids=[row.ids.tolist() for row in rows],
        labels=[numbers[row.gold] for row in (*train, *dev)],
        num_train=len(train),
        majority=baseline,
    )


def _own(rows: Rows, budget: int, share: DataRank) -> _Task:
    """Take this rank's part; `budget` is the most tokens of a pass, padding included."""
    passes, own = [], []
    for numbers in passes_of([len(ids) for ids in rows.ids], budget, share.world_size):
        mine = numbers[share.rank :: share.world_size]
        own += mine
        read = [rows.ids[number] for number in mine or numbers[:1]]
        lengths = torch.tensor([0, *map(len, read)])
        ids = torch.tensor([token for each in read for token in each])
        passes.append(_Pass(ids, lengths.cumsum(0), int(lengths.max()), len(mine)))
    return _Task(rows, passes, own)


def passes_of(lengths: Sequence[int], budget: int, world_size: int) -> list[list[int]]:
    """Put rows of about the same length into passes, each for all ranks together.

    Every rank makes as many passes: at ZeRO stage 3 they are collective.
    """
    left = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    passes = []
    while left:
        size = max(1, budget // lengths[left[0]]) * world_size
        passes.append(left[:size])
        left = left[size:]
    return passes
