"""The folder of a run: the name of everything in it, and what to say when it is another folder.

Files are written by the room that they belong to; here stand their names, how a rank leaves its
exit code, and whether a process trains the run. Nothing here imports torch.
"""

import errno
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import RunFolderError
from pipeline.runtime.env import ProcessInfo
from pipeline.runtime.files import make_folder, read_json_lines, retry_storage
from pipeline.runtime.remote import is_address

FORMAT_VERSION = 1
"""Of the files of a run; raise it where an earlier version would damage what a newer one wrote."""
RESOLVED_FILE = "resolved.yaml"
A_STARTED_RUN = "the run_dir of a started run"
_OTHER_KINDS = {
    "config.json": "a model folder",
    "index.json": "a dataset",
    "manifest.json": "a checkpoint of a run",
    "result.json": "the result of several seeds, whose runs are in seed-N",
}
"""Files that tell what kind of folder was given in place of a run's."""


_BESIDE_A_RUN = (".yaml", ".yml", ".sh", ".py", ".md", ".log", ".out", ".err")
"""Suffixes of what people may put into a run's folder before its first start."""
_OF_TASKS = frozenset({"tokenizer.model", "tokenizer.json", "left-out.json"})
"""Files that runs on tasks write before their first start."""
_FOR_GOOD = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ELOOP}
)
"""Errors of a folder's making that do not pass by themselves."""


