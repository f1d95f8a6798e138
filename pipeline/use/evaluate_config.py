"""What an evaluation is to be of, as a config: a run's own, or the defaults for a model folder."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.config.load import build, load
from pipeline.config.runs import PretrainConfig
from pipeline.errors import CheckpointError, ConfigError
from pipeline.runtime.files import RESOLVED_FILE
from pipeline.use.folder import is_model_folder, read_architecture

MASK_FIELDS = (
    "masking", "mask_selection", "mask_prob", "at_least_one", "replace_mask_prob",
    "replace_random_prob",
)  # fmt: skip
"""Of `DataConfig`: they decide what is predicted."""
_SEQ_LEN = 512
_ALL = 2**62


@dataclass(frozen=True)
class EvaluateRequest:
    """The command line. None: the run's value, or a default for a model folder."""

    source: Path
    """Run folder or model folder."""
    step: int | None = None
    """Of the checkpoint; None: the newest good one."""
    every: bool = False
    """Every kept checkpoint."""
    data: Path | None = None
    """Dataset; a model folder knows none."""
    sequences: int | None = None
    """At most so many; None: all held-out text."""
    seq_len: int | None = None
    micro_batch: int | None = None
    precision: str | None = None
    """bf16 or fp32."""
    overrides: tuple[str, ...] = ()
    """Of the masks: `data.mask_prob=0.15`."""


def evaluation_config(request: EvaluateRequest) -> PretrainConfig:
    """A config that `EvalLoader` takes.

    Raises:
        ConfigError: a value is out of range, or names something else than masks.
        CheckpointError: the source is no run, no model, or a model folder without a dataset.
    """
    settings = [*_checked(request.overrides), *_settings(request)]
    source = request.source
    if not is_model_folder(source):
        path = source / RESOLVED_FILE
        if not path.is_file():
            raise CheckpointError(
                f"{source} is no run folder and no model folder: it has neither {RESOLVED_FILE} "
                "nor config.json with model.safetensors; give the run_dir of a run, or what "
                "`python -m pipeline export`, convert or grow wrote"
            )
        return load(PretrainConfig, path, settings).config
    if request.step is not None or request.every:
        raise CheckpointError(f"{source} is a model folder, of one model; leave out --step, --all")
    if request.data is None:
        raise CheckpointError(
            f"{source} is a model folder, which does not know its dataset; give its folder with "
            "--data"
        )
    model, _ = read_architecture(source)
    longest = min(_SEQ_LEN, model.longest_document or _SEQ_LEN)
    values: dict[str, Any] = {
        "run_dir": str(source),
        "model": asdict(model),
        "data": {"dir": str(request.data), "seq_len": longest},
        # In which fill-mask and encode use it.
        "train": {"precision": "fp32"},
    }
    return build(PretrainConfig, values, str(source), settings)


def _checked(overrides: tuple[str, ...]) -> tuple[str, ...]:
    known = {f"data.{name}" for name in MASK_FIELDS}
    for text in overrides:
        if text.partition("=")[0].strip() not in known:
            raise ConfigError(
                f"override {text!r}: an evaluation takes only {', '.join(sorted(known))}; for "
                "dataset, length and batch see --help"
            )
    return overrides


def _settings(request: EvaluateRequest) -> list[str]:
    """The command line as overrides, so that ranges are checked as in a config."""
    sequences = _ALL if request.sequences is None else request.sequences
    found = ["phases=[]", f"monitor.eval_sequences={sequences}"]
    if request.data is not None:
        found.append(f"data.dir={json.dumps(str(request.data))}")
    if request.seq_len is not None:
        found.append(f"data.seq_len={request.seq_len}")
    if request.micro_batch is not None:
        # A step's batch, which there is none of, would have to be a multiple.
        found += [f"train.{name}={request.micro_batch}" for name in ("micro_batch", "global_batch")]
    if request.precision is not None:
        found.append(f"train.precision={request.precision}")
    return found
