"""Which checkpoints of a run are kept, why, and how the others go. Never imports torch."""

import math
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pipeline.checkpoints.manifest import published, read_manifest, step_of
from pipeline.config.train import CheckpointConfig
from pipeline.errors import CheckpointError
from pipeline.runtime.files import sync_path

REMOVING = ".removing-"


@dataclass(frozen=True)
class Retention:
    """A rule; what any part of it keeps is kept."""

    keep: int
    """Newest ones."""
    keep_every_steps: int | None = None
    """Those at multiples of it."""
    keep_best: int = 0
    """Those of the lowest held-out loss, among the ones that were evaluated at their own step."""

    @classmethod
    def of(cls, config: CheckpointConfig) -> "Retention":
        """That of a run."""
        return cls(config.keep, config.keep_every_steps, config.keep_best)

    def reasons(self, losses: dict[int, float | None]) -> dict[int, list[str]]:
        """Why each checkpoint is kept; an empty list: it is not.

        Args:
            losses: held-out loss by step; None where there was no evaluation.
        """
        steps = sorted(losses, reverse=True)
        scored = [(loss, step) for step, loss in losses.items() if loss is not None]
        # Of equal losses the later step: it has seen more.
        ranked = sorted((s for s in scored if math.isfinite(s[0])), key=lambda s: (s[0], -s[1]))
        best = {step: rank for rank, (_, step) in enumerate(ranked[: self.keep_best], 1)}
        found: dict[int, list[str]] = {step: [] for step in steps}
        for place, step in enumerate(steps):
            if place < self.keep:
                found[step].append("newest" if place == 0 else f"newest {place + 1}")
            if self.keep_every_steps and step % self.keep_every_steps == 0:
                found[step].append(f"every {self.keep_every_steps}")
            if step in best:
                found[step].append("best" if best[step] == 1 else f"best {best[step]}")
        return found


def superseded(folder: Path, rule: Retention, good: Path) -> list[Path]:
    """Checkpoints that a rule does not keep, oldest first.

    What is newer than the newest one that is known to verify is neither counted nor removed.

    Args:
        folder: a run's `FOLDER`.
        rule: of the run.
        good: the newest checkpoint that verifies.
    """
    paths = {step_of(path): path for path in published(folder)}
    losses = {step: _loss(path) for step, path in paths.items() if step <= step_of(good)}
    reasons = rule.reasons(losses)
    return [paths[step] for step in sorted(losses) if not reasons[step] and paths[step] != good]


def remove(paths: Iterable[Path]) -> None:
    """Removes checkpoints so that a kill in between leaves no part that looks like a whole one.

    Raises:
        OSError: one cannot be removed.
    """
    for path in paths:
        hidden = path.with_name(f"{REMOVING}{path.name}")
        if hidden.exists():
            shutil.rmtree(hidden)
        path.rename(hidden)
        sync_path(path.parent)
        shutil.rmtree(hidden)


def _loss(path: Path) -> float | None:
    try:
        return read_manifest(path).own_held_out_loss
    except CheckpointError:
        return None  # damaged: it competes for nothing
