"""Removing a run's superseded checkpoints by hand."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.checkpoints.manifest import newest_good
from pipeline.checkpoints.retention import REMOVING, Retention, remove, superseded
from pipeline.checkpoints.table import folder_of, retention_of
from pipeline.errors import BusyError, CheckpointError
from pipeline.runtime.files import LOCK_FILE


@dataclass(frozen=True)
class Plan:
    """What is to go."""

    rule: Retention
    good: Path
    """The newest checkpoint that verifies; it stays whatever the rule says."""
    rejected: list[str]
    """What is wrong with newer ones; they stay, too."""
    removed: list[Path]
    """Oldest first."""


def plan(run: Path, keep: int | None, keep_every: int | None, keep_best: int | None) -> Plan:
    """What a run's retention, with these parts of it replaced, would remove.

    Raises:
        CheckpointError: there are no checkpoints, none verifies, or no rule is given or recorded.
    """
    folder = folder_of(run)
    rule = retention_of(run)
    if rule is None:
        if keep is None:
            raise CheckpointError(f"{run} has no config with a retention; give --keep N")
        rule = Retention(keep)
    given = {"keep": keep, "keep_every_steps": keep_every, "keep_best": keep_best}
    rule = replace(rule, **{name: value for name, value in given.items() if value is not None})
    good, rejected = newest_good(folder)
    if good is None:
        raise CheckpointError(
            f"none of the checkpoints in {folder} verifies, so nothing is removed: "
            f"{'; '.join(rejected)}"
        )
    return Plan(rule, good, rejected, superseded(folder, rule, good))


def carry_out(run: Path, paths: list[Path]) -> None:
    """Removes them, and what a killed removal left.

    Raises:
        BusyError: a process uses the folder.
    """
    with _locked(run):
        remove(paths)
        for hidden in folder_of(run).glob(f"{REMOVING}*"):
            shutil.rmtree(hidden)


@contextmanager
def _locked(run: Path) -> Iterator[None]:
    with (run / LOCK_FILE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(
                f"{run} is in use by a running process, which removes checkpoints by its own "
                "retention; stop it, or wait until it ends"
            ) from None
        yield
