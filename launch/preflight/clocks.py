"""Nodes whose clock is wrong, as far as it can be proven without a time server.

A start is no common moment: srun starts tasks seconds apart. But a check begins after the batch
node has written the time, and the judge reads its record after it has ended. So node minus batch
node lies in [last - judged, first - started], a few seconds wide; a clock beyond is wrong. Where
the file server stamps files, a node minus that server is known within milliseconds.

As in NTP (Marzullo's algorithm; RFC 5905, section 11.2.1), the right time is the one that most
intervals agree on.
"""

from collections.abc import Iterable, Iterator, Sequence

from launch.preflight.record import Record

_Interval = tuple[float, float]


def wrong_clocks(
    records: Iterable[Record], started: float | None, judged: float, limit_s: float
) -> Iterator[tuple[str, str]]:
    """Yields nodes whose clock differs from most by more than `limit_s`, with what is to be told.

    Args:
        records: of all nodes.
        started: before any check, seconds since 1970 by the clock of the batch node; or not known.
        judged: after all checks, likewise.
        limit_s: that is still good.
    """
    records = list(records)
    of_server = {r.node: r.clock.file_server for r in records if r.clock.file_server}
    of_batch = {}
    if started is not None:
        of_batch = {r.node: (r.clock.last - judged, r.clock.first - started) for r in records}
    told = set()
    for intervals in (of_server, of_batch):
        right = _agreed([*intervals.values(), (0.0, 0.0)], limit_s)
        for node, (low, high) in intervals.items():
            ahead, behind = low - right, right - high
            if max(ahead, behind) > limit_s / 2 and node not in told:
                told.add(node)
                direction = "ahead of" if ahead > behind else "behind"
                yield (
                    node,
                    (
                        f"its clock is at least {max(ahead, behind):.1f} s {direction} the others', "
                        f"expected at most preflight.max_clock_skew_s={limit_s:g}: it does not follow "
                        "the time server"
                    ),
                )


def _agreed(intervals: Sequence[_Interval], limit_s: float) -> float:
    """The point that lies in most intervals, each widened so that those within the limit meet.

    Of several, the middle of the first stretch.
    """
    margin = limit_s / 2
    wide = [(low - margin, high + margin) for low, high in intervals]
    edges = sorted({edge for interval in wide for edge in interval})
    counts = [sum(low <= edge <= high for low, high in wide) for edge in edges]
    first = counts.index(max(counts))
    last = first
    while last + 1 < len(edges) and counts[last + 1] == counts[first]:
        last += 1
    return (edges[first] + edges[last]) / 2
