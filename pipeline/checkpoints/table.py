"""The checkpoints of a run as table rows: contents, whether each is good, why it is kept."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from pipeline.checkpoints.manifest import (
    PREFIX,
    Manifest,
    problems,
    published,
    read_manifest,
    step_of,
)
from pipeline.checkpoints.retention import Retention
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.errors import CheckpointError
from pipeline.runtime.log import duration_text
from pipeline.runtime.run_folder import A_STARTED_RUN, RunFolder


@dataclass(frozen=True)
class Row:
    """One checkpoint."""

    path: str
    step: int
    manifest: Manifest | None
    """None if it cannot be read."""
    problems: list[str]
    """Everything wrong with it; without `is_verified`, from its manifest alone."""
    is_verified: bool
    """Whether all files were compared with their hashes."""
    would_resume: bool
    """Whether a start would resume from it, as far as was verified."""
    kept: list[str] | None
    """Why the run's retention keeps it; empty if it does not, None if the rule is unknown."""


A_RUN_OR_ITS_COPY = f"{A_STARTED_RUN}, or its checkpoint.copy_to"


def folder_of(run: Path, expected: str = A_RUN_OR_ITS_COPY) -> Path:
    """Find a run's folder of checkpoints.

    Args:
        run: a run folder, or one with copies.
        expected: what the caller takes, for the message.

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


def at_step(run: Path, step: int) -> Path:
    """Return the checkpoint of a run at a step.

    Raises:
        RunFolderError: this is not a run.
        CheckpointError: there is none of that step; says which there are.
    """
    paths = {step_of(path): path for path in published(folder_of(run))}
    if step not in paths:
        steps = ", ".join(map(str, sorted(paths)))
        raise CheckpointError(f"{run} has no checkpoint of step {step}; it has those of {steps}")
    return paths[step]


def retention_of(run: Path) -> Retention | None:
    """The rule of a run's config; None if the folder has none, as one of copies."""
    path = RunFolder(run).resolved
    return Retention.of(load(PretrainConfig, path).config.checkpoint) if path.is_file() else None


def all_problems(paths: list[Path]) -> Iterator[tuple[Path, list[str]]]:
    """Compare the files of checkpoints with their hashes, with a progress bar over bytes."""
    sizes = [manifest.num_bytes for path in paths if (manifest := _manifest(path)[0])]
    with tqdm(
        total=sum(sizes), unit="B", unit_scale=True, desc="verify", disable=None, leave=False
    ) as progress:
        for path in paths:
            yield path, list(problems(path, progress.update))


def rows(run: Path, *, verify: bool = False) -> list[Row]:
    """List all checkpoints of a run, oldest first.

    Args:
        run: a run folder, or a folder of copies.
        verify: compare files with their hashes; otherwise only manifests are read.

    Raises:
        RunFolderError: this is not a run.
        CheckpointError: there are none.
    """
    paths = published(folder_of(run))
    manifests = {path: _manifest(path) for path in paths}
    wrong = {path: [text] if text else [] for path, (_, text) in manifests.items()}
    if verify:
        wrong |= dict(all_problems(paths))
    resumed = next((path for path in paths if not wrong[path]), None)
    rule = retention_of(run)
    # Like `retention.superseded`: checkpoints newer than the newest good one are not counted.
    counted = {
        step_of(path): manifest.own_held_out_loss if (manifest := manifests[path][0]) else None
        for path in paths
        if resumed is not None and step_of(path) <= step_of(resumed)
    }
    reasons = rule.reasons(counted) if rule else {}
    return [
        Row(
            path=str(path),
            step=step_of(path),
            manifest=manifests[path][0],
            problems=wrong[path],
            is_verified=verify,
            would_resume=path == resumed,
            kept=reasons.get(step_of(path), ["damaged, newer"]) if rule else None,
        )
        for path in reversed(paths)
    ]


_COLUMNS = (
    "step",
    "cursor",
    "skipped",
    "alpha",
    "age",
    "MB",
    "ranks",
    "zero",
    "held-out",
    "checked",
    "resume",
    "kept",
)


def table(rows: list[Row], now_s: float | None = None) -> Iterator[str]:
    """Format rows as lines of a table, followed by the problems found."""
    now_s = time.time() if now_s is None else now_s
    cells = [_COLUMNS, *(tuple(_cells(row, now_s)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  ".join(
            text.ljust(width) if name == "kept" else text.rjust(width)
            for name, text, width in zip(_COLUMNS, line, widths, strict=True)
        ).rstrip()
    yield from (f"bad: {text}" for row in rows for text in row.problems)


def _cells(row: Row, now_s: float) -> Iterator[str]:
    manifest = row.manifest
    yield f"{row.step:,}"
    if manifest is None:
        yield from ["?"] * 8
    else:
        yield f"{manifest.cursor:,}"
        yield f"{manifest.skipped:,}"
        yield f"{manifest.alpha:.3f}"
        yield duration_text(max(0.0, now_s - manifest.created_unix_s))
        yield f"{manifest.num_bytes / 1e6:,.1f}"
        yield str(manifest.world_size)
        yield "?" if manifest.zero_stage is None else str(manifest.zero_stage)
        loss = manifest.own_held_out_loss
        yield "-" if loss is None else f"{loss:.4f}"
    yield "BAD" if row.problems else "files" if row.is_verified else "manifest"
    yield "<-" if row.would_resume else ""
    yield "?" if row.kept is None else ", ".join(row.kept) or "no"


def _manifest(path: Path) -> tuple[Manifest | None, str]:
    try:
        return read_manifest(path), ""
    except CheckpointError as error:
        return None, str(error)
