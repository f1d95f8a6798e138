"""What is told about a preparation without doing it: its plan, its status, and single documents.

`plan` estimates stages, tasks, core-hours and disk from file sizes alone; the text is not read.
`data_prep.stage.Estimate` says where the rates come from.

`status` reads the records of tasks. For `show`, intermediate files tell which piece of the input a
document came from; the original is then read from the input itself.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep import corpus
from data_prep.chain import estimates, look, steps
from data_prep.config import PrepConfig
from data_prep.corpus import RESOLVED_FILE, Corpus
from data_prep.documents import ReadStats, read_piece
from data_prep.lease import holders
from data_prep.pieces import id_hash, piece_name, read_documents, read_lines
from data_prep.stage import FOLDER_TASKS, Size, Stage, State, state_of
from data_prep.types import Document, Metadata
from pipeline.config.load import load
from pipeline.config.strict_yaml import read_file
from pipeline.data.format import INDEX_FILE, read_index
from pipeline.errors import DataError
from pipeline.runtime.summary import FolderSummary, table

_SHOWN_CHARS = 2000
_COLUMNS = ("done", "running", "failed", "stopped", "waiting")
_EXAMPLES = 5
_REMEDIES = {
    "failed": "    fix the cause; the same command repeats them",
    "stopped": "    the same command repeats them; finished tasks stay done",
}
# Bytes of text in a byte of a file.
_EXPANSION = {".gz": 3.0, ".zst": 3.3, ".xz": 4.0, ".bz2": 4.0, ".parquet": 2.2}
_DOCUMENT_BYTES = 4000
_MANY_FILES, _MANY_IN_A_FOLDER = 300_000, 10_000  # what file systems of clusters take easily
_LONG_TASK_HOURS = 12
_SECONDS_PER_HOUR = 3600


def plan(config: PrepConfig) -> dict[str, Any]:
    """Estimate a preparation.

    Returns:
        {"files", "pieces", "text_gb", "stages": [{"name", "tasks", "max_tasks", "core_hours",
        "disk_gb", "memory_gb", "files", "files_a_folder", "todo"}], "core_hours", "disk_gb",
        "files_made"}; `max_tasks` is the number of parts of the stage that can run at a time,
        `memory_gb` the memory of one task, `files` those that the stage leaves, and
        `files_a_folder` those in each of its folders, `todo` has the numbers of unfinished tasks,
        or is None until the stages before are complete.

    Raises:
        DataError: an input does not exist or has no text files.
    """
    given = corpus.find(config)
    size = _size(given)
    costs = estimates(size)
    todo = {
        stage.name: [i for i, done in enumerate(records) if done is None]
        for stage, records in look(given)
    }
    stages = [
        {
            "name": name,
            "tasks": made.tasks,
            "max_tasks": made.tasks,
            "core_hours": _figure(made.cpu_s / _SECONDS_PER_HOUR),
            "disk_gb": _figure(made.disk_bytes / 1e9),
            "memory_gb": round(made.memory_bytes / 1e9, 2),
            "files": made.files,
            # A single task may write every piece's files, in folders of FOLDER_TASKS.
            "files_a_folder": math.ceil(
                made.files / math.ceil(max(made.tasks, min(made.files, size.pieces)) / FOLDER_TASKS)
            ),
            "todo": todo.get(name),
        }
        for name, made in costs.items()
    ]
    return {
        "files": len({file.path for piece in given.pieces for file in piece.files}),
        "pieces": size.pieces,
        "text_gb": _figure(size.text_bytes / 1e9),
        "stages": stages,
        "core_hours": _figure(sum(e.cpu_s for e in costs.values()) / _SECONDS_PER_HOUR),
        "disk_gb": _figure(sum(e.disk_bytes for e in costs.values()) / 1e9),
        "files_made": sum(e.files for e in costs.values()),
    }


def plan_text(made: dict[str, Any], cores: int) -> str:
    """Format a plan as a table, for a number of cores."""
    rows = [("stage", "tasks", "core-hours", f"hours on {cores}", "disk GB", "GB a task", "files")]
    total_hours = 0.0
    for stage in made["stages"]:
        hours = stage["core_hours"] / min(cores, stage["max_tasks"])
        total_hours += hours
        rows.append((
            stage["name"], f"{stage['tasks']:,}", _cell(stage["core_hours"], 2), _cell(hours, 2),
            _cell(stage["disk_gb"], 1), f"{stage['memory_gb']:.2f}", f"{stage['files']:,}",
        ))  # fmt: skip
    total = _cell(made["core_hours"], 2), _cell(total_hours, 2), _cell(made["disk_gb"], 1)
    lines = [
        f"{made['files']:,} files, about {_gb_text(made['text_gb'])} of text, in "
        f"{made['pieces']:,} pieces",
        "",
        *table([*rows, ("total", "", *total, "", f"{made['files_made']:,}")], right=range(1, 7)),
        "",
        "Estimates from file sizes and measured rates (benchmarks/data_prep.py); they count text",
        "that stages drop in full. work/ may be deleted when the dataset is complete.",
        *_warnings(made),
    ]
    return "\n".join(lines)


def _warnings(made: dict[str, Any]) -> Iterator[str]:
    """Say what a file system or a job's time limit may refuse."""
    fullest = max(made["stages"], key=lambda stage: stage["files_a_folder"])
    if made["files_made"] > _MANY_FILES or fullest["files_a_folder"] > _MANY_IN_A_FOLDER:
        yield (
            f"warning: {made['files_made']:,} files, up to {fullest['files_a_folder']:,} in a "
            f"folder, of stage {fullest['name']}: check the quota of inodes, or raise piece_mb (a "
            "task's memory grows with it) and shards.shard_mb"
        )
    for stage in made["stages"]:
        hours = stage["core_hours"] / stage["tasks"]
        if hours > _LONG_TASK_HOURS:
            yield (
                f"warning: stage {stage['name']}: a task takes about {hours:,.0f} hours and starts "
                "anew if it is ended before: give its job more time (prep.time_limit of the "
                "cluster profile)" + ("" if stage["tasks"] == 1 else ", or lower piece_mb")
            )


