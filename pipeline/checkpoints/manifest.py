"""The files of a checkpoint, whether they are good, and which checkpoints are kept. Without torch.

RUN/checkpoints/step-00000040/state/*          weights and optimizer state: `checkpoints.state`
RUN/checkpoints/step-00000040/tokenizer.model  the dataset's tokenizer, or tokenizer.json
RUN/checkpoints/step-00000040/index.json       the dataset's index, which a resume must match
RUN/checkpoints/step-00000040/manifest.json    counters, identity, sha256 of every file and itself
RUN/checkpoints/latest                         name of the newest, for people and scripts
RUN/checkpoints/.saving-*, .removing-*         unfinished work of a running or killed process
RUN/checkpoints/.rejected-*                    found unusable by a probe (`checkpoints.probe`)
"""

import errno
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.runs import RunConfig
from pipeline.errors import CheckpointError, NewerFormatError
from pipeline.runtime import checkpoints
from pipeline.runtime.files import rename, retry_storage, sha256_file, sync_folder

REJECTED = ".rejected-"

COUNTERS = (
    *("step", "cursor", "skipped", "elapsed_s", "held_out_loss", "held_out_step"),
    *("left_out", "rewinds"),
)
"""Fields that a manifest has from `state.TrainState`, where they are explained."""


def newest_readable(folder: Path) -> tuple[Path, checkpoints.Manifest] | None:
    """Return the newest checkpoint whose manifest can be read; its files are not compared."""
    for path in checkpoints.published(folder):
        try:
            return path, checkpoints.read_manifest(path)
        except CheckpointError:
            continue  # just removed, or damaged, of which the trainer tells
    return None


def newest_of(config: RunConfig) -> checkpoints.Manifest | None:
    """Return the manifest of a run's newest checkpoint, or of that which it begins from."""
    newest = newest_readable(config.folder.checkpoints)
    if newest is not None:
        return newest[1]
    return checkpoints.read_manifest(config.origin) if config.origin else None


def problems(path: Path, on_bytes: Callable[[int], object] = lambda _: None) -> Iterator[str]:
    """List everything wrong with a checkpoint, file by file; empty if it is good. Not collective.

    `on_bytes` is called with the size of each file that was checked.
    """
    try:
        manifest = checkpoints.read_manifest(path)
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
        elif text := _damage(file, entry["sha256"]):
            yield f"{path}: {name} {text}"
        on_bytes(entry["bytes"])


def _damage(file: Path, sha256: str) -> str:
    """Say what is wrong with a file's content; a place that the disk cannot read is damage, too."""
    try:
        found = retry_storage(lambda: sha256_file(file), lambda: f"reading {file}")
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return f"cannot be read: {error}"
    return "" if found == sha256 else "is damaged, its sha256 differs"


def verify(path: Path, on_bytes: Callable[[int], object] = lambda _: None) -> None:
    """Compare all files of a checkpoint with its manifest. Not collective.

    Raises:
        CheckpointError: a file is missing or changed; names the first.
    """
    for text in problems(path, on_bytes):
        raise CheckpointError(text)


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
    for path in checkpoints.published(folder):
        try:
            checkpoints.read_manifest(path)
            verify(path, on_bytes)
            also(path)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            rejected.append(str(error))
        else:
            return path, rejected
    return None, rejected


def state_file(rank: int, world_size: int) -> str:
    """Return the name of a rank's state file, relative to the checkpoint."""
    return f"{checkpoints.STATE_FOLDER}/rank-{rank:05d}-of-{world_size:05d}.safetensors"


