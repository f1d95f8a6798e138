"""The folder of a run: the name of everything in it, and what to say when it is another folder.

Files are written by the room that they belong to; here stand their names, how a rank leaves its
exit code, and whether a process trains the run. Nothing here imports torch.
"""

import fcntl
import json
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import RunFolderError
from pipeline.runtime.env import ProcessInfo

A_STARTED_RUN = "the run_dir of a started run"
_OTHER_KINDS = {
    "config.json": "a model folder",
    "index.json": "a dataset",
    "manifest.json": "a checkpoint of a run",
}
"""Files that tell what kind of folder was given in place of a run's."""


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

    @property
    def has_started(self) -> bool:
        """Whether a start of the run is on record."""
        try:
            lines = self.attempts.read_bytes().splitlines()
        except OSError:
            return False
        return any(map(_is_json, lines))

    def refusal(self, expected: str = A_STARTED_RUN) -> RunFolderError:
        """Make the error that says what this is in place of a started run."""
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
                f"`python -m launch status {path}` tells what it waits for."
            )
        if self.logs.is_dir():
            return RunFolderError(
                f"{path} is a run that has not started {missing}. {self.logs} holds the messages "
                "of a start that failed early."
            )
        return RunFolderError(f"{path} is not a run folder {missing}. {remedy}")

    # Written at the start of the run.

    @property
    def resolved(self) -> Path:
        """The config in full, with versions."""
        return self.path / "resolved.yaml"

    @property
    def deepspeed(self) -> Path:
        """The config that DeepSpeed gets; absent at ZeRO stage 0."""
        return self.path / "deepspeed.json"

    @property
    def attempts(self) -> Path:
        """One JSON line for each start."""
        return self.path / "attempts.jsonl"

    @property
    def lock(self) -> Path:
        """Locked while rank 0 lives."""
        return self.path / "lock"

    # Written while it trains.

    @property
    def metrics(self) -> Path:
        """One JSON line for each time that numbers were logged."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def batches(self) -> Path:
        """One line for each batch, with its hash."""
        return self.path / "batches.tsv"

    @property
    def ledger(self) -> Path:
        """One JSON line for each batch that was not trained on, and for each loss spike."""
        return self.path / "ledger.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints; `pipeline.checkpoints.manifest` says what it holds."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Folder of the ranks' logs, and of the jobs' under SLURM."""
        return self.path / "logs"

    def log(self, rank: int) -> Path:
        """The log of a rank; the attempts of a requeued job follow each other in it."""
        return self.logs / f"rank-{rank:05d}.log"

    # Written when it ends.

    @property
    def done(self) -> Path:
        """Exists when the run is finished."""
        return self.path / "done.json"

    @property
    def hangs(self) -> Path:
        """Folder of the stacks of ranks that the watchdog ended."""
        return self.path / "hangs"

    def exits(self, job: str) -> Path:
        """Folder of the exit codes of a job's ranks."""
        return self.path / "exit" / job

    def exit_code(self, job: str, rank: int) -> Path:
        """The exit code of a rank."""
        return self.exits(job) / f"rank-{rank:05d}"

    # Written by people and other commands.

    @property
    def stop(self) -> Path:
        """Put there by a person: the run saves and ends, and does not start again."""
        return self.path / "STOP"

    @property
    def save(self) -> Path:
        """Put there by a person: the run saves, then removes the file and goes on."""
        return self.path / "SAVE"

    @property
    def evaluations(self) -> Path:
        """One JSON line for each checkpoint that was evaluated apart from training."""
        return self.path / "evaluations.jsonl"

    @property
    def launch(self) -> Path:
        """Folder of submissions, with the code and config of each."""
        return self.path / "launch"

    def is_locked(self) -> bool:
        """Whether a process trains the run; holds the lock for a moment, starts wait longer."""
        try:
            with self.lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False


def record_exit(run_dir: Path, process: ProcessInfo, code: int) -> None:
    """Leave this rank's exit code in the run's folder.

    Job scripts read it, because srun hides the code of a rank behind those that it then kills.
    """
    path = RunFolder(run_dir).exit_code(process.job, process.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{code}\n")


def _is_json(line: bytes) -> bool:
    # A killed writer may leave half a line.
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
