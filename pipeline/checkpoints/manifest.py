"""The files of a checkpoint, whether they are good, and which checkpoints are kept. Without torch.

RUN/checkpoints/step-00000040/state/*          weights and optimizer state: `checkpoints.state`
RUN/checkpoints/step-00000040/tokenizer.model  the dataset's tokenizer, or tokenizer.json
RUN/checkpoints/step-00000040/index.json       the dataset's index, which a resume must match
RUN/checkpoints/step-00000040/manifest.json    counters, identity, sha256 of every file and itself
RUN/checkpoints/latest                         name of the newest, for people and scripts
RUN/checkpoints/.saving-*, .removing-*         unfinished work of a running or killed process
RUN/checkpoints/.rejected-*                    found unusable by a probe (`checkpoints.probe`)
"""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from pipeline.config.train import CheckpointConfig
from pipeline.errors import CheckpointError, NewerFormatError
from pipeline.runtime import files
from pipeline.runtime.files import rename, retry_storage, sha256_file, sync_folder
from pipeline.runtime.run_folder import A_STARTED_RUN, RunFolder

FOLDER = RunFolder(Path()).checkpoints.name
"""In a run's folder, and in that of copies (`checkpoint.copy_to`)."""
LATEST_FILE = "latest"
MANIFEST_FILE = "manifest.json"
PREFIX = "step-"
STATE_FOLDER = "state"
REJECTED = ".rejected-"
_NAME = re.compile(rf"{PREFIX}\d{{8,}}")
_SIGNATURE = "manifest_sha256"

CONTENTS = {
    "weights": "master, fp32",
    "moments": "exp_avg, exp_avg_sq, fp32",
    "counters": "updates, global_steps, skipped_steps",
    "dropout": "a function of (seed, cursor, rank): no random state",
}
"""The parts of a run's state; a checkpoint with other parts cannot be resumed."""
COUNTERS = (
    *("step", "cursor", "skipped", "elapsed_s", "held_out_loss", "held_out_step"),
    *("left_out", "rewinds"),
)
"""Fields that a manifest has from `state.TrainState`, where they are explained."""


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
    """Config values that a resumed run must share: see `resume.identity`."""
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
        NewerFormatError: another version wrote it, whose checkpoints this one cannot read.
    """
    try:
        body = json.loads((path / MANIFEST_FILE).read_bytes())
        unsigned = {name: value for name, value in body.items() if name != _SIGNATURE}
        if body != signed(unsigned):
            raise CheckpointError(f"{path}: {MANIFEST_FILE} is damaged, its own sha256 differs")
        _refuse_newer(path, unsigned)
        manifest = Manifest(**unsigned)
    except (OSError, ValueError, TypeError, AttributeError) as error:
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


def newest_readable(folder: Path) -> tuple[Path, Manifest] | None:
    """Return the newest checkpoint whose manifest can be read; its files are not compared."""
    for path in published(folder):
        try:
            return path, read_manifest(path)
        except CheckpointError:
            continue  # just removed, or damaged, of which the trainer tells
    return None


def problems(path: Path, on_bytes: Callable[[int], object] = lambda _: None) -> Iterator[str]:
    """List everything wrong with a checkpoint, file by file; empty if it is good. Not collective.

    `on_bytes` is called with the size of each file that was checked.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        yield str(error)
        return
    yield from (f"{path}: {text}" for text in _listing_problems(manifest))
    for name, entry in manifest.files.items():
        file = path / name
        if not file.is_file():
            yield f"{path}: {name} is missing"
        elif file.stat().st_size != entry["bytes"]:
            yield f"{path}: {name} has {file.stat().st_size} bytes, expected {entry['bytes']}"
        elif sha256_file(file) != entry["sha256"]:
            yield f"{path}: {name} is damaged, its sha256 differs"
        on_bytes(entry["bytes"])


def verify(path: Path, on_bytes: Callable[[int], object] = lambda _: None) -> None:
    """Compare all files of a checkpoint with its manifest. Not collective.

    Raises:
        CheckpointError: a file is missing or changed; names the first.
    """
    for text in problems(path, on_bytes):
        raise CheckpointError(text)


def published(folder: Path) -> list[Path]:
    """List the checkpoints in a run's `FOLDER`, newest first by their names."""
    paths = [path for path in folder.glob(f"{PREFIX}*") if _NAME.fullmatch(path.name)]
    # By number: from 100 million steps on names have nine digits.
    return sorted(paths, key=step_of, reverse=True)


def newest_good(
    folder: Path,
    also: Callable[[Path], object] = lambda _: None,
    on_bytes: Callable[[int], object] = lambda _: None,
) -> tuple[Path | None, list[str]]:
    """Find the newest checkpoint that verifies, and why newer ones do not. Not collective.

    `also` is a further check, which raises CheckpointError; `on_bytes` is as in `problems`.

    Raises:
        NewerFormatError: a newer version wrote one before it: it is good, and must not be replaced.
    """
    rejected = []
    for path in published(folder):
        try:
            read_manifest(path)
            verify(path, on_bytes)
            also(path)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            rejected.append(str(error))
        else:
            return path, rejected
    return None, rejected


