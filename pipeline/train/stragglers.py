"""Finds ranks that all others wait for.

Rule: in each of three log intervals in a row, a rank's own work (waiting for data, and forward and
backward passes until the first collective) took more than `monitor.straggler_factor` times the
median of the other ranks, by at least a hundredth of the step.
"""

import numpy as np
import numpy.typing as npt

_PATIENCE = 3
_LEAST_SHARE = 0.01


class Stragglers:
    """Follows the ranks of one attempt."""

    def __init__(self, hosts: list[str], factor: float) -> None:
        """Nothing was seen yet.

        Args:
            hosts: of each rank.
            factor: see the rule.
        """
        self._hosts = hosts
        self._factor = factor
        self._slow = [0] * len(hosts)
        """Intervals in a row in which a rank was slow."""

    def look(
        self, wait_s: npt.NDArray[np.float64], compute_s: npt.NDArray[np.float64], step_s: float
    ) -> list[tuple[int, float, str]]:
        """Ranks of which it is time to tell, with their factor and what to tell.

        Told once, until the rank has been as fast as the others for an interval.

        Args:
            wait_s: (ranks,) waiting for data in a step, mean of the interval.
            compute_s: (ranks,) passes until the first collective, likewise.
            step_s: of a whole step.
        """
        if len(self._hosts) < 2:
            return []
        own_s = wait_s + compute_s
        found = []
        for rank, slow in enumerate(self._slow):
            others_s = float(np.median(np.delete(own_s, rank)))
            late_s = float(own_s[rank]) - others_s
            is_slow = late_s > (self._factor - 1) * others_s and late_s > _LEAST_SHARE * step_s
            self._slow[rank] = slow + 1 if is_slow else 0
            if self._slow[rank] == _PATIENCE:
                factor = float(own_s[rank]) / others_s if others_s else float("inf")
                cause = "waiting for data" if wait_s[rank] > compute_s[rank] else "computing"
                found.append((
                    rank, factor,
                    f"rank {rank} on {self._hosts[rank]} needs {factor:.2f} times as long as the "
                    f"median of the other ranks, most of it {cause}: {own_s[rank] * 1e3:.1f} ms a "
                    f"step against {others_s * 1e3:.1f} ms, {_PATIENCE} log intervals in a row. "
                    f"The others wait for it: about {late_s / step_s:.0%} of the run's time. Look "
                    "at the temperature, clock, other processes and storage of that node, or leave "
                    "it out",
                ))  # fmt: skip
        return found
