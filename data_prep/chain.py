"""The chain of stages: their order, when each runs, and what its tasks need of the stages before.

`STEPS` is the only place with the order. `walk` goes along it; its caller decides what happens at
each stage: `run` does all tasks, an array task does its share of one stage, `look` only reads
records.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from data_prep import documents, index, ingest, shards
from data_prep.config import PrepConfig
from data_prep.corpus import Corpus, Progress
from data_prep.decontaminate import stages as evaluated
from data_prep.dedup import exact, lines, near
from data_prep.stage import (
    INGEST_STAGES,
    Done,
    Estimate,
    Function,
    Size,
    Stage,
    StageCounts,
    StageTask,
    finished,
    table,
)
from data_prep.tokenizer import vocabulary
from pipeline.errors import DataError


@dataclass(frozen=True)
class Step:
    """A stage, before its tasks are known."""

    name: str
    tasks: Callable[[Progress, Path], Sequence[StageTask[Any]]]
    """Makes the tasks from the progress so far and the stage's folder."""
    run: Function[Any]
    wanted: Callable[[PrepConfig], Any] = lambda config: True
    produces: Literal["", "texts", "masks", "tokenizer", "shards"] = ""
    """Results that the report is about; empty if only the next stages use them."""
    consumes: str = ""
    """Earlier stages of which it reads more than texts: names, or TEXTS and MASKS for the stages
    that wrote those last."""


def _eval_sets(progress: Progress, folder: Path) -> list[StageTask[Any]]:
    files, config = progress.corpus.eval_sets, progress.corpus.config
    return [evaluated.eval_set_task(files, config.decontaminate, config.clean, folder)]


def _ingest(progress: Progress, folder: Path) -> list[StageTask[Any]]:
    return ingest.tasks(progress.corpus.pieces, progress.corpus.config, folder)


def _line_parts(progress: Progress, folder: Path) -> list[StageTask[Any]]:
    name = "line_hashes"
    return lines.part_tasks(progress.tasks[name], progress.records[name], folder)


def _exact(progress: Progress, folder: Path) -> list[StageTask[Any]]:
    ingested = progress.records["ingest"]
    num_read = sum(done.result["ingest"]["documents_in"] for done in ingested)
    return exact.exact_tasks(progress.written, progress.pieces, num_read, folder)


def _dedup(progress: Progress, folder: Path) -> list[StageTask[Any]]:
    tasks, compared = progress.tasks["exact"], progress.records["exact"]
    return exact.dedup_tasks(tasks, compared, progress.written, folder)


def _candidates(progress: Progress, folder: Path) -> list[StageTask[Any]]:
    upstream = (progress.records["signatures"], progress.kept, progress.records["buckets"])
    return near.candidate_tasks(progress.tasks["buckets"], upstream, folder)


def _near(progress: Progress, folder: Path) -> list[StageTask[Any]]:
    groups, compared = progress.tasks["candidates"], progress.records["candidates"]
    config = progress.corpus.config
    thresholds = tuple(config.near_threshold_of(piece.source) for piece in progress.corpus.pieces)
    return near.near_tasks(groups, compared, progress.kept, thresholds, folder)


_HAS_LINES = attrgetter("dedup.lines")
_HAS_NEAR = attrgetter("dedup.near_duplicates")
_HAS_SETS = attrgetter("decontaminate.sets")
STEPS = (
    # Evaluation sets come first, so that an unusable one stops a run before hours of work.
    Step("eval_sets", _eval_sets, evaluated.run_eval_sets, _HAS_SETS),
    Step("ingest", _ingest, ingest.run, produces="texts"),
    Step("line_hashes", lines.hash_tasks, lines.run_hashes, _HAS_LINES),
    Step("line_parts", _line_parts, lines.run_part, _HAS_LINES, consumes="line_hashes"),
    Step("lines", lines.rewrite_tasks, lines.run_rewrite, _HAS_LINES, produces="texts",
         consumes="ingest line_hashes line_parts"),
    Step("exact", _exact, exact.run_exact, consumes="TEXTS"),
    Step("dedup", _dedup, exact.run_dedup, produces="masks", consumes="TEXTS exact"),
    Step("signatures", near.signature_tasks, near.run_signatures, _HAS_NEAR, consumes="TEXTS"),
    Step("buckets", near.bucket_tasks, near.run_buckets, _HAS_NEAR, consumes="signatures MASKS"),
    Step("candidates", _candidates, near.run_candidates, _HAS_NEAR,
         consumes="signatures buckets MASKS"),
    Step("near", _near, near.run_near, _HAS_NEAR, produces="masks",
         consumes="TEXTS signatures candidates MASKS"),
    Step("overlaps", evaluated.overlap_tasks, evaluated.run_overlaps, _HAS_SETS,
         consumes="eval_sets MASKS"),
    Step("decontaminate", evaluated.tasks, evaluated.run, _HAS_SETS, produces="masks",
         consumes="TEXTS eval_sets overlaps MASKS"),
    Step("tokenizer", vocabulary.tasks, vocabulary.run, produces="tokenizer",
         consumes="TEXTS MASKS"),
    Step("shards", shards.tasks, shards.run, produces="shards", consumes="MASKS tokenizer"),
    Step("index", index.tasks, index.run, consumes="tokenizer shards"),
)  # fmt: skip


