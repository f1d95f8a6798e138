"""`python -m launch preflight check`: looks at the node that it runs on.

Every part runs in a thread of its own, which is left behind when the time is over: a call into a
file system or a driver that hangs cannot be ended. Threads that hang keep nobody: the process
leaves by `os._exit`.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from launch.cluster import ClusterConfig
from launch.preflight.config import PreflightConfig
from launch.preflight.dataset import check_dataset
from launch.preflight.gpus import check_gpus
from launch.preflight.host import (
    ahead_of_file_server,
    check_folder,
    check_limits,
    check_shared_memory,
    check_stage_dir,
    packages,
)
from launch.preflight.record import ClockFacts, Finding, GpuFacts, Record
from pipeline.config.runs import PretrainConfig
from pipeline.runtime import env


class _Notes:
    """What the parts have found so far; each writes to its own fields."""

    def __init__(self) -> None:
        self.findings: dict[str, list[Finding]] = {}
        self.gpus: GpuFacts | None = None
        self.packages: dict[str, str] = {}
        self.fingerprint = ""
        self.free_gb: float | None = None
        self.file_server: tuple[float, float] | None = None


def check_node(config: PretrainConfig, cluster: ClusterConfig, records: Path, node: str) -> Record:
    """Looks at everything, for at most `preflight.timeout_s`.

    Args:
        config: the run.
        cluster: where it runs, and what is expected of a node.
        records: folder of the records; its name decides which shards are looked at.
        node: name of this node.
    """
    first, notes = time.time(), _Notes()
    threads = {
        name: threading.Thread(target=_noted, args=(notes, name, part), name=name, daemon=True)
        for name, part in _parts(notes, config, cluster, records, node).items()
    }
    deadline = time.monotonic() + cluster.preflight.timeout_s
    for thread in threads.values():
        thread.start()
    for thread in threads.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    findings = [finding for found in list(notes.findings.values()) for finding in found]
    for name in (name for name in threads if name not in notes.findings):
        text = f"{name}: not done within preflight.timeout_s={cluster.preflight.timeout_s}"
        findings.append(Finding(f"{name} in time", text, "few"))
    return Record(
        node=node,
        clock=ClockFacts(first, time.time(), notes.file_server),
        findings=findings,
        gpus=notes.gpus,
        packages=notes.packages,
        fingerprint=notes.fingerprint,
        free_gb=notes.free_gb,
    )


def _noted(notes: _Notes, name: str, part: Callable[[], list[Finding]]) -> None:
    try:
        notes.findings[name] = part()
    except Exception as error:  # noqa: BLE001 - of a thread; it is told like all else
        text = f"{name}: {type(error).__name__}: {error}"
        notes.findings[name] = [Finding(name, text, "all")]


def _parts(
    notes: _Notes, config: PretrainConfig, cluster: ClusterConfig, records: Path, node: str
) -> dict[str, Callable[[], list[Finding]]]:
    """What is looked at, by name."""
    expected: PreflightConfig = cluster.preflight

    def gpus() -> list[Finding]:
        if not cluster.gpus_per_node:
            return []
        notes.gpus, found = check_gpus(expected, cluster.gpus_per_node, env.child_environment())
        return found

    def run_folder() -> list[Finding]:
        notes.free_gb, found = check_folder(expected, "run_dir", Path(config.run_dir), "all")
        return found

    def clock() -> list[Finding]:
        notes.file_server = ahead_of_file_server(records)
        return []

    def dataset() -> list[Finding]:
        seed = f"{records.name} {node}"
        notes.fingerprint, found = check_dataset(config.data.dir, expected.shards, seed)
        return found

    def packages_() -> list[Finding]:
        notes.packages = packages()
        return []

    stage_dir = config.data.stage_dir
    return {
        "GPUs": gpus,
        "run_dir": run_folder,
        "data.stage_dir": lambda: check_stage_dir(expected, stage_dir) if stage_dir else [],
        "limits": lambda: check_limits(expected),
        "/dev/shm": lambda: check_shared_memory(expected),
        "packages": packages_,
        "clock": clock,
        "dataset": dataset,
    }