def _listing_problems(manifest: checkpoints.Manifest) -> Iterator[str]:
    """List state files that the manifest misses or should not list."""
    listed = {
        name for name in manifest.files if name.startswith(f"{checkpoints.STATE_FOLDER}/rank-")
    }
    if not listed and manifest.contents is None:
        return  # an earlier version wrote it; loading it says so
    expected = {state_file(rank, manifest.world_size) for rank in range(manifest.world_size)}
    for name in sorted(expected - listed):
        yield f"{checkpoints.MANIFEST_FILE} of {manifest.world_size} ranks does not list {name}"
    for name in sorted(listed - expected):
        yield f"{checkpoints.MANIFEST_FILE} of {manifest.world_size} ranks lists {name}"


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
    borders: frozenset[int] = frozenset()
    """Cursors at which a stage ends: these checkpoints are kept, so that other stages can begin
    from them."""
    skip_before: int = 0
    """While losses are high, the newest from this many batches before the first high one is
    kept."""

    @classmethod
    def of(cls, config: RunConfig) -> "Retention":
        """Return the rule of a run's config."""
        given = config.checkpoint
        return cls(
            given.keep,
            given.keep_every_steps,
            given.keep_best,
            given.keep_first,
            frozenset(config.timeline.borders),
            config.spikes.skip_before_steps,
        )

    def reasons(
        self,
        losses: dict[int, float | None],
        manifests: Mapping[int, checkpoints.Manifest] | None = None,
    ) -> dict[int, list[str]]:
        """Return why each checkpoint is kept; an empty list if it is not kept.

        `losses` are held-out losses by step; None without an evaluation. `manifests` are by step;
        without those that are damaged.
        """
        manifests = manifests or {}
        steps = sorted(losses, reverse=True)
        scored = [(loss, step) for step, loss in losses.items() if loss is not None]
        # Among equal losses the later step is better: it has seen more data.
        ranked = sorted((s for s in scored if math.isfinite(s[0])), key=lambda s: (s[0], -s[1]))
        best = {step: rank for rank, (_, step) in enumerate(ranked[: self.keep_best], 1)}
        healthy = self._healthy(manifests)
        reasons: dict[int, list[str]] = {step: [] for step in steps}
        for place, step in enumerate(steps):
            if place < self.keep:
                reasons[step].append("newest" if place == 0 else f"newest {place + 1}")
            if self.keep_first and step == 0:
                reasons[step].append("first")
            if step in manifests and manifests[step].cursor in self.borders:
                reasons[step].append("end of a stage")
            if step == healthy:
                reasons[step].append("before the loss rose")
            if self.keep_every_steps and step and step % self.keep_every_steps == 0:
                reasons[step].append(f"every {self.keep_every_steps}")
            if step in best:
                reasons[step].append("best" if best[step] == 1 else f"best {best[step]}")
        return reasons

    def _healthy(self, manifests: Mapping[int, checkpoints.Manifest]) -> int | None:
        """Find the newest step from before the losses became high; None while they are not."""
        high = manifests[max(manifests)].losses.get("high") if manifests else None
        if not high:
            return None
        first_high = high[0][0]
        # As `FaultHandler` looks for a checkpoint: with the batches to leave out, or without.
        for first in (first_high - self.skip_before, first_high):
            steps = [step for step, each in manifests.items() if each.next_batch <= max(0, first)]
            if steps:
                return max(steps)
        return None


def superseded(folder: Path, rule: Retention, good: Path) -> list[Path]:
    """List the checkpoints that a rule does not keep, oldest first.

    Checkpoints newer than the newest good one are neither counted nor removed.
    """
    paths = {checkpoints.step_of(path): path for path in checkpoints.published(folder)}
    paths = {step: path for step, path in paths.items() if step <= checkpoints.step_of(good)}
    losses = {step: checkpoints.own_loss(path) for step, path in paths.items()}
    reasons = rule.reasons(losses, manifests_of(paths))
    return [paths[step] for step in sorted(losses) if not reasons[step] and paths[step] != good]


def manifests_of(paths: Mapping[int, Path]) -> dict[int, checkpoints.Manifest]:
    """Read the manifests of checkpoints, by step; without those that are damaged."""
    found = {}
    for step, path in paths.items():
        with suppress(CheckpointError):
            found[step] = checkpoints.read_manifest(path)
    return found


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
