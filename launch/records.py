"""The files in which the launcher records runs and data preparations, and the code of their jobs.

A copy of the code stands in the run's folder, so that a job that waits runs what was submitted.
"""

import hashlib
import json
import re
import shutil
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.config.load import REVISION_FILE, git_revision
from pipeline.errors import DataError, PostnormError
from pipeline.runtime import files
from pipeline.runtime.checkpoints import FOLDER as CHECKPOINTS
from pipeline.runtime.checkpoints import LATEST_FILE
from pipeline.runtime.run_folder import RunFolder

PRETRAIN, EVALUATE, PROGRAM = "pretrain", "evaluate", "program"
FINETUNE = "finetune"
"""Kinds of jobs: commands of `python -m pipeline`, and the user's own programs."""
MULTITASK = "multitask"
"""The verb of a multi-task run, whose jobs are of kind PRETRAIN."""
FOLDER = "launch"
"""In a run's folder: one folder for each submission, and the files below."""
SUBMISSION_FILE = "submission.json"
CONFIG_FILE = "config.yaml"
"""The resolved config of a submission."""
CLUSTER_FILE = "cluster.yaml"
"""The resolved profile of a submission."""
SCRIPT_FILE = "job.sh"
CODE_FOLDER = "code"
"""Beside the submissions: copies of the code, by hash."""
HISTORY_FILE = "history.jsonl"
"""One line for each attempt that ended in a decision."""
CANCELLED = "cancelled"
LAST_DECISIONS = ("finished", "stopped", "failed", CANCELLED)
"""Decisions in the history after which a job does not go on."""
STARTS_FILE = "starts.jsonl"
"""One line for each start of a job's script."""
UNJUDGED_FILE = "unjudged"
"""Written by job scripts: the id of the job for each attempt without a verdict since the last."""
EXCLUDED_FILE = "excluded"
"""Names of nodes that the run must not get again."""
PREP_RECORD = Path("work", "logs", "submitted.json")
"""In a dataset folder: its last submission."""
FAILED_MARK = "failed-"
"""With the name of a stage, in the folder of a preparation's submission: which part failed."""
# `postnorm/configs` is a link in a checkout, which `rglob` does not follow.
_FOLDERS = ("data_prep", "launch", "pipeline", "postnorm", "postnorm/configs", "experiments")
_ROOT = Path(__file__).resolve().parents[1]
_HASH_LETTERS = 16


@dataclass(frozen=True)
class Submission:
    """One call of sbatch for a run."""

    number: int
    job: str
    kind: str
    """PRETRAIN, EVALUATE or PROGRAM."""
    config: str
    submitted_unix_s: float
    work_dir: str
    """Folder that relative paths of the config start at."""


def submission_folder(run_dir: Path, number: int) -> Path:
    """Name the folder of a submission: its config, profile, script and record."""
    return run_dir / FOLDER / f"{number:04d}"


def next_number(run_dir: Path) -> int:
    """Return the number for the next submission."""
    names = [path.name for path in (run_dir / FOLDER).glob("*")]
    # Not their number: a submission in between may have been removed.
    return max((int(name) for name in names if re.fullmatch(r"\d{4,}", name)), default=0) + 1


def last_folder(run_dir: Path) -> Path:
    """Name the folder of the newest submission; one that is not there if there was none."""
    return submission_folder(run_dir, next_number(run_dir) - 1)


def failed_stages(folder: Path) -> dict[str, str]:
    """Read which part of which stage failed in a submission of a preparation, by stage."""
    marks = sorted(folder.glob(f"{FAILED_MARK}*"))
    return {mark.name.removeprefix(FAILED_MARK): mark.read_text().strip() for mark in marks}


def submissions(run_dir: Path) -> list[Submission]:
    """Read all submissions of a run, oldest first; empty if it was never submitted."""
    return [_submission(path) for path in sorted((run_dir / FOLDER).glob(f"*/{SUBMISSION_FILE}"))]


def newest(every: Sequence[Submission]) -> list[Submission]:
    """Return the last submission of each kind, that of training first."""
    by_kind = {submission.kind: submission for submission in every}
    return sorted(by_kind.values(), key=lambda submission: submission.kind != PRETRAIN)


