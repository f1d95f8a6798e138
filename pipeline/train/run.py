"""A run as this process has opened it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.checkpoints.resume import CheckpointStore
from pipeline.checkpoints.save import Saver
from pipeline.config.runs import PretrainConfig
from pipeline.data.format import DatasetIndex
from pipeline.data.loader import EvalLoader, TrainLoader
from pipeline.model.encoder import EncoderModel
from pipeline.objectives.base import Objective
from pipeline.runtime.env import ProcessInfo
from pipeline.runtime.run_folder import RunFolder
from pipeline.sinks.base import Sinks
from pipeline.train.engine import Engine
from pipeline.train.requests import Requests


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that lasts as long as the process; an attempt at training uses it."""

    config: PretrainConfig
    process: ProcessInfo
    index: DatasetIndex
    model: EncoderModel
    engine: Engine
    objective: Objective
    train_loader: TrainLoader
    eval_loader: EvalLoader
    store: CheckpointStore
    saver: Saver
    requests: Requests
    probes: Callable[[int, Sinks | None], None] | None = None
    """Called at each evaluation with its step and rank 0's sinks; must change nothing."""

    @property
    def folder(self) -> RunFolder:
        """The folder that everything is written to."""
        return RunFolder(Path(self.config.run_dir))
