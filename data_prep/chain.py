"""The chain of stages: their order, when each runs, and what its tasks need of the stages before.

`STEPS` is the only place with the order. `walk` goes along it; its caller decides what happens at
each stage: `run` does all tasks, an array task does its share of one stage, `look` only reads
records.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from data_prep import index, ingest, shards
from data_prep.config import PrepConfig
from data_prep.corpus import Corpus, Progress
from data_prep.decontaminate import stages as evaluated
from data_prep.dedup import exact, lines, near
from data_prep.stage import (
    INGEST_STAGES,
    Counts,
    Done,
    Estimate,
    Function,
    Size,
    Stage,
    Task,
    finished,
    table,
)
from data_prep.tokenizer import vocabulary
from pipeline.errors import DataError


@dataclass(frozen=True)
class Step:
    """A stage, before its tasks are known."""

    name: str
    tasks: Callable[[Progress, Path], Sequence[Task[Any]]]
    """Makes the tasks from the progress so far and the stage's folder."""
    run: Function[Any]
    estimate: Callable[[Size], Estimate]
    wanted: Callable[[PrepConfig], Any] = lambda config: True
    gives: Literal["", "texts", "masks", "tokenizer", "shards"] = ""
    """Results that the report is about; empty if only the next stages use them."""


def _eval_sets(progress: Progress, folder: Path) -> list[Task[Any]]:
    corpus, config = progress.corpus, progress.corpus.config
    files = corpus.eval_sets
    return [evaluated.eval_set_task(files, config.decontaminate, config.clean, folder)]


def _ingest(progress: Progress, folder: Path) -> list[Task[Any]]:
    config = progress.corpus.config
    return ingest.tasks(progress.corpus.pieces, config.clean, config.filters, folder)


def _line_hashes(progress: Progress, folder: Path) -> list[Task[Any]]:
    pieces, min_chars = progress.pieces, progress.corpus.config.dedup.line_min_chars
    return lines.hash_tasks(progress.written, pieces.names, pieces.texts, min_chars, folder)


def _line_parts(progress: Progress, folder: Path) -> list[Task[Any]]:
    name = "line_hashes"
    return lines.part_tasks(progress.tasks[name], progress.records[name], folder)


def _lines(progress: Progress, folder: Path) -> list[Task[Any]]:
    tasks = (progress.tasks["line_hashes"], progress.tasks["line_parts"])
    hashed, compared = progress.records["line_hashes"], progress.records["line_parts"]
    upstream = (progress.written, hashed, compared)
    return lines.rewrite_tasks(tasks, upstream, progress.corpus.config.clean.min_chars, folder)


def _exact(progress: Progress, folder: Path) -> list[Task[Any]]:
    num_read = _ingested(progress)["ingest"].documents_in
    return exact.exact_tasks(progress.written, progress.pieces, num_read, folder)


def _dedup(progress: Progress, folder: Path) -> list[Task[Any]]:
    tasks, compared = progress.tasks["exact"], progress.records["exact"]
    return exact.dedup_tasks(tasks, compared, progress.written, folder)


def _signatures(progress: Progress, folder: Path) -> list[Task[Any]]:
    place = near.Place(progress.pieces, folder)
    return near.signature_tasks(progress.written, place, progress.corpus.config.dedup)


def _buckets(progress: Progress, folder: Path) -> list[Task[Any]]:
    place = near.Place(progress.pieces, progress.folder("signatures"))
    signed, bands = progress.records["signatures"], progress.corpus.config.dedup.bands
    return near.bucket_tasks(signed, progress.kept, place, bands, folder)


def _candidates(progress: Progress, folder: Path) -> list[Task[Any]]:
    upstream = (progress.records["signatures"], progress.kept, progress.records["buckets"])
    return near.candidate_tasks(progress.tasks["buckets"], upstream, folder)


def _near(progress: Progress, folder: Path) -> list[Task[Any]]:
    groups, compared = progress.tasks["candidates"], progress.records["candidates"]
    threshold = progress.corpus.config.dedup.threshold
    return near.near_tasks(groups, compared, progress.kept, threshold, folder)


def _overlaps(progress: Progress, folder: Path) -> list[Task[Any]]:
    upstream = (progress.written, progress.kept, progress.records["eval_sets"][0])
    tables, config = progress.folder("eval_sets"), progress.corpus.config.decontaminate
    return evaluated.overlap_tasks(upstream, progress.pieces, tables, config, folder)


def _decontaminate(progress: Progress, folder: Path) -> list[Task[Any]]:
    [made] = progress.records["eval_sets"]
    job = evaluated.DecontaminateJob(
        progress.pieces,
        progress.folder("eval_sets"),
        progress.folder("overlaps"),
        made.result["sets"],
        progress.corpus.config.decontaminate,
    )
    upstream = (progress.kept, made, progress.records["overlaps"])
    return [evaluated.decontaminate_task(job, upstream, folder)]


