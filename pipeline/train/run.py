"""A run as this process has opened it, and what differs between kinds of runs: their work."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pipeline.checkpoints.resume import CheckpointStore
from pipeline.checkpoints.save import Saver
from pipeline.checkpoints.state import TrainState
from pipeline.config.data import BatchSpec
from pipeline.config.runs import RunConfig
from pipeline.config.stages import RunStage
from pipeline.data.format import DataIdentity
from pipeline.data.loader import MicroBatch
from pipeline.data.run_order import DataRank
from pipeline.model.encoder import EncoderModel
from pipeline.objectives.base import Objective
from pipeline.runtime.env import ProcessInfo
from pipeline.runtime.notify import Notifier
from pipeline.runtime.run_folder import RunFolder
from pipeline.train.engine import Engine, LossBalancer
from pipeline.train.requests import Requests


class TrainingData(Protocol):
    """Training batches of one rank; which ones follows from the cursor alone."""

    def steps_from(self, cursor: int) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of endless steps, the first of which begins at a cursor.

        Raises:
            PostnormError: a step cannot be made; those before it were given.
        """

    def samples(self, place: BatchSpec) -> list[list[int]]:
        """Return [epoch, sample] of each sequence of a batch, over all ranks."""

    def positions_in_batch(self, place: BatchSpec, share: DataRank) -> list[int]:
        """Return which samples of a batch a rank computes, counted from its first."""

    def epochs(self, cursor: int) -> dict[str, float]:
        """Return how often each group of the data was seen before a cursor."""

    @property
    def description(self) -> str:
        """Its size in words."""


@dataclass(frozen=True)
class HeldOutResult:
    """What an evaluation found; the same on all ranks but for pictures and texts."""

    loss: float
    """What `checkpoint.keep_best` compares, the lower the better."""
    text: str
    """Line for the console."""
    values: Mapping[str, float]
    images: Mapping[str, npt.NDArray[np.uint8]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    probes: Mapping[str, float] = field(default_factory=dict)
    """Values that `pipeline.train.probes.Probes` returns, written as their own record."""


class HeldOutEvaluator(Protocol):
    """Scores the model on data that it is not trained on."""

    def __call__(self, step: int, *, shows: bool) -> HeldOutResult | None:
        """Evaluate at the model's alpha; None if there is nothing to say at this step. Collective.

        `shows`: whether this rank's pictures and texts are looked at.
        """


class Workload(Protocol):
    """What a run trains and on what; the loop, checkpoints, faults and figures know no more."""

    @property
    def indexes(self) -> Sequence[DataIdentity]:
        """The data of each of the run's stages."""

    @property
    def objective(self) -> Objective:
        """What is minimised."""

    @property
    def unigram_entropy(self) -> float | None:
        """Nats; where it is known, a loss that stays there is told as a plateau."""

    @property
    def uniform_guess(self) -> float | None:
        """Nats of a guess for which all answers are alike; None: not known."""

    def open(self, share: DataRank) -> TrainingData:
        """Open and check the data. Collective.

        Raises:
            PostnormError: on all ranks, if one finds damage.
        """

    def begin(self, stage: RunStage) -> None:
        """Check that a stage that begins has the data that was opened. Collective.

        Raises:
            DataError: it is gone, or another one.
        """

    def start(self, model: EncoderModel) -> None:
        """Load the weights that a new run starts from, if they are not random ones.

        Raises:
            PostnormError: they do not fit.
        """

    def flops_per_token(self, masked_share: float, document_len: float) -> float:
        """Count the FLOPs of a real token, forward and backward.

        Args:
            masked_share: tokens that the head predicts, of all.
            document_len: mean over tokens of the length of their piece.
        """

    def lr_scale(self, parameter: str) -> float:
        """Return the learning rate of a parameter as a share of the run's."""

    def weighing(self, state: TrainState, batch: int) -> LossBalancer | None:
        """Weigh the losses of a step; None: by the objective's factors alone."""

    def evaluation(self, model: EncoderModel, engine: Engine) -> HeldOutEvaluator:
        """Make what scores the model; `open` was called. Collective."""

    def finish(self) -> None:
        """Do what is left when all steps are done, with all ranks. Collective."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Everything that lasts as long as the process; an attempt at training uses it."""

    config: RunConfig
    process: ProcessInfo
    work: Workload
    model: EncoderModel
    engine: Engine
    data: TrainingData
    evaluation: HeldOutEvaluator
    store: CheckpointStore
    saver: Saver
    requests: Requests
    notifier: Notifier

    @property
    def objective(self) -> Objective:
        """What is minimised."""
        return self.work.objective

    @property
    def folder(self) -> RunFolder:
        """The folder that everything is written to."""
        return self.config.folder
