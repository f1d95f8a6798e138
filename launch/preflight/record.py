"""What nodes report about themselves: `DIR/NODE.json` of a check, `DIR/NODE.bandwidth.json`."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from pipeline.runtime.files import write_json_atomic

_R = TypeVar("_R")

Blame = Literal["node", "all"]
"""Whose fault a finding is if the job has one node: the node's, such as a broken GPU, or that of
the config or the site, since nothing tells them apart. Of several nodes it is the node's unless all
have it: then another node would have it, too."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    check: str
    """Name of the check; equal on all nodes that have the same trouble."""
    text: str
    """What was wrong, what was expected, what to change."""
    blame: Blame
    block: int | None = None
    """Row of the dataset's block that is damaged as this node reads it."""


@dataclass
class Record:
    """Everything that one node reports about itself."""

    node: str
    findings: list[Finding] = field(default_factory=list)
    gpus: list[str] | None = None
    """Names of the GPUs; None on nodes that need none."""
    driver: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    """Versions of Python and of the packages that training imports."""
    fingerprint: str = ""
    """Fingerprint of the dataset, as this node reads its index; empty if it could not."""
    free_gb: float | None = None
    """Free space in the run's folder."""
    is_finished: bool = False
    """False in the record that a check writes when it begins: its node is alive, though SLURM may
    end the check."""


@dataclass(frozen=True)
class BandwidthRound:
    """One all-reduce that a node took part in."""

    nodes: list[str]
    ranks: int
    gb_per_s: float
    """Bus bandwidth."""


@dataclass(frozen=True)
class Bandwidth:
    """The report of a node that `python -m pipeline bandwidth` wrote."""

    node: str
    rounds: list[BandwidthRound]
    error: str
    """Why it could not go on; empty if it could."""
    missing: list[str]
    """Nodes that did not join, as far as they are known here."""


def write_record(folder: Path, record: Record) -> None:
    """Write a record for the judge."""
    write_json_atomic(folder / f"{record.node}.json", asdict(record))


def read_record(folder: Path, node: str) -> Record | None:
    """Read the record of a node; None if it left none that can be read."""
    return _read(folder / f"{node}.json", Record, "findings", Finding)


def read_bandwidth(folder: Path, node: str) -> Bandwidth | None:
    """Read the bandwidth report of a node; None if it left none that can be read."""
    return _read(folder / f"{node}.bandwidth.json", Bandwidth, "rounds", BandwidthRound)


def _read(path: Path, kind: type[_R], items: str, item: type) -> _R | None:
    try:
        body = json.loads(path.read_bytes())
        return kind(**{**body, items: [item(**one) for one in body[items]]})
    except (OSError, ValueError, KeyError, TypeError):
        return None
