"""Room in the queue: how many jobs a user may have there, and the wait until some have ended.

SLURM counts each element of an array (MaxSubmitJobs of an association, MaxSubmitJobsPerUser of a
QOS). A call in the foreground hands over the next array when it fits. Jobs submit nothing: many
sites forbid sbatch on nodes, and a job that fails to submit the next one fails where nobody looks.
What is left to submit follows from files, so the same call goes on where another was ended.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from launch.cluster import ClusterConfig
from launch.queue import my_jobs
from launch.site import submit_limit
from launch.slurm import TooManyJobsError

logger = logging.getLogger(__name__)

_SHARE = 4
"""Arrays that fill the room: the next one comes when the first of them have ended."""


@dataclass(frozen=True)
class Room:
    """The jobs that a user may have in the queue, and whether to wait for them to end."""

    limit: int = 0
    """0: not known, so that sbatch alone says when it is reached."""
    every_s: float | None = None
    """Seconds between two looks at the queue; None: do not wait."""

    @property
    def waits(self) -> bool:
        """Whether to wait where there is no room."""
        return self.every_s is not None

    def array_size(self, largest: int) -> int:
        """Return the number of elements that arrays should have at most."""
        return min(largest, max(1, self.limit // _SHARE)) if self.limit else largest

    def lacks(self, size: int) -> str:
        """Say why so many jobs more do not fit now; empty if they do."""
        if not self.limit:
            return ""
        taken = sum(facts.is_alive for facts in my_jobs())
        if taken + size <= self.limit:
            return ""
        return f"{taken} of {self.limit} jobs that you may have are in the queue"

    def wait(self, size: int, what: str, stop: Callable[[], None]) -> None:
        """Wait until so many jobs more fit; `stop` raises where waiting has become no use.

        Raises:
            TooManyJobsError: they do not fit, and this does not wait.
        """
        said = ""
        while True:
            stop()
            why = self.lacks(size)
            if not why:
                return
            if not self.waits:
                raise TooManyJobsError(f"{what}: {size} more do not fit: {why}")
            if why != said:
                logger.info("%s: waiting for room: %s", what, why)
                said = why
            self.pause()

    def pause(self) -> None:
        """Wait until the next look."""
        time.sleep(self.every_s or 0.0)


def room_of(cluster: ClusterConfig, *, prep: bool, every_s: float | None) -> Room:
    """Find the limit for the jobs of a profile: its own, else what accounting says."""
    if cluster.max_submit_jobs:
        return Room(cluster.max_submit_jobs, every_s)
    account, qos = cluster.account, cluster.qos
    if prep:
        account, qos = cluster.prep.account or account, cluster.prep.qos or qos
    return Room(submit_limit(account, qos) or 0, every_s)
