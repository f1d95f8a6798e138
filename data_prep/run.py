"""`python -m data_prep run`: all stages in order, each continuing where an earlier run stopped."""

import json
import logging
import os
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_prep import dedup, index, ingest, inputs, near_cluster, sample, vocabulary
from data_prep import shards as shard_stage
from data_prep.config import PrepConfig
from data_prep.counts import Counts, table
from data_prep.given_tokenizer import read_given
from data_prep.stage import Done, make_key, run_stage
from pipeline.config.load import provenance, resolved_text
from pipeline.data.shards import read_index
from pipeline.errors import DataError
from pipeline.runtime.files import write_atomic, write_json_atomic

logger = logging.getLogger(__name__)

REPORT_FILE = "report.json"


def run(config: PrepConfig, *, replace: bool = False) -> dict[str, Any]:
    """Prepares a dataset and returns its report.

    Args:
        config: what to prepare.
        replace: allow a finished dataset made from other inputs or settings to be replaced.

    Raises:
        DataError: the input is unusable, or `output_dir` holds another finished dataset.
    """
    output = Path(config.output_dir)
    pieces = _find_pieces(config)
    settings = asdict(config)
    del settings["workers"], settings["output_dir"]
    given = read_given(config.tokenizer)
    key = make_key(settings, [asdict(piece) for piece in pieces], given and given.sha256)
    _refuse_other_dataset(output, key, replace=replace)
    output.mkdir(parents=True, exist_ok=True)
    write_atomic(output / "resolved.yaml", resolved_text(config).encode())

    work = output / "work"
    workers = config.workers or os.cpu_count() or 1
    ingest_tasks = ingest.tasks(pieces, config.clean, config.filters, work / "ingest")
    ingested = run_stage("ingest", ingest_tasks, ingest.run, workers)
    stages = {name: _total(ingested, name) for name in ("ingest", "normalise", "filter")}
    _refuse_empty(stages, work / "ingest")
    names = [f"{i:05d}" for i in range(len(pieces))]
    [deduplicated] = run_stage(
        "dedup", [dedup.task(ingested, work / "ingest", names, work / "dedup")], dedup.run, 1
    )
    stages["dedup"] = _total([deduplicated], "dedup")
    kept_folder = work / "dedup"
    if config.dedup.near_duplicates:
        deduplicated = near_cluster.run_stages(
            work, names, (ingested, deduplicated), config.dedup, workers
        )
        stages["near"] = _total([deduplicated], "near")
        kept_folder = work / "near"
    sources = tuple(piece.source for piece in pieces)
    kept = sample.Kept(work / "ingest", kept_folder, tuple(names), sources)
    vocabulary_task = vocabulary.task(
        kept, config.tokenizer, given, ingested, deduplicated, work / "tokenizer"
    )
    [trained] = run_stage("tokenizer", [vocabulary_task], vocabulary.run, 1)
    shard_job = shard_stage.ShardJob(
        kept.ingest_folder, kept.keep_folder, vocabulary.tokenizer_path(vocabulary_task),
        kept.names, config.shards,
    )  # fmt: skip
    groups = shard_stage.plan([int(kept.sizes(n).sum()) for n in names], config.shards.shard_mb)
    shard_tasks = shard_stage.tasks(
        groups, shard_job, (ingested, deduplicated, trained), output / index.SHARD_FOLDER
    )
    sharded = run_stage("shards", shard_tasks, shard_stage.run, workers)
    stages["shards"] = _total(sharded, "shards")
    index.write(output, shard_job.tokenizer_path, sharded)
    _remove_stale(output / index.SHARD_FOLDER, {name for done in sharded for name in done.files})
    notes = Counter[str]()
    for done in ingested:
        notes.update(done.result["notes"])
    found = {name: n for name, n in notes.items() if n}
    return _report(output, key, stages, trained, found, index.tokens_by_source(sharded))


