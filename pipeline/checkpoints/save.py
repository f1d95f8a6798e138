"""Saves a run's checkpoints while training goes on; a save is published whole or not at all.

A save is written to `.saving-...`. Each rank copies its state to host memory, and a thread writes,
flushes and hashes the files. At the next log line after all ranks are done, rank 0 checks that
every file is there, writes the manifest, and publishes the checkpoint with one rename. A thread of
rank 0 then reads it back (if a probe is due), removes superseded checkpoints and makes a copy.
"""

import hashlib
import logging
import shutil
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pipeline import errors
from pipeline.checkpoints import background
from pipeline.checkpoints.manifest import (
    COUNTERS,
    REMOVING,
    Retention,
    manifests_of,
    remove,
    remove_tree,
    superseded,
)
from pipeline.checkpoints.probe import ProbeRunner
from pipeline.checkpoints.state import Checkpointable, TrainState, expected_files
from pipeline.config.load import digest, plain_values, provenance
from pipeline.config.runs import RunConfig
from pipeline.config.schedule import alpha
from pipeline.data.format import INDEX_FILE, DataIdentity
from pipeline.runtime import dist, log
from pipeline.runtime.checkpoints import (
    CONTENTS,
    LATEST_FILE,
    MANIFEST_FILE,
    STATE_FOLDER,
    Manifest,
    name_of,
    published,
    read_manifest,
    signed,
    step_of,
)
from pipeline.runtime.env import ProcessInfo
from pipeline.runtime.files import (
    make_folder,
    remove_abandoned,
    rename,
    retry_storage,
    sync_folder,
    write_atomic,
    write_json_atomic,
)

logger = logging.getLogger(__name__)

_UNFINISHED = ".saving-"
# fp32 master weights and two fp32 averages.
_BYTES_PER_PARAMETER = 12
_DEAR = 0.01
"""Share of the training time above which saves should run in the background."""


@dataclass(frozen=True)
class SaveNumbers:
    """Times that a save or its probe took, for the metrics."""

    step: int
    values: dict[str, float]


@dataclass
class _Writing:
    """A save whose files are being written."""

    manifest: Manifest
    task: background.BackgroundTask[background.Described]
    period_s: float
    """Seconds since the previous save began."""
    stall_s: float
    """Seconds for which training waited for this save."""


