"""`python -m launch preflight check | judge`, which the job script runs before training."""

import argparse
import logging
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from launch.cluster import cluster_of
from launch.decide import newest_checkpoint
from launch.preflight.check import check_node
from launch.preflight.dataset import read_block
from launch.preflight.judge import Evidence, Verdict, judge
from launch.preflight.record import (
    ClockFacts,
    Record,
    read_bandwidth,
    read_record,
    read_started,
    write_record,
)
from launch.records import append_history, exclude_nodes, excluded_nodes
from pipeline.checkpoints.manifest import FOLDER, published, read_manifest
from pipeline.config.load import load
from pipeline.config.runs import PretrainConfig
from pipeline.data.format import read_index
from pipeline.errors import EXIT_FINISHED, CheckpointError, DataError, PostnormError
from pipeline.runtime import cli, env

logger = logging.getLogger(__name__)


def add_preflight(commands: Any) -> None:
    """Adds `preflight` with its two parts."""
    preflight = commands.add_parser(
        "preflight", help="look at the nodes of an allocation before training; for job scripts"
    )
    parts = preflight.add_subparsers(required=True)
    check = parts.add_parser("check", help="look at this node and write DIR/NODE.json")
    check.set_defaults(run=_check)
    judge_ = parts.add_parser(
        "judge",
        help="read all records; exit code 0: go, 75: bad nodes were added to RUN/launch/excluded, "
        "2: stop, no other node helps",
    )
    judge_.add_argument(
        "--nodes", required=True, metavar="'A B'", help="names of all nodes of the job"
    )
    judge_.add_argument("--job", required=True, help="SLURM's id")
    judge_.add_argument("--restart", required=True, type=int, metavar="N")
    judge_.add_argument(
        "--bandwidth", action="store_true",
        help="judge what `python -m pipeline bandwidth` has measured as well",
    )  # fmt: skip
    judge_.set_defaults(run=_judge)
    for part in (check, judge_):
        cli.add_config_arguments(part)
        part.add_argument("--cluster", help="YAML file of the cluster; default: one GPU")
        part.add_argument(
            "--records", type=Path, required=True, metavar="DIR", help="folder of the records"
        )


def _check(arguments: argparse.Namespace) -> int:
    config = load(PretrainConfig, arguments.config, arguments.overrides).config
    cluster = cluster_of(arguments.cluster)
    arguments.records.mkdir(parents=True, exist_ok=True)
    node, now = env.node_name(), time.time()
    # srun kills all tasks if it cannot start one: those that could start are told by this.
    write_record(arguments.records, Record(node, ClockFacts(now, now), [], is_finished=False))
    record = check_node(config, cluster, arguments.records, node)
    write_record(arguments.records, record)
    for finding in record.findings:
        logger.info("%s: %s", record.node, finding.text)
    logging.shutdown()
    # A thread that hangs in a driver or a file system would hold back Python's own way out.
    os._exit(EXIT_FINISHED)


def _judge(arguments: argparse.Namespace) -> int:
    config = load(PretrainConfig, arguments.config, arguments.overrides).config
    cluster = cluster_of(arguments.cluster)
    nodes = arguments.nodes.split()
    evidence = _evidence(arguments.records, nodes, config, with_bandwidth=arguments.bandwidth)
    run_dir = Path(config.run_dir)
    excluded = excluded_nodes(run_dir)
    verdict = judge(
        evidence, cluster.preflight, excluded=excluded, max_excluded=cluster.max_excluded_nodes
    )
    for line in verdict_text(evidence, verdict):
        logger.info("%s", line)
    if verdict.bad and not verdict.problems:
        exclude_nodes(run_dir, verdict.bad)
        newest = newest_checkpoint(run_dir)
        append_history(run_dir, {
            "job": arguments.job, "restart": arguments.restart, "nodes": nodes, "before": newest,
            "after": newest, "miss": None, "decision": "requeue",
            "reason": f"preflight: without {', '.join(verdict.bad)}: "
            + "; ".join(text for texts in verdict.bad.values() for text in texts),
        })  # fmt: skip
    return verdict.exit_code


def _evidence(
    folder: Path, nodes: Sequence[str], config: PretrainConfig, *, with_bandwidth: bool
) -> Evidence:
    left = {node: found for node in nodes if (found := read_record(folder, node))}
    records = {node: record for node, record in left.items() if record.is_finished}
    measured = {node: read_bandwidth(folder, node) for node in nodes}
    bandwidths = {node: found for node, found in measured.items() if found}
    return Evidence(
        nodes=nodes,
        records=records,
        begun=left.keys() - records.keys(),
        bandwidths=bandwidths if with_bandwidth else None,
        started=read_started(folder),
        judged=time.time(),
        damaged=_confirmed(config.data.dir, records.values()),
        checkpoint=_newest_checkpoint(Path(config.run_dir)),
    )


def _confirmed(folder: str, records: Iterable[Record]) -> set[int]:
    """Blocks that are damaged as this node reads them, too."""
    suspects = {f.block for r in records for f in r.findings if f.block is not None}
    found = set()
    for block in suspects:
        try:
            read_block(read_index(folder), block)
        except DataError:
            found.add(block)
        except (PostnormError, OSError):
            continue
    return found


def _newest_checkpoint(run_dir: Path) -> tuple[str, str] | None:
    for path in published(run_dir / FOLDER):
        try:
            return str(path), read_manifest(path).fingerprint
        except CheckpointError:
            continue  # the trainer says what is wrong with it, and takes the one before
    return None


def verdict_text(evidence: Evidence, verdict: Verdict) -> list[str]:
    """A line for each node, then what is wrong, then what follows."""
    width = max([len("node"), *map(len, evidence.nodes)])
    lines = [f"preflight: {'node':<{width}}  {'state':<5}  {'free GB':>9}  {'GB/s':>7}  GPUs"]
    for node in evidence.nodes:
        record = evidence.records.get(node)
        lines.append(f"preflight: {node:<{width}}  {_row(evidence, verdict, node, record)}")
    for node, texts in verdict.bad.items():
        lines += [f"preflight: bad node {node}: {text}" for text in texts]
    lines += [f"preflight: warning: {text}" for text in verdict.warnings]
    lines += [f"preflight: problem: {text}" for text in verdict.problems]
    if verdict.problems:
        last = "stop: no other node cures what is named as a problem; mend it and submit again"
    elif verdict.bad:
        last = f"go on without {', '.join(verdict.bad)}"
    else:
        last = f"go: {len(evidence.nodes)} good node{'s' * (len(evidence.nodes) > 1)}"
    return [*lines, f"preflight: {last}"]


def _row(evidence: Evidence, verdict: Verdict, node: str, record: Record | None) -> str:
    state = "bad" if node in verdict.bad else "good"
    if record is None:
        begun = node in evidence.begun
        state = state if node in verdict.bad else "?"
        return f"{state:<5}  {'-':>9}  {'-':>7}  {'not done' if begun else 'no record'}"
    free = "-" if record.free_gb is None else f"{record.free_gb:,.1f}"
    bandwidth = (evidence.bandwidths or {}).get(node)
    speeds = [one.gb_per_s for one in bandwidth.rounds] if bandwidth else []
    speed = f"{min(speeds):.3g}" if speeds else "-"
    gpus = "-"
    if record.gpus:
        names = ", ".join(sorted(set(record.gpus.names))) or "none"
        gpus = f"{len(record.gpus.names)} x {names}, driver {record.gpus.driver or '-'}"
    return f"{state:<5}  {free:>9}  {speed:>7}  {gpus}"
