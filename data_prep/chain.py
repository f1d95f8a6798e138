"""The chain of stages: which tasks there are, and what each needs of those before.

`chain` is the only place that knows the order. Whoever walks along it decides what happens at each
stage: `run` does all tasks, an array task does its share of one stage, `status` only looks.
"""

from collections.abc import Callable, Generator
from pathlib import Path

from data_prep import finish, ingest, shards
from data_prep.config import PrepConfig
from data_prep.corpus import Corpus
from data_prep.counts import Counts, table
from data_prep.decontaminate import decide, eval_sets, overlaps
from data_prep.dedup import exact, lines, near, near_cluster
from data_prep.index import SHARD_FOLDER
from data_prep.stage import Done, Stage
from data_prep.tokenizer import sample, vocabulary
from pipeline.errors import DataError

Chain = Generator[Stage, list[Done], None]
InnerChain = Generator[Stage, list[Done], list[Done]]


def stage_names(config: PrepConfig) -> list[str]:
    """Names of the stages that a config asks for, in order."""
    line_stages = ["line_hashes", "line_parts", "lines"] if config.dedup.lines else []
    near_stages = (
        ["signatures", "buckets", "candidates", "near"] if config.dedup.near_duplicates else []
    )
    # First of all, so that a set that cannot be used stops a run before it has begun.
    first, later = (
        (["eval_sets"], ["overlaps", "decontaminate"]) if config.decontaminate.sets else ([], [])
    )
    return [
        *first, "ingest", *line_stages, "exact", "dedup", *near_stages, *later, "tokenizer",
        "shards", "index",
    ]  # fmt: skip


def walk(corpus: Corpus, visit: Callable[[Stage], list[Done] | None]) -> bool:
    """Goes along the chain.

    Args:
        corpus: what is prepared.
        visit: is handed each stage; returns the records of all its tasks, or None to stop there.

    Returns:
        Whether the end was reached.
    """
    steps = chain(corpus)
    stage = next(steps)
    while True:
        records = visit(stage)
        if records is None:
            return False
        try:
            stage = steps.send(records)
        except StopIteration:
            return True


def chain(corpus: Corpus) -> Chain:
    """Yields the stages, one after another, and takes the records of each.

    Raises:
        DataError: nothing is left to go on with.
    """
    config, work = corpus.config, corpus.work
    names = tuple(f"{i:05d}" for i in range(len(corpus.pieces)))
    evaluated = []
    if config.decontaminate.sets:
        to_read = eval_sets.eval_set_task(
            corpus.eval_sets, config.decontaminate, config.clean, work / "eval_sets"
        )
        evaluated = yield Stage("eval_sets", [to_read], eval_sets.run_eval_sets)
    ingested = yield Stage(
        "ingest",
        ingest.tasks(corpus.pieces, config.clean, config.filters, work / "ingest"),
        ingest.run,
    )
    _refuse_empty(ingested, work / "ingest")
    records = {"ingest": ingested}
    texts, written = work / "ingest", ingested
    if config.dedup.lines:
        texts = work / "lines"
        written = records["lines"] = yield from _lines(corpus, names, ingested)
    masks = {"dedup": work / "dedup"}
    to_find = exact.exact_tasks(written, names, texts, _num_read(ingested), work / "exact")
    found = yield Stage("exact", to_find, exact.run_exact)
    [kept] = records["dedup"] = yield Stage(
        "dedup", exact.dedup_tasks(to_find, found, written, work / "dedup"), exact.run_dedup
    )
    if config.dedup.near_duplicates:
        masks["near"] = work / "near"
        place = near.Place(texts, work / "dedup", work / "signatures", names)
        [kept] = records["near"] = yield from _near(corpus, place, written, kept)
    if evaluated:
        [kept] = records["decontaminate"] = yield from _decontaminate(
            corpus, names, (written, kept, evaluated[0]), (texts, list(masks.values())[-1])
        )
        masks["decontaminate"] = work / "decontaminate"
    left = sample.Kept(
        texts, list(masks.values())[-1], names, tuple(piece.source for piece in corpus.pieces)
    )
    to_train = vocabulary.task(
        left, config.tokenizer, corpus.tokenizer, written, kept, work / "tokenizer"
    )
    [trained] = records["tokenizer"] = yield Stage("tokenizer", [to_train], vocabulary.run)
    tokenizer_path = vocabulary.tokenizer_path(to_train)
    shard_job = shards.ShardJob(texts, left.keep_folder, tokenizer_path, names, config.shards)
    groups = shards.plan([int(left.sizes(name).sum()) for name in names], config.shards.shard_mb)
    records["shards"] = yield Stage(
        "shards",
        shards.tasks(groups, shard_job, (written, kept, trained), corpus.output / SHARD_FOLDER),
        shards.run,
    )
    finish_job = finish.FinishJob(corpus, names, masks, tokenizer_path, records)
    yield Stage("index", [finish.task(finish_job)], finish.run)