class Saver:
    """Save the checkpoints of one run, at most one at a time. Methods are collective."""

    def __init__(
        self,
        config: RunConfig,
        indexes: Sequence[DataIdentity],
        process: ProcessInfo,
        num_parameters: int,
    ) -> None:
        """Make the folder and remove what killed processes left behind.

        `indexes` are those of the data of the run's stages.

        Raises:
            DataError: the dataset's tokenizer is missing or damaged.
            ConfigError: `checkpoint.copy_to` belongs to another run.
        """
        self.folder = config.folder.checkpoints
        self._config = config
        self._indexes = indexes
        # Read now: the dataset's folder may be replaced while the run goes on.
        self._tokenizers = [
            _read_tokenizer(index) if index.tokenizer_file else b"" for index in indexes
        ]
        self._past = {} if all(index.tokenizer_file for index in indexes) else _past_files(config)
        self._process = process
        self._least_bytes = num_parameters * _BYTES_PER_PARAMETER
        self._provenance = provenance()
        self._rule = Retention.of(config)
        self._host = background.HostCopy()
        self._writing: _Writing | None = None
        self._tidying_step: int | None = None
        """Step of the checkpoint that rank 0 is probing, or making room for."""
        self._tidying: background.BackgroundTask[float | None] | None = None
        self._probe = ProbeRunner()
        self._numbers: list[SaveNumbers] = []
        self._began_s = time.perf_counter()
        self._mirror: background.Mirror | None = None
        dist.on_first(self._prepare, "tidying up")

    def save(self, engine: Checkpointable, state: TrainState) -> None:
        """Begin a save; without `checkpoint.background`, it is published on return.

        Waits for the previous save. Updates may change the state as soon as this returns.

        Raises:
            CheckpointError: this save or the one before failed. Earlier checkpoints are untouched.
        """
        self._publish_if_written(wait=True)
        started = time.perf_counter()
        manifest = self._manifest(state)
        unfinished = self._unfinished(manifest.step)
        dist.on_first(lambda: self._require_space(unfinished), "making space for a save")
        parts, counters = engine.state_parts()
        # Training stands still for 0.26 s instead of 5.4, for 0.6 GB on two loaded cores (`python
        # -m benchmarks.saving`).
        if self._config.checkpoint.background:
            parts = self._host.take(parts)
        # So that a refusal names what differs, and an export needs no dataset: 2.1 MB for 80,000
        # blocks.
        stage = self._config.timeline.trained(state.cursor).number
        index = self._indexes[stage]
        others = {index.tokenizer_file: self._tokenizers[stage], INDEX_FILE: index.content}
        if not index.tokenizer_file:
            others = self._past
        files = background.RankFiles(
            folder=unfinished,
            rank=self._process.rank,
            world_size=self._process.world_size,
            parts=parts,
            counters=counters,
            others=others if self._process.is_first else {},
        )
        task, now_s = background.BackgroundTask(files.write), time.perf_counter()
        self._writing = _Writing(manifest, task, started - self._began_s, now_s - started)
        self._began_s = started
        if not self._config.checkpoint.background:
            self._publish_if_written(wait=True)

    def has(self, state: TrainState) -> bool:
        """Return whether the checkpoint of a state is published."""
        paths = {state.step: self.folder / name_of(state.step)}
        # That of its step may be from before batches that were skipped since.
        cursors = dist.on_first(
            lambda: [each.cursor for each in manifests_of(paths).values()], "finding a checkpoint"
        )
        return state.cursor in cursors

    def poll(self) -> None:
        """Publish the save if all ranks have written it; costs nothing without a save.

        Raises:
            CheckpointError: a rank could not write, or (RejectedError) a probe failed.
        """
        self._publish_if_written(wait=False)
        self._look_at_tidying(wait=False)

    def publish(self) -> None:
        """Wait until the last save is published (CheckpointError: the save failed)."""
        self._publish_if_written(wait=True)

    def finish(self, *, stopping: bool = False) -> None:
        """Wait until the last save is published, probed and copied.

        `stopping` skips the probe and the copy (the next start makes it), because the time before a
        kill may be short.
        """
        if stopping and self._process.is_first:
            self._probe.cancel()
        self._publish_if_written(wait=True)
        self._look_at_tidying(wait=True)
        if stopping or self._config.checkpoint.copy_to is None:
            return
        # Copies may take longer than any time limit of the ranks.
        what = "copying checkpoints"
        with dist.raise_on_all_ranks([0], what):
            if self._mirror is not None:
                self._mirror.finish(lambda: dist.heartbeat_all(what))

    def take_numbers(self) -> list[SaveNumbers]:
        """Return the times of saves and probes since the last call; the same on all ranks."""
        taken, self._numbers = self._numbers, []
        return taken

    def _prepare(self) -> None:
        make_folder(self.folder)
        for folder in (self.folder, self.folder.parent):
            remove_abandoned(folder)
        for what, prefix in (("save", _UNFINISHED), ("removal", REMOVING)):
            for path in self.folder.glob(f"{prefix}*"):
                logger.warning("removing %s: a %s that was never finished", path, what)
                remove_tree(path)
        target = self._config.checkpoint.copy_to
        if target is not None:
            self._mirror = background.Mirror(self._config.folder.path, Path(target), self._rule)
            self._mirror.request()  # copies that the previous attempt did not finish

    def _manifest(self, state: TrainState) -> Manifest:
        stage = self._config.timeline.trained(state.cursor).number
        *before, fingerprint = [index.fingerprint for index in self._indexes[: stage + 1]]
        return Manifest(
            **{name: getattr(state, name) for name in COUNTERS},
            alpha=alpha(state.step, self._config.train.alpha_warmup_steps),
            fingerprint=fingerprint,
            fingerprints=before,
            identity=self._config.identity_at(state.cursor),
            config=plain_values(self._config),
            config_sha256=digest(self._config),
            world_size=self._process.world_size,
            created_unix_s=time.time(),
            provenance=self._provenance,
            files={},
            zero_stage=self._config.train.zero_stage,
            losses=asdict(state.losses),
            # What the weighing remembers changes in the next steps, while the files are written.
            weights=deepcopy(state.weights),
            contents=CONTENTS,
            # `RankFiles.write` refuses what is not finite, so a resume need not read all values
            # again.
            is_sound=True,
        )

    def _unfinished(self, step: int) -> Path:
        return self.folder / f"{_UNFINISHED}{name_of(step)}"

    def _require_space(self, unfinished: Path) -> None:
        # An attempt at this step before the run went back may have left it.
        shutil.rmtree(unfinished, ignore_errors=True)
        needed = self._least_bytes
        for path in published(self.folder)[:1]:
            sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
            needed = max(needed, sum(sizes))
        if _free_bytes(self.folder) < needed:
            raise errors.CheckpointError(
                f"no space for checkpoint {unfinished.name.removeprefix(_UNFINISHED)}: it needs "
                f"about {needed / 1e9:.4f} GB, {_free_text(self.folder)}; earlier checkpoints are "
                "untouched. Free space or lower checkpoint.keep, then start the run again"
            )

    def _publish_if_written(self, *, wait: bool) -> None:
        save = self._writing
        # The same on all ranks, as they begin saves at the same step: the gather below needs all of
        # them.
        if save is None:
            return
        started = time.perf_counter()
        self._look_at_tidying(wait=wait)
        if self._tidying_step is not None:
            return  # the probe of the previous checkpoint must end first; no rank has waited yet
        done, error = save.task.is_done(wait=wait), save.task.error
        failure = self._failure(error) if error else None
        if error is not None and not isinstance(
            error, (OSError, errors.PostnormError, background.UnsoundPartError)
        ):
            logger.error("saving failed", exc_info=error)
        outcomes = dist.gather((done, failure, save.task.result))
        failures = [each for _, each, _ in outcomes if each is not None]
        if failures:
            self._give_up(save, failures)
        if not all(done for done, _, _ in outcomes):
            save.stall_s += time.perf_counter() - started
            return
        files = {name: entry for _, _, part in outcomes for name, entry in (part or {}).items()}
        manifest = replace(save.manifest, files=dict(sorted(files.items())))
        dist.on_first(lambda: self._publish(manifest), "publishing a checkpoint")
        self._writing = None
        self._report(save, save.stall_s + time.perf_counter() - started)
        self._tidying_step = manifest.step
        if self._process.is_first:
            self._tidying = background.BackgroundTask(
                lambda: self._post_save(self.folder / name_of(manifest.step))
            )

    def _failure(self, error: Exception) -> "_Failure":
        text = f"rank {self._process.rank} on {self._process.host}: {error!s}"
        number = error.errno if isinstance(error, OSError) else None
        return _Failure(text, number, isinstance(error, background.UnsoundPartError))

    def _give_up(self, save: _Writing, failures: "list[_Failure]") -> None:
        """Remove the failed save once no rank writes any more, then raise on all ranks."""
        save.task.is_done(wait=True)
        dist.barrier()
        self._writing = None
        step = save.manifest.step
        if self._process.is_first:
            shutil.rmtree(self._unfinished(step), ignore_errors=True)
        unsound = [each.text for each in failures if each.is_unsound]
        if unsound:
            raise errors.UnsoundStateError(
                f"the state of step {step} is not finite: {'; '.join(unsound)}; it was not saved",
                save.manifest.cursor,
                unsound,
            )
        what = f"checkpoint {name_of(step)} could not be written to {self.folder}"
        raise _not_saved(what, failures, self.folder)

    def _publish(self, manifest: Manifest) -> None:
        unfinished, final = self._unfinished(manifest.step), self.folder / name_of(manifest.step)
        try:
            _require_files(unfinished, manifest)
            write_json_atomic(unfinished / MANIFEST_FILE, signed(asdict(manifest)))
            # Before the rename: a checkpoint that has its name has its files, also after a power
            # cut.
            for folder in [unfinished, *(p for p in unfinished.rglob("*") if p.is_dir())]:
                sync_folder(folder)
            # One of the same step is damaged, or from before batches that were skipped since.
            remove([final] if final.exists() else [])
            rename(unfinished, final)
            sync_folder(self.folder)
            # Last, and for people: a resume looks at the checkpoints, whatever this file says.
            write_atomic(self.folder / LATEST_FILE, f"{final.name}\n".encode())
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            what = f"checkpoint {final.name} could not be published in {self.folder}"
            raise _not_saved(what, [self._failure(error)], self.folder) from error

    def _report(self, save: _Writing, stall_s: float) -> None:
        share = stall_s / max(save.period_s, stall_s)
        remark = ""
        if self._config.checkpoint.background:
            remark = f"; written in {save.task.took_s:.2f} s meanwhile"
        elif share > _DEAR:
            remark = "; set checkpoint.background=true"
        logger.info(
            "saved %s: training waited %.2f s, %.2f%% of the time since the previous save%s",
            self.folder / name_of(save.manifest.step),
            stall_s,
            100 * share,
            remark,
            extra=log.ASIDE,
        )
        values = {"save_s": stall_s, "save_share": share, "save_written_s": save.task.took_s}
        self._numbers.append(SaveNumbers(save.manifest.step, values))

    def _post_save(self, path: Path) -> float | None:
        """Probe a published checkpoint if due, remove superseded ones, request a copy. On rank 0.

        Returns:
            Seconds that the probe took; None if it was not due or came to no verdict.
        """
        every, took_s = self._config.checkpoint.probe_every, None
        # By the run's steps, not by the saves of this process, which may end before it has so many.
        number = step_of(path) // self._config.checkpoint.every_steps
        if every and number and number % every == 0:
            took_s = self._probe.run(path)
            if took_s is None:
                return None  # not known to be good, so older checkpoints may still be needed
        busy = self._mirror.busy_with if self._mirror else None
        # Not what is being copied: the mirror would lose its source in the middle of a file.
        remove(old for old in superseded(self.folder, self._rule, path) if old != busy)
        if self._mirror is not None:
            self._mirror.request()
        return took_s

    def _look_at_tidying(self, *, wait: bool) -> None:
        step = self._tidying_step
        if step is None:
            return
        verdict: tuple[bool, errors.RejectedError | None, float | None] = (False, None, None)
        if self._tidying is not None and self._tidying.is_done(wait=wait):
            verdict = (True, self._rejection(self._tidying.error), self._tidying.result)
        done, rejection, took_s = dist.from_first(verdict)
        if not done:
            return
        self._tidying_step, self._tidying = None, None
        if rejection is not None:
            raise rejection
        if took_s is not None:
            self._numbers.append(SaveNumbers(step, {"probe_s": took_s}))

    def _rejection(self, error: Exception | None) -> errors.RejectedError | None:
        """Return the error of rank 0 that all ranks must raise, if any."""
        if isinstance(error, OSError):
            logger.warning("older checkpoints in %s could not be removed: %s", self.folder, error)
        elif isinstance(error, errors.RejectedError) or error is None:
            return error
        else:
            raise error
        return None


