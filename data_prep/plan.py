"""`python -m data_prep plan`: stages, tasks, core-hours and disk, from the input files' sizes.

No text is read. Rates are those of `benchmarks/data_prep.py` on one core of an AMD EPYC, Chinese
and English text; other processors and texts differ, by half or double.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from data_prep import corpus, shards
from data_prep.chain import stage_names
from data_prep.config import PrepConfig
from data_prep.corpus import Corpus
from data_prep.dedup import dropped, exact, lines, near, near_cluster
from data_prep.dedup.minhash import NUM_BINS
from data_prep.status import remaining

# Bytes of text in a byte of a file.
_EXPANSION = {".gz": 3.0, ".zst": 3.3, ".xz": 4.0, ".parquet": 2.2}
_DOCUMENT_BYTES = 4000
_LINE_BYTES = 90
_PAIRS = 15  # a document, of candidates for near duplicates: half by chance
_SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class Estimate:
    """Of one stage."""

    tasks: int
    cpu_s: float
    disk_bytes: float
    """Of its results."""
    memory_bytes: float
    """Peak of one task."""


@dataclass(frozen=True)
class _Size:
    """What estimates depend on; text that later stages drop is not known and counts."""

    config: PrepConfig
    pieces: int
    largest_bytes: float
    """Text of the largest piece."""
    text_bytes: float
    documents: float
    eval_bytes: float
    """Text of the evaluation sets."""


def plan(config: PrepConfig) -> dict[str, Any]:
    """Estimates a preparation.

    Returns:
        {"files", "pieces", "text_gb", "stages": [{"name", "tasks", "max_tasks", "core_hours",
        "disk_gb", "memory_gb", "todo"}], "core_hours", "disk_gb"}; `max_tasks` is how many parts
        of the stage can run at a time, `memory_gb` what one task takes, `todo` has the numbers of
        tasks that are not done, or is None until the stages before are complete.

    Raises:
        DataError: an input does not exist or has no text files.
    """
    given = corpus.find(config)
    size = _size(given)
    estimates = {name: _ESTIMATES[name](size) for name in stage_names(config)}
    todo = remaining(given)
    stages = []
    for name, made in estimates.items():
        stages.append(
            {
                "name": name,
                "tasks": made.tasks,
                "max_tasks": made.tasks,
                "core_hours": round(made.cpu_s / _SECONDS_PER_HOUR, 3),
                "disk_gb": round(made.disk_bytes / 1e9, 3),
                "memory_gb": round(made.memory_bytes / 1e9, 2),
                "todo": todo.get(name),
            }
        )
    return {
        "files": len({file.path for piece in given.pieces for file in piece.files}),
        "pieces": size.pieces,
        "text_gb": round(size.text_bytes / 1e9, 3),
        "stages": stages,
        "core_hours": round(sum(e.cpu_s for e in estimates.values()) / _SECONDS_PER_HOUR, 3),
        "disk_gb": round(sum(e.disk_bytes for e in estimates.values()) / 1e9, 3),
    }


def plan_text(made: dict[str, Any], cores: int) -> str:
    """A plan as a table; `cores` is how many are meant to work on it."""
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
        f"{'in all':<16}{'':>8}{made['core_hours']:>12.2f}{total_hours:>14.2f}"
        f"{made['disk_gb']:>10.1f}",
        "",
        "Estimates from file sizes and measured rates (benchmarks/data_prep.py); text that is",
        "dropped on the way makes it less. work/ may be deleted when the dataset is complete.",
    ]
    return "\n".join(lines)


def _size(given: Corpus) -> _Size:
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
    return _Size(given.config, len(texts), max(texts), total, total / _DOCUMENT_BYTES, eval_bytes)


def _text_bytes(path: str, num_bytes: int) -> float:
    factors = [factor for suffix, factor in _EXPANSION.items() if path.lower().endswith(suffix)]
    return num_bytes * (factors[0] if factors else 1.0)


def _ingest(size: _Size) -> Estimate:
    filters = size.config.filters
    groups = (filters.shape, filters.script, filters.quality, filters.repetition, filters.c4)
    filtered = any(group.enabled for group in groups) or filters.mask.enabled
    per_mb = 1 / 32 + (1 / 23 if filtered else 0)
    return Estimate(
        size.pieces, size.text_bytes / 1e6 * per_mb, 0.45 * size.text_bytes,
        150e6 + 25e6 * size.config.clean.max_document_mb * (size.largest_bytes > 1e9),
    )  # fmt: skip


def _line_hashes(size: _Size) -> Estimate:
    num_lines = size.text_bytes / _LINE_BYTES
    return Estimate(
        size.pieces, size.text_bytes / 1e6 / 60, 12 * num_lines,
        100e6 + 40 * num_lines / size.pieces,
    )  # fmt: skip


def _line_parts(size: _Size) -> Estimate:
    num_lines = size.text_bytes / _LINE_BYTES
    parts = 1 + int(num_lines) // lines.PART_LINES
    return Estimate(parts, num_lines * 0.3e-6, num_lines, 100e6 + 50 * num_lines / parts)


def _lines(size: _Size) -> Estimate:
    return Estimate(size.pieces, size.text_bytes / 1e6 / 35, 0.45 * size.text_bytes, 150e6)


def _exact(size: _Size) -> Estimate:
    parts = 1 + int(size.documents) // exact.PART_DOCUMENTS
    return Estimate(
        parts, size.documents * 1e-6, size.documents, 100e6 + 60 * size.documents / parts
    )


def _dedup(size: _Size) -> Estimate:
    return Estimate(1, size.documents * 2.5e-6, size.documents, 150e6 + _list_bytes(size))


def _list_bytes(size: _Size) -> float:
    """Of the ids of documents that are named in lists of dropped ones."""
    return 1400 * min(size.documents / 5, dropped.LISTED)


def _signatures(size: _Size) -> Estimate:
    return Estimate(
        size.pieces, size.text_bytes / 1e6 / 60,
        size.documents * (8 * size.config.dedup.bands + NUM_BINS), 300e6,
    )  # fmt: skip


def _buckets(size: _Size) -> Estimate:
    bands, parts = size.config.dedup.bands, 1 + int(size.documents) // near.PART_DOCUMENTS
    return Estimate(
        bands * parts, size.documents * bands * 0.3e-6, size.documents * 8 * _PAIRS,
        100e6 + 70 * size.documents / parts,
    )  # fmt: skip


def _candidates(size: _Size) -> Estimate:
    groups = 1 + int(size.documents) // near_cluster.GROUP_DOCUMENTS
    return Estimate(
        groups, size.documents * _PAIRS * 2.2e-6, size.documents * 10 * _PAIRS,
        150e6 + size.documents / groups * (256 + 60 * min(8, _PAIRS)),
    )  # fmt: skip


def _near(size: _Size) -> Estimate:
    return Estimate(
        1, size.documents * _PAIRS * 1.9e-6, size.documents,
        200e6 + 5 * size.documents + _list_bytes(size),
    )  # fmt: skip


def _eval_sets(size: _Size) -> Estimate:
    return Estimate(1, size.eval_bytes / 1e6 / 4, 4 * size.eval_bytes, 100e6 + 12 * size.eval_bytes)


def _overlaps(size: _Size) -> Estimate:
    return Estimate(
        size.pieces, size.text_bytes / 1e6 / 50, 0.001 * size.text_bytes,
        200e6 + 6 * size.eval_bytes,
    )  # fmt: skip


def _decontaminate(size: _Size) -> Estimate:
    return Estimate(
        1, size.documents * 1e-6, size.documents, 100e6 + 10 * size.documents / size.pieces
    )


def _tokenizer(size: _Size) -> Estimate:
    sample = min(size.text_bytes, size.config.tokenizer.sample_mb * 1e6)
    unigram = size.config.tokenizer.model_type == "unigram"
    read = size.text_bytes / 1e6 / 150  # the sample is drawn from all documents
    return Estimate(1, read + sample / 1e6 * (2.4 if unigram else 0.2), 2e6, 100e6 + 17 * sample)


def _shards(size: _Size) -> Estimate:
    groups = shards.plan([int(size.text_bytes / size.pieces)] * size.pieces,
                         size.config.shards.shard_mb)  # fmt: skip
    return Estimate(len(groups), size.text_bytes / 1e6 / 10, 0.6 * size.text_bytes, 500e6)


def _index(size: _Size) -> Estimate:
    return Estimate(1, 5 + size.text_bytes / 1e9, 0.001 * size.text_bytes, 500e6)


_ESTIMATES: dict[str, Callable[[_Size], Estimate]] = {
    "ingest": _ingest,
    "line_hashes": _line_hashes,
    "line_parts": _line_parts,
    "lines": _lines,
    "exact": _exact,
    "dedup": _dedup,
    "signatures": _signatures,
    "buckets": _buckets,
    "candidates": _candidates,
    "near": _near,
    "eval_sets": _eval_sets,
    "overlaps": _overlaps,
    "decontaminate": _decontaminate,
    "tokenizer": _tokenizer,
    "shards": _shards,
    "index": _index,
}
