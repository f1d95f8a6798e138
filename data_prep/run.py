"""The work of `data_prep run`: all stages in order, or one task's share of one stage."""

import json
import logging
import os
from collections.abc import Iterator
from typing import Any

from data_prep import corpus
from data_prep.chain import steps, walk
from data_prep.config import PrepConfig
from data_prep.corpus import RESOLVED_FILE, Corpus
from data_prep.datasheet.gather import REPORT_FILE
from data_prep.lease import held, this_process
from data_prep.stage import Done, Stage, StageCounts, finished, run_tasks, table
from pipeline.config.load import resolved_text
from pipeline.errors import ConfigError, DataError
from pipeline.runtime.files import make_folder, write_atomic

logger = logging.getLogger(__name__)


def run(config: PrepConfig, *, replace: bool = False) -> dict[str, Any]:
    """Prepare a dataset, continuing where an earlier run stopped, and return its report.

    `replace` allows a finished dataset made from other inputs or settings to be replaced.

    Raises:
        DataError: the input is unusable, `output_dir` holds another finished dataset, or what a
            stage reads is not what was written.
        BusyError: another run writes to `output_dir`.
    """
    given = corpus.find(config)
    workers = config.workers or available_cores()
    with held(given.lease, this_process(given.key, None)) as hosts:
        _open_output(given, replace=replace)
        walk(given, lambda stage: run_tasks(stage, workers, hosts=hosts))
    report: dict[str, Any] = json.loads((given.output / REPORT_FILE).read_bytes())
    return report


def run_part(
    config: PrepConfig, name: str, *, rank: int = 0, world: int = 1, replace: bool = False
) -> None:
    """Do part `rank` of `world` of one stage, as an array task; earlier stages must be complete.

    Results do not depend on the number of parts.

    Raises:
        ConfigError: the config has no such stage, or rank and world do not fit.
        DataError: an earlier stage is not complete; see also `run`.
        BusyError: another run, or the same part of this one, writes to `output_dir`.
    """
    names = [step.name for step in steps(config)]
    if name not in names:
        raise ConfigError(f"--stage {name}: this config has the stages {', '.join(names)}")
    if not 0 <= rank < world:
        raise ConfigError(f"--rank {rank} --world {world}: expected 0 <= rank < world")
    given = corpus.find(config)
    with held(given.lease, this_process(given.key, (name, rank, world))) as hosts:
        # Another part of the last stage may have written the index just now.
        _open_output(given, replace=replace, is_last=name == names[-1])

        def visit(stage: Stage) -> list[Done] | None:
            if stage.name != name:
                return _records(stage, name)
            workers = config.workers or available_cores()
            done = run_tasks(stage, workers, rank, world, hosts=hosts)
            counts = (len(done), len(stage.tasks))
            logger.info("stage %s, part %d of %d: %d of %d tasks", name, rank, world, *counts)
            return None

        walk(given, visit, warns=rank == 0)


def available_cores() -> int:
    """Count the cores that this process may use, which SLURM can restrict."""
    return len(os.sched_getaffinity(0))


def _records(stage: Stage, wanted: str) -> list[Done]:
    """Read the records of all tasks of an earlier stage."""
    records = [finished(task) for task in stage.tasks]
    missing = [task for task, done in zip(stage.tasks, records, strict=True) if done is None]
    if missing:
        raise DataError(
            f"stage {wanted} needs stage {stage.name}, of which {len(missing)} of "
            f"{len(records)} tasks are not done with these inputs and settings, such as "
            f"{missing[0].marker}; run --stage {stage.name} first (`status` shows its progress)"
        )
    return [done for done in records if done is not None]


def _open_output(given: Corpus, *, replace: bool, is_last: bool = False) -> None:
    output = given.output
    report_path = output / REPORT_FILE
    try:
        report = json.loads(report_path.read_bytes())
    except FileNotFoundError:
        report = None
    same = report is not None and report.get("key") == given.key
    if report is not None and not same and not replace:
        raise DataError(
            f"{output} holds a finished dataset made from other inputs or settings (fingerprint "
            f"{report.get('fingerprint')}); choose another output_dir, or pass --replace"
        )
    if not same and not is_last:
        # From here until the new report is written the folder is not a finished dataset.
        (output / "index.json").unlink(missing_ok=True)
        report_path.unlink(missing_ok=True)
    make_folder(output)
    write_atomic(output / RESOLVED_FILE, resolved_text(given.config).encode())


def report_text(report: dict[str, Any]) -> Iterator[str]:
    """Format the most important numbers of a report."""
    yield table({name: StageCounts.total([c]) for name, c in report["stages"].items()})
    for name, count in report["notes"].items():
        yield f"{name}: {count:,}"
    for name, source in report["sources"].items():
        yield (
            f"source {name}: {source['tokens']:,} tokens, {100 * source['unknown_share']:.3f}% of "
            f"them unknown, {100 * source['byte_piece_share']:.3f}% bytes of rare characters"
        )
    for name, counts in report["decontaminate"].get("sets", {}).items():
        yield (
            f"evaluation set {name}: {counts['documents']:,} documents share text with it; "
            f"searched for {counts['items']:,} items, {counts['too short']:,} more are too short"
        )
    for split, total in report["totals"].items():
        bytes_a_token = total["text_bytes"] / total["tokens"]
        yield (
            f"{split}: {total['tokens']:,} tokens, {total['documents']:,} documents, "
            f"{bytes_a_token:.2f} bytes a token"
        )
    yield (
        f"{report['num_shards']} shards, {report['num_blocks']} blocks, vocabulary "
        f"{report['vocab_size']}, unigram entropy {report['unigram_entropy_nats']:.3f} nats"
    )
    yield f"fingerprint {report['fingerprint']}"
