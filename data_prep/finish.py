"""Stage index: gathers all shards into the dataset's index, and tells in `report.json` how it went.

The report is the last file to be written: without it the folder is no finished dataset.
"""

import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep import index, ingest
from data_prep.corpus import Corpus
from data_prep.counts import Counts, table
from data_prep.stage import Done, Task, make_key
from pipeline.config.load import provenance
from pipeline.data.shards import read_index
from pipeline.runtime.files import write_json_atomic

logger = logging.getLogger(__name__)

REPORT_FILE = "report.json"


@dataclass(frozen=True)
class FinishJob:
    """Everything that was done."""

    corpus: Corpus
    names: tuple[str, ...]
    """Of the pieces."""
    masks: dict[str, Path]
    """stage -> folder of its `NAME.keep.npy`, in order."""
    tokenizer_path: Path
    records: dict[str, list[Done]]
    """stage -> records of its tasks."""


def task(job: FinishJob) -> Task[FinishJob]:
    """The one task of this stage."""
    digests = {stage: [done.digest for done in records] for stage, records in job.records.items()}
    return Task("dataset", job.corpus.output, make_key(job.corpus.key, digests), job)


def run(task: Task[FinishJob]) -> tuple[dict[str, Any], list[Path]]:
    """Writes index and report, and removes shards of an earlier plan."""
    job, output = task.payload, task.folder
    sharded = job.records["shards"]
    index.write(output, job.tokenizer_path, sharded)
    _remove_stale(output / index.SHARD_FOLDER, {name for done in sharded for name in done.files})
    report = _report(job)
    write_json_atomic(output / REPORT_FILE, report)
    names = (job.tokenizer_path.name, "index.npz", "index.json", REPORT_FILE)
    return {"fingerprint": report["fingerprint"]}, [output / name for name in names]


def log_report(report: dict[str, Any]) -> None:
    """Shows a report to the person who waited for it."""
    counts = {name: Counts.total([stage]) for name, stage in report["stages"].items()}
    logger.info("%s", table(counts))
    for name, count in report["notes"].items():
        logger.info("%s: %s", name, f"{count:,}")
    for name, source in report["sources"].items():
        logger.info(
            "source %s: %s tokens, %.3f%% of them unknown, %.3f%% bytes of rare characters",
            name, f"{source['tokens']:,}", 100 * source["unknown_share"],
            100 * source["byte_piece_share"],
        )  # fmt: skip
    for split, total in report["totals"].items():
        logger.info(
            "%s: %s tokens, %s documents, %.2f bytes a token",
            split, f"{total['tokens']:,}", f"{total['documents']:,}",
            total["text_bytes"] / total["tokens"],
        )  # fmt: skip
    logger.info(
        "%d shards, %d blocks, vocabulary %d, unigram entropy %.3f nats\nfingerprint %s",
        report["num_shards"], report["num_blocks"], report["vocab_size"],
        report["unigram_entropy_nats"], report["fingerprint"],
    )  # fmt: skip


def _report(job: FinishJob) -> dict[str, Any]:
    made = read_index(job.corpus.output)
    [trained] = job.records["tokenizer"]
    notes = Counter[str]()
    for done in job.records["ingest"]:
        notes.update(done.result["notes"])
    stages = {
        name: Counts.total(done.result[name] for done in job.records["ingest"])
        for name in ingest.STAGES
    }
    for name in (*job.masks, "shards"):
        stages[name] = Counts.total(done.result[name] for done in job.records[name])
    return {
        "key": job.corpus.key,
        "fingerprint": made.fingerprint,
        "vocab_size": made.vocab_size,
        "tokenizer_sample_bytes": trained.result["sample_bytes"],
        "tokenizer_sample": trained.result["sample"],
        "sources": index.tokens_by_source(job.records["shards"]),
        "unigram_entropy_nats": made.unigram_entropy_nats,
        "totals": made.totals,
        "num_shards": len(made.shards),
        "num_blocks": len(made.blocks),
        "stages": {name: counts.to_json() for name, counts in stages.items()},
        "notes": {name: count for name, count in notes.items() if count},
        "provenance": provenance(),
    }


def _remove_stale(folder: Path, current: set[str]) -> None:
    markers = {f"{name.split('-')[1].removesuffix('.tar')}.done.json" for name in current
               if name.endswith(".tar")}  # fmt: skip
    for path in sorted(folder.iterdir()):
        if path.name not in current | markers:
            logger.info("removing %s: it belongs to an earlier plan of shards", path)
            path.unlink()
