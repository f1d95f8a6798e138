"""What the check of one node found: `DIR/NODE.json`, written once and whole."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeline.runtime.files import write_json_atomic

STARTED_FILE = "started"
"""In the folder of records: seconds since 1970 by the clock of the batch node, before any check."""
BANDWIDTH_SUFFIX = ".bandwidth.json"
"""`DIR/NODE.bandwidth.json` is written by `python -m pipeline bandwidth`."""

Blame = Literal["node", "few", "all"]
"""Whose fault a finding is. `node`: always the node's, such as a broken GPU. `few`: the node's,
unless every one of several nodes has it; then another node would have it, too. `all`: likewise, and
where a job has one node only it is the config's: nothing tells the two apart."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    check: str
    """What was looked at; equal on all nodes that have the same trouble."""
    text: str
    """What was found, what was expected, what to change."""
    blame: Blame
    block: int | None = None
    """Row of the dataset's block that is damaged as this node reads it."""


@dataclass(frozen=True)
class GpuFacts:
    """What nodes are compared by."""

    names: list[str]
    driver: str


@dataclass(frozen=True)
class ClockFacts:
    """Readings of this node's clock, seconds since 1970."""

    first: float
    """When the check began."""
    last: float
    """When the record was written."""
    file_server: tuple[float, float] | None = None
    """Lowest and highest that this clock can be ahead of the one that stamps files."""


@dataclass(frozen=True)
class Record:
    """All that one node says about itself."""

    node: str
    clock: ClockFacts
    findings: list[Finding]
    gpus: GpuFacts | None = None
    """None on nodes without GPUs."""
    packages: dict[str, str] = field(default_factory=dict)
    """Versions of Python and of what training imports."""
    fingerprint: str = ""
    """Of the dataset, as this node reads its index; empty if it could not."""
    free_gb: float | None = None
    """In the run's folder."""
    is_finished: bool = True
    """False in what a check leaves when it begins: its node is alive, though it may be ended."""


@dataclass(frozen=True)
class BandwidthRound:
    """One all-reduce that a node took part in."""

    nodes: list[str]
    ranks: int
    gb_per_s: float
    """Bus bandwidth."""


@dataclass(frozen=True)
class Bandwidth:
    """What a node measured with others."""

    node: str
    rounds: list[BandwidthRound]
    error: str
    """Why it could not go on; empty if it could."""
    missing: list[str]
    """Nodes that did not join, as far as they are known here."""


def write_record(folder: Path, record: Record) -> None:
    """Leaves a record for the judge."""
    write_json_atomic(folder / f"{record.node}.json", asdict(record))


def read_record(folder: Path, node: str) -> Record | None:
    """The record of a node; None if it left none that can be read."""
    body = _read(folder / f"{node}.json")
    try:
        clock = body.pop("clock")
        server = clock.pop("file_server")
        gpus = body.pop("gpus")
        return Record(
            clock=ClockFacts(**clock, file_server=tuple(server) if server else None),
            findings=[Finding(**finding) for finding in body.pop("findings")],
            gpus=GpuFacts(**gpus) if gpus else None,
            **body,
        )
    except (KeyError, TypeError):
        return None


def read_bandwidth(folder: Path, node: str) -> Bandwidth | None:
    """What a node measured; None if it left nothing that can be read."""
    body = _read(folder / f"{node}{BANDWIDTH_SUFFIX}")
    try:
        rounds = [BandwidthRound(**one) for one in body.pop("rounds")]
        return Bandwidth(rounds=rounds, **body)
    except (KeyError, TypeError):
        return None


def read_started(folder: Path) -> float | None:
    """When the first check was started, by the clock of the batch node; None if nobody said."""
    try:
        return float((folder / STARTED_FILE).read_text())
    except (OSError, ValueError):
        return None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
