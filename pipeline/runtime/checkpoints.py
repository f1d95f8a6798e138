"""Checkpoints by name: which ones a run has, what they say of themselves. Without torch.

Here, below the configs: `continue_from` names a checkpoint.
"""

import json
import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from pipeline.errors import PASSING, CheckpointError, ConfigError, NewerFormatError
from pipeline.runtime import files
from pipeline.runtime.run_folder import A_STARTED_RUN, RunFolder

FOLDER = RunFolder(Path()).checkpoints.name
"""In a run's folder, and in that of copies (`checkpoint.copy_to`)."""
LATEST_FILE = "latest"
MANIFEST_FILE = "manifest.json"
PREFIX = "step-"
STATE_FOLDER = "state"
_NAME = re.compile(rf"{PREFIX}\d{{8,}}")
_SIGNATURE = "manifest_sha256"

CONTENTS = {
    "weights": "master, fp32",
    "moments": "exp_avg, exp_avg_sq, fp32",
    "counters": "updates, global_steps, skipped_steps",
    "dropout": "a function of (seed, cursor, rank): no random state",
}
"""The parts of a run's state; a checkpoint with other parts cannot be resumed."""


@dataclass(frozen=True)
class Manifest:
    """Description of a checkpoint: counters, the run that it fits, and its files."""

    step: int
    cursor: int
    skipped: int
    alpha: float
    """The residual's alpha that the next step would use; below 1 in the warm-up."""
    fingerprint: str
    identity: dict[str, Any]
    """Config values that a resumed run must share: see `RunConfig.identity_at`."""
    config_sha256: str
    world_size: int
    created_unix_s: float
    provenance: dict[str, str]
    files: dict[str, dict[str, Any]]
    """path below the checkpoint -> {"bytes", "sha256"}."""
    # Manifests of earlier versions lack the following fields.
    elapsed_s: float = 0.0
    zero_stage: int | None = None
    """ZeRO stage that saved it; any stage can load it."""
    held_out_loss: float | None = None
    held_out_step: int | None = None
    left_out: int = 0
    rewinds: int = 0
    losses: dict[str, Any] = field(default_factory=dict)
    """`state.LossHistory`: the losses that the next decision about a spike needs."""
    weights: dict[str, dict[str, float]] = field(default_factory=dict)
    """`state.TrainState.weights`."""
    contents: dict[str, str] | None = None
    """`CONTENTS` of the version that wrote it."""
    is_sound: bool = False
    """Whether it was made sure before writing that every value is finite."""
    config: dict[str, Any] = field(default_factory=dict)
    """The run's config, as plain values."""
    fingerprints: list[str] = field(default_factory=list)
    """Of the data of the stages before that of `fingerprint`."""

    @property
    def next_batch(self) -> int:
        """Number of the batch that comes after it."""
        return self.step + self.skipped + self.left_out

    @property
    def num_bytes(self) -> int:
        """Size of its files without the manifest."""
        return sum(int(entry["bytes"]) for entry in self.files.values())

    @property
    def own_held_out_loss(self) -> float | None:
        """Held-out loss of exactly these weights; None if they were not evaluated."""
        return self.held_out_loss if self.held_out_step == self.step else None


def signed(body: dict[str, Any]) -> dict[str, Any]:
    """Add a sha256 of the manifest to itself."""
    return files.signed(body, _SIGNATURE)


