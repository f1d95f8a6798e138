"""Pre-trains Post-LN bidirectional encoders from raw text; the Python API.

Example:
    >>> import postnorm
    >>> model = postnorm.load("runs/mine")  # doctest: +SKIP
    >>> vectors = model.encode(["a text", "another"])  # doctest: +SKIP
    >>> model.fill_mask("The capital of France is [MASK].")  # doctest: +SKIP
    >>> hidden = model(["a text"]).hidden  # doctest: +SKIP
    >>> data = postnorm.TrainDataset("data/mine", seq_len=512)  # doctest: +SKIP
    >>> result = postnorm.pretrain("train.yaml", {"train.lr": 1e-4})  # doctest: +SKIP
    >>> run = postnorm.submit("train.yaml", cluster="h200.yaml")  # doctest: +SKIP
    >>> run.wait().state, run.result().loss  # doctest: +SKIP

Names are imported when they are first used, so that `import postnorm` imports no torch.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launch.jobs import SubmittedRun, SubmittedStatus, submit
    from pipeline.errors import PostnormError
    from pipeline.use.model import Candidate, Model, Output, load
    from pipeline.use.pretrain import PretrainResult, pretrain
    from pipeline.use.sentences import SentenceEncoder
    from pipeline.use.train_dataset import TrainDataset
    from pipeline.use.whiten import Whitening

__version__ = "0.1.0"

__all__ = [
    "Candidate",
    "Model",
    "Output",
    "PostnormError",
    "PretrainResult",
    "SentenceEncoder",
    "SubmittedRun",
    "SubmittedStatus",
    "TrainDataset",
    "Whitening",
    "__version__",
    "load",
    "pretrain",
    "submit",
]

_HOMES = {
    "PostnormError": "pipeline.errors",
    "Candidate": "pipeline.use.model",
    "Model": "pipeline.use.model",
    "Output": "pipeline.use.model",
    "load": "pipeline.use.model",
    "PretrainResult": "pipeline.use.pretrain",
    "pretrain": "pipeline.use.pretrain",
    "SentenceEncoder": "pipeline.use.sentences",
    "TrainDataset": "pipeline.use.train_dataset",
    "Whitening": "pipeline.use.whiten",
    "SubmittedRun": "launch.jobs",
    "SubmittedStatus": "launch.jobs",
    "submit": "launch.jobs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'postnorm' has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        here, other = Path(__file__).parents[1], sys.modules.get("pipeline")
        if other is not None and here not in Path(str(other.__file__)).parents:
            raise ImportError(
                f"{other.__file__} was imported in place of Postnorm's package `pipeline`: rename "
                "that file, or run the program in another folder"
            ) from error
        from pipeline.errors import missing_extra

        raise missing_extra(error) or error from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
