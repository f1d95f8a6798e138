"""Held-out evaluation of checkpoints and models apart from training, on any number of ranks.

Text, masks, alpha and precision are those of the trainer's own evaluation, which takes the first
`monitor.eval_sequences`: for as many sequences the numbers are the same. A run is evaluated with
its own objective, a model folder as masked language modelling. The run may go on meanwhile: an
evaluation does not take its lock and does not write to its metrics.
"""

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from pipeline.checkpoints.manifest import at_step, folder_of, published, step_of, verify
from pipeline.config.data import EvalDataConfig
from pipeline.data.counts import sequences_at
from pipeline.data.format import DatasetIndex
from pipeline.data.loader import EvalLoader
from pipeline.data.objects import open_index
from pipeline.data.run_order import DataRank
from pipeline.errors import CheckpointError, DataError, PostnormError
from pipeline.model.architecture import is_model_folder, tokenizer_path
from pipeline.objectives.choose import make_objective
from pipeline.runtime import dist
from pipeline.runtime.env import ProcessInfo
from pipeline.runtime.rank import AgreedStop
from pipeline.runtime.summary import duration
from pipeline.train.evaluate import EvalResult, local_sums, reduce_sums
from pipeline.train.initial import tokenizer_differences
from pipeline.use.folder import load_model, load_objective

logger = logging.getLogger(__name__)

T = TypeVar("T")
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_TELL_EVERY_S = 10.0


@dataclass(frozen=True)
class TextEvaluation:
    """One model on the held-out text."""

    path: Path
    """The checkpoint, or the model folder."""
    step: int | None
    """Applied optimizer steps; None: the model folder does not say."""
    alpha: float
    """Scale of the residual branches, as the checkpoint's next step would use it."""
    result: EvalResult


class Evaluator:
    """The held-out text of a dataset, ready for one model after another."""

    def __init__(
        self,
        config: EvalDataConfig,
        precision: str,
        run: Path | None,
        process: ProcessInfo,
        device: torch.device,
        stop: AgreedStop,
    ) -> None:
        """Open the data. Collective.

        Numbers of sequences are cached in the dataset's folder, or in that of the `run`. `stop` is
        looked at between batches and checkpoints.

        Raises:
            PostnormError: on all ranks, if one finds that something is wrong.
        """
        self._objective, self._dtype = make_objective(config.objective), _DTYPES[precision]
        self._device, self._stop = device, stop
        self.index: DatasetIndex = open_index(config.data)
        seq_len = config.data.seq_len
        counts = dist.on_first(
            lambda: sequences_at(self.index, [seq_len], run, config.objective),
            "counting sequences",
        )
        with dist.raise_on_all_ranks():
            share = DataRank(process.rank, process.world_size)
            inputs = self._objective.eval_inputs(config, self.index)
            self._loader = EvalLoader(self.index, config, inputs, share, counts)

    @property
    def num_sequences(self) -> int:
        """Sequences that are evaluated, of all ranks."""
        return self._loader.num_sequences

    @property
    def sources(self) -> tuple[str, ...]:
        """Names in the dataset's order, also of sources without held-out text."""
        return self._loader.sources

    def evaluations(
        self,
        source: Path,
        *,
        step: int | None = None,
        every: bool = False,
        passed_over: frozenset[int] = frozenset(),
        other_data: bool = False,
    ) -> Iterator[TextEvaluation]:
        """Evaluate a model folder, or checkpoints of a run, oldest first. Collective.

        Without a `step` it is the newest good checkpoint, or `every` one but those `passed_over`.
        Data other than the run's must be asked for.

        Raises:
            CheckpointError: there is no such checkpoint, or none that verifies.
            DataError: the model does not fit the data.
            Stopped: a rank is to stop.
        """
        if is_model_folder(source):
            trained = load_model(source)
            self._require_fit(source, None, other_data=True)
            result = self._result(trained.model)
            yield TextEvaluation(source, trained.facts.get("step"), 1.0, result)
            return
        for path in _good_checkpoints(source, step, every, passed_over):
            self._stop.check()
            with dist.raise_on_all_ranks():
                try:
                    model, manifest = load_objective(path, self._objective)
                except (CheckpointError, OSError) as error:
                    raise _reading_error(path, error) from error
            self._require_fit(path, manifest.fingerprint, other_data=other_data)
            result = self._result(model)
            yield TextEvaluation(path, manifest.step, manifest.alpha, result)

    def _require_fit(self, path: Path, fingerprint: str | None, *, other_data: bool) -> None:
        """Check that the model's ids mean the dataset's tokens."""
        folder = self.index.folder
        if fingerprint == self.index.fingerprint:
            return
        if fingerprint is not None and not other_data:
            raise DataError(
                f"{folder} has fingerprint {self.index.fingerprint}, {path} was trained on "
                f"{fingerprint}; name the folder of that dataset with --data, or this one if you "
                "mean it"
            )
        other_ids, other_text = tokenizer_differences(tokenizer_path(path), self.index)
        if other_ids:
            raise DataError(
                f"{folder} was made with another tokenizer than {path} has: "
                f"{'; '.join(other_ids)}; losses of other tokens cannot be compared: give a "
                "dataset made with the model's tokenizer"
            )
        for text in other_text:
            same = "the tokenizers of %s and %s give the same ids to the same pieces, but %s"
            logger.warning(same, path, folder, text)

    def _result(self, model: nn.Module) -> EvalResult:
        """Evaluate one model. Collective."""
        # As both engines have it: weights rounded to bf16, and all passes in bf16; no autocast.
        model = model.to(self._device, self._dtype)
        loader, objective = self._loader, self._objective
        batches = self._stop.until(
            _with_progress(loader.batches(), loader.num_batches, loader.num_sequences)
        )
        sums = local_sums(model, self._device, objective, batches, len(loader.sources))
        self._stop.check()
        return reduce_sums(sums, objective, loader.sources)