def _require_files(unfinished: Path, manifest: Manifest) -> None:
    """Check that rank 0 sees the files of all ranks: several nodes must share the folder."""
    names = expected_files(unfinished, manifest.world_size)
    present = {name: (unfinished / name).stat().st_size for name in names}
    described = {name: entry["bytes"] for name, entry in manifest.files.items()}
    if present != described:
        differing = sorted({name for name, _ in present.items() ^ described.items()})
        raise errors.CheckpointError(
            f"{unfinished} does not match what the ranks wrote: {', '.join(differing)}; run_dir "
            "must be the same folder on all nodes"
        )


def _past_files(config: RunConfig) -> dict[str, bytes]:
    """Read index and tokenizer of data that is gone from the checkpoint that the run goes on from.

    A fork begins with a save, of the stage that ended before it.
    """
    paths = [*published(config.folder.checkpoints), *([config.origin] if config.origin else [])]
    names = [name for path in paths[:1] for name in read_manifest(path).files]
    return {
        name: (paths[0] / name).read_bytes() for name in names if not name.startswith(STATE_FOLDER)
    }


def _read_tokenizer(index: DataIdentity) -> bytes:
    """Read the tokenizer's file of a dataset (DataError: it is missing or damaged)."""
    path = index.folder / index.tokenizer_file
    data = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(data).hexdigest() != index.tokenizer_sha256:
        raise errors.DataError(f"tokenizer {path} is missing or damaged; restore it")
    return data


class _Failure(NamedTuple):
    """Why a rank could not save: all that other ranks need to know of its error."""

    text: str
    number: int | None
    """errno of an error of the system."""
    is_unsound: bool


def _not_saved(what: str, failures: list[_Failure], folder: Path) -> errors.CheckpointError:
    """Return the error of a save: another start helps unless the disk is full or read-only."""
    said = f"{what}: {'; '.join(each.text for each in failures)}; earlier checkpoints are untouched"
    numbers = {each.number for each in failures}
    remedies = [remedy for number, remedy in errors.LASTING.items() if number in numbers]
    if remedies:
        return errors.CheckpointError(
            f"{said}; {_free_text(folder)}. To go on {', '.join(remedies)}, or lower "
            "checkpoint.keep; then start the run again"
        )
    return errors.NotSavedError(
        f"{said}. Storage failed, also when it was tried again: look at its state, then start the "
        "run again"
    )


def _free_text(folder: Path) -> str:
    return f"{_free_bytes(folder) / 1e9:.4f} GB are free there"


def _free_bytes(folder: Path) -> int:
    return retry_storage(lambda: shutil.disk_usage(folder), lambda: f"looking at {folder}").free
