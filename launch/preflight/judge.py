"""The verdict on the nodes of a job: go, go without some of them, or stop.

`judge` is a pure function of the evidence; `gather` reads that evidence, and `judge_nodes` acts on
the verdict. Where nodes should be alike, the majority is right. Where every node has the same
trouble, another node would have it as well, so the message asks to change the config or the site
and nothing is requeued.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from launch.cluster import ClusterConfig, PreflightConfig
from launch.preflight.check import (
    Bandwidth,
    CheckedConfig,
    Record,
    data_of,
    read_bandwidth,
    read_block,
    read_record,
)
from launch.records import append_history, exclude_nodes, excluded_nodes, newest_checkpoint
from pipeline.checkpoints.manifest import newest_readable
from pipeline.config.data import DataConfig
from pipeline.config.runs import RunConfig
from pipeline.data.objects import open_index
from pipeline.errors import (
    EXIT_FAILED_DO_NOT_RETRY,
    EXIT_FINISHED,
    EXIT_PREEMPTED,
    DataError,
    PostnormError,
)
from pipeline.runtime.summary import table


@dataclass(frozen=True)
class Evidence:
    """Everything that is known of the nodes of a job."""

    nodes: Sequence[str]
    """Names as SLURM lists them."""
    records: Mapping[str, Record]
    """Finished records, by node."""
    begun: Collection[str] = ()
    """Nodes whose check began and did not finish."""
    bandwidths: Mapping[str, Bandwidth] | None = None
    """Bandwidth reports, by node; None if nothing was measured yet."""
    damaged: Collection[int] = ()
    """Blocks that some node found damaged and that the batch node reads as damaged, too."""
    checkpoint: tuple[str, str] | None = None
    """Path of the newest checkpoint, and the fingerprint of its dataset."""


@dataclass
class Verdict:
    """Bad nodes, problems and warnings."""

    bad: dict[str, list[str]] = field(default_factory=dict)
    """Nodes that must not be used, and why."""
    problems: list[str] = field(default_factory=list)
    """Troubles that no other node cures."""
    warnings: list[str] = field(default_factory=list)
    passing: list[str] = field(default_factory=list)
    """Those of the problems that are storage which may come back."""

    @property
    def passes(self) -> bool:
        """Whether all problems may pass, and no node is bad."""
        return self.passing == self.problems and not self.bad

    @property
    def exit_code(self) -> int:
        """0: go; 75: go without the bad nodes; 2: stop."""
        if self.problems:
            return EXIT_FAILED_DO_NOT_RETRY
        return EXIT_PREEMPTED if self.bad else EXIT_FINISHED

    def blame(self, node: str, text: str) -> None:
        """Note that a node is bad."""
        self.bad.setdefault(node, []).append(text)

    def spare(self, node: str, proven: Collection[str]) -> None:
        """Make a problem of what a node was blamed for, and what does not prove that it is bad."""
        texts = self.bad.pop(node, [])
        self.problems += [
            f"{node}: {text}; in a job of one node nothing tells if the node or the profile is "
            "the cause: if it is the node, add it to exclude of the profile and submit again"
            for text in texts
            if text not in proven
        ]
        if kept := [text for text in texts if text in proven]:
            self.bad[node] = kept

    def text(self, evidence: Evidence) -> Iterator[str]:
        """Yield a line for each node, then what is wrong, then what follows."""
        header = ("node", "state", "free GB", "GB/s", "GPUs")
        rows = [_row(evidence, self, node) for node in evidence.nodes]
        yield from table([header, *rows], right=(2, 3))
        for node, texts in self.bad.items():
            yield from (f"bad node {node}: {text}" for text in texts)
        yield from (f"warning: {text}" for text in self.warnings)
        yield from (f"problem: {text}" for text in self.problems)
        if self.problems:
            yield "stop: no other node cures these problems; fix the cause and resubmit"
        elif self.bad:
            yield f"go on without {', '.join(self.bad)}"
        else:
            yield f"go: {len(evidence.nodes)} good node{'s' * (len(evidence.nodes) > 1)}"


def _row(evidence: Evidence, verdict: Verdict, node: str) -> tuple[str, ...]:
    record = evidence.records.get(node)
    state = "bad" if node in verdict.bad else "good" if record else "?"
    if record is None:
        return node, state, "-", "-", "not done" if node in evidence.begun else "no record"
    free = "-" if record.free_gb is None else f"{record.free_gb:,.1f}"
    rate = _rate((evidence.bandwidths or {}).get(node))
    gpus = "-"
    if record.gpus is not None:
        names = ", ".join(sorted(set(record.gpus))) or "none"
        gpus = f"{len(record.gpus)} x {names}, driver {record.driver or '-'}"
    return node, state, free, f"{rate:.3g}" if rate else "-", gpus


def gather(
    folder: Path, nodes: Sequence[str], config: CheckedConfig, *, with_bandwidth: bool
) -> Evidence:
    """Read the reports of all nodes, and compare suspected blocks with what this node reads."""
    left = {node: record for node in nodes if (record := read_record(folder, node))}
    records = {node: record for node, record in left.items() if record.is_finished}
    measured = {node: report for node in nodes if (report := read_bandwidth(folder, node))}
    # That of a multi-task run has the fingerprint of the whole mix.
    newest, data = None, data_of(config)
    if isinstance(config, RunConfig) and (newest := newest_readable(config.folder.checkpoints)):
        at, line = newest[1].cursor, config.timeline
        if line.has_stages and line.trained(at).data.dir != line.at(at).data.dir:
            newest = None  # the next stage has other data
    return Evidence(
        nodes=nodes,
        records=records,
        begun=left.keys() - records.keys(),
        bandwidths=measured if with_bandwidth else None,
        damaged=_confirmed(data, records.values()) if data else set(),
        checkpoint=(str(newest[0]), newest[1].fingerprint) if newest else None,
    )


# Nodes look at different blocks, so one node alone sees what is damaged for all: read it again
# here.
def _confirmed(data: DataConfig, records: Iterable[Record]) -> set[int]:
    """Return the suspected blocks that are damaged as this node reads them, too."""
    damaged = set()
    for block in {f.block for r in records for f in r.findings if f.block is not None}:
        try:
            read_block(open_index(data), block)
        except DataError:
            damaged.add(block)
        except (PostnormError, OSError):
            continue
    return damaged


def judge_nodes(
    config: CheckedConfig, cluster: ClusterConfig, evidence: Evidence, *, job: str, restart: int
) -> Verdict:
    """Judge the nodes, and exclude bad nodes if other nodes would help."""
    run_dir = config.folder.path
    excluded, most = excluded_nodes(run_dir), cluster.max_excluded_nodes
    verdict = judge(evidence, cluster.preflight, excluded=excluded, max_excluded=most)
    if verdict.bad and not verdict.problems:
        exclude_nodes(run_dir, verdict.bad)
        texts = "; ".join(text for texts in verdict.bad.values() for text in texts)
        newest = newest_checkpoint(run_dir)
        attempt = {"job": job, "restart": restart, "nodes": list(evidence.nodes)}
        # None: no attempt of the ranks, which `decide` must not count as one without progress.
        attempt |= {"before": newest, "after": newest, "miss": None, "decision": "requeue"}
        reason = f"preflight: without {', '.join(verdict.bad)}: {texts}"
        try:
            append_history(run_dir, {**attempt, "reason": reason})
        except OSError as error:
            verdict.warnings.append(f"the verdict could not be recorded: {error}")
    return verdict


def judge(
    evidence: Evidence,
    config: PreflightConfig,
    *,
    excluded: Collection[str] = (),
    max_excluded: int,
) -> Verdict:
    """Find the bad nodes, and the problems that no other node cures. Pure.

    Nodes in `excluded`, which the job already must not get, count for `max_excluded`, too.
    """
    verdict = Verdict()
    _judge_silence(evidence, config, verdict)
    _judge_findings(evidence, verdict)
    _judge_likeness(evidence, verdict)
    _judge_bandwidth(evidence, config, verdict)
    if len(evidence.nodes) == 1:
        [node] = evidence.nodes
        findings = evidence.records[node].findings if node in evidence.records else []
        verdict.spare(node, {finding.text for finding in findings if finding.blame == "node"})
    out = sorted({*excluded, *verdict.bad})
    if verdict.bad and len(out) > max_excluded:
        verdict.problems.append(
            f"{len(out)} nodes would be excluded, {', '.join(out)}, more than max_excluded_nodes="
            f"{max_excluded}: look for a common cause above, tell the administrators, or raise that"
        )
    if again := sorted({*excluded} & {*evidence.nodes}):
        verdict.warnings.append(
            f"{', '.join(again)}: excluded before, but SLURM assigned it again; `scontrol update "
            "jobid=ID excnodelist=...` works on a requeued job while it waits"
        )
    verdict.bad = {node: verdict.bad[node] for node in evidence.nodes if node in verdict.bad}
    return verdict


def _judge_silence(evidence: Evidence, config: PreflightConfig, verdict: Verdict) -> None:
    """Judge nodes without a finished record."""
    silent = [n for n in evidence.nodes if n not in evidence.records and n not in evidence.begun]
    if len(silent) == len(evidence.nodes) > 1:
        verdict.problems.append(
            f"none of the {len(silent)} nodes left a record: see above why the check did not start "
            "there; `python`, `setup` and the container of the profile decide how it is started"
        )
        return
    for node in silent:
        verdict.blame(
            node,
            f"it left no record within preflight.timeout_s={config.timeout_s}: it is down, hangs, "
            "cannot start Python or cannot write to the folder of the run",
        )
    for node in (node for node in evidence.nodes if node in evidence.begun):
        if silent:
            text = f"{node} was not checked: srun ended its check because of another node"
            verdict.warnings.append(text)
        else:
            verdict.blame(node, "its check began and was killed: out of memory, or it hangs")


def _judge_findings(evidence: Evidence, verdict: Verdict) -> None:
    """Separate what is wrong with one node from what is wrong with all."""
    records = evidence.records
    having = Counter(name for r in records.values() for name in {f.check for f in r.findings})
    reported = set()
    for node, finding in ((node, one) for node, r in records.items() for one in r.findings):
        check, blame, text = finding.check, finding.blame, finding.text
        if finding.block is not None and finding.block in evidence.damaged:
            verdict.problems.append(f"found by {node}, and on this node, too: {text}")
        elif finding.block is not None:
            verdict.blame(node, f"only this node reads it so: {text}")
        elif having[check] < len(records) or (len(records) == 1 and blame == "node"):
            verdict.blame(node, text)
        elif (check, text) not in reported:
            reported.add((check, text))
            who = f"all {len(records)} nodes, {node} says" if len(records) > 1 else node
            verdict.problems.append(f"{who}: {text}")
            verdict.passing += [verdict.problems[-1]] * finding.passes


def _judge_likeness(evidence: Evidence, verdict: Verdict) -> None:
    """Compare what should be equal on all nodes."""
    records = evidence.records
    gpus = {node: set(record.gpus or ()) for node, record in records.items()}
    advice = "name the right one as preflight.gpu, or ask SLURM for one kind (--constraint)"
    _compare("GPUs", gpus, advice, verdict)
    packages = {
        node: {f"{name} {version}" for name, version in record.packages.items()}
        for node, record in records.items()
    }
    _compare("packages", packages, "use one environment or image on all nodes", verdict)
    fingerprints = {node: {r.fingerprint} for node, r in records.items() if r.fingerprint}
    advice = "every node must read the same index.json"
    usual = _compare("dataset fingerprint", fingerprints, advice, verdict)
    drivers = {node: {record.driver} for node, record in records.items() if record.driver}
    if len({*map(frozenset, drivers.values())}) > 1:
        # Training works with different drivers, and sites renew them a few nodes at a time.
        verdict.warnings.append(f"GPU drivers differ: {_groups(drivers)}")
    if evidence.checkpoint and usual and evidence.checkpoint[1] not in usual:
        path, expected = evidence.checkpoint
        verdict.problems.append(
            f"the dataset has fingerprint {min(usual)}, but checkpoint {path} was trained on "
            f"{expected}: set data.dir to that dataset, or start a new run in another run_dir"
        )


def _compare(
    what: str, values: Mapping[str, set[str]], advice: str, verdict: Verdict
) -> frozenset[str] | None:
    """Blame nodes that differ from the majority, and return its value; None if there is none."""
    values = {node: value for node, value in values.items() if value}
    if not values:
        return None
    usual, count = Counter(map(frozenset, values.values())).most_common(1)[0]
    if 2 * count <= len(values):
        text = f"{what} differ, and no value has a majority: {_groups(values)}; {advice}"
        verdict.problems.append(text)
        return None
    for node, value in values.items():
        if value != usual:
            here, there = _listed(value - usual), _listed(usual - value)
            verdict.blame(node, f"{what}: {here}, most nodes have {there}")
    return usual


def _groups(values: Mapping[str, set[str]]) -> str:
    """Write `A on node1, node2; B on node3`, without what all of them have."""
    common = set.intersection(*values.values())
    nodes: dict[str, list[str]] = {}
    for node, value in values.items():
        nodes.setdefault(_listed(value - common), []).append(node)
    return "; ".join(f"{value} on {', '.join(names)}" for value, names in nodes.items())


def _listed(items: Collection[str]) -> str:
    return ", ".join(sorted(items)) or "nothing more"


def _judge_bandwidth(evidence: Evidence, config: PreflightConfig, verdict: Verdict) -> None:
    """Find nodes that are slow or did not take part."""
    reports = evidence.bandwidths
    if reports is None:
        return
    # Bad nodes held up the others: what those measured with them says nothing.
    nodes = [node for node in evidence.nodes if node not in verdict.bad]
    if not reports:
        verdict.problems.append(
            "bandwidth: no node left a record: see above why `postnorm bandwidth` failed"
        )
        return
    missing = {node for report in reports.values() for node in report.missing}
    if absent := [node for node in nodes if node in missing or node not in reports]:
        # The errors of the others say only that they waited.
        for node in absent:
            verdict.blame(node, "bandwidth: not all of its ranks joined the others")
        return
    errors = {node: reports[node].error for node in nodes if reports[node].error}
    if len(errors) == len(nodes) > 1:
        verdict.problems.append(
            f"bandwidth: no node could measure; {nodes[0]} says: {errors[nodes[0]]}. Look at the "
            "network variables in `setup` of the profile, such as NCCL_SOCKET_IFNAME"
        )
        return
    for node, error in errors.items():
        verdict.blame(node, f"bandwidth: {error}")
    if not errors:
        rates = {node: _rate(reports[node]) or 0.0 for node in nodes}
        _judge_speed(rates, config, verdict)


def _judge_speed(rates: Mapping[str, float], config: PreflightConfig, verdict: Verdict) -> None:
    """Blame nodes that are slow beside the others; where most are slow, it is the network."""
    usual, share = median(rates.values()), config.bandwidth_share
    if usual < share * config.bandwidth_gb_per_s:
        verdict.problems.append(
            f"bandwidth: {usual:.3g} GB/s is the nodes' median, expected "
            f"{share * config.bandwidth_gb_per_s:.3g} GB/s (preflight.bandwidth_share={share:g} of "
            f"bandwidth_gb_per_s={config.bandwidth_gb_per_s:g}): the network or its variables are "
            "wrong (does NCCL_DEBUG=INFO name the network that you expect?), or the expectation is"
        )
        return
    for node, rate in rates.items():
        if rate < share * usual:
            verdict.blame(
                node,
                f"bandwidth: {rate:.3g} GB/s, expected {share * usual:.3g} GB/s "
                f"(preflight.bandwidth_share={share:g} of the nodes' median {usual:.3g})",
            )


def _rate(report: Bandwidth | None) -> float | None:
    """Return a node's speed."""
    # With its faster neighbour, since a slow one slows the pair.
    return max((one.gb_per_s for one in report.rounds), default=0.0) if report else None
