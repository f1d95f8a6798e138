"""What a run resumes from: the newest checkpoint that verifies and fits, whatever `latest` says.

`saving` writes them, `checkpoints.manifest` has the layout.
"""

import hashlib
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.checkpoints.manifest import (
    FOLDER,
    STATE_FOLDER,
    Manifest,
    newest_good,
    published,
    read_manifest,
)
from pipeline.checkpoints.retention import remove
from pipeline.checkpoints.state import SavedState, state_paths
from pipeline.config.runs import PretrainConfig
from pipeline.data.difference import dataset_differences, value_differences
from pipeline.data.format import INDEX_FILE, DatasetIndex
from pipeline.data.ledger import Ledger, read_ledger
from pipeline.errors import CheckpointError, DataError
from pipeline.runtime import dist
from pipeline.runtime.env import ProcessInfo
from pipeline.train.engine import Engine
from pipeline.train.spikes import LossHistory
from pipeline.train.state import TrainState

logger = logging.getLogger(__name__)

_HOW_DATA_IS_READ = (
    "dir", "stage_dir", "verify_at_start_gib", "check_blocks", "workers", "prefetch_steps"
)  # fmt: skip


def identity(config: PretrainConfig) -> dict[str, Any]:
    """Values that decide weights' shapes, order and masks: a run cannot change them half-way.

    Steps, learning rate, schedules, intervals and paths may change.
    """
    tree = asdict(config)
    data = {name: value for name, value in tree["data"].items() if name not in _HOW_DATA_IS_READ}
    train = {name: tree["train"][name] for name in ("global_batch", "precision", "optimizer")}
    phases = [
        {name: value for name, value in phase.items() if name != "micro_batch"}
        for phase in tree["phases"]
    ]
    found = {
        "seed": config.seed, "model": tree["model"], "data": data, "train": train, "phases": phases
    }  # fmt: skip
    # As a manifest gives it back: JSON has no tuples.
    as_read: dict[str, Any] = json.loads(json.dumps(found))
    return as_read


class CheckpointStore:
    """Finds and restores the checkpoints of one run. Methods are collective."""

    def __init__(self, config: PretrainConfig, index: DatasetIndex, process: ProcessInfo) -> None:
        """Changes nothing."""
        self.folder = Path(config.run_dir) / FOLDER
        self._config = config
        self._index = index
        self._process = process

    def newest(self) -> Path | None:
        """The newest checkpoint that verifies; None if there is none at all.

        If the run's folder has none, it is that of `checkpoint.copy_to`.

        Raises:
            CheckpointError: checkpoints exist but none verifies, or the newest good one is an
                earlier version's, or belongs to other data or another model.
            DataError: the run's ledger is damaged.
        """
        path = dist.on_first(self._choose, "verifying checkpoints")
        if path is not None:
            self._require_fit(path, read_manifest(path))
        return path

    def load(self, engine: Engine, path: Path) -> TrainState:
        """Loads what `newest` found.

        Raises:
            CheckpointError: the engine does not accept it.
        """
        engine.load_files(path)
        manifest = read_manifest(path)
        if manifest.world_size != self._process.world_size:
            logger.info(
                "%s was saved by %d ranks, this run has %d: data and schedules go on as they would "
                "have, dropout draws other numbers", path, manifest.world_size,
                self._process.world_size,
            )  # fmt: skip
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
        found: list[str] = []
        ledger = read_ledger(self.folder.parent)
        for folder in folders:
            _remove_spoiled(folder, ledger)
            good, rejected = newest_good(
                folder, _require_complete, lambda _: dist.get_on("verifying checkpoints")
            )
            for text in rejected:
                logger.warning("checkpoint rejected: %s", text)
            found += rejected
            if good is not None:
                if folder != self.folder:
                    logger.warning(
                        "%s has no checkpoint that verifies: %s, a copy, is used", self.folder, good
                    )
                # Before the data is opened: an earlier version's cannot be loaded.
                state_paths(good)
                return good
        if found:
            raise CheckpointError(
                f"none of the {len(found)} checkpoints in {' and '.join(map(str, folders))} "
                f"verifies: {'; '.join(found)}. Restore one, or move the folder away to start "
                "afresh"
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
    """Removes checkpoints that were trained on batches which the run left out later.

    Here and not when that is decided: a run can be killed before it goes back.
    """
    for path in published(folder):
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue  # nobody loads it
        if ledger.is_spoiled(manifest.cursor, manifest.rewinds):
            logger.warning("removing %s: it is from a spike of the loss, see the ledger", path)
            remove([path])


def read_tokenizer(index: DatasetIndex) -> bytes:
    """The file of a dataset's tokenizer.

    Raises:
        DataError: it is missing or damaged.
    """
    path = index.folder / index.tokenizer_file
    data = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(data).hexdigest() != index.tokenizer_sha256:
        raise DataError(f"tokenizer {path} is missing or damaged; restore it")
    return data


def _require_complete(path: Path) -> None:
    """Weights and optimizer state of every parameter are there, by the headers of the files.

    Raises:
        CheckpointError: a part is missing; names it.
    """
    if any((path / STATE_FOLDER).glob("rank-*")):
        SavedState(path)