def name_of(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"{PREFIX}{step:08d}"


def step_of(path: Path) -> int:
    """Return the step that a checkpoint's folder is named after."""
    return int(path.name.removeprefix(PREFIX))


def state_file(rank: int, world_size: int) -> str:
    """Return the name of a rank's state file, relative to the checkpoint."""
    return f"{STATE_FOLDER}/rank-{rank:05d}-of-{world_size:05d}.safetensors"


def _listing_problems(manifest: Manifest) -> Iterator[str]:
    """List state files that the manifest misses or should not list."""
    listed = {name for name in manifest.files if name.startswith(f"{STATE_FOLDER}/rank-")}
    if not listed and manifest.contents is None:
        return  # an earlier version wrote it; loading it says so
    expected = {state_file(rank, manifest.world_size) for rank in range(manifest.world_size)}
    for name in sorted(expected - listed):
        yield f"{MANIFEST_FILE} of {manifest.world_size} ranks does not list {name}"
    for name in sorted(listed - expected):
        yield f"{MANIFEST_FILE} of {manifest.world_size} ranks lists {name}"


REMOVING = ".removing-"


@dataclass(frozen=True)
class Retention:
    """A rule; a checkpoint is kept if any part of the rule keeps it."""

    keep: int
    keep_every_steps: int | None = None
    """Checkpoints at multiples of it are kept."""
    keep_best: int = 0
    """Number of checkpoints with the lowest held-out loss, measured at their own step."""
    keep_first: bool = False
    """That of step 0 is kept."""

    @classmethod
    def of(cls, config: CheckpointConfig) -> "Retention":
        """Return the rule of a run's config."""
        return cls(config.keep, config.keep_every_steps, config.keep_best, config.keep_first)

    def reasons(self, losses: dict[int, float | None]) -> dict[int, list[str]]:
        """Return why each checkpoint is kept; an empty list if it is not kept.

        `losses` are held-out losses by step; None without an evaluation.
        """
        steps = sorted(losses, reverse=True)
        scored = [(loss, step) for step, loss in losses.items() if loss is not None]
        # Among equal losses the later step is better: it has seen more data.
        ranked = sorted((s for s in scored if math.isfinite(s[0])), key=lambda s: (s[0], -s[1]))
        best = {step: rank for rank, (_, step) in enumerate(ranked[: self.keep_best], 1)}
        reasons: dict[int, list[str]] = {step: [] for step in steps}
        for place, step in enumerate(steps):
            if place < self.keep:
                reasons[step].append("newest" if place == 0 else f"newest {place + 1}")
            if self.keep_first and step == 0:
                reasons[step].append("first")
            if self.keep_every_steps and step and step % self.keep_every_steps == 0:
                reasons[step].append(f"every {self.keep_every_steps}")
            if step in best:
                reasons[step].append("best" if best[step] == 1 else f"best {best[step]}")
        return reasons


def superseded(folder: Path, rule: Retention, good: Path) -> list[Path]:
    """List the checkpoints that a rule does not keep, oldest first.

    Checkpoints newer than the newest good one are neither counted nor removed.
    """
    paths = {step_of(path): path for path in published(folder)}
    losses = {step: _loss(path) for step, path in paths.items() if step <= step_of(good)}
    reasons = rule.reasons(losses)
    return [paths[step] for step in sorted(losses) if not reasons[step] and paths[step] != good]


def remove(paths: Iterable[Path]) -> None:
    """Remove checkpoints; a kill in between leaves nothing that looks like a complete checkpoint.

    Raises:
        OSError: one cannot be removed.
    """
    for path in paths:
        hidden = path.with_name(f"{REMOVING}{path.name}")
        remove_tree(hidden)
        rename(path, hidden)
        sync_folder(path.parent)
        remove_tree(hidden)


def remove_tree(folder: Path) -> None:
    """Remove a folder, if it is there; tried again while storage fails in passing."""

    def remove_once() -> None:
        if folder.exists():
            shutil.rmtree(folder)

    retry_storage(remove_once, lambda: f"removing {folder}")


def _loss(path: Path) -> float | None:
    try:
        return read_manifest(path).own_held_out_loss
    except CheckpointError:
        return None  # a damaged checkpoint is never among the best


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


def at_step(run: Path, step: Step) -> Path:
    """Return the checkpoint of a run at a step.

    Raises:
        RunFolderError: this is not a run.
        CheckpointError: there is none of that step, or none with a held-out loss; says which there
            are.
    """
    paths = {step_of(path): path for path in published(folder_of(run))}
    if step == "best":
        measured = {number: _loss(path) for number, path in paths.items()}
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
