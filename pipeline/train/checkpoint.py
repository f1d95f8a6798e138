"""Checkpoints that are complete and verified, or do not exist.

    RUN/checkpoints/step-00000040/state/*          weights and optimizer state: `state_files`
    RUN/checkpoints/step-00000040/tokenizer.model  of the dataset, or tokenizer.json
    RUN/checkpoints/step-00000040/index.json       of the dataset: what else it must be resumed on
    RUN/checkpoints/step-00000040/manifest.json    counters, identity, sha256 of every file, its own
    RUN/checkpoints/latest                         name of the newest, for people and scripts

A save goes to `.saving-...`; when all ranks are done every file is listed, hashed and flushed, the
manifest is written, and one rename publishes all of it. Resuming takes the newest checkpoint whose
files have the hashes of its manifest, whatever `latest` says.
"""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.config.load import digest, provenance
from pipeline.config.run import PretrainConfig
from pipeline.data.difference import dataset_differences, value_differences
from pipeline.data.shards import INDEX_FILE, DatasetIndex
from pipeline.errors import CheckpointError, DataError
from pipeline.runtime import dist, watchdog
from pipeline.runtime.env import ProcessInfo
from pipeline.runtime.files import sha256_file, sync_path, write_atomic, write_json_atomic
from pipeline.train.engine import Engine
from pipeline.train.state import TrainState
from pipeline.train.state_files import expected_files, state_paths

logger = logging.getLogger(__name__)

FOLDER = "checkpoints"
LATEST_FILE = "latest"
MANIFEST_FILE = "manifest.json"
_PREFIX = "step-"
_UNFINISHED = ".saving-"
_SIGNATURE = "manifest_sha256"
# fp32 master weights and two fp32 averages.
_BYTES_PER_PARAMETER = 12


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds, and what it fits."""

    step: int
    cursor: int
    skipped: int
    alpha: float
    """The residual's alpha that the next step would use; below 1 in the warm-up."""
    fingerprint: str
    """Of the dataset."""
    identity: dict[str, Any]
    """Config values that a resumed run must share: see `identity`."""
    config_sha256: str
    world_size: int
    created_unix_s: float
    provenance: dict[str, str]
    files: dict[str, dict[str, Any]]
    """path below the checkpoint -> {"bytes", "sha256"}."""
    elapsed_s: float = 0.0
    """Time of training as a time budget counts it; an earlier version's manifests lack it."""


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
    """Saves and restores the checkpoints of one run. Methods are collective unless said."""

    def __init__(
        self, config: PretrainConfig, index: DatasetIndex, process: ProcessInfo, num_parameters: int
    ) -> None:
        """Makes the folder and removes what killed saves left behind.

        Raises:
            DataError: the dataset's tokenizer is missing or damaged.
        """
        self.folder = Path(config.run_dir) / FOLDER
        self._config = config
        self._index = index
        # Read now: the dataset's folder may be replaced while the run goes on.
        self._tokenizer = _read_tokenizer(index)
        self._process = process
        self._least_bytes = num_parameters * _BYTES_PER_PARAMETER
        if process.is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.glob(f"{_UNFINISHED}*"):
                logger.warning("removing %s: a save that was never finished", path)
                shutil.rmtree(path)

    def save(self, engine: Engine, state: TrainState, alpha: float) -> Path:
        """Saves and publishes; older checkpoints beyond `keep` are removed afterwards.

        Raises:
            CheckpointError: a rank could not write. Earlier checkpoints are untouched.
        """
        final = self.folder / f"{_PREFIX}{state.step:08d}"
        unfinished = self.folder / f"{_UNFINISHED}{final.name}"
        self._on_first(lambda: self._require_space(unfinished))
        try:
            engine.save_files(unfinished)
            if self._process.is_first:
                (unfinished / self._index.tokenizer_file).write_bytes(self._tokenizer)
                (unfinished / INDEX_FILE).write_bytes(self._index.content)
            dist.barrier()
            # So that a rank reads back the file that it wrote.
            names = expected_files(unfinished, self._process.world_size)
            mine = names[self._process.rank :: self._process.world_size]
            parts = dist.gather({name: _flush_and_describe(unfinished / name) for name in mine})
        except (OSError, RuntimeError) as error:
            if dist.is_lost_rank(error):
                raise  # trying again may help
            # The other ranks are told by this process' end. The disk may be full: make room.
            shutil.rmtree(unfinished, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint {final.name} could not be written to {self.folder}: {error}; "
                f"{_free_text(self.folder)}; earlier checkpoints are untouched. Free space or set "
                "checkpoint.keep lower, then start the run again"
            ) from error
        files = {name: entry for part in parts for name, entry in part.items()}
        manifest = Manifest(
            step=state.step,
            cursor=state.cursor,
            skipped=state.skipped,
            alpha=alpha,
            fingerprint=self._index.fingerprint,
            identity=identity(self._config),
            config_sha256=digest(self._config),
            world_size=self._process.world_size,
            created_unix_s=time.time(),
            provenance=provenance(),
            files=dict(sorted(files.items())),
            elapsed_s=state.elapsed_s,
        )
        self._on_first(lambda: self._publish(unfinished, final, manifest))
        return final

    def newest(self) -> Path | None:
        """The newest checkpoint that verifies; None if there is none at all.

        Raises:
            CheckpointError: checkpoints exist but none verifies, or the newest good one is an
                earlier version's, or belongs to other data or another model.
        """
        path = self._on_first(self._choose)
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
            manifest.step, manifest.cursor, manifest.skipped, elapsed_s=manifest.elapsed_s
        )

    def _on_first(self, function: Callable[[], Path | None]) -> Path | None:
        """Runs on rank 0 only and gives every rank the result, or raises its error on all."""
        outcome: Path | CheckpointError | None = None
        if self._process.is_first:
            try:
                outcome = function()
            except CheckpointError as error:
                outcome = error
        dist.wait_for([0], "work on checkpoints")  # hashing may take long
        shared: Path | CheckpointError | None = dist.from_first(outcome)
        if isinstance(shared, CheckpointError):
            raise shared
        return shared

    def _choose(self) -> Path | None:
        good, rejected = newest_good(self.folder)
        for text in rejected:
            logger.warning("checkpoint rejected: %s", text)
        if good is None and rejected:
            raise CheckpointError(
                f"none of the {len(rejected)} checkpoints in {self.folder} verifies: "
                f"{'; '.join(rejected)}. Restore one, or move the folder away to start afresh"
            )
        if good is not None:
            state_paths(good)  # before the data is opened: an earlier version's cannot be loaded
        return good

    def _require_space(self, unfinished: Path) -> None:
        shutil.rmtree(unfinished, ignore_errors=True)
        needed = self._least_bytes
        for path in _published(self.folder)[:1]:
            sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
            needed = max(needed, sum(sizes))
        if shutil.disk_usage(self.folder).free < needed:
            raise CheckpointError(
                f"no space for checkpoint {unfinished.name.removeprefix(_UNFINISHED)}: it needs "
                f"about {needed / 1e9:.4f} GB, {_free_text(self.folder)}; earlier "
                "checkpoints are untouched. Free space or set checkpoint.keep lower, then start "
                "the run again"
            )

    def _publish(self, unfinished: Path, final: Path, manifest: Manifest) -> None:
        try:
            write_json_atomic(unfinished / MANIFEST_FILE, _signed(asdict(manifest)))
            for folder in [unfinished, *(p for p in unfinished.rglob("*") if p.is_dir())]:
                sync_path(folder)
            if final.exists():
                # A damaged checkpoint of the same step, which this run did not resume from.
                shutil.rmtree(final)
            unfinished.rename(final)
            sync_path(self.folder)
            write_atomic(self.folder / LATEST_FILE, f"{final.name}\n".encode())
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint {final.name} could not be published in {self.folder}: {error}; "
                f"{_free_text(self.folder)}; earlier checkpoints are untouched"
            ) from error
        for old in _published(self.folder)[self._config.checkpoint.keep :]:
            shutil.rmtree(old)

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