def estimates(size: Size) -> dict[str, Estimate]:
    """Estimate the cost of the stages that a config asks for, in order."""
    modules = (evaluated, ingest, lines, exact, near, vocabulary, shards, index)
    every = {name: made for module in modules for name, made in module.estimates(size).items()}
    return {step.name: every[step.name] for step in steps(size.config)}


def steps(config: PrepConfig) -> list[Step]:
    """List the stages that a config asks for, in order."""
    return [step for step in STEPS if step.wanted(config)]


def walk(
    corpus: Corpus,
    visit: Callable[[Stage], list[Done] | None],
    *,
    only_look: bool = False,
    warns: bool = True,
) -> bool:
    """Go along the chain; return whether the end was reached.

    Args:
        corpus: the corpus to prepare.
        visit: receives each stage; returns the records of all its tasks, or None to stop there.
        only_look: nothing is done, so a corpus from which nothing can be made is no error.
        warns: about the input; of an array one task does.

    Raises:
        DataError: too much of a source could not be read, or no document is left.
    """
    progress = Progress(corpus)
    num_documents = None
    for step in steps(corpus.config):
        tasks = step.tasks(progress, progress.folder(step.name))
        records = visit(Stage(step.name, tasks, step.run, progress.files(step.consumes.split())))
        if records is None:
            return False
        progress.add(step.name, tasks, records, step.produces)
        num_documents = _reconcile(step.name, records, num_documents)
        if step.name == "ingest" and not only_look:
            _check_read(progress, warns=warns)
            _refuse_empty(progress)
    return True


def _reconcile(stage: str, records: list[Done], came: int | None) -> int | None:
    """Follow the number of documents through a stage; `came` from the one before.

    Raises:
        DataError: documents appeared, or went without a reason.
    """
    for name in INGEST_STAGES if stage == "ingest" else (stage,):
        if name not in records[0].result or "documents_in" not in records[0].result[name]:
            return came  # it neither takes nor drops text
        counts = StageCounts.total(done.result[name] for done in records)
        if not counts.add_up(came):
            raise DataError(
                f"documents do not add up in stage {name}: {came or counts.documents_in:,} came "
                f"from the stage before, it read {counts.documents_in:,}, rejected "
                f"{counts.documents_rejected:,} with a reason, and gave {counts.documents_out:,}; "
                "files of two runs may be mixed: remove the folder work/ and run again"
            )
        came = counts.documents_out
    return came


def look(corpus: Corpus) -> list[tuple[Stage, list[Done | None]]]:
    """Read the records of all stages up to the first incomplete one; None for unfinished tasks."""
    seen: list[tuple[Stage, list[Done | None]]] = []

    def visit(stage: Stage) -> list[Done] | None:
        records = [finished(task) for task in stage.tasks]
        seen.append((stage, records))
        done = [record for record in records if record is not None]
        return done if len(done) == len(records) else None

    walk(corpus, visit, only_look=True)
    return seen


def _check_read(progress: Progress, *, warns: bool) -> None:
    records = zip(progress.corpus.pieces, progress.records["ingest"], strict=True)
    for source, parts in groupby(records, key=lambda part: part[0].source):
        documents.check_losses(source, (done.result["read"] for _, done in parts), warns=warns)


def _refuse_empty(progress: Progress) -> None:
    records = progress.records["ingest"]
    counts = {
        name: StageCounts.total(done.result[name] for done in records) for name in INGEST_STAGES
    }
    if not counts["filter"].documents_out:
        raise DataError(
            f"the corpus is empty: the filters left no document\n{table(counts)}\n"
            f"see {progress.folder('ingest')}/*.rejected.jsonl.zst for the reasons, then correct "
            "sources or filters"
        )