class _Inside:
    """A path below a run's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunFolder", _: object = None) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """Paths in a run's folder, whether they exist or not."""

    path: Path

    @classmethod
    def started(cls, path: Path, expected: str = A_STARTED_RUN) -> "RunFolder":
        """Open the folder of a run that has started at least once.

        Raises:
            RunFolderError: the run has not started, or this is not the folder of a run.
        """
        run = cls(path)
        if not run.has_started:
            raise run.refusal(expected)
        return run

    def as_started(self, path: str) -> str:
        """Return a path of the run's config as it is to be read here.

        One that does not exist here is taken to begin where the run was started.
        """
        records = read_json_lines(self.attempts)
        cwd = records[-1].get("cwd") if records else None
        if cwd is None or is_address(path) or Path(path).exists():
            return path
        return str(Path(cwd) / path)

    @property
    def has_started(self) -> bool:
        """Whether a start of the run is on record."""
        try:
            return bool(read_json_lines(self.attempts))
        except OSError:
            return False

    def create(self) -> None:
        """Make the folder and the one of its logs; check those that are there.

        Raises:
            RunFolderError: another try would fail as well: nobody may write there, or a newer
                version wrote the files of the run.
        """
        self._make(self.path)
        self._make(self.logs)
        for folder in (self.checkpoints, self.tensorboard):
            if folder.exists():  # a first save is no time to find out
                self._make(folder)
        newer = [
            record
            for record in read_json_lines(self.attempts)
            if int(record.get("format_version", 1)) > FORMAT_VERSION
        ]
        if newer:
            version, wrote = newer[-1]["format_version"], newer[-1].get("git_revision", "unknown")
            raise RunFolderError(
                f"{self.attempts} has format_version {version}, expected {FORMAT_VERSION} at most: "
                f"a newer version ({wrote}) has trained this run, and its files would be damaged. "
                "Continue with that version, or choose another run_dir; nothing was changed"
            )

    def _make(self, folder: Path) -> None:
        why = "Permission denied"
        try:
            make_folder(folder)
            # Asked of the system, not read off the mode: access lists and read-only mounts count,
            # too.
            if os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
                return
        except OSError as error:
            if error.errno not in _FOR_GOOD:
                raise
            why = f"{folder.name} is a file" if error.errno == errno.EEXIST else str(error)
        where = "" if folder == self.path else f"{folder} "
        raise RunFolderError(
            f"run_dir={self.path} cannot be written ({where}{why}). Choose another run_dir, or "
            "make the folder writable on every node"
        )

    def refuse_foreign(self) -> None:
        """Check that a folder without a start holds no files but configs, scripts and notes.

        Raises:
            RunFolderError: it does, such as texts or a dataset.
        """
        if self.has_started or not self.path.is_dir():
            return
        inside = [entry for entry in vars(RunFolder).values() if isinstance(entry, _Inside)]
        own = {*_OF_TASKS, *(entry._name for entry in inside)}
        others = sorted(
            path.name
            for path in self.path.iterdir()
            if path.is_file() and not path.name.startswith(".")
            if path.name not in own and path.suffix not in _BESIDE_A_RUN
        )
        if others:
            raise RunFolderError(
                f"run_dir={self.path} is not the folder of a run: it holds "
                f"{', '.join(others[:3])}{' and more' if len(others) > 3 else ''}. Choose a new or "
                "an empty folder"
            )

    def refusal(self, expected: str = A_STARTED_RUN) -> RunFolderError:
        """Build the error that explains why this folder is not a started run."""
        path, remedy = self.path, f"Pass {expected}."
        if not path.exists():
            return RunFolderError(f"{path} does not exist. {remedy}")
        if not path.is_dir():
            return RunFolderError(f"{path} is a file, not a run folder. {remedy}")
        missing = f"(no {self.attempts.name})"
        kind = next((text for name, text in _OTHER_KINDS.items() if (path / name).is_file()), None)
        if kind is not None:
            return RunFolderError(f"{path} is {kind}, not a run folder {missing}. {remedy}")
        if self.launch.is_dir():
            return RunFolderError(
                f"{path} is a run that was submitted but has not started {missing}. "
                f"`postnorm status {path}` tells what it waits for."
            )
        if refused := read_json_lines(self.refused):
            return RunFolderError(
                f"{path} is a run that has not trained {missing}: its last start was refused: "
                f"{refused[-1].get('error')}"
            )
        if self.logs.is_dir():
            return RunFolderError(
                f"{path} is a run that has not started {missing}. {self.logs} holds the messages "
                "of a start that failed early."
            )
        return RunFolderError(f"{path} is not a run folder {missing}. {remedy}")

    # Written at the start of the run.

    resolved = _Inside(RESOLVED_FILE)
    """The config in full, with versions."""

    def resolved_of(self, attempt: int) -> Path:
        """Return the config of an attempt, 1 for the first, as `resolved` was then."""
        return self.path / "starts" / f"{attempt:04d}.yaml"

    deepspeed = _Inside("deepspeed.json")
    """The config that DeepSpeed gets; absent at ZeRO stage 0."""
    attempts = _Inside("attempts.jsonl")
    """One JSON line for each start."""
    refused = _Inside("refused.jsonl")
    """One JSON line for each start that ended before it trained, with the reason."""
    lock = _Inside("lock")
    """Locked while rank 0 lives."""
    # Written while it trains.

    metrics = _Inside("metrics.jsonl")
    """One JSON line for each time that numbers were logged."""
    tensorboard = _Inside("tensorboard")
    """Folder of TensorBoard's event files."""

    def sink_id(self, service: str) -> Path:
        """Return the file with the id under which a service knows the run."""
        return self.path / "sinks" / service

    batches = _Inside("batches.tsv")
    """One line for each batch, with its hash."""
    ledger = _Inside("ledger.jsonl")
    """One JSON line for each batch that was not trained on, and for each loss spike."""
    checkpoints = _Inside("checkpoints")
    """Folder of checkpoints; `pipeline.checkpoints.manifest` says what it holds."""
    logs = _Inside("logs")
    """Folder of the ranks' logs, and of the jobs' under SLURM."""

    def log(self, rank: int) -> Path:
        """Return the log of a rank; the attempts of a requeued job follow each other in it."""
        return self.logs / f"rank-{rank:05d}.log"

    # Written when it ends.

    done = _Inside("done.json")
    """Exists when the run is finished."""
    result = _Inside("result.json")
    """Scores of a fine-tuning; it is written last."""
    hangs = _Inside("hangs")
    """Folder of the stacks of ranks that the watchdog ended."""

    def exits(self, job: str) -> Path:
        """Folder of the exit codes of a job's ranks."""
        return self.path / "exit" / job

    def exit_code(self, job: str, rank: int) -> Path:
        """Return the exit code of a rank."""
        return self.exits(job) / f"rank-{rank:05d}"

    # Written by people and other commands.

    stop = _Inside("STOP")
    """Put there by a person: the run saves and ends, and does not start again."""
    save = _Inside("SAVE")
    """Put there by a person: the run saves, then removes the file and goes on."""
    evaluations = _Inside("evaluations.jsonl")
    """One JSON line for each checkpoint that was evaluated apart from training."""
    launch = _Inside("launch")
    """Folder of submissions, with the code and config of each."""

    def is_locked(self) -> bool:
        """Return whether a process trains the run; this holds the lock for a moment only."""
        try:
            with self.lock.open("rb") as file:
                # Shared, so that two who ask at the same time do not take each other for the run.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False


def record_exit(run_dir: Path, process: ProcessInfo, code: int) -> None:
    """Leave this rank's exit code in the run's folder."""
    # Job scripts read it, because srun hides the code of a rank behind those that it then kills.
    path = RunFolder(run_dir).exit_code(process.job, process.rank)
    make_folder(path.parent)
    retry_storage(lambda: path.write_text(f"{code}\n"), lambda: f"writing {path}")
