"""MaxArraySize: how large job arrays may be at the site that is submitted to."""

import re
import subprocess
from dataclasses import replace

from launch.cluster import ClusterConfig


def within_site(cluster: ClusterConfig) -> ClusterConfig:
    """The profile with `prep.max_array_size` no larger than the site's MaxArraySize.

    Where SLURM cannot be asked, the profile stays as it is, and sbatch has the last word.

    Raises:
        ConfigError: `prep.max_concurrent` is too small for that many arrays.
    """
    site = _max_array_size()
    if site is None or site >= cluster.prep.max_array_size:
        return cluster
    return replace(cluster, prep=replace(cluster.prep, max_array_size=site))


def _max_array_size() -> int | None:
    command = ["scontrol", "show", "config"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)$", done.stdout, re.MULTILINE)
    return int(found[1]) if found else None