def _submission(path: Path) -> Submission:
    try:
        record = json.loads(path.read_bytes())
        return Submission(
            number=int(record["number"]),
            job=str(record["job"]),
            kind=str(record["kind"]),
            config=str(record["config"]),
            submitted_unix_s=float(record["submitted_unix_s"]),
            work_dir=str(record["work_dir"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not a record of a submission ({type(error).__name__}: {error}); expected "
            "number, job, kind, config, submitted_unix_s and work_dir: remove the file, or submit "
            "again"
        ) from None


def history(run_dir: Path) -> list[dict[str, Any]]:
    """Read the ends of attempts that `launch.decide` recorded, oldest first."""
    return files.read_json_lines(run_dir / FOLDER / HISTORY_FILE)


def append_history(run_dir: Path, record: Mapping[str, Any]) -> None:
    """Record the end of an attempt, with the time."""
    _append(run_dir / FOLDER / HISTORY_FILE, record)


def script_starts(run_dir: Path) -> list[dict[str, Any]]:
    """Read the starts of job scripts, oldest first."""
    return files.read_json_lines(run_dir / FOLDER / STARTS_FILE)


def append_start(run_dir: Path, record: Mapping[str, Any]) -> None:
    """Record the start of a job's script, with the time."""
    _append(run_dir / FOLDER / STARTS_FILE, record)


def _append(path: Path, record: Mapping[str, Any]) -> None:
    line = json.dumps({"unix_s": round(time.time(), 1), **record})
    files.AppendedFile(path).append(f"{line}\n".encode(), end=b"\n")


def newest_checkpoint(run_dir: Path) -> str | None:
    """Read the name of the newest published checkpoint; None if there is none."""
    # Without a look at the checkpoint: this is compared with itself to see progress, and the resume
    # verifies.
    path = run_dir / CHECKPOINTS / LATEST_FILE
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def progress(kind: str, run_dir: Path) -> str | None:
    """Describe what a job of a kind has achieved: it has got on where this differs from before.

    The newest checkpoint of a run, the evaluations of a job of evaluations, and of a fine-tuning
    its finished parts (seeds, trials) with the checkpoints of the others. A program has none that
    is known here: its exit code says whether it got on. None: nothing yet.
    """
    if kind == PROGRAM:
        return None
    if kind == EVALUATE:
        number = len(files.read_json_lines(RunFolder(run_dir).evaluations))
        return f"{number} evaluations" if number else None
    if kind != FINETUNE:
        return newest_checkpoint(run_dir)
    parts = [run_dir, *sorted(run_dir.glob("seed-*")), *sorted(run_dir.glob("search/*"))]
    finished = [part for part in parts if RunFolder(part).result.is_file()]
    saved = [
        f"{part.relative_to(run_dir)}/{checkpoint}".removeprefix("./")
        for part in parts
        if part not in finished and (checkpoint := newest_checkpoint(part))
    ]
    told = [f"{len(finished)} finished"] * bool(finished) + saved
    return ", ".join(told) or None


def measured_save_s(run_dir: Path) -> float | None:
    """Read how long the longest of the last saves took until it was published; None without one."""
    lines = [line for line in files.read_json_lines(RunFolder(run_dir).metrics) if "save_s" in line]
    took = (float(line["save_s"]) + float(line.get("save_written_s", 0.0)) for line in lines[-20:])
    return max(took, default=None)


def measured_tflops(run_dir: Path) -> float | None:
    """Read what a rank reached in the median of the last log lines; None without one."""
    lines = files.read_json_lines(RunFolder(run_dir).metrics)
    reached = [line["model_tflops_per_device"] for line in lines if line["kind"] == "train"]
    return statistics.median(reached[-20:]) if reached else None


def exclude_nodes(run_dir: Path, names: Iterable[str]) -> None:
    """Add nodes that the run's job must not get again."""
    path = run_dir / FOLDER / EXCLUDED_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    every = dict.fromkeys([*excluded_nodes(run_dir), *names])
    files.write_atomic(path, "".join(f"{name}\n" for name in every).encode())


def excluded_nodes(run_dir: Path) -> list[str]:
    """Read the names of nodes that the run must not get again."""
    path = run_dir / FOLDER / EXCLUDED_FILE
    return path.read_text().split() if path.is_file() else []


@dataclass(frozen=True)
class PrepSubmission:
    """The last submission of a data preparation."""

    jobs: dict[str, list[str]]
    """Ids of the arrays of each stage."""
    submitted_unix_s: float | None = None
    cancelled_unix_s: float | None = None
    """When `launch cancel` ended what was in the queue of it; None if it did not."""
    waiting: int = 0
    """Arrays that are not submitted yet, for want of room in the queue."""


def write_prep(output_dir: Path, submission: PrepSubmission) -> None:
    """Record the submission of a data preparation."""
    files.write_json_atomic(output_dir / PREP_RECORD, asdict(submission))


def read_prep(output_dir: Path) -> PrepSubmission | None:
    """Read the last submission of a data preparation; None if it was never submitted."""
    path = output_dir / PREP_RECORD
    try:
        found = json.loads(path.read_bytes())
        jobs = {str(stage): [str(job) for job in ids] for stage, ids in found["jobs"].items()}
        times = [found.get("submitted_unix_s"), found.get("cancelled_unix_s")]
        submitted, cancelled = (None if unix_s is None else float(unix_s) for unix_s in times)
        return PrepSubmission(jobs, submitted, cancelled, int(found.get("waiting", 0)))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is not a record of submitted jobs ({type(error).__name__}: {error}): remove "
            "it when `squeue --me` shows none of the preparation's jobs, and submit again"
        ) from None


def prep_jobs(output_dir: Path) -> dict[str, list[str]]:
    """Read the jobs of each stage of a data preparation; none if it was never submitted."""
    found = read_prep(output_dir)
    return found.jobs if found else {}


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run folder: submitted, or started."""
    run = RunFolder(folder)
    return run.launch.exists() or run.attempts.exists()


def require_run(folder: Path) -> Path:
    """Return a run folder as an absolute path, or say why it is not one."""
    if is_run(folder):
        return folder.resolve()
    if (folder / "work").is_dir():
        raise DataError(
            f"{folder} holds a data preparation that was not submitted to SLURM (no "
            f"{PREP_RECORD}); `postnorm status {folder}` shows its progress"
        )
    run = RunFolder(folder)
    missing = f"no {run.launch.name}/ and no {run.attempts.name}"
    there = "it is a file" if folder.exists() else "it does not exist"
    why = missing if folder.is_dir() else there
    near = [*folder.glob("*"), *folder.parent.glob("*")]
    runs = sorted(str(path) for path in near if is_run(path))
    raise DataError(
        f"{folder} is not a run folder ({why}). Pass the run_dir of a submitted or started run"
        + (f", such as {', '.join(runs[:5])}" if runs else "")
    )


class SnapshotError(PostnormError):
    """The copy of the code differs from its original."""


def code_hash(root: Path) -> str:
    """Compute the sha256 of the packages' files with their names, shortened."""
    digest = hashlib.sha256()
    for path in _files(root):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()[:_HASH_LETTERS]


def start_file(folder: Path) -> Path:
    """Name the file that runs modules of the copy that `snapshot` makes of the code now."""
    return folder / code_hash(_ROOT) / "pipeline" / "runtime" / "start.py"


def snapshot(folder: Path, root: Path = _ROOT) -> Path:
    """Copy the packages to `folder/HASH`, with the git revision in `REVISION`; return that folder.

    An existing copy is verified and kept.

    Raises:
        SnapshotError: a copy does not match its name: files were changed, in the checkout during
            the copy or in an earlier copy.
    """
    expected = code_hash(root)
    target = folder / expected
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        copy = files.temporary_beside(target)
        try:
            # numba's machine code, which holds for files of this content, saves each start 15 s.
            compiled = (
                path for name in _FOLDERS for path in (root / name).rglob("__pycache__/*.nb?")
            )
            for path in (*_files(root), *compiled):
                to = copy / path.relative_to(root)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, to)
            (copy / REVISION_FILE).write_text(f"{git_revision()}\n", encoding="utf-8")
            files.rename(copy, target)
        finally:
            shutil.rmtree(copy, ignore_errors=True)
    actual = code_hash(target)
    if actual != expected:
        raise SnapshotError(
            f"{target} holds code of hash {actual}: a file in it was changed, or the checkout was "
            "changed while it was copied; remove that folder and submit again"
        )
    return target


def snapshot_for(start: Path, folder: Path) -> None:
    """Make the copy that a job runs, unless the code was edited since `start_file` was asked."""
    if snapshot(folder) not in start.parents:
        raise SnapshotError("the code was edited while it was being submitted; submit again")


def _files(root: Path) -> list[Path]:
    """List the files of the packages in a fixed order, without Python's compiled ones."""
    every = {path for folder in _FOLDERS for path in (root / folder).rglob("*")}
    return sorted(path for path in every if path.is_file() and "__pycache__" not in path.parts)
