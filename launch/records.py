"""What the launcher has written down of a run, and of a data preparation."""

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import DataError
from pipeline.runtime.files import ATTEMPTS_FILE, AppendedFile, read_json_lines, write_atomic

PRETRAIN, EVALUATE, PROGRAM = "pretrain", "evaluate", "program"
"""Kinds of jobs: two commands of `python -m pipeline`, and programs of the user."""
FOLDER = "launch"
"""In a run's folder: one folder for each submission, and what follows."""
SUBMISSION_FILE = "submission.json"
CONFIG_FILE = "config.yaml"
"""Resolved."""
CLUSTER_FILE = "cluster.yaml"
"""Resolved."""
SCRIPT_FILE = "job.sh"
CODE_FOLDER = "code"
"""Beside the submissions: copies of the code, by hash."""
HISTORY_FILE = "history.jsonl"
"""One line for each attempt that ended in a decision."""
EXCLUDED_FILE = "excluded"
"""Nodes that the run must not get again."""
PREP_RECORD = Path("work", "logs", "submitted.json")
"""In a dataset folder: jobs of each stage."""


@dataclass(frozen=True)
class Submission:
    """One call of sbatch for a run."""

    number: int
    job: str
    kind: str
    """PRETRAIN or `evaluate`."""
    config: str
    submitted_unix_s: float
    work_dir: str
    """Where relative paths of the config start."""


def submission_folder(run_dir: Path, number: int) -> Path:
    """What a submission was made of, and its record."""
    return run_dir / FOLDER / f"{number:04d}"


def next_number(run_dir: Path) -> int:
    """Of the next submission."""
    names = [path.name for path in (run_dir / FOLDER).glob("*")]
    return max((int(name) for name in names if re.fullmatch(r"\d{4,}", name)), default=0) + 1


def submissions(run_dir: Path) -> list[Submission]:
    """All of a run, oldest first; empty if it was never submitted.

    Raises:
        DataError: a record is damaged.
    """
    return [_submission(path) for path in sorted((run_dir / FOLDER).glob(f"*/{SUBMISSION_FILE}"))]


def newest(found: Sequence[Submission]) -> list[Submission]:
    """The last submission of each kind, that of training first."""
    by_kind = {submission.kind: submission for submission in found}
    return sorted(by_kind.values(), key=lambda submission: submission.kind != PRETRAIN)


def _submission(path: Path) -> Submission:
    try:
        found = json.loads(path.read_bytes())
        return Submission(
            int(found["number"]), str(found["job"]), str(found["kind"]), str(found["config"]),
            float(found["submitted_unix_s"]), str(found["work_dir"]),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is no record of a submission ({type(error).__name__}: {error}); expected "
            "number, job, kind, config, submitted_unix_s and work_dir: remove the file, or submit "
            "again"
        ) from None


def history(run_dir: Path) -> list[dict[str, Any]]:
    """Ends of attempts, oldest first: what `python -m launch decide` wrote down."""
    return read_json_lines(run_dir / FOLDER / HISTORY_FILE)


def append_history(run_dir: Path, record: Mapping[str, Any]) -> None:
    """Writes down the end of an attempt, with the time.

    Raises:
        OSError: it cannot be written.
    """
    line = json.dumps({"unix_s": round(time.time(), 1), **record})
    AppendedFile(run_dir / FOLDER / HISTORY_FILE).append(f"{line}\n".encode(), end=b"\n")


def exclude_nodes(run_dir: Path, names: Iterable[str]) -> None:
    """Adds nodes that the run's job must not get again."""
    path = run_dir / FOLDER / EXCLUDED_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    every = dict.fromkeys([*excluded_nodes(run_dir), *names])
    write_atomic(path, "".join(f"{name}\n" for name in every).encode())


def excluded_nodes(run_dir: Path) -> list[str]:
    """Nodes that the run must not get again."""
    path = run_dir / FOLDER / EXCLUDED_FILE
    return path.read_text().split() if path.is_file() else []


def prep_jobs(output_dir: Path) -> dict[str, list[str]] | None:
    """Jobs of each stage of a data preparation; None if it was never submitted.

    Raises:
        DataError: the record is damaged.
    """
    path = output_dir / PREP_RECORD
    try:
        jobs = json.loads(path.read_bytes())["jobs"]
        return {str(stage): [str(job) for job in jobs[stage]] for stage in jobs}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is no record of submitted jobs ({type(error).__name__}: {error}): remove it "
            "when `squeue --me` shows none of the preparation's jobs, and submit again"
        ) from None


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run: submitted, or started."""
    return any((folder / name).exists() for name in (FOLDER, ATTEMPTS_FILE))


def require_run(folder: Path) -> Path:
    """The folder as an absolute path.

    Raises:
        DataError: it is no run's.
    """
    if is_run(folder):
        return folder.resolve()
    if (folder / "work").is_dir():
        raise DataError(
            f"{folder} holds a data preparation that was not submitted to SLURM (it has no "
            f"{PREP_RECORD}); `python -m data_prep status CONFIG` says how far it is"
        )
    there = f"has neither {FOLDER}/ nor {ATTEMPTS_FILE}" if folder.is_dir() else "is not there"
    near = [*folder.glob("*"), *folder.parent.glob("*")]
    runs = sorted(str(path) for path in near if is_run(path))
    raise DataError(
        f"{folder} is no run folder: it {there}; expected the run_dir of a config that was "
        "submitted or started" + (f", such as {', '.join(runs[:5])}" if runs else "")
    )
