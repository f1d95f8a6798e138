"""The verdict on the nodes of a job: go, go without some of them, or stop.

A pure function of the evidence. Where nodes should be alike, the majority is right. Where every
node has the same trouble, another node would have it as well, so the message asks to change the
config or the site and nothing is requeued.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from launch.cluster import PreflightConfig
from launch.preflight.record import Bandwidth, BandwidthRound, Record
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, EXIT_FINISHED, EXIT_PREEMPTED

_Interval = Sequence[float]


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
    started: float | None = None
    """Time when the checks were started, by the clock of the batch node; None if not known."""
    judged: float = 0.0
    """Time when this is judged, by the same clock."""
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

    @property
    def exit_code(self) -> int:
        """0: go; 75: go without the bad nodes; 2: stop."""
        if self.problems:
            return EXIT_FAILED_DO_NOT_RETRY
        return EXIT_PREEMPTED if self.bad else EXIT_FINISHED

    def blame(self, node: str, text: str) -> None:
        """Note that a node is bad."""
        self.bad.setdefault(node, []).append(text)


def judge(
    evidence: Evidence,
    config: PreflightConfig,
    *,
    excluded: Collection[str] = (),
    max_excluded: int,
) -> Verdict:
    """Find the bad nodes, and the problems that no other node cures.

    Args:
        evidence: the reports of all nodes.
        config: the expectations.
        excluded: nodes that the job already must not get.
        max_excluded: most nodes that a job may exclude, including those.
    """
    verdict = Verdict()
    _judge_silence(evidence, config, verdict)
    _judge_findings(evidence, verdict)
    _judge_likeness(evidence, verdict)
    for node, text in wrong_clocks(evidence, config.max_clock_skew_s):
        verdict.blame(node, text)
    if evidence.bandwidths is not None:
        # Bad nodes held up the others: what those measured with them says nothing.
        rest = [node for node in evidence.nodes if node not in verdict.bad]
        _judge_bandwidth(rest, evidence.bandwidths, config, verdict)
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
            verdict.warnings.append(
                f"{node} was not checked: srun ended its check because of another node"
            )
        else:
            verdict.blame(node, "its check began and was killed: out of memory, or it hangs")


def _judge_findings(evidence: Evidence, verdict: Verdict) -> None:
    num_nodes = len(evidence.records)
    having = Counter(
        check
        for record in evidence.records.values()
        for check in {finding.check for finding in record.findings}
    )
    reported = set()
    for node, record in evidence.records.items():
        for finding in record.findings:
            check, blame = finding.check, finding.blame
            if finding.block is not None and finding.block in evidence.damaged:
                verdict.problems.append(f"found by {node}, and on this node, too: {finding.text}")
            elif finding.block is not None:
                verdict.blame(node, f"only this node reads it so: {finding.text}")
            elif having[check] < num_nodes or blame == "node" or (num_nodes, blame) == (1, "few"):
                verdict.blame(node, finding.text)
            elif (check, finding.text) not in reported:
                reported.add((check, finding.text))
                who = f"all {num_nodes} nodes, {node} says" if num_nodes > 1 else node
                verdict.problems.append(f"{who}: {finding.text}")


def _judge_likeness(evidence: Evidence, verdict: Verdict) -> None:
    """Compare what should be equal on all nodes."""
    records = evidence.records
    gpus = {node: set(record.gpus) for node, record in records.items() if record.gpus}
    packages = {
        node: {f"{name} {version}" for name, version in record.packages.items()}
        for node, record in records.items()
    }
    fingerprints = {node: {r.fingerprint} for node, r in records.items() if r.fingerprint}
    advice = "name the right one as preflight.gpu, or ask SLURM for one kind (--constraint)"
    _compare("GPUs", gpus, advice, verdict)
    _compare("packages", packages, "use one environment or image on all nodes", verdict)
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
        verdict.problems.append(
            f"{what} differ, and no value has a majority: {_groups(values)}; {advice}"
        )
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


def wrong_clocks(evidence: Evidence, limit_s: float) -> Iterator[tuple[str, str]]:
    """Yield nodes whose clock is provably wrong, and by how much. Needs no time server.

    srun starts tasks seconds apart, so starts cannot be compared. But a check begins after the
    batch node has written the time, and the judge reads its record after it has ended: node minus
    batch node lies in [last - judged, first - started], a few seconds wide. Where the file server
    stamps files, a node minus that server is known within milliseconds. As in NTP (Marzullo's
    algorithm; RFC 5905, section 11.2.1), the right time is the one that most intervals agree on.

    Args:
        evidence: the reports of all nodes.
        limit_s: largest difference from most clocks that is still good.
    """
    records = evidence.records.values()
    by_server: dict[str, _Interval] = {r.node: r.file_server for r in records if r.file_server}
    by_batch: dict[str, _Interval] = {}
    if evidence.started is not None:
        begin, end = evidence.started, evidence.judged
        by_batch = {r.node: (r.last - end, r.first - begin) for r in records}
    reported = set()
    for intervals in (by_server, by_batch):
        right = _agreed([*intervals.values(), (0.0, 0.0)], limit_s)
        for node, (low, high) in intervals.items():
            ahead, behind = low - right, right - high
            if max(ahead, behind) > limit_s and node not in reported:
                reported.add(node)
                direction = "ahead of" if ahead > behind else "behind"
                yield (
                    node,
                    f"its clock is at least {max(ahead, behind):.1f} s {direction} the others', "
                    f"expected at most preflight.max_clock_skew_s={limit_s:g}: it does not "
                    "follow the time server",
                )


def _agreed(intervals: Sequence[_Interval], limit_s: float) -> float:
    """Return the middle of where most intervals overlap.

    Each is widened by half of the limit: those whose difference is within it then meet.
    """
    wide = [(low - limit_s / 2, high + limit_s / 2) for low, high in intervals]
    overlapping = [[(low, high) for low, high in wide if low <= at <= high] for at, _ in wide]
    most = max(overlapping, key=len)
    return (max(low for low, _ in most) + min(high for _, high in most)) / 2


def _judge_bandwidth(
    nodes: Sequence[str],
    reports: Mapping[str, Bandwidth],
    config: PreflightConfig,
    verdict: Verdict,
) -> None:
    """Find nodes that are slow or did not take part.

    Args:
        nodes: nodes that are good so far.
        reports: bandwidth reports by node.
        config: the expectations.
        verdict: receives what is found.
    """
    if not reports:
        verdict.problems.append(
            "bandwidth: no node left a record: see above why `python -m pipeline bandwidth` failed"
        )
        return
    absent = {node for report in reports.values() for node in report.missing}
    absent |= {node for node in nodes if node not in reports}
    if absent:
        # The errors of the others say only that they waited.
        for node in (node for node in nodes if node in absent):
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
        _judge_speed(nodes, reports, config, verdict)


def _judge_speed(
    nodes: Sequence[str],
    reports: Mapping[str, Bandwidth],
    config: PreflightConfig,
    verdict: Verdict,
) -> None:
    """Tell slow nodes from a slow network.

    Nodes stand in a ring and measure with both neighbours, so a slow node is one with which both
    are slow. Where no pair is fast, it is the network or the expectation.
    """
    least = config.bandwidth_share * config.bandwidth_gb_per_s
    expected = (
        f"expected {least:.3g} GB/s (preflight.bandwidth_share={config.bandwidth_share:g} of "
        f"bandwidth_gb_per_s={config.bandwidth_gb_per_s:g})"
    )
    # A lone node has no pair; its only round is its own.
    size = min(2, len(nodes))
    own = {n: [r for r in reports[n].rounds if len(r.nodes) == size] for n in nodes}
    good = {n for n, rounds in own.items() if any(r.gb_per_s >= least for r in rounds)}
    if not good and len(nodes) > 1:
        best = max((r.gb_per_s for rounds in own.values() for r in rounds), default=0.0)
        verdict.problems.append(
            f"bandwidth: no pair of nodes reaches more than {best:.3g} GB/s, {expected}: the "
            "network or its variables are wrong (does NCCL_DEBUG=INFO name the network that you "
            "expect?), or the expectation is; of two nodes, either may be the slow one"
        )
        return
    for node, rounds in own.items():
        if node not in good:
            verdict.blame(node, f"bandwidth: {_measured(node, rounds)}, {expected}")
    slow = {tuple(sorted(r.nodes)): r for n in nodes for r in own[n] if r.gb_per_s < least}
    for pair, one in slow.items():
        if good.issuperset(pair):
            verdict.warnings.append(
                f"bandwidth: {' with '.join(pair)} {one.gb_per_s:.3g} GB/s, {expected}; both are "
                "fast with another node, so the path between them is slow"
            )
    together = [r for n in nodes for r in reports[n].rounds if len(r.nodes) > 2]
    if not verdict.bad and together and together[0].gb_per_s < least:
        verdict.warnings.append(
            f"bandwidth: {len(nodes)} nodes together reach {together[0].gb_per_s:.3g} GB/s, pairs "
            f"more than {least:.3g}: the network between them is narrow, or busy with other jobs"
        )


def _measured(node: str, rounds: Sequence[BandwidthRound]) -> str:
    """Write such as `with node2 3.1 GB/s, with node4 2.9 GB/s`."""
    parts = []
    for one in rounds:
        others = [name for name in one.nodes if name != node]
        parts.append(f"with {others[0] if others else 'itself'} {one.gb_per_s:.3g} GB/s")
    return ", ".join(parts) or "it measured nothing"
