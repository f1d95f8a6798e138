"""Held-out evaluation of checkpoints and models apart from training, on any number of ranks.

Text, masks, alpha and precision are those of the trainer's own evaluation, which takes the first
`monitor.eval_sequences`: for as many sequences the numbers are the same. The run may go on
meanwhile: an evaluation does not take its lock and does not write to its metrics.
"""

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from pipeline.checkpoints.manifest import newest_good, published, step_of, verify
from pipeline.checkpoints.table import at_step, folder_of
from pipeline.data.counts import sequences_at
from pipeline.data.format import DatasetIndex, read_index
from pipeline.data.loader import EvalLoader
from pipeline.data.steps import Share
from pipeline.errors import CheckpointError, DataError, PostnormError
from pipeline.model.architecture import is_model_folder, tokenizer_path
from pipeline.objectives.mlm import MaskedLanguageModeling
from pipeline.runtime import dist
from pipeline.runtime.env import ProcessInfo
from pipeline.runtime.log import duration_text
from pipeline.runtime.rank import AgreedStop
from pipeline.train.evaluate import EvalResult, combine, own_sums
from pipeline.train.initial import tokenizer_differences
from pipeline.use.evaluate_command import MASK_FIELDS, EvaluateConfig, EvaluateRequest
from pipeline.use.export import load_checkpoint
from pipeline.use.folder import load_model

logger = logging.getLogger(__name__)

T = TypeVar("T")
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_TELL_EVERY_S = 10.0


@dataclass(frozen=True)
class Evaluation:
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
        request: EvaluateRequest,
        config: EvaluateConfig,
        process: ProcessInfo,
        device: torch.device,
        stop: AgreedStop,
    ) -> None:
        """Open the data. Collective.

        Raises:
            PostnormError: on all ranks, if one finds that something is wrong.
        """
        self.request, self.config, self.process = request, config, process
        self._device, self._stop = device, stop
        self.index: DatasetIndex = read_index(config.data.dir)
        seq_len, source = config.data.seq_len, request.source
        keep_in = None if is_model_folder(source) else source
        counts = dist.on_first(
            lambda: sequences_at(self.index, [seq_len], keep_in), "counting sequences"
        )
        with dist.together():
            share = Share(process.rank, process.world_size)
            held_out = config.eval_data
            inputs = MaskedLanguageModeling().eval_inputs(held_out, self.index)
            self._loader = EvalLoader(self.index, held_out, inputs, share, counts)

    @cached_property
    def setting(self) -> dict[str, Any]:
        """What the numbers depend on besides the model; they compare where it is equal."""
        data = self.config.data
        return {
            "data": data.dir,
            "fingerprint": self.index.fingerprint,
            "sequences": self._loader.num_sequences,
            "seq_len": data.seq_len,
            "precision": self.config.precision,
            "masks": {name: value for name, value in asdict(data).items() if name in MASK_FIELDS},
        }

    @property
    def sources(self) -> tuple[str, ...]:
        """Names in the dataset's order, also of sources without held-out text."""
        return self._loader.sources

    def evaluations(self, passed_over: frozenset[int] = frozenset()) -> Iterator[Evaluation]:
        """Evaluate what the request asks for. Collective.

        Args:
            passed_over: steps of checkpoints that are not evaluated again.

        Raises:
            CheckpointError: there is no such checkpoint, or none that verifies.
            DataError: the model does not fit the data.
            Stopped: a rank is to stop.
        """
        source = self.request.source
        if is_model_folder(source):
            trained = load_model(source)
            self._require_fit(source, None)
            result = self._result(trained.model)
            yield Evaluation(source, trained.facts.get("step"), 1.0, result)
            return
        for path in self._checkpoints(passed_over):
            self._stop.check()
            with dist.together():
                try:
                    model, manifest = load_checkpoint(path)
                except (CheckpointError, OSError) as error:
                    raise _reading_error(path, error) from error
            self._require_fit(path, manifest.fingerprint)
            result = self._result(model)
            yield Evaluation(path, manifest.step, manifest.alpha, result)

    def _checkpoints(self, passed_over: frozenset[int]) -> Iterator[Path]:
        """Give the checkpoints to evaluate, oldest first, each verified. Collective."""
        source, step = self.request.source, self.request.step
        if not self.request.every:
            yield dist.on_first(
                lambda: _newest(source) if step is None else _of_step(source, step),
                "verifying checkpoints",
            )
            return
        paths = dist.on_first(lambda: published(folder_of(source))[::-1], "listing checkpoints")
        rejected = []
        for path in paths:
            if step_of(path) in passed_over:
                continue
            problem = dist.on_first(partial(_problem, path), "verifying checkpoints")
            if problem is None:
                yield path
            else:
                rejected.append(problem)
                logger.warning("checkpoint rejected: %s", problem)
        if len(rejected) == len(paths):
            raise CheckpointError(_none_good(source, rejected))

    def _require_fit(self, path: Path, fingerprint: str | None) -> None:
        """Check that the model's ids mean the dataset's tokens.

        Raises:
            DataError: they do not, or the run's dataset was replaced without --data.
        """
        folder, given = self.index.folder, self.request.data is not None
        if fingerprint == self.index.fingerprint:
            return
        if fingerprint is not None and not given:
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
        """Collective."""
        # As both engines have it: weights rounded to bf16, and all passes in bf16; no autocast.
        model = model.to(self._device, _DTYPES[self.config.precision])
        objective = MaskedLanguageModeling()
        loader = self._loader
        batches = self._stop.until(
            _with_progress(loader.batches(), loader.num_batches, loader.num_sequences)
        )
        sums = own_sums(model, self._device, objective, batches, len(loader.sources))
        self._stop.check()
        return combine(sums, objective, loader.sources)


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
                duration_text((now_s - start_s) * (1 - done) / done),
            )
        yield item


def _newest(run: Path) -> Path:
    path, rejected = newest_good(folder_of(run), on_bytes=_get_on)
    for text in rejected:
        logger.warning("checkpoint rejected: %s", text)
    if path is None:
        raise CheckpointError(_none_good(run, rejected))
    return path


def _of_step(run: Path, step: int) -> Path:
    path = at_step(run, step)
    problem = _problem(path)
    if problem is not None:
        raise CheckpointError(
            f"{problem}: step {step} cannot be evaluated; give another --step, or none for the "
            "newest good checkpoint"
        )
    return path


def _problem(path: Path) -> str | None:
    try:
        verify(path, _get_on)
    except CheckpointError as error:
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


def _none_good(run: Path, rejected: list[str]) -> str:
    return f"none of the {len(rejected)} checkpoints of {run} verifies: {'; '.join(rejected)}"


def _get_on(_: int) -> None:
    dist.get_on("verifying checkpoints")
