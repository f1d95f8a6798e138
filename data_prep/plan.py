"""The estimates of `data_prep plan`: stages, tasks, core-hours and disk, from file sizes alone.

The text is not read. `data_prep.stage.Estimate` says where the rates come from.
"""

from typing import Any

from data_prep import corpus
from data_prep.chain import estimates, look
from data_prep.config import PrepConfig
from data_prep.corpus import Corpus
from data_prep.stage import Size

# Bytes of text in a byte of a file.
_EXPANSION = {".gz": 3.0, ".zst": 3.3, ".xz": 4.0, ".parquet": 2.2}
_DOCUMENT_BYTES = 4000
_SECONDS_PER_HOUR = 3600


def plan(config: PrepConfig) -> dict[str, Any]:
    """Estimate a preparation.

    Returns:
        {"files", "pieces", "text_gb", "stages": [{"name", "tasks", "max_tasks", "core_hours",
        "disk_gb", "memory_gb", "todo"}], "core_hours", "disk_gb"}; `max_tasks` is the number of
        parts of the stage that can run at a time, `memory_gb` the memory of one task, `todo` has
        the numbers of unfinished tasks, or is None until the stages before are complete.

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
            "core_hours": round(made.cpu_s / _SECONDS_PER_HOUR, 3),
            "disk_gb": round(made.disk_bytes / 1e9, 3),
            "memory_gb": round(made.memory_bytes / 1e9, 2),
            "todo": todo.get(name),
        }
        for name, made in costs.items()
    ]
    return {
        "files": len({file.path for piece in given.pieces for file in piece.files}),
        "pieces": size.pieces,
        "text_gb": round(size.text_bytes / 1e9, 3),
        "stages": stages,
        "core_hours": round(sum(e.cpu_s for e in costs.values()) / _SECONDS_PER_HOUR, 3),
        "disk_gb": round(sum(e.disk_bytes for e in costs.values()) / 1e9, 3),
    }


def plan_text(made: dict[str, Any], cores: int) -> str:
    """Format a plan as a table, for a number of cores."""
    lines = [
        f"{made['files']:,} files, about {made['text_gb']:,.1f} GB of text, in {made['pieces']:,} "
        "pieces",
        "",
        f"{'stage':<16}{'tasks':>8}{'core-hours':>12}{f'hours on {cores}':>14}{'disk GB':>10}"
        f"{'GB a task':>11}",
    ]
    total_hours = 0.0
    for stage in made["stages"]:
        hours = stage["core_hours"] / min(cores, stage["max_tasks"])
        total_hours += hours
        lines.append(
            f"{stage['name']:<16}{stage['tasks']:>8,}{stage['core_hours']:>12.2f}{hours:>14.2f}"
            f"{stage['disk_gb']:>10.1f}{stage['memory_gb']:>11.2f}"
        )
    lines += [
        f"{'total':<16}{'':>8}{made['core_hours']:>12.2f}{total_hours:>14.2f}"
        f"{made['disk_gb']:>10.1f}",
        "",
        "Estimates from file sizes and measured rates (benchmarks/data_prep.py); they count text",
        "that stages drop in full. work/ may be deleted when the dataset is complete.",
    ]
    return "\n".join(lines)


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