def _find_pieces(config: PrepConfig) -> list[inputs.Piece]:
    pieces = []
    for source in config.sources:
        found = inputs.find(source)
        if found.ignored:
            shown = ", ".join(found.ignored[:3])
            logger.warning(
                "source %s: %d files are no text by their suffix and are left out, such as %s",
                source.name, len(found.ignored), shown,
            )  # fmt: skip
        if not found.files:
            raise DataError(
                f"source {source.name!r}: no text files in {list(source.inputs)}; "
                f"expected {', '.join(inputs.TEXT_SUFFIXES)}, plain, .gz, .zst or .xz"
            )
        pieces += inputs.pieces(source, found.files, config.piece_mb * 1_000_000)
    return pieces


def _refuse_other_dataset(output: Path, key: str, *, replace: bool) -> None:
    try:
        report = json.loads((output / REPORT_FILE).read_bytes())
    except FileNotFoundError:
        return
    if report.get("key") != key and not replace:
        raise DataError(
            f"{output} holds a finished dataset made from other inputs or settings (fingerprint "
            f"{report.get('fingerprint')}); choose another output_dir, or pass --replace"
        )
    # From here until the new report is written the folder is no finished dataset.
    if report.get("key") != key:
        (output / "index.json").unlink(missing_ok=True)
        (output / REPORT_FILE).unlink()


def _refuse_empty(stages: dict[str, Counts], folder: Path) -> None:
    if not stages["filter"].documents_out:
        raise DataError(
            f"the corpus is empty: no document is left after the filters\n{table(stages)}\n"
            f"look at {folder}/*.rejected.jsonl, or correct sources or filters"
        )


def _total(records: list[Done], stage: str) -> Counts:
    return Counts.total(done.result[stage] for done in records)


def _remove_stale(folder: Path, current: set[str]) -> None:
    markers = {f"{name.split('-')[1].removesuffix('.tar')}.done.json" for name in current
               if name.endswith(".tar")}  # fmt: skip
    for path in sorted(folder.iterdir()):
        if path.name not in current | markers:
            logger.info("removing %s: it belongs to an earlier plan of shards", path)
            path.unlink()


def _report(
    output: Path,
    key: str,
    stages: dict[str, Counts],
    trained: Done,
    notes: dict[str, int],
    sources: dict[str, dict[str, float]],
) -> dict[str, Any]:
    made = read_index(output)
    report = {
        "key": key,
        "fingerprint": made.fingerprint,
        "vocab_size": made.vocab_size,
        "tokenizer_sample_bytes": trained.result["sample_bytes"],
        "tokenizer_sample": trained.result["sample"],
        "sources": sources,
        "unigram_entropy_nats": made.unigram_entropy_nats,
        "totals": made.totals,
        "num_shards": len(made.shards),
        "num_blocks": len(made.blocks),
        "stages": {name: counts.to_json() for name, counts in stages.items()},
        "notes": notes,
        "provenance": provenance(),
    }
    write_json_atomic(output / REPORT_FILE, report)
    logger.info("%s", table(stages))
    for name, count in notes.items():
        logger.info("%s: %s", name, f"{count:,}")
    for name, source in sources.items():
        logger.info(
            "source %s: %s tokens, %.3f%% of them unknown, %.3f%% bytes of rare characters",
            name, f"{source['tokens']:,}", 100 * source["unknown_share"],
            100 * source["byte_piece_share"],
        )  # fmt: skip
    for split, total in made.totals.items():
        logger.info(
            "%s: %s tokens, %s documents, %.2f bytes a token",
            split, f"{total['tokens']:,}", f"{total['documents']:,}",
            total["text_bytes"] / total["tokens"],
        )  # fmt: skip
    logger.info(
        "%s: %d shards, %d blocks, vocabulary %d, unigram entropy %.3f nats\nfingerprint %s",
        output, len(made.shards), len(made.blocks), made.vocab_size, made.unigram_entropy_nats,
        made.fingerprint,
    )  # fmt: skip
    return report
