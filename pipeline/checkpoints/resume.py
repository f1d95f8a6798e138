"""Finds the checkpoint that a run resumes from: the newest that verifies and fits the run.

The file `latest` is not consulted. `manifest` describes the layout, `save` writes checkpoints.
"""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.checkpoints.counters import LossHistory, TrainState
from pipeline.checkpoints.manifest import (
    FOLDER,
    STATE_FOLDER,
    Manifest,
    newest_good,
    published,
    read_manifest,
)
from pipeline.checkpoints.retention import remove
from pipeline.checkpoints.state import HasState, SavedState, state_paths
from pipeline.config.runs import PretrainConfig
from pipeline.data.difference import dataset_differences, value_differences
from pipeline.data.format import INDEX_FILE, DatasetIndex
from pipeline.data.ledger import Ledger, read_ledger
from pipeline.errors import CheckpointError
from pipeline.runtime import dist
from pipeline.runtime.env import ProcessInfo

logger = logging.getLogger(__name__)

_HOW_DATA_IS_READ = {
    "dir",
    "stage_dir",
    "verify_at_start_gib",
    "check_blocks",
    "workers",
    "prefetch_steps",
}


def identity(config: PretrainConfig) -> dict[str, Any]:
    """Return the values that fix weights' shapes, order and masks, which a resume cannot change.

    Steps, learning rate, schedules, intervals and paths may change.
    """
    tree = asdict(config)
    data = {name: value for name, value in tree["data"].items() if name not in _HOW_DATA_IS_READ}
    train = {name: tree["train"][name] for name in ("global_batch", "precision", "optimizer")}
    phases = [
        {name: value for name, value in phase.items() if name != "micro_batch"}
        for phase in tree["phases"]
    ]
    values = {
        "seed": config.seed,
        "model": tree["model"],
        "data": data,
        "train": train,
        "phases": phases,
    }
    # Compared with a manifest's, and JSON turns tuples into lists.
    as_read: dict[str, Any] = json.loads(json.dumps(values))
    return as_read


class CheckpointStore:
    """Find and restore the checkpoints of one run. Methods are collective."""

    def __init__(self, config: PretrainConfig, index: DatasetIndex, process: ProcessInfo) -> None:
        """Remember what checkpoints must fit; nothing is read yet."""
        self.folder = Path(config.run_dir) / FOLDER
        self._config = config
        self._index = index
        self._process = process

    def newest(self) -> Path | None:
        """Return the newest checkpoint that verifies; None if there are no checkpoints.

        If the run's folder has none, copies in `checkpoint.copy_to` are used.

        Raises:
            CheckpointError: checkpoints exist but none verifies, or an earlier version wrote the
                newest good one, or it belongs to other data or another model.
            DataError: the run's ledger is damaged.
        """
        path = dist.on_first(self._choose, "verifying checkpoints")
        if path is not None:
            self._require_fit(path, read_manifest(path))
        return path

    def load(self, engine: HasState, path: Path) -> TrainState:
        """Load a checkpoint that `newest` returned.

        Raises:
            CheckpointError: the engine does not accept it.
        """
        engine.load_files(path)
        manifest = read_manifest(path)
        if manifest.world_size != self._process.world_size:
            logger.info(
                "%s was saved by %d ranks, this run has %d: data and schedules continue unchanged, "
                "dropout draws other numbers",
                path,
                manifest.world_size,
                self._process.world_size,
            )
        return TrainState(
            manifest.step,
            manifest.cursor,
            manifest.skipped,
            left_out=manifest.left_out,
            rewinds=manifest.rewinds,
            losses=LossHistory.read(manifest.losses),
            elapsed_s=manifest.elapsed_s,
            held_out_loss=manifest.held_out_loss,
            held_out_step=manifest.held_out_step,
        )

    def _choose(self) -> Path | None:
        folders = [self.folder]
        if self._config.checkpoint.copy_to is not None:
            folders.append(Path(self._config.checkpoint.copy_to) / FOLDER)
        problems: list[str] = []
        ledger = read_ledger(self.folder.parent)
        for folder in folders:
            _remove_spoiled(folder, ledger)
            good, rejected = newest_good(
                folder, _require_complete, lambda _: dist.get_on("verifying checkpoints")
            )
            for text in rejected:
                logger.warning("checkpoint rejected: %s", text)
            problems += rejected
            if good is not None:
                if folder != self.folder:
                    logger.warning(
                        "%s has no checkpoint that verifies: %s, a copy, is used", self.folder, good
                    )
                # Refuses a checkpoint of an earlier version now, before the data is opened.
                state_paths(good)
                return good
        if problems:
            raise CheckpointError(
                f"none of the {len(problems)} checkpoints in {' and '.join(map(str, folders))} "
                f"verifies: {'; '.join(problems)}. Restore one, or move the folder away to start "
                "from the beginning"
            )
        return None

    def _require_fit(self, path: Path, manifest: Manifest) -> None:
        problems, remedy = [], "Continue with the values of the checkpoint"
        if manifest.fingerprint != self._index.fingerprint:
            problems.append(
                f"dataset fingerprint: checkpoint {manifest.fingerprint}, data.dir "
                f"{self._config.data.dir} has {self._index.fingerprint}"
            )
            saved = json.loads((path / INDEX_FILE).read_bytes())
            problems += dataset_differences(saved, json.loads(self._index.content))
            remedy = (
                f"Restore the data that {path / INDEX_FILE} lists, or correct data.dir, and "
                "continue with the values of the checkpoint"
            )
        problems += value_differences(manifest.identity, identity(self._config))
        if problems:
            raise CheckpointError(
                f"{path} does not fit this run: {'; '.join(problems)}. {remedy}, or choose another "
                "run_dir"
            )


def _remove_spoiled(folder: Path, ledger: Ledger) -> None:
    """Remove checkpoints that were trained on batches which the run later left out.

    This is done at a start and not when batches are left out, because a run can be killed between
    that decision and its way back.
    """
    for path in published(folder):
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue  # never loaded: `newest_good` rejects it
        if ledger.is_spoiled(manifest.cursor, manifest.rewinds):
            logger.warning("removing %s: it was trained on a loss spike, see the ledger", path)
            remove([path])


def _require_complete(path: Path) -> None:
    """Check by the files' headers that every parameter has its weights and optimizer state.

    Raises:
        CheckpointError: a part is missing; names it.
    """
    if any((path / STATE_FOLDER).glob("rank-*")):
        SavedState(path)
