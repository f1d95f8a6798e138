"""`python -m data_prep run`: all stages in order, each continuing where an earlier run stopped."""

import json
import logging
import os
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from data_prep import dedup, index, ingest, inputs, lines, near, near_cluster, vocabulary
from data_prep import shards as shard_stage
from data_prep.config import PrepConfig
from data_prep.counts import Counts, table
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
    key = make_key(settings, [asdict(piece) for piece in pieces])
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
    notes = Counter[str]()
    for done in ingested:
        notes.update(done.result["notes"])
    del notes[dedup.REPEATED_IDS]  # within a piece; the next but one stage counts over all
    folder = work / "ingest"
    if config.dedup.lines:
        ingested = _drop_lines(config, names, ingested, work, workers)
        stages["lines"], folder = _total(ingested, "lines"), work / "lines"
    exact = dedup.exact_tasks(
        ingested, names, folder, stages["ingest"].documents_in, work / "exact"
    )
    found = run_stage("exact", exact, dedup.run_exact, workers)
    [deduplicated] = run_stage(
        "dedup", dedup.dedup_tasks(exact, found, ingested, work / "dedup"), dedup.run_dedup, 1
    )
    stages["dedup"] = _total([deduplicated], "dedup")
    notes.update(deduplicated.result["notes"])
    _warn_of_repeated_ids(deduplicated.result)
    kept_folder, kept_bytes = work / "dedup", stages["dedup"].bytes_out
    if config.dedup.near_duplicates:
        deduplicated = _drop_near(config, names, (ingested, deduplicated), (work, folder), workers)
        stages["near"] = _total([deduplicated], "near")
        kept_folder, kept_bytes = work / "near", stages["near"].bytes_out
    job = vocabulary.VocabularyJob(folder, kept_folder, tuple(names), kept_bytes, config.tokenizer)
    vocabulary_task = vocabulary.task(job, ingested, deduplicated, work / "tokenizer")
    [trained] = run_stage("tokenizer", [vocabulary_task], vocabulary.run, 1)
    shard_job = shard_stage.ShardJob(
        job.ingest_folder, job.dedup_folder, vocabulary_task.path(".model"), job.names,
        config.shards,
    )  # fmt: skip
    groups = shard_stage.plan(_kept_bytes(job), config.shards.shard_mb)
    shard_tasks = shard_stage.tasks(
        groups, shard_job, (ingested, deduplicated, trained), output / index.SHARD_FOLDER
    )
    sharded = run_stage("shards", shard_tasks, shard_stage.run, workers)
    stages["shards"] = _total(sharded, "shards")
    index.write(output, shard_job.tokenizer_path, sharded, trained.result["vocab_size"])
    _remove_stale(output / index.SHARD_FOLDER, {name for done in sharded for name in done.files})
    return _report(output, key, stages, trained, {name: n for name, n in notes.items() if n})


def _drop_lines(
    config: PrepConfig, names: list[str], ingested: list[Done], work: Path, workers: int
) -> list[Done]:
    hash_tasks = lines.hash_tasks(
        ingested, names, work / "ingest", config.dedup.line_min_chars, work / "line_hashes"
    )
    hashed = run_stage("line hashes", hash_tasks, lines.run_hashes, workers)
    part_tasks = lines.part_tasks(hash_tasks, hashed, work / "line_parts")
    found = run_stage("line parts", part_tasks, lines.run_part, workers)
    tasks = lines.rewrite_tasks(
        (hash_tasks, part_tasks), (ingested, hashed, found), config.clean.min_chars, work / "lines"
    )
    return run_stage("lines", tasks, lines.run_rewrite, workers)


def _drop_near(
    config: PrepConfig, names: list[str], upstream: tuple[list[Done], Done],
    folders: tuple[Path, Path], workers: int,
) -> Done:  # fmt: skip
    (ingested, deduplicated), (work, documents) = upstream, folders
    signature_tasks = near.signature_tasks(
        ingested, names, documents, config.dedup, work / "signatures"
    )
    signed = run_stage("signatures", signature_tasks, near.run_signatures, workers)
    place = near.Place(documents, work / "dedup", work / "signatures", tuple(names))
    bucket_tasks = near.bucket_tasks(
        signed, deduplicated, place, config.dedup.bands, work / "buckets"
    )
    paired = run_stage("buckets", bucket_tasks, near.run_buckets, workers)
    candidate_tasks = near_cluster.candidate_tasks(
        bucket_tasks, (signed, deduplicated, paired), work / "candidates"
    )
    compared = run_stage("candidates", candidate_tasks, near_cluster.run_candidates, workers)
    near_tasks = near_cluster.near_tasks(
        candidate_tasks, compared, deduplicated, config.dedup.threshold, work / "near"
    )
    [done] = run_stage("near", near_tasks, near_cluster.run_near, 1)
    return done


def _warn_of_repeated_ids(result: dict[str, Any]) -> None:
    if repeated := result["notes"][dedup.REPEATED_IDS]:
        logger.warning(
            "%s documents have the id of an earlier one, such as %s; all are kept, but splits and "
            "samples treat them alike", f"{repeated:,}", ", ".join(result["repeated_ids"]),
        )  # fmt: skip


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


def _kept_bytes(job: vocabulary.VocabularyJob) -> list[int]:
    """Text bytes of every piece that deduplication kept."""
    return [
        int(
            np.load(job.ingest_folder / f"{name}.bytes.npy")[
                np.load(job.dedup_folder / f"{name}.keep.npy")
            ].sum()
        )
        for name in job.names
    ]


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
    output: Path, key: str, stages: dict[str, Counts], trained: Done, notes: dict[str, int]
) -> dict[str, Any]:
    made = read_index(output)
    report = {
        "key": key,
        "fingerprint": made.fingerprint,
        "vocab_size": made.vocab_size,
        "tokenizer_sample_bytes": trained.result["sample_bytes"],
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