def _figure(value: float) -> float:
    """Round to three decimals, or three digits: what is small is not nothing."""
    return round(value, 3) if value >= 1 else float(f"{value:.3g}")


def _cell(value: float, decimals: int) -> str:
    least = 10.0**-decimals
    return f"<{least:g}" if 0 < value < least else f"{value:.{decimals}f}"


def _gb_text(gigabytes: float) -> str:
    return f"{gigabytes:,.1f} GB" if gigabytes >= 1 else f"{1000 * gigabytes:,.1f} MB"


def _size(given: Corpus) -> Size:
    texts = [
        sum(_text_bytes(file.path, file.range_bytes) for file in piece.files)
        for piece in given.pieces
    ]
    total = sum(texts)
    eval_bytes = sum(
        _text_bytes(file.path, file.num_bytes)
        for files in given.eval_sets.values()
        for file in files
    )
    return Size(given.config, len(texts), max(texts), total, total / _DOCUMENT_BYTES, eval_bytes)


def _text_bytes(path: str, num_bytes: int) -> float:
    factors = [factor for suffix, factor in _EXPANSION.items() if path.lower().endswith(suffix)]
    return num_bytes * (factors[0] if factors else 1.0)


@dataclass(frozen=True)
class DatasetStatus:
    """How far a dataset is."""

    output_dir: str
    is_complete: bool
    stages: dict[str, dict[str, int]]
    """stage -> tasks in each state; empty as long as stages before it are not complete, and where a
    finished dataset stands without its inputs."""
    totals: dict[str, dict[str, int]]
    """split -> {"tokens", "documents", "text_bytes"} of a finished dataset."""
    remarks: list[str]
    """Failures and the next command."""

    def summary(self) -> FolderSummary:
        """Summarise for a terminal: a line a stage, then the remarks."""
        rows: list[tuple[str, ...]] = [("stage", *_COLUMNS)]
        before = ""
        for name, counts in self.stages.items():
            texts = [f"{counts[column]:,}" for column in _COLUMNS if counts]
            rows.append((name, *(texts or [f"after {before}", *[""] * (len(_COLUMNS) - 1)])))
            before = name if counts else before
        lines = list(table(rows, right=range(1, len(_COLUMNS) + 1))) if self.stages else []
        for split, total in self.totals.items():
            lines.append(f"{split}: {total['tokens']:,} tokens, {total['documents']:,} documents")
        state = "complete" if self.is_complete else "not complete"
        return FolderSummary(self.output_dir, f"dataset, {state}", [*lines, *self.remarks])


