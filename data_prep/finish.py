"""Stage index: gathers all shards into the dataset's index, and tells in `report.json` how it went.

Without the report the folder is no finished dataset. The datasheet comes after it: a page that
cannot be made is a warning, and `python -m data_prep datasheet` makes it again.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep import index
from data_prep.corpus import Corpus
from data_prep.counts import Counts, table
from data_prep.datasheet import report, sheet
from data_prep.datasheet.report import REPORT_FILE
from data_prep.stage import Done, Task, make_key
from pipeline.runtime.files import write_json_atomic

logger = logging.getLogger(__name__)


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
    """Writes index, report and datasheet, and removes shards of an earlier plan."""
    job, output = task.payload, task.folder
    sharded = job.records["shards"]
    index.write(output, job.tokenizer_path, sharded, job.corpus.config.sources)
    _remove_stale(output / index.SHARD_FOLDER, {name for done in sharded for name in done.files})
    made = report.make(job.corpus, job.names, job.masks, job.records)
    write_json_atomic(output / REPORT_FILE, made)
    try:
        sheet.write(output)
    except Exception:
        # A dataset that took days is not given up for a page about it.
        logger.exception(
            "the datasheet could not be made; the dataset is complete, and "
            "`python -m data_prep datasheet %s` tries again", output,
        )  # fmt: skip
    names = (job.tokenizer_path.name, "index.npz", "index.json", REPORT_FILE)
    return {"fingerprint": made["fingerprint"]}, [output / name for name in names]


def log_report(made: dict[str, Any]) -> None:
    """Shows a report to the person who waited for it."""
    counts = {name: Counts.total([stage]) for name, stage in made["stages"].items()}
    logger.info("%s", table(counts))
    for name, count in made["notes"].items():
        logger.info("%s: %s", name, f"{count:,}")
    for name, source in made["sources"].items():
        logger.info(
            "source %s: %s tokens, %.3f%% of them unknown, %.3f%% bytes of rare characters",
            name, f"{source['tokens']:,}", 100 * source["unknown_share"],
            100 * source["byte_piece_share"],
        )  # fmt: skip
    for name, found in made["decontaminate"].get("sets", {}).items():
        logger.info(
            "evaluation set %s: %s documents share text with it; %s items were looked for, %s are "
            "too short for that", name, f"{found['documents']:,}", f"{found['items']:,}",
            f"{found['too short']:,}",
        )  # fmt: skip
    for split, total in made["totals"].items():
        logger.info(
            "%s: %s tokens, %s documents, %.2f bytes a token",
            split, f"{total['tokens']:,}", f"{total['documents']:,}",
            total["text_bytes"] / total["tokens"],
        )  # fmt: skip
    logger.info(
        "%d shards, %d blocks, vocabulary %d, unigram entropy %.3f nats\nfingerprint %s",
        made["num_shards"], made["num_blocks"], made["vocab_size"],
        made["unigram_entropy_nats"], made["fingerprint"],
    )  # fmt: skip


def _remove_stale(folder: Path, current: set[str]) -> None:
    markers = {f"{name.split('-')[1].removesuffix('.tar')}.done.json" for name in current
               if name.endswith(".tar")}  # fmt: skip
    for path in sorted(folder.iterdir()):
        if path.name not in current | markers:
            logger.info("removing %s: it belongs to an earlier plan of shards", path)
            path.unlink()
