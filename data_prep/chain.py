"""The chain of stages: their order, when each runs, and what its tasks need of the stages before.

`STEPS` is the only place with the order. `walk` goes along it; its caller decides what happens at
each stage: `run` does all tasks, an array task does its share of one stage, `look` only reads
records.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from data_prep import index, ingest, shards
from data_prep.config import PrepConfig
from data_prep.corpus import Corpus
from data_prep.decontaminate import stages as decontaminate
from data_prep.dedup import exact, lines, near
from data_prep.pieces import Pieces
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


class Progress:
    """Tasks and records of the stages so far, and the pieces as these stages left them."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.tasks: dict[str, list[Task[Any]]] = {}
        self.records: dict[str, list[Done]] = {}
        self.results: dict[str, list[Done]] = {}
        """Records of the stages that the report is about: those whose `Step.gives` is not empty."""
        self.masks: dict[str, Path] = {}
        """Stage -> folder of its masks, in order."""
        self._texts = ""

    def folder(self, stage: str) -> Path:
        """Return the folder of a stage's results."""
        return self.corpus.work / stage

    @property
    def pieces(self) -> Pieces:
        """All pieces, with the last texts and masks."""
        masks = [self.folder("dedup"), *self.masks.values()][-1]
        names = tuple(f"{i:05d}" for i in range(len(self.corpus.pieces)))
        return Pieces(self.folder(self._texts), masks, names)

    @property
    def written(self) -> list[Done]:
        """Records of the stage that wrote the texts last."""
        return self.records[self._texts]

    @property
    def kept(self) -> Done:
        """Record of the stage that wrote masks last."""
        return self.records[list(self.masks)[-1]][0]

    def add(self, step: "Step", tasks: Sequence[Task[Any]], records: list[Done]) -> None:
        """Take the tasks and records of a complete stage."""
        self.tasks[step.name], self.records[step.name] = list(tasks), records
        if step.gives:
            self.results[step.name] = records
        if step.gives == "texts":
            self._texts = step.name
        elif step.gives == "masks":
            self.masks[step.name] = self.folder(step.name)


@dataclass(frozen=True)
class Step:
    """A stage, before its tasks are known."""

    name: str
    tasks: Callable[[Progress, Path], Sequence[Task[Any]]]
    """Makes the tasks from the progress so far and the stage's folder."""
    run: Function[Any]
    estimate: Callable[[Size], Estimate]
    wanted: Callable[[PrepConfig], bool] = lambda config: True
    gives: Literal["", "texts", "masks", "tokenizer", "shards"] = ""
    """Results that the report is about; empty if only the next stages use them."""


def _eval_sets(progress: Progress, folder: Path) -> list[Task[Any]]:
    corpus, config = progress.corpus, progress.corpus.config
    files = corpus.eval_sets
    return [decontaminate.eval_set_task(files, config.decontaminate, config.clean, folder)]


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
    return decontaminate.overlap_tasks(upstream, progress.pieces, tables, config, folder)


def _decontaminate(progress: Progress, folder: Path) -> list[Task[Any]]:
    [evaluated] = progress.records["eval_sets"]
    job = decontaminate.DecontaminateJob(
        progress.pieces,
        progress.folder("eval_sets"),
        progress.folder("overlaps"),
        evaluated.result["sets"],
        progress.corpus.config.decontaminate,
    )
    upstream = (progress.kept, evaluated, progress.records["overlaps"])
    return [decontaminate.decontaminate_task(job, upstream, folder)]


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
    job = index.IndexJob(
        progress.corpus, progress.pieces, progress.masks, tokenizer_path, progress.results
    )
    return [index.task(job)]


def _has_lines(config: PrepConfig) -> bool:
    return config.dedup.lines


def _has_near(config: PrepConfig) -> bool:
    return config.dedup.near_duplicates


def _has_sets(config: PrepConfig) -> bool:
    return bool(config.decontaminate.sets)


STEPS = (
    # Evaluation sets come first, so that an unusable one stops a run before hours of work.
    Step(
        "eval_sets",
        _eval_sets,
        decontaminate.run_eval_sets,
        decontaminate.estimate_eval_sets,
        _has_sets,
    ),
    Step("ingest", _ingest, ingest.run, ingest.estimate, gives="texts"),
    Step("line_hashes", _line_hashes, lines.run_hashes, lines.estimate_hashes, _has_lines),
    Step("line_parts", _line_parts, lines.run_part, lines.estimate_parts, _has_lines),
    Step("lines", _lines, lines.run_rewrite, lines.estimate_rewrite, _has_lines, gives="texts"),
    Step("exact", _exact, exact.run_exact, exact.estimate_exact),
    Step("dedup", _dedup, exact.run_dedup, exact.estimate_dedup, gives="masks"),
    Step("signatures", _signatures, near.run_signatures, near.estimate_signatures, _has_near),
    Step("buckets", _buckets, near.run_buckets, near.estimate_buckets, _has_near),
    Step("candidates", _candidates, near.run_candidates, near.estimate_candidates, _has_near),
    Step("near", _near, near.run_near, near.estimate_near, _has_near, gives="masks"),
    Step(
        "overlaps",
        _overlaps,
        decontaminate.run_overlaps,
        decontaminate.estimate_overlaps,
        _has_sets,
    ),
    Step(
        "decontaminate",
        _decontaminate,
        decontaminate.run_decontaminate,
        decontaminate.estimate_decontaminate,
        _has_sets,
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
    """Go along the chain.

    Args:
        corpus: the corpus to prepare.
        visit: receives each stage; returns the records of all its tasks, or None to stop there.

    Returns:
        Whether the end was reached.

    Raises:
        DataError: the filters left no document.
    """
    progress = Progress(corpus)
    for step in steps(corpus.config):
        tasks = step.tasks(progress, progress.folder(step.name))
        records = visit(Stage(step.name, tasks, step.run))
        if records is None:
            return False
        progress.add(step, tasks, records)
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