def status_of_folder(folder: Path) -> DatasetStatus | None:
    """Look at a dataset's folder, by the config that it holds; None if it is another folder.

    Raises:
        DataError: the dataset is not finished, and an input is not there any more.
    """
    if (folder / INDEX_FILE).is_file():
        index = read_index(folder)
        remarks = [f"{len(index.shards)} shards, fingerprint {index.fingerprint}"]
        return DatasetStatus(str(folder), True, {}, index.totals, remarks)
    path = folder / RESOLVED_FILE
    if not path.is_file() or "output_dir" not in read_file(path).plain():
        return None
    return status(load(PrepConfig, path, [f"output_dir={json.dumps(str(folder))}"]).config)


def status(config: PrepConfig) -> DatasetStatus:
    """Look at the tasks of a preparation; only reads.

    Tasks done with other inputs or settings count as waiting. The number of tasks of a stage is
    known when the stages before are complete.

    Raises:
        DataError: an input does not exist or has no text files.
    """
    given = corpus.find(config)
    stages: dict[str, dict[str, int]] = {}
    remarks: list[str] = []
    seen = look(given)
    for stage, records in seen:
        tasks = zip(stage.tasks, records, strict=True)
        states = [State("done") if record else state_of(task) for task, record in tasks]
        counts = Counter[str](state.name for state in states)
        stages[stage.name] = {name: counts[name] for name in _COLUMNS}
        remarks += _remarks(stage, states)
    remarks += [f"in use by {holder}" for holder in holders(given.lease)]
    last, records = seen[-1]
    later = [step.name for step in steps(config)][len(seen) :]
    is_complete = all(records) and not later
    if not is_complete and not remarks:
        remarks.append(f"next: postnorm prep run CONFIG, or --stage {last.name} in parts")
    stages |= {name: {} for name in later}
    return DatasetStatus(str(given.output), is_complete, stages, {}, remarks)


def _remarks(stage: Stage, states: list[State]) -> list[str]:
    texts = []
    for name in ("failed", "stopped", "running"):
        pairs = zip(stage.tasks, states, strict=True)
        those = [(task, state) for task, state in pairs if state.name == name]
        shown = those[:_EXAMPLES]
        texts += [f"{name}: {stage.name} {task.name}: {state.text}" for task, state in shown]
        if len(those) > _EXAMPLES:
            texts.append(f"{name}: {len(those) - _EXAMPLES:,} more tasks of {stage.name}")
        if those and name in _REMEDIES:
            texts.append(_REMEDIES[name])
    return texts


def document_text(config: PrepConfig, document_id: str) -> str:
    """Show the original of a document, its later forms, and the stage that dropped it, if any.

    Raises:
        DataError: no document of that id was ingested.
    """
    given = corpus.find(config)
    complete = [stage.name for stage, records in look(given) if all(records)]
    if "ingest" not in complete:
        raise DataError(
            "stage ingest is not complete, so documents cannot be shown yet; see `status`"
        )
    pieces = _pieces_of(given, document_id)
    texts = [_in_piece(given, number, document_id, complete) for number in pieces]
    if not texts:
        raise DataError(
            f"no document has the id {document_id!r}; expected SOURCE/ID, or SOURCE/FILE@OFFSET "
            "for documents without an id of their own, such as those in "
            f"{given.work / 'ingest'}/00000.ids.jsonl.zst"
        )
    return "\n\n".join(texts)