def read_manifest(path: Path) -> Manifest:
    """Reads a checkpoint's manifest.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    try:
        body = json.loads((path / MANIFEST_FILE).read_bytes())
        unsigned = {name: value for name, value in body.items() if name != _SIGNATURE}
        if body != _signed(unsigned):
            raise CheckpointError(f"{path}: {MANIFEST_FILE} is damaged, its own sha256 differs")
        return Manifest(**unsigned)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} has no readable {MANIFEST_FILE}: {error}") from error


def verify(path: Path) -> None:
    """Compares all files of a checkpoint with its manifest. Not collective.

    Raises:
        CheckpointError: a file is missing or changed; names it.
    """
    for name, entry in read_manifest(path).files.items():
        watchdog.beat("verifying a checkpoint")
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path}: {name} is missing")
        if file.stat().st_size != entry["bytes"]:
            raise CheckpointError(
                f"{path}: {name} has {file.stat().st_size} bytes, expected {entry['bytes']}"
            )
        if sha256_file(file) != entry["sha256"]:
            raise CheckpointError(f"{path}: {name} is damaged, its sha256 differs")


def newest_good(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, and why newer ones do not. Not collective."""
    rejected = []
    for path in _published(folder):
        try:
            verify(path)
        except CheckpointError as error:
            rejected.append(str(error))
        else:
            return path, rejected
    return None, rejected


def _read_tokenizer(index: DatasetIndex) -> bytes:
    path = index.folder / index.tokenizer_file
    data = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(data).hexdigest() != index.tokenizer_sha256:
        raise DataError(f"tokenizer {path} is missing or damaged; restore it")
    return data


def _published(folder: Path) -> list[Path]:
    """Checkpoints, newest first."""
    return sorted(folder.glob(f"{_PREFIX}*"), reverse=True)


def _signed(body: dict[str, Any]) -> dict[str, Any]:
    """The manifest with a sha256 of itself: a flipped digit of the cursor must not pass."""
    text = json.dumps(body, sort_keys=True)
    return {**body, _SIGNATURE: hashlib.sha256(text.encode()).hexdigest()}


def _flush_and_describe(path: Path) -> dict[str, Any]:
    watchdog.beat("hashing what was saved")
    sync_path(path)
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def _free_text(folder: Path) -> str:
    return f"{shutil.disk_usage(folder).free / 1e9:.4f} GB are free there"
