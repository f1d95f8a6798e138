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
            if max(ahead, behind) > limit_s and node not in told:
                told.add(node)
                direction = "ahead of" if ahead > behind else "behind"
                text = (
                    f"its clock is at least {max(ahead, behind):.1f} s {direction} the others', "
                    f"expected at most preflight.max_clock_skew_s={limit_s:g}: it does not "
                    "follow the time server"
                )
                yield node, text


def _agreed(intervals: Sequence[_Interval], limit_s: float) -> float:
    """The middle of where most intervals lie over each other.

    Each is widened by half of the limit: those whose difference is within it then meet.
    """
    wide = [(low - limit_s / 2, high + limit_s / 2) for low, high in intervals]
    over_each_other = [
        [(low, high) for low, high in wide if low <= start <= high] for start, _ in wide
    ]
    most = max(over_each_other, key=len)
    return (max(low for low, _ in most) + min(high for _, high in most)) / 2