def _with_progress(items: Iterable[T], num_items: int, num_sequences: int) -> Iterator[T]:
    """Give the items on, with a line in the log every ten seconds."""
    start_s = told_s = time.monotonic()
    for number, item in enumerate(items):
        now_s = time.monotonic()
        if number and now_s - told_s >= _TELL_EVERY_S:
            told_s, done = now_s, number / num_items
            logger.info(
                "evaluated about %s of %s sequences (%.0f%%), %s left",
                f"{done * num_sequences:,.0f}",
                f"{num_sequences:,}",
                100 * done,
                duration((now_s - start_s) * (1 - done) / done),
            )
        yield item


def _good_checkpoints(
    run: Path, step: int | None, every: bool, passed_over: frozenset[int]
) -> Iterator[Path]:
    """Give the checkpoints to evaluate, each verified just before. Collective."""
    paths: list[Path] = dist.on_first(
        lambda: published(folder_of(run)) if step is None else [at_step(run, step)],
        "listing checkpoints",
    )
    rejected = []
    for path in reversed(paths) if every else paths:
        if every and step_of(path) in passed_over:
            continue
        find_problem = partial(_problem, path, tell=step is None)
        problem = dist.on_first(find_problem, "verifying checkpoints")
        if problem is None:
            yield path
            if not every:
                return
            continue
        if step is not None:
            raise CheckpointError(
                f"{problem}: step {step} cannot be evaluated; give another --step, or none for "
                "the newest good checkpoint"
            )
        rejected.append(problem)
    if len(rejected) == len(paths):
        raise CheckpointError(
            f"none of the {len(paths)} checkpoints of {run} verifies: {'; '.join(rejected)}"
        )


def _problem(path: Path, *, tell: bool) -> str | None:
    try:
        verify(path, lambda _: dist.heartbeat_all("verifying checkpoints"))
    except CheckpointError as error:
        if tell:
            logger.warning("checkpoint rejected: %s", error)
        return str(error)
    return None


def _reading_error(path: Path, found: Exception) -> PostnormError:
    if not path.exists():
        return CheckpointError(
            f"{path} was removed while it was read, by the retention of the run, which goes on "
            "(checkpoint.keep); evaluate again, or ask for a checkpoint that is kept"
        )
    return (
        found
        if isinstance(found, PostnormError)
        else CheckpointError(f"{path} cannot be read: {found}")
    )