def rejected_text(config: PrepConfig, reason: str, limit: int) -> str:
    """Show documents and lines whose reason has `reason` in it, up to `limit` per reason."""
    given = corpus.find(config)
    counts = Counter[str]()
    parts = []
    stages = ["ingest", *(["lines"] if config.dedup.lines else [])]
    # By their pieces: those of an earlier corpus may still be there.
    names = [f"{piece_name(n)}.rejected.jsonl.zst" for n in range(len(given.pieces))]
    paths = [given.work / stage / name for stage in stages for name in names]
    if not any(path.is_file() for path in paths):
        raise DataError(f"stage ingest has not read a file of {given.output} yet; see `status`")
    for path in (path for path in paths if path.is_file()):
        for record in read_lines(path):
            if reason not in record["reason"]:
                continue
            counts[record["reason"]] += 1
            if counts[record["reason"]] <= limit:
                why = f"{record['reason']} {record.get('detail', '')}".rstrip()
                raw = record.get("raw") or f"base64: {record.get('raw_base64', '')}"
                told = _told(record.get("metadata", {}))
                parts.append(f"--- {record['id']}: {why}{told}\n{_cut(raw)}")
    totals = [f"{name}: {count:,}" for name, count in counts.most_common()]
    return "\n".join([*parts, "---", *(totals or [f"no document was rejected for {reason!r}"])])


def _pieces_of(given: Corpus, document_id: str) -> Iterator[int]:
    wanted = np.uint64(id_hash(document_id))
    for number, piece in enumerate(given.pieces):
        if document_id.startswith(f"{piece.source.name}/"):
            hashes = np.load(given.work / "ingest" / f"{piece_name(number)}.id_hashes.npy")
            if (hashes == wanted).any():
                yield number


def _in_piece(given: Corpus, number: int, document_id: str, stages: list[str]) -> str:
    """Show every document of a piece that has the id; `stages` are the complete ones."""
    piece, name = given.pieces[number], piece_name(number)
    originals = [
        item
        for item in read_piece(piece, given.config.clean_of(piece.source), ReadStats())
        if isinstance(item, Document) and item.id == document_id
    ]
    lines = [f"--- {document_id}, in {piece.files[0].path} and {len(piece.files) - 1} more files"]
    lines += [
        f"original, {len(item.text):,} characters{_told(item.metadata)}:\n{_cut(item.text)}"
        for item in originals
    ]
    texts = [stage for stage in ("ingest", "lines") if stage in stages]
    for stage in texts:
        path = given.work / stage / name
        lines += [
            f"rejected: {record['reason']} {record.get('detail', '')}".rstrip()
            for record in read_lines(Path(f"{path}.rejected.jsonl.zst"))
            if record["id"] == document_id
        ]
        done = "ingested as" if stage == "ingest" else "without lines that occurred before"
        for row, text in _texts(path, document_id):
            lines.append(f"{done}:\n{_cut(text)}")
            if stage == texts[-1]:
                lines += _masks(given.work, name, row, stages)
    return "\n".join(lines)


def _texts(path: Path, document_id: str) -> Iterator[tuple[int, str]]:
    """Yield rows and texts of a piece's documents that have the id."""
    ids = read_lines(Path(f"{path}.ids.jsonl.zst"))
    rows = [row for row, key in enumerate(ids) if key == document_id]
    documents = read_documents(Path(f"{path}.jsonl.zst"), rows)
    for row, document in zip(rows, documents, strict=True):
        yield row, document["text"]


def _masks(work: Path, name: str, row: int, stages: list[str]) -> list[str]:
    """Whether each stage that drops whole documents kept this one."""
    lines = []
    for stage in stages:
        path = work / stage / f"{name}.keep.npy"
        if path.exists():
            kept = bool(np.load(path, mmap_mode="r")[row])
            lines.append(f"stage {stage}: {'kept' if kept else 'dropped'}")
            if not kept:
                break
    return lines


def _told(metadata: Metadata) -> str:
    return "".join(f", {name} {value}" for name, value in metadata.items())


def _cut(text: str) -> str:
    more = len(text) - _SHOWN_CHARS
    return text if more <= 0 else f"{text[:_SHOWN_CHARS]}\n[{more:,} more characters]"
