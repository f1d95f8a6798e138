"""The SLURM site as its own commands tell it.

Text formats with separators are read, which are the same from 22.05 on; `--json` changes between
versions and leaves options out. Names of reservations and accounts come from `scontrol` and
`sacctmgr`, the latter only where SLURM enforces them.
"""

import getpass
import re
from dataclasses import dataclass, field, replace

from launch.cluster import ClusterConfig
from launch.fields import seconds
from launch.slurm import NoAnswerError, NoSlurmError, SlurmError, run_command
from pipeline.errors import ConfigError

_NODE_FORMAT = "%P|%a|%l|%s|%N|%c|%m|%G|%f"
_NOT_NOW = "Requested node configuration is not available"


@dataclass(frozen=True)
class Node:
    """What a node has, whoever uses it now."""

    name: str
    cpus: int
    memory_mib: int
    gpus: dict[str, int]
    """GPUs by type; the type is empty where the site names none."""
    features: frozenset[str]


@dataclass
class Partition:
    """A partition and its nodes."""

    name: str
    available: str
    """up, down (jobs wait), drain or inact (jobs are refused)."""
    time_limit: str
    """As `sinfo` shows it."""
    max_nodes: int | None
    """Of one job; None has no limit."""
    nodes: list[Node] = field(default_factory=list)

    @property
    def time_limit_s(self) -> float:
        """The time limit in seconds."""
        if self.time_limit == "infinite":
            return float("inf")
        return seconds(self.time_limit, f"time limit of partition {self.name}")


@dataclass(frozen=True)
class Site:
    """What jobs can ask for."""

    partitions: dict[str, Partition]
    default: str
    """Name of the default partition; empty if there is none."""
    max_array_size: int | None = None
    reservations: frozenset[str] = frozenset()
    accounts: frozenset[str] | None = None
    """Of this user; None if SLURM takes any."""
    qos: frozenset[str] | None = None
    """Of this user; None if SLURM takes any."""


def read() -> Site:
    """Asks SLURM.

    Raises:
        NoSlurmError: there is none on this machine.
        NoAnswerError: it did not answer.
    """
    # Hidden partitions take jobs, too.
    partitions, default = parse_nodes(
        run_command(["sinfo", "--all", "--noheader", "--Node", f"--format={_NODE_FORMAT}"])
    )
    settings = parse_settings(run_command(["scontrol", "show", "config"]))
    enforced = settings.get("AccountingStorageEnforce", "").split(",")
    accounts = qos = None
    if {"associations", "limits", "qos"} & set(enforced):
        accounts, qos = parse_associations(
            run_command([
                "sacctmgr", "--noheader", "--parsable2", "show", "assoc",
                f"user={getpass.getuser()}", "format=account,qos",
            ])
        )  # fmt: skip
    size = settings.get("MaxArraySize", "")
    return Site(
        partitions,
        default,
        max_array_size=int(size) if size.isdecimal() else None,
        reservations=frozenset(
            re.findall(
                r"^ReservationName=(\S+)",
                run_command(["scontrol", "--oneliner", "show", "reservation"]),
                re.MULTILINE,
            )
        ),
        accounts=accounts,
        qos=qos if "qos" in enforced else None,
    )


def within_site(cluster: ClusterConfig) -> ClusterConfig:
    """The profile with `prep.max_array_size` no larger than the site's MaxArraySize.

    Where SLURM cannot be asked, the profile stays as it is, and sbatch has the last word.

    Raises:
        ConfigError: `prep.max_concurrent` is too small for that many arrays.
    """
    try:
        size = parse_settings(run_command(["scontrol", "show", "config"])).get("MaxArraySize", "")
    except (NoSlurmError, SlurmError):
        return cluster
    if not size.isdecimal() or int(size) >= cluster.prep.max_array_size:
        return cluster
    return replace(cluster, prep=replace(cluster.prep, max_array_size=int(size)))


def host_names(host_list: str) -> list[str]:
    """Node names of a list such as `node[1-3],node9`.

    Raises:
        NoSlurmError: there is no SLURM on this machine.
        SlurmError: it cannot read the list.
    """
    return run_command(["scontrol", "show", "hostnames", host_list]).split() if host_list else []


def ask_sbatch(script: str) -> str:
    """Lets sbatch say whether it would take a script (`--test-only`), the last check of one.

    It sees what only the controller knows, such as partitions that an account may not use. Measured
    on SLURM 22.05: a time limit above the partition's passes where EnforcePartLimits=NO, and nodes
    that are drained or reserved at the moment make it refuse what sbatch itself would queue; so
    that refusal is only told, and `launch.fit` compares limits and nodes.

    Returns:
        When the job would start and where, in SLURM's words.

    Raises:
        ConfigError: sbatch would refuse it.
        NoSlurmError: there is no SLURM on this machine.
        NoAnswerError: the controller did not answer.
    """
    try:
        # The answer is on standard error.
        command = "SLURM_TIME_FORMAT=standard exec sbatch --test-only 2>&1"
        answer = run_command(["bash", "-c", command], script)
    except NoAnswerError:
        raise
    except SlurmError as error:
        if _NOT_NOW not in str(error):
            raise ConfigError(
                f"sbatch would refuse the job: {error}; change the cluster profile"
            ) from None
        return _NOT_NOW
    return answer.strip().removeprefix("sbatch: ")


def parse_nodes(text: str) -> tuple[dict[str, Partition], str]:
    """Partitions by name and the default's name, of `sinfo --Node` in this module's format."""
    partitions: dict[str, Partition] = {}
    default = ""
    for line in text.splitlines():
        name, available, limit, job_nodes, node, cpus, memory, gres, features = line.split("|")
        if name.endswith("*"):
            name = default = name.removesuffix("*")
        most = job_nodes.rpartition("-")[2]
        partition = partitions.setdefault(
            name, Partition(name, available, limit, int(most) if most.isdecimal() else None)
        )
        partition.nodes.append(
            Node(node, int(cpus), int(memory), parse_gpus(gres),
                 frozenset(features.split(",")) - {"(null)"})
        )  # fmt: skip
    return partitions, default


def parse_gpus(gres: str) -> dict[str, int]:
    """GPUs by type, of a node's GRES such as `gpu:h200:8(S:0-1),nvme:1`."""
    found: dict[str, int] = {}
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):
        kind, *rest = item.split(":")
        if kind == "gpu":
            *types, count = rest
            name = types[0] if types else ""
            found[name] = found.get(name, 0) + int(count)
    return found


def parse_settings(text: str) -> dict[str, str]:
    """Of `scontrol show config`."""
    return {
        name.strip(): value.strip()
        for name, equals, value in (line.partition("=") for line in text.splitlines())
        if equals
    }


def parse_associations(text: str) -> tuple[frozenset[str], frozenset[str]]:
    """Accounts and QOS of a user, of `sacctmgr show assoc` with `format=account,qos`."""
    lines = [line.split("|") for line in text.splitlines()]
    return (
        frozenset(account for account, _ in lines),
        frozenset(name for _, names in lines for name in names.split(",") if name),
    )
