"""Slow nodes told from a slow network, by what pairs of nodes measured.

Nodes stand in a ring and measure with both neighbours, so a slow node is one with which both are
slow. Where no pair is fast, it is the network or the expectation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from launch.preflight.config import PreflightConfig
from launch.preflight.record import Bandwidth, BandwidthRound


@dataclass
class Trouble:
    """What has been found so far."""

    bad: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def of_node(self, node: str, text: str) -> None:
        """Notes that a node is bad."""
        self.bad.setdefault(node, []).append(text)


def judge_bandwidth(
    nodes: Sequence[str],
    found: Mapping[str, Bandwidth],
    config: PreflightConfig,
    trouble: Trouble,
) -> None:
    """Finds nodes that are slow or did not take part.

    Args:
        nodes: that are good so far.
        found: what nodes measured.
        config: what was expected.
        trouble: is added to.
    """
    absent = {node for bandwidth in found.values() for node in bandwidth.missing}
    absent |= {node for node in nodes if node not in found}
    errors = {node: found[node].error for node in nodes if node in found and found[node].error}
    if not found:
        trouble.problems.append(
            "bandwidth: no node left a record: see above why `python -m pipeline bandwidth` failed"
        )
        return
    if absent:
        for node in (node for node in nodes if node in absent):
            trouble.of_node(node, "bandwidth: not all of its ranks joined the others")
        return  # what the others say is that they waited
    if len(errors) == len(nodes) > 1:
        trouble.problems.append(
            f"bandwidth: no node could measure; {nodes[0]} says: {errors[nodes[0]]}. Look at the "
            "network variables in `setup` of the profile, such as NCCL_SOCKET_IFNAME"
        )
        return
    for node, error in errors.items():
        trouble.of_node(node, f"bandwidth: {error}")
    if not errors:
        _judge_speed(nodes, found, config, trouble)


def _judge_speed(
    nodes: Sequence[str],
    found: Mapping[str, Bandwidth],
    config: PreflightConfig,
    trouble: Trouble,
) -> None:
    least = config.bandwidth_share * config.bandwidth_gb_per_s
    expected = (
        f"expected {least:.3g} GB/s (preflight.bandwidth_share={config.bandwidth_share:g} of "
        f"bandwidth_gb_per_s={config.bandwidth_gb_per_s:g})"
    )
    # Of a lone node there is no pair, and the only round is its own.
    size = min(2, len(nodes))
    own = {n: [r for r in found[n].rounds if len(r.nodes) == size] for n in nodes}
    good = {n for n, rounds in own.items() if any(r.gb_per_s >= least for r in rounds)}
    if not good and len(nodes) > 1:
        best = max((r.gb_per_s for rounds in own.values() for r in rounds), default=0.0)
        trouble.problems.append(
            f"bandwidth: no pair of nodes reaches more than {best:.3g} GB/s, {expected}: the "
            "network or its variables are wrong (does NCCL_DEBUG=INFO name the network that you "
            "expect?), or the expectation is; of two nodes, either may be the slow one"
        )
        return
    for node, rounds in own.items():
        if node not in good:
            trouble.of_node(node, f"bandwidth: {_told(node, rounds)}, {expected}")
    seen = set()
    for node in good:
        for one in own[node]:
            pair = tuple(sorted(one.nodes))
            if one.gb_per_s < least and good.issuperset(pair) and pair not in seen:
                seen.add(pair)
                trouble.warnings.append(
                    f"bandwidth: {' with '.join(pair)} {one.gb_per_s:.3g} GB/s, {expected}; both "
                    "are fast with another node, so it is the way between them"
                )
    _judge_all(nodes, found, least, trouble)


def _judge_all(
    nodes: Sequence[str], found: Mapping[str, Bandwidth], least: float, trouble: Trouble
) -> None:
    together = [r for n in nodes for r in found[n].rounds if len(r.nodes) > 2]
    if not trouble.bad and together and together[0].gb_per_s < least:
        trouble.warnings.append(
            f"bandwidth: {len(nodes)} nodes together reach {together[0].gb_per_s:.3g} GB/s, pairs "
            f"more than {least:.3g}: the network between them is narrow, or busy with other jobs"
        )


def _told(node: str, rounds: Sequence[BandwidthRound]) -> str:
    """`with node2 3.1 GB/s, with node4 2.9 GB/s`."""
    parts = []
    for one in rounds:
        others = [name for name in one.nodes if name != node]
        parts.append(f"with {others[0] if others else 'itself'} {one.gb_per_s:.3g} GB/s")
    return ", ".join(parts) or "it measured nothing"
