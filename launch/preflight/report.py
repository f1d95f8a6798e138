"""The judge's command: gather the reports of all nodes, print the verdict, exclude bad nodes."""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from launch.cluster import ClusterConfig
from launch.preflight.check import read_block
from launch.preflight.judge import Evidence, Verdict, judge
from launch.preflight.record import STARTED_FILE, Record, read_bandwidth, read_record
from launch.records import append_history, exclude_nodes, excluded_nodes, newest_checkpoint
from launch.summary import table
from pipeline.checkpoints.manifest import FOLDER, published, read_manifest
from pipeline.config.runs import PretrainConfig
from pipeline.data.format import read_index
from pipeline.errors import CheckpointError, DataError, PostnormError

logger = logging.getLogger(__name__)


def judge_nodes(
    config: PretrainConfig, cluster: ClusterConfig, evidence: Evidence, *, job: str, restart: int
) -> Verdict:
    """Judge the nodes, print the verdict, and exclude bad nodes if other nodes would help.

    Args:
        config: the run.
        cluster: the profile, which has the expectations.
        evidence: the reports of all nodes.
        job: SLURM's id, for the run's history.
        restart: number of restarts of the job, for the run's history.
    """
    run_dir = Path(config.run_dir)
    excluded, most = excluded_nodes(run_dir), cluster.max_excluded_nodes
    verdict = judge(evidence, cluster.preflight, excluded=excluded, max_excluded=most)
    for line in verdict_text(evidence, verdict):
        logger.info("preflight: %s", line)
    if verdict.bad and not verdict.problems:
        exclude_nodes(run_dir, verdict.bad)
        texts = "; ".join(text for texts in verdict.bad.values() for text in texts)
        newest = newest_checkpoint(run_dir)
        attempt = {"job": job, "restart": restart, "nodes": list(evidence.nodes)}
        # None: no attempt of the ranks, which `decide` must not count as one without progress.
        attempt |= {"before": newest, "after": newest, "miss": None, "decision": "requeue"}
        reason = f"preflight: without {', '.join(verdict.bad)}: {texts}"
        append_history(run_dir, {**attempt, "reason": reason})
    return verdict


def gather(
    folder: Path, nodes: Sequence[str], config: PretrainConfig, *, with_bandwidth: bool
) -> Evidence:
    """Read the reports of all nodes, and compare suspected blocks with what this node reads.

    Args:
        folder: folder of the records.
        nodes: names of all nodes of the job.
        config: the run.
        with_bandwidth: whether the bandwidth was measured.
    """
    left = {node: record for node in nodes if (record := read_record(folder, node))}
    records = {node: record for node, record in left.items() if record.is_finished}
    measured = {node: report for node in nodes if (report := read_bandwidth(folder, node))}
    try:
        started = float((folder / STARTED_FILE).read_text())
    except (OSError, ValueError):
        started = None
    return Evidence(
        nodes=nodes,
        records=records,
        begun=left.keys() - records.keys(),
        bandwidths=measured if with_bandwidth else None,
        started=started,
        judged=time.time(),
        damaged=_confirmed(config.data.dir, records.values()),
        checkpoint=_newest_checkpoint(Path(config.run_dir)),
    )


def _confirmed(folder: str, records: Iterable[Record]) -> set[int]:
    """Return the suspected blocks that are damaged as this node reads them, too."""
    suspects = {f.block for r in records for f in r.findings if f.block is not None}
    damaged = set()
    for block in suspects:
        try:
            read_block(read_index(folder), block)
        except DataError:
            damaged.add(block)
        except (PostnormError, OSError):
            continue
    return damaged


def _newest_checkpoint(run_dir: Path) -> tuple[str, str] | None:
    for path in published(run_dir / FOLDER):
        try:
            return str(path), read_manifest(path).fingerprint
        except CheckpointError:
            continue  # the trainer says what is wrong with it, and takes the one before
    return None


def verdict_text(evidence: Evidence, verdict: Verdict) -> Iterator[str]:
    """Yield a line for each node, then what is wrong, then what follows."""
    header = ("node", "state", "free GB", "GB/s", "GPUs")
    rows = [_row(evidence, verdict, node) for node in evidence.nodes]
    yield from table([header, *rows], right=(2, 3))
    for node, texts in verdict.bad.items():
        yield from (f"bad node {node}: {text}" for text in texts)
    yield from (f"warning: {text}" for text in verdict.warnings)
    yield from (f"problem: {text}" for text in verdict.problems)
    if verdict.problems:
        yield "stop: no other node cures these problems; fix the cause and resubmit"
    elif verdict.bad:
        yield f"go on without {', '.join(verdict.bad)}"
    else:
        yield f"go: {len(evidence.nodes)} good node{'s' * (len(evidence.nodes) > 1)}"


def _row(evidence: Evidence, verdict: Verdict, node: str) -> tuple[str, ...]:
    record = evidence.records.get(node)
    if record is None:
        state = "bad" if node in verdict.bad else "?"
        return node, state, "-", "-", "not done" if node in evidence.begun else "no record"
    free = "-" if record.free_gb is None else f"{record.free_gb:,.1f}"
    report = (evidence.bandwidths or {}).get(node)
    speeds = [one.gb_per_s for one in report.rounds] if report else []
    gpus = "-"
    if record.gpus is not None:
        names = ", ".join(sorted(set(record.gpus))) or "none"
        gpus = f"{len(record.gpus)} x {names}, driver {record.driver or '-'}"
    state = "bad" if node in verdict.bad else "good"
    return node, state, free, f"{min(speeds):.3g}" if speeds else "-", gpus