def _num_read(ingested: list[Done]) -> int:
    return sum(int(done.result["ingest"]["documents_in"]) for done in ingested)


def _lines(corpus: Corpus, names: tuple[str, ...], ingested: list[Done]) -> InnerChain:
    """Stages line_hashes, line_parts and lines; returns the records of the last."""
    work, config = corpus.work, corpus.config
    to_hash = lines.hash_tasks(
        ingested, names, work / "ingest", config.dedup.line_min_chars, work / "line_hashes"
    )
    hashed = yield Stage("line_hashes", to_hash, lines.run_hashes)
    parts = lines.part_tasks(to_hash, hashed, work / "line_parts")
    found = yield Stage("line_parts", parts, lines.run_part)
    to_write = lines.rewrite_tasks(
        (to_hash, parts), (ingested, hashed, found), config.clean.min_chars, work / "lines"
    )
    return (yield Stage("lines", to_write, lines.run_rewrite))


def _near(corpus: Corpus, place: near.Place, written: list[Done], deduplicated: Done) -> InnerChain:
    """Stages signatures, buckets, candidates and near; returns the records of the last."""
    work, config = corpus.work, corpus.config.dedup
    to_sign = near.signature_tasks(written, place, config)
    signed = yield Stage("signatures", to_sign, near.run_signatures)
    buckets = near.bucket_tasks(signed, deduplicated, place, config.bands, work / "buckets")
    paired = yield Stage("buckets", buckets, near.run_buckets)
    groups = near_cluster.candidate_tasks(
        buckets, (signed, deduplicated, paired), work / "candidates"
    )
    compared = yield Stage("candidates", groups, near_cluster.run_candidates)
    to_decide = near_cluster.near_tasks(
        groups, compared, deduplicated, config.threshold, work / "near"
    )
    return (yield Stage("near", to_decide, near_cluster.run_near))


def _decontaminate(
    corpus: Corpus,
    names: tuple[str, ...],
    upstream: tuple[list[Done], Done, Done],
    folders: tuple[Path, Path],
) -> InnerChain:
    """Stages overlaps and decontaminate; returns the records of the last.

    `upstream`: records of the stage that wrote the texts, of the last one with masks, and of
    eval_sets; `folders`: of texts and masks.
    """
    work, config = corpus.work, corpus.config.decontaminate
    _, kept, evaluated = upstream
    places = (*folders, work / "eval_sets")
    to_search = overlaps.overlap_tasks(upstream, names, places, config, work / "overlaps")
    searched = yield Stage("overlaps", to_search, overlaps.run_overlaps)
    job = decide.DecontaminateJob(
        *places, work / "overlaps", names, evaluated.result["sets"], config
    )
    to_decide = decide.decontaminate_task(job, (kept, evaluated, searched), work / "decontaminate")
    return (yield Stage("decontaminate", [to_decide], decide.run_decontaminate))


def _refuse_empty(ingested: list[Done], folder: Path) -> None:
    stages = {name: Counts.total(done.result[name] for done in ingested) for name in ingest.STAGES}
    if not stages["filter"].documents_out:
        raise DataError(
            f"the corpus is empty: no document is left after the filters\n{table(stages)}\n"
            f"look at {folder}/*.rejected.jsonl.zst, or correct sources or filters"
        )
