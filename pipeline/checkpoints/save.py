"""How a run saves: complete and verified checkpoints, or none, while training goes on.

A save goes to `.saving-...`. Each rank copies its state to host memory, and a thread of it writes,
flushes and hashes the files. At the next log line at which all ranks are done, rank 0 looks for
every file, writes the manifest, and one rename publishes all of it. Then, on a thread of rank 0, a
probe reads it back if one is due, superseded checkpoints go, and a copy is made.
"""

import logging
import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline.checkpoints.manifest import (
    CONTENTS,
    FOLDER,
    LATEST_FILE,
    MANIFEST_FILE,
    Manifest,
    name_of,
    published,
    signed,
)
from pipeline.checkpoints.mirror import Mirror
from pipeline.checkpoints.probe import Probe
from pipeline.checkpoints.resume import identity, read_tokenizer
from pipeline.checkpoints.retention import REMOVING, Retention, remove, superseded
from pipeline.checkpoints.save_job import Described, HostCopy, RankFiles, Task
from pipeline.checkpoints.state import expected_files
from pipeline.config.load import digest, provenance
from pipeline.config.runs import PretrainConfig
from pipeline.data.format import INDEX_FILE, DatasetIndex
from pipeline.errors import CheckpointError, PostnormError, RejectedError
from pipeline.runtime import dist
from pipeline.runtime.env import ProcessInfo
from pipeline.runtime.files import sync_path, write_atomic, write_json_atomic
from pipeline.train.engine import Engine
from pipeline.train.state import TrainState

logger = logging.getLogger(__name__)

_UNFINISHED = ".saving-"
# fp32 master weights and two fp32 averages.
_BYTES_PER_PARAMETER = 12
_DEAR = 0.01
"""Share of the time from which on it pays to save in the background."""


@dataclass(frozen=True)
class SaveNumbers:
    """What a save cost, or its probe."""

    step: int
    values: dict[str, float]


@dataclass
class _Writing:
    """A save whose files are being written."""

    manifest: Manifest
    """Still without files."""
    task: Task[Described]
    """This rank's part."""
    period_s: float
    """Since the save before began."""
    stall_s: float
    """Time in which training stood still for it."""


