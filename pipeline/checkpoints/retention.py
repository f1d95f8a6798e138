"""Rules for which checkpoints a run keeps, and the removal of the others. Without torch."""

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
    """A rule; a checkpoint is kept if any part of the rule keeps it."""

    keep: int
    """Number of newest checkpoints."""
    keep_every_steps: int | None = None
    """Checkpoints at multiples of it are kept."""
    keep_best: int = 0
    """Number of checkpoints with the lowest held-out loss, measured at their own step."""

    @classmethod
    def of(cls, config: CheckpointConfig) -> "Retention":
        """Return the rule of a run's config."""
        return cls(config.keep, config.keep_every_steps, config.keep_best)

    def reasons(self, losses: dict[int, float | None]) -> dict[int, list[str]]:
        """Return why each checkpoint is kept; an empty list if it is not kept.

        Args:
            losses: held-out loss by step; None without an evaluation.
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
            if self.keep_every_steps and step % self.keep_every_steps == 0:
                reasons[step].append(f"every {self.keep_every_steps}")
            if step in best:
                reasons[step].append("best" if best[step] == 1 else f"best {best[step]}")
        return reasons


def superseded(folder: Path, rule: Retention, good: Path) -> list[Path]:
    """List the checkpoints that a rule does not keep, oldest first.

    Checkpoints newer than the newest good one are neither counted nor removed.

    Args:
        folder: a run's `FOLDER`.
        rule: the run's rule.
        good: the newest checkpoint that verifies.
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
        if hidden.exists():
            shutil.rmtree(hidden)
        path.rename(hidden)
        sync_path(path.parent)
        shutil.rmtree(hidden)


def _loss(path: Path) -> float | None:
    try:
        return read_manifest(path).own_held_out_loss
    except CheckpointError:
        return None  # a damaged checkpoint is never among the best
