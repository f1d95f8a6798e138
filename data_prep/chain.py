"""The chain of stages: which tasks there are, and what each needs of those before.

`chain` is the only place that knows the order. Whoever walks along it decides what happens at each
stage: `run` does all tasks, an array task does its share of one stage, `status` only looks.
"""

from collections.abc import Callable, Generator
from pathlib import Path

from data_prep import dedup, finish, ingest, near, near_cluster, sample, shards, vocabulary
from data_prep.config import PrepConfig
from data_prep.corpus import Corpus
from data_prep.counts import Counts, table
from data_prep.index import SHARD_FOLDER
from data_prep.stage import Done, Stage
from pipeline.errors import DataError

Chain = Generator[Stage, list[Done], None]
NearChain = Generator[Stage, list[Done], list[Done]]


def stage_names(config: PrepConfig) -> list[str]:
    """Names of the stages that a config asks for, in order."""
    near_stages = ["signatures", "buckets", "near"] if config.dedup.near_duplicates else []
    return ["ingest", "dedup", *near_stages, "tokenizer", "shards", "index"]


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
    ingested = yield Stage(
        "ingest",
        ingest.tasks(corpus.pieces, config.clean, config.filters, work / "ingest"),
        ingest.run,
    )
    _refuse_empty(ingested, work / "ingest")
    records = {"ingest": ingested}
    masks = {"dedup": work / "dedup"}
    [kept] = records["dedup"] = yield Stage(
        "dedup", [dedup.task(ingested, work / "ingest", names, work / "dedup")], dedup.run
    )
    if config.dedup.near_duplicates:
        masks["near"] = work / "near"
        [kept] = records["near"] = yield from _near(corpus, names, ingested, kept)
    left = sample.Kept(
        work / "ingest", list(masks.values())[-1], names,
        tuple(piece.source for piece in corpus.pieces),
    )  # fmt: skip
    to_train = vocabulary.task(
        left, config.tokenizer, corpus.tokenizer, ingested, kept, work / "tokenizer"
    )
    [trained] = records["tokenizer"] = yield Stage("tokenizer", [to_train], vocabulary.run)
    tokenizer_path = vocabulary.tokenizer_path(to_train)
    shard_job = shards.ShardJob(
        left.ingest_folder, left.keep_folder, tokenizer_path, names, config.shards
    )
    groups = shards.plan([int(left.sizes(name).sum()) for name in names], config.shards.shard_mb)
    records["shards"] = yield Stage(
        "shards",
        shards.tasks(groups, shard_job, (ingested, kept, trained), corpus.output / SHARD_FOLDER),
        shards.run,
    )
    finish_job = finish.FinishJob(corpus, names, masks, tokenizer_path, records)
    yield Stage("index", [finish.task(finish_job)], finish.run)


def _near(
    corpus: Corpus, names: tuple[str, ...], ingested: list[Done], deduplicated: Done
) -> NearChain:
    """Stages signatures, buckets and near; returns the records of the last."""
    work, config = corpus.work, corpus.config.dedup
    signed = yield Stage(
        "signatures",
        near.signature_tasks(ingested, names, work / "ingest", config, work / "signatures"),
        near.run_signatures,
    )
    place = near.BucketJob(work / "signatures", work / "dedup", names, 0, 0, 1)
    buckets = near.bucket_tasks(signed, deduplicated, place, config.bands, work / "buckets")
    paired = yield Stage("buckets", buckets, near.run_buckets)
    job = near_cluster.ClusterJob(
        work / "ingest", work / "dedup", work / "signatures",
        tuple(bucket.path(".pairs.npy") for bucket in buckets), names, config.threshold,
    )  # fmt: skip
    to_decide = near_cluster.task(job, signed, deduplicated, paired, work / "near")
    return (yield Stage("near", [to_decide], near_cluster.run))


def _refuse_empty(ingested: list[Done], folder: Path) -> None:
    stages = {name: Counts.total(done.result[name] for done in ingested) for name in ingest.STAGES}
    if not stages["filter"].documents_out:
        raise DataError(
            f"the corpus is empty: no document is left after the filters\n{table(stages)}\n"
            f"look at {folder}/*.rejected.jsonl.zst, or correct sources or filters"
        )
