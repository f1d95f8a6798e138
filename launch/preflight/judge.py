"""What the records of all nodes mean together: go, go elsewhere, or stop.

A pure function of what was found. Where nodes should be alike, the majority is right. Where every
node has the same trouble, another node would have it as well, so the config or the site is asked to
change and nothing is requeued.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from launch.preflight.clocks import wrong_clocks
from launch.preflight.config import PreflightConfig
from launch.preflight.network import Trouble, judge_bandwidth
from launch.preflight.record import Bandwidth, Record
from pipeline.errors import EXIT_FAILED_DO_NOT_RETRY, EXIT_FINISHED, EXIT_PREEMPTED


@dataclass(frozen=True)
class Evidence:
    """All that is known of the nodes of a job."""

    nodes: Sequence[str]
    """As SLURM names them."""
    records: Mapping[str, Record]
    """Of those nodes that left a finished one."""
    begun: Collection[str] = ()
    """Nodes whose check began, and did not come to its end."""
    bandwidths: Mapping[str, Bandwidth] | None = None
    """Likewise; None if nothing was measured yet."""
    started: float | None = None
    """When the checks were started, by the clock of the batch node."""
    judged: float = 0.0
    """When this is judged, by the same clock."""
    damaged: Collection[int] = ()
    """Blocks that some node found damaged, and that the batch node reads as damaged, too."""
    checkpoint: tuple[str, str] | None = None
    """Path of the newest checkpoint, and the fingerprint of its dataset."""


@dataclass(frozen=True)
class Verdict:
    """What is to be done."""

    bad: dict[str, list[str]]
    """Nodes that must not be used, with what is wrong."""
    problems: list[str]
    """What no other node cures."""
    warnings: list[str]

    @property
    def exit_code(self) -> int:
        """0: go; 75: go without the bad nodes; 2: stop."""
        if self.problems:
            return EXIT_FAILED_DO_NOT_RETRY
        return EXIT_PREEMPTED if self.bad else EXIT_FINISHED


def judge(
    evidence: Evidence,
    config: PreflightConfig,
    *,
    excluded: Collection[str] = (),
    max_excluded: int,
) -> Verdict:
    """Says which nodes are bad, and what no other node cures.

    Args:
        evidence: of all nodes.
        config: what was expected.
        excluded: nodes that the job must not get already.
        max_excluded: most nodes that a job may exclude, those included.
    """
    trouble = Trouble()
    _judge_silence(evidence, config, trouble)
    _judge_findings(evidence, trouble)
    _judge_likeness(evidence, trouble)
    for node, text in wrong_clocks(evidence.records.values(), evidence.started, evidence.judged,
                                   config.max_clock_skew_s):  # fmt: skip
        trouble.of_node(node, text)
    if evidence.bandwidths is not None:
        # Nodes that are bad were in the way of the others: what those measured says nothing.
        rest = [node for node in evidence.nodes if node not in trouble.bad]
        judge_bandwidth(rest, evidence.bandwidths, config, trouble)
    out = sorted({*excluded, *trouble.bad})
    if trouble.bad and len(out) > max_excluded:
        trouble.problems.append(
            f"{len(out)} nodes would be excluded, {', '.join(out)}, more than max_excluded_nodes="
            f"{max_excluded}: look for a common cause above, tell the administrators, or raise that"
        )
    if again := sorted({*excluded} & {*evidence.nodes}):
        trouble.warnings.append(
            f"{', '.join(again)}: excluded before, but SLURM gave it again; `scontrol update "
            "jobid=ID excnodelist=...` works on a requeued job while it waits"
        )
    in_order = {node: trouble.bad[node] for node in evidence.nodes if node in trouble.bad}
    return Verdict(in_order, trouble.problems, trouble.warnings)


def _judge_silence(evidence: Evidence, config: PreflightConfig, trouble: Trouble) -> None:
    absent = [node for node in evidence.nodes if node not in evidence.records]
    silent = [node for node in absent if node not in evidence.begun]
    if len(silent) == len(evidence.nodes) > 1:
        trouble.problems.append(
            f"none of the {len(silent)} nodes left a record: see above why the check did not start "
            "there; `python`, `setup` and the container of the profile decide how it is started"
        )
        return
    for node in silent:
        trouble.of_node(
            node,
            f"it left no record within preflight.timeout_s={config.timeout_s}: it is down, hangs, "
            "cannot start Python or cannot write to the folder of the run",
        )
    for node in (node for node in absent if node in evidence.begun):
        if silent:
            trouble.warnings.append(
                f"{node} was not looked at: srun ended its check because of another node"
            )
        else:
            trouble.of_node(node, "its check began and was killed: out of memory, or it hangs")


def _judge_findings(evidence: Evidence, trouble: Trouble) -> None:
    num_nodes = len(evidence.records)
    having = Counter(
        check
        for record in evidence.records.values()
        for check in {finding.check for finding in record.findings}
    )
    told = set()
    for node, record in evidence.records.items():
        for finding in record.findings:
            check, blame = finding.check, finding.blame
            if finding.block is not None:
                if finding.block in evidence.damaged:
                    trouble.problems.append(
                        f"found by {node}, and on this node, too: {finding.text}"
                    )
                else:
                    trouble.of_node(node, f"only this node reads it so: {finding.text}")
            elif having[check] < num_nodes or blame == "node" or (
                num_nodes == 1 and blame == "few"
            ):  # fmt: skip
                trouble.of_node(node, finding.text)
            elif (check, finding.text) not in told:
                told.add((check, finding.text))
                who = f"all {num_nodes} nodes, {node} says" if num_nodes > 1 else node
                trouble.problems.append(f"{who}: {finding.text}")


def _judge_likeness(evidence: Evidence, trouble: Trouble) -> None:
    records = evidence.records
    gpus = {node: record.gpus for node, record in records.items() if record.gpus}
    names = {node: ", ".join(sorted(set(facts.names))) for node, facts in gpus.items()}
    packages = {
        node: ", ".join(f"{name} {version}" for name, version in record.packages.items())
        for node, record in records.items()
    }
    fingerprints = {node: record.fingerprint for node, record in records.items()}
    advice = "name the right one as preflight.gpu, or ask SLURM for one kind (--constraint)"
    _compare("GPUs", names, advice, trouble)
    _compare("packages", packages, "use one environment or image on all nodes", trouble)
    fingerprint = _compare(
        "dataset fingerprint", fingerprints, "every node must read the same index.json", trouble
    )
    drivers = {node: facts.driver for node, facts in gpus.items() if facts.driver}
    if len(set(drivers.values())) > 1:
        # Training works with it, and sites renew drivers a few nodes at a time.
        trouble.warnings.append(f"GPU drivers differ: {_groups(drivers)}")
    if evidence.checkpoint and fingerprint not in (None, evidence.checkpoint[1]):
        path, expected = evidence.checkpoint
        trouble.problems.append(
            f"the dataset has fingerprint {fingerprint}, but checkpoint {path} was trained on "
            f"{expected}: set data.dir to that dataset, or start a new run in another run_dir"
        )


def _compare(what: str, values: dict[str, str], advice: str, trouble: Trouble) -> str | None:
    """Names the nodes that differ from the majority, and returns its value; None if none has it."""
    values = {node: value for node, value in values.items() if value}
    if not values:
        return None
    usual, count = Counter(values.values()).most_common(1)[0]
    if 2 * count <= len(values):
        trouble.problems.append(
            f"{what} differ, and no majority is right: {_groups(values)}; {advice}"
        )
        return None
    for node, value in values.items():
        if value != usual:
            trouble.of_node(node, f"{what}: {_difference(value, usual)}")
    return usual


def _difference(value: str, usual: str) -> str:
    """What one list has and most nodes' has not, and the other way round."""
    own, others = value.split(", "), usual.split(", ")
    only_here = ", ".join(item for item in own if item not in others) or "nothing more"
    only_there = ", ".join(item for item in others if item not in own) or "nothing more"
    return f"{only_here}, most nodes have {only_there}"


def _groups(values: dict[str, str]) -> str:
    """`A on node1, node2; B on node3`, shortened to where the values differ."""
    parts = [set(value.split(", ")) for value in values.values()]
    common = set.intersection(*parts)
    nodes: dict[str, list[str]] = {}
    for node, value in values.items():
        own = ", ".join(item for item in value.split(", ") if item not in common) or "nothing more"
        nodes.setdefault(own, []).append(node)
    return "; ".join(f"{value} on {', '.join(names)}" for value, names in nodes.items())