def _tokenizer(progress: Progress, folder: Path) -> list[Task[Any]]:
    corpus = progress.corpus
    sources = tuple(piece.source for piece in corpus.pieces)
    job = vocabulary.VocabularyJob(
        progress.pieces, sources, corpus.config.tokenizer, corpus.tokenizer
    )
    return [vocabulary.task(job, progress.written, progress.kept, folder)]


def _shards(progress: Progress, folder: Path) -> list[Task[Any]]:
    pieces, config = progress.pieces, progress.corpus.config.shards
    tokenizer_path = vocabulary.tokenizer_path(progress.tasks["tokenizer"][0])
    kept_bytes = [int(pieces.kept_sizes(name).sum()) for name in pieces.names]
    groups = shards.plan(kept_bytes, config.shard_mb)
    upstream = (progress.written, progress.kept, progress.records["tokenizer"][0])
    # The shards belong to the dataset, so they are not in the stage's folder below work/.
    folder = progress.corpus.output / index.SHARD_FOLDER
    return shards.tasks(groups, shards.ShardJob(pieces, tokenizer_path, config), upstream, folder)


def _index(progress: Progress, folder: Path) -> list[Task[Any]]:
    tokenizer_path = vocabulary.tokenizer_path(progress.tasks["tokenizer"][0])
    return [index.task(index.IndexJob(progress, tokenizer_path))]


_HAS_LINES = attrgetter("dedup.lines")
_HAS_NEAR = attrgetter("dedup.near_duplicates")
_HAS_SETS = attrgetter("decontaminate.sets")
STEPS = (
    # Evaluation sets come first, so that an unusable one stops a run before hours of work.
    Step("eval_sets", _eval_sets, evaluated.run_eval_sets, evaluated.estimate_eval_sets, _HAS_SETS),
    Step("ingest", _ingest, ingest.run, ingest.estimate, gives="texts"),
    Step("line_hashes", _line_hashes, lines.run_hashes, lines.estimate_hashes, _HAS_LINES),
    Step("line_parts", _line_parts, lines.run_part, lines.estimate_parts, _HAS_LINES),
    Step("lines", _lines, lines.run_rewrite, lines.estimate_rewrite, _HAS_LINES, gives="texts"),
    Step("exact", _exact, exact.run_exact, exact.estimate_exact),
    Step("dedup", _dedup, exact.run_dedup, exact.estimate_dedup, gives="masks"),
    Step("signatures", _signatures, near.run_signatures, near.estimate_signatures, _HAS_NEAR),
    Step("buckets", _buckets, near.run_buckets, near.estimate_buckets, _HAS_NEAR),
    Step("candidates", _candidates, near.run_candidates, near.estimate_candidates, _HAS_NEAR),
    Step("near", _near, near.run_near, near.estimate_near, _HAS_NEAR, gives="masks"),
    Step("overlaps", _overlaps, evaluated.run_overlaps, evaluated.estimate_overlaps, _HAS_SETS),
    Step(
        "decontaminate",
        _decontaminate,
        evaluated.run_decontaminate,
        evaluated.estimate_decontaminate,
        _HAS_SETS,
        gives="masks",
    ),
    Step("tokenizer", _tokenizer, vocabulary.run, vocabulary.estimate, gives="tokenizer"),
    Step("shards", _shards, shards.run, shards.estimate, gives="shards"),
    Step("index", _index, index.run, index.estimate),
)


def steps(config: PrepConfig) -> list[Step]:
    """List the stages that a config asks for, in order."""
    return [step for step in STEPS if step.wanted(config)]


def walk(corpus: Corpus, visit: Callable[[Stage], list[Done] | None]) -> bool:
    """Go along the chain; return whether the end was reached.

    Args:
        corpus: the corpus to prepare.
        visit: receives each stage; returns the records of all its tasks, or None to stop there.
    """
    progress = Progress(corpus)
    for step in steps(corpus.config):
        tasks = step.tasks(progress, progress.folder(step.name))
        records = visit(Stage(step.name, tasks, step.run))
        if records is None:
            return False
        progress.add(step.name, tasks, records, step.gives)
        if step.name == "ingest":
            _refuse_empty(progress)
    return True


def look(corpus: Corpus) -> list[tuple[Stage, list[Done | None]]]:
    """Read the records of all stages up to the first incomplete one; None for unfinished tasks."""
    seen: list[tuple[Stage, list[Done | None]]] = []

    def visit(stage: Stage) -> list[Done] | None:
        records = [finished(task) for task in stage.tasks]
        seen.append((stage, records))
        done = [record for record in records if record is not None]
        return done if len(done) == len(records) else None

    walk(corpus, visit)
    return seen


def _ingested(progress: Progress) -> dict[str, Counts]:
    records = progress.records["ingest"]
    return {name: Counts.total(done.result[name] for done in records) for name in INGEST_STAGES}


def _refuse_empty(progress: Progress) -> None:
    counts = _ingested(progress)
    if not counts["filter"].documents_out:
        raise DataError(
            f"the corpus is empty: the filters left no document\n{table(counts)}\n"
            f"see {progress.folder('ingest')}/*.rejected.jsonl.zst for the reasons, then correct "
            "sources or filters"
        )