class Saver:
    """Saves the checkpoints of one run, at most one at a time. Methods are collective."""

    def __init__(
        self, config: PretrainConfig, index: DatasetIndex, process: ProcessInfo, num_parameters: int
    ) -> None:
        """Makes the folder and removes what killed processes left behind.

        Raises:
            DataError: the dataset's tokenizer is missing or damaged.
            ConfigError: `checkpoint.copy_to` belongs to another run.
        """
        self.folder = Path(config.run_dir) / FOLDER
        self._config = config
        self._index = index
        # Read now: the dataset's folder may be replaced while the run goes on.
        self._tokenizer = read_tokenizer(index)
        self._process = process
        self._least_bytes = num_parameters * _BYTES_PER_PARAMETER
        self._provenance = provenance()
        self._rule = Retention.of(config.checkpoint)
        self._host = HostCopy()
        self._writing: _Writing | None = None
        self._tidying_step: int | None = None
        """Of the checkpoint that rank 0 looks after."""
        self._tidying: Task[float | None] | None = None
        self._probe = Probe()
        self._num_saves = 0
        self._numbers: list[SaveNumbers] = []
        self._began_s = time.perf_counter()
        self._mirror: Mirror | None = None
        dist.on_first(self._prepare, "tidying up")

    def save(self, engine: Engine, state: TrainState, alpha: float) -> None:
        """Begins a save; without `checkpoint.background`, it is published on return.

        Waits for the save before. From here on updates may change the state again.

        Raises:
            CheckpointError: this save or the one before failed. Earlier checkpoints are untouched.
        """
        self._publish_if_written(wait=True)
        started = time.perf_counter()
        manifest = self._manifest(state, alpha)
        unfinished = self._unfinished(manifest.step)
        dist.on_first(lambda: self._require_space(unfinished), "making space for a save")
        parts, counters = engine.state_parts()
        if self._config.checkpoint.background:
            parts = self._host.take(parts)
        others = {self._index.tokenizer_file: self._tokenizer, INDEX_FILE: self._index.content}
        files = RankFiles(
            unfinished, self._process.rank, self._process.world_size, parts, counters,
            others if self._process.is_first else {},
        )  # fmt: skip
        task, now_s = Task(files.write), time.perf_counter()
        self._writing = _Writing(manifest, task, started - self._began_s, now_s - started)
        self._began_s = started
        if not self._config.checkpoint.background:
            self._publish_if_written(wait=True)

    def poll(self) -> None:
        """Publishes what all ranks have written by now; costs nothing if there is no save.

        Raises:
            CheckpointError: a rank could not write, or (RejectedError) a probe failed.
        """
        self._publish_if_written(wait=False)
        self._look_at_tidying(wait=False)

    def publish(self) -> None:
        """Waits until the last save is published.

        Raises:
            CheckpointError: it failed.
        """
        self._publish_if_written(wait=True)

    def finish(self, *, stopping: bool = False) -> None:
        """Waits until the last save is published, probed and copied.

        Args:
            stopping: leave out the probe, and the copy, which the next start makes: there may be
                no time.

        Raises:
            CheckpointError: as `poll` does.
        """
        if stopping and self._process.is_first:
            self._probe.cancel()
        self._publish_if_written(wait=True)
        self._look_at_tidying(wait=True)
        if self._mirror is not None and not stopping:
            self._mirror.finish()

    def take_numbers(self) -> list[SaveNumbers]:
        """What saves cost and probes found since the last call; the same on all ranks."""
        taken, self._numbers = self._numbers, []
        return taken

    def _prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for what, prefix in (("save", _UNFINISHED), ("removal", REMOVING)):
            for path in self.folder.glob(f"{prefix}*"):
                logger.warning("removing %s: a %s that was never finished", path, what)
                shutil.rmtree(path)
        target = self._config.checkpoint.copy_to
        if target is not None:
            self._mirror = Mirror(Path(self._config.run_dir), Path(target), self._rule)
            self._mirror.request()  # what the attempt before did not get to

    def _manifest(self, state: TrainState, alpha: float) -> Manifest:
        return Manifest(
            step=state.step,
            cursor=state.cursor,
            skipped=state.skipped,
            alpha=alpha,
            fingerprint=self._index.fingerprint,
            identity=identity(self._config),
            config_sha256=digest(self._config),
            world_size=self._process.world_size,
            created_unix_s=time.time(),
            provenance=self._provenance,
            files={},
            elapsed_s=state.elapsed_s,
            zero_stage=self._config.train.zero_stage,
            held_out_loss=state.held_out_loss,
            held_out_step=state.held_out_step,
            left_out=state.left_out,
            rewinds=state.rewinds,
            losses=asdict(state.losses),
            contents=CONTENTS,
        )

    def _unfinished(self, step: int) -> Path:
        return self.folder / f"{_UNFINISHED}{name_of(step)}"

    def _require_space(self, unfinished: Path) -> None:
        shutil.rmtree(unfinished, ignore_errors=True)
        needed = self._least_bytes
        for path in published(self.folder)[:1]:
            sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
            needed = max(needed, sum(sizes))
        if shutil.disk_usage(self.folder).free < needed:
            raise CheckpointError(
                f"no space for checkpoint {unfinished.name.removeprefix(_UNFINISHED)}: it needs "
                f"about {needed / 1e9:.4f} GB, {_free_text(self.folder)}; earlier "
                "checkpoints are untouched. Free space or set checkpoint.keep lower, then start "
                "the run again"
            )

    def _publish_if_written(self, *, wait: bool) -> None:
        save = self._writing
        if save is None:
            return
        started = time.perf_counter()
        self._look_at_tidying(wait=wait)
        if self._tidying_step is not None:
            return  # one after the other; so far nothing has waited
        done, error = save.task.is_done(wait=wait), save.task.error
        text = f"rank {self._process.rank}: {error!s}" if error else None
        if error is not None and not isinstance(error, (OSError, PostnormError)):
            logger.error("saving failed", exc_info=error)
        outcomes = dist.gather((done, text, save.task.result))
        errors = [text for _, text, _ in outcomes if text is not None]
        if errors:
            self._give_up(save, errors)
        if not all(done for done, _, _ in outcomes):
            save.stall_s += time.perf_counter() - started
            return
        files = {name: entry for _, _, part in outcomes for name, entry in (part or {}).items()}
        manifest = replace(save.manifest, files=dict(sorted(files.items())))
        dist.on_first(lambda: self._publish(manifest), "publishing a checkpoint")
        self._writing = None
        self._num_saves += 1
        self._report(save, save.stall_s + time.perf_counter() - started)
        self._tidying_step = manifest.step
        if self._process.is_first:
            self._tidying = Task(lambda: self._tidy(self.folder / name_of(manifest.step)))

    def _give_up(self, save: _Writing, errors: list[str]) -> None:
        """Raises on all ranks, when none of them writes any more. The disk may be full: make room.

        Raises:
            CheckpointError: always.
        """
        save.task.is_done(wait=True)
        dist.barrier()
        self._writing = None
        step = save.manifest.step
        if self._process.is_first:
            shutil.rmtree(self._unfinished(step), ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {name_of(step)} could not be written to {self.folder}: "
            f"{'; '.join(errors)}; {_free_text(self.folder)}; earlier checkpoints are untouched. "
            "Free space or set checkpoint.keep lower, then start the run again"
        )

    def _publish(self, manifest: Manifest) -> None:
        unfinished, final = self._unfinished(manifest.step), self.folder / name_of(manifest.step)
        try:
            _require_files(unfinished, manifest)
            write_json_atomic(unfinished / MANIFEST_FILE, signed(asdict(manifest)))
            for folder in [unfinished, *(p for p in unfinished.rglob("*") if p.is_dir())]:
                sync_path(folder)
            # A damaged checkpoint of the same step, which this run did not resume from.
            remove([final] if final.exists() else [])
            unfinished.rename(final)
            sync_path(self.folder)
            write_atomic(self.folder / LATEST_FILE, f"{final.name}\n".encode())
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint {final.name} could not be published in {self.folder}: {error}; "
                f"{_free_text(self.folder)}; earlier checkpoints are untouched"
            ) from error

    def _report(self, save: _Writing, stall_s: float) -> None:
        share = stall_s / max(save.period_s, stall_s)
        aside = self._config.checkpoint.background
        logger.info(
            "saved %s: training stood still for %.2f s, %.2f%% of the time since the save before%s",
            self.folder / name_of(save.manifest.step), stall_s, 100 * share,
            f"; written in {save.task.took_s:.2f} s meanwhile" if aside
            else "; set checkpoint.background=true" if share > _DEAR else "",
        )  # fmt: skip
        values = {"save_s": stall_s, "save_share": share, "save_written_s": save.task.took_s}
        self._numbers.append(SaveNumbers(save.manifest.step, values))

    def _tidy(self, path: Path) -> float | None:
        """What follows a save, on rank 0; returns what a probe took, if there was one.

        Raises:
            RejectedError: the probe failed.
        """
        every, took_s = self._config.checkpoint.probe_every, None
        if every and self._num_saves % every == 0:
            took_s = self._probe.run(path)
            if took_s is None:
                return None  # not known to be good: what is older may be needed
        busy = self._mirror.busy_with if self._mirror else None
        remove(old for old in superseded(self.folder, self._rule, path) if old != busy)
        if self._mirror is not None:
            self._mirror.request()
        return took_s

    def _look_at_tidying(self, *, wait: bool) -> None:
        step = self._tidying_step
        if step is None:
            return
        verdict: tuple[bool, RejectedError | None, float | None] = (False, None, None)
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

    def _rejection(self, error: Exception | None) -> RejectedError | None:
        """What all ranks are to raise of rank 0's errors."""
        if isinstance(error, OSError):
            logger.warning("older checkpoints in %s could not be removed: %s", self.folder, error)
        elif isinstance(error, RejectedError) or error is None:
            return error
        else:
            raise error
        return None


def _require_files(unfinished: Path, manifest: Manifest) -> None:
    """Rank 0 sees what all ranks wrote; on several nodes the folder must be shared.

    Raises:
        CheckpointError: a file is missing; OSError likewise.
    """
    found = {name: (unfinished / name).stat().st_size
             for name in expected_files(unfinished, manifest.world_size)}  # fmt: skip
    described = {name: entry["bytes"] for name, entry in manifest.files.items()}
    if found != described:
        differing = sorted(name for name, _ in found.items() ^ described.items())
        raise CheckpointError(
            f"{unfinished} is not what the ranks have written: {', '.join(differing)}; run_dir "
            "must be the same folder on all nodes"
        )


def _free_text(folder: Path) -> str:
    return f"{shutil.disk_usage(folder).free / 1e9:.4f} GB are free there"