def read_manifest(path: Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises:
        CheckpointError: it is missing, damaged, or for another step than the folder's name says.
        OSError: storage fails in passing, also when it is tried again: that is no damage.
        NewerFormatError: another version wrote it, whose checkpoints this one cannot read.
    """
    try:
        file = path / MANIFEST_FILE
        body = json.loads(files.retry_storage(file.read_bytes, lambda: f"reading {file}"))
        unsigned = {name: value for name, value in body.items() if name != _SIGNATURE}
        if body != signed(unsigned):
            raise CheckpointError(f"{path}: {MANIFEST_FILE} is damaged, its own sha256 differs")
        _refuse_newer(path, unsigned)
        manifest = Manifest(**unsigned)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno in PASSING:
            raise
        raise CheckpointError(f"{path} has no readable {MANIFEST_FILE}: {error}") from error
    if _NAME.fullmatch(path.name) and step_of(path) != manifest.step:
        raise CheckpointError(
            f"{path}: {MANIFEST_FILE} is for step {manifest.step}, expected {step_of(path)}"
        )
    return manifest


def _refuse_newer(path: Path, body: dict[str, Any]) -> None:
    strangers = sorted(body.keys() - {field.name for field in fields(Manifest)})
    contents = body.get("contents") or CONTENTS
    if not strangers and contents == CONTENTS:
        return
    what = f"the fields {', '.join(strangers)}" if strangers else f"a state of {contents}"
    revision = body.get("provenance", {}).get("git_revision", "unknown")
    raise NewerFormatError(
        f"{path}: {MANIFEST_FILE} is whole and has {what}, which this version does not know: a "
        f"newer one ({revision}) wrote it. Continue with that version, or choose another run_dir; "
        "nothing was changed"
    )


def published(folder: Path) -> list[Path]:
    """List the checkpoints in a run's `FOLDER`, newest first by their names."""
    paths = [path for path in folder.glob(f"{PREFIX}*") if _NAME.fullmatch(path.name)]
    # By number: from 100 million steps on names have nine digits.
    return sorted(paths, key=step_of, reverse=True)


def name_of(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"{PREFIX}{step:08d}"


def step_of(path: Path) -> int:
    """Return the step that a checkpoint's folder is named after."""
    return int(path.name.removeprefix(PREFIX))


A_RUN_OR_ITS_COPY = f"{A_STARTED_RUN}, or its checkpoint.copy_to"


def folder_of(run: Path, expected: str = A_RUN_OR_ITS_COPY) -> Path:
    """Find a run's folder of checkpoints.

    Raises:
        RunFolderError: this is neither.
        CheckpointError: the run has not saved yet.
    """
    opened = RunFolder(run)
    folder = opened.checkpoints
    if published(folder):
        return folder
    if not opened.has_started:
        raise opened.refusal(expected)
    raise CheckpointError(
        f"{run} has no checkpoints yet: {folder} has no {PREFIX}N. Wait for the run's first save "
        f"(checkpoint.every_steps), or ask for one with `touch {opened.save}`."
    )


Step = int | Literal["best"]
"""A checkpoint of a run; the best one has the lowest held-out loss, measured at its own step."""


def split_step(source: str | Path) -> tuple[Path, Step | None]:
    """Read `RUN@STEP` or `RUN@best`; the step is None where the words name a folder alone."""
    run, at, step = str(source).rpartition("@")
    step = step.replace("_", "").replace(",", "")
    if not at or Path(source).exists() or not (step == "best" or step.isdecimal()):
        return Path(source), None
    return Path(run), "best" if step == "best" else int(step)


def asked_step(source: str | Path, step: int | None, every: bool) -> tuple[Path, int | None]:
    """Return the run that is to be evaluated, and the step that `RUN@STEP` or `--step` names.

    Raises:
        ConfigError: `RUN@STEP` stands beside `--step` or `--all`; see also `at_step`.
    """
    run, named = split_step(source)
    if named is None:
        return run, step
    if every or step is not None:
        raise ConfigError(f"{source} names a checkpoint; leave out --step and --all")
    return run, step_of(at_step(run, named))


def at_step(run: Path, step: Step) -> Path:
    """Return the checkpoint of a run at a step.

    Raises:
        RunFolderError: this is not a run.
        CheckpointError: there is none of that step, or none with a held-out loss; says which there
            are.
    """
    paths = {step_of(path): path for path in published(folder_of(run))}
    if step == "best":
        measured = {number: own_loss(path) for number, path in paths.items()}
        losses = {
            number: loss
            for number, loss in measured.items()
            if loss is not None and math.isfinite(loss)
        }
        if not losses:
            raise CheckpointError(
                f"{run}: none of the checkpoints of steps {', '.join(map(str, sorted(paths)))} has "
                "a held-out loss of its own step; name one of them, RUN@STEP, or save where the "
                "run evaluates (checkpoint.keep_best)"
            )
        return paths[min(losses, key=lambda number: (losses[number], -number))]
    if step not in paths:
        steps = ", ".join(map(str, sorted(paths)))
        raise CheckpointError(f"{run} has no checkpoint of step {step}; it has those of {steps}")
    return paths[step]


def own_loss(path: Path) -> float | None:
    """Return the held-out loss of a checkpoint's own step; None without one, or if damaged."""
    try:
        return read_manifest(path).own_held_out_loss
    except CheckpointError:
        return None  # a damaged checkpoint is never among the best
