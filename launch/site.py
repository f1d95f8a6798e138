"""The SLURM site as its own commands tell it.

Text formats with separators are read, which are the same from 22.05 on; `--json` changes between
versions and leaves options out. Names of reservations and accounts come from `scontrol` and
`sacctmgr`, the latter only where SLURM enforces them.
"""

import getpass
import re
import shlex
import subprocess
from dataclasses import dataclass, field

from launch.fields import seconds
from pipeline.errors import EXIT_FAILED_RETRY, ConfigError, PostnormError

_NODE_FORMAT = "%P|%a|%l|%s|%N|%c|%m|%G|%f"
_PATIENCE_S = 60
_NOT_NOW = "Requested node configuration is not available"


class NoSlurmError(PostnormError):
    """SLURM's commands are not on this machine."""


class SiteError(PostnormError):
    """A command of SLURM failed; it may work when it is tried again."""

    exit_code = EXIT_FAILED_RETRY


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
        SiteError: it did not answer.
    """
    # Hidden partitions take jobs, too.
    partitions, default = parse_nodes(
        ask("sinfo", "--all", "--noheader", "--Node", f"--format={_NODE_FORMAT}")
    )
    settings = parse_settings(ask("scontrol", "show", "config"))
    enforced = settings.get("AccountingStorageEnforce", "").split(",")
    accounts = qos = None
    if {"associations", "limits", "qos"} & set(enforced):
        accounts, qos = parse_associations(
            ask(
                "sacctmgr", "--noheader", "--parsable2", "show", "assoc",
                f"user={getpass.getuser()}", "format=account,qos",
            )
        )  # fmt: skip
    size = settings.get("MaxArraySize", "")
    return Site(
        partitions,
        default,
        max_array_size=int(size) if size.isdecimal() else None,
        reservations=frozenset(
            re.findall(
                r"^ReservationName=(\S+)",
                ask("scontrol", "--oneliner", "show", "reservation"),
                re.MULTILINE,
            )
        ),
        accounts=accounts,
        qos=qos if "qos" in enforced else None,
    )


def host_names(host_list: str) -> list[str]:
    """Node names of a list such as `node[1-3],node9`.

    Raises:
        NoSlurmError: there is no SLURM on this machine.
        SiteError: it cannot read the list.
    """
    return ask("scontrol", "show", "hostnames", host_list).split() if host_list else []


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
        SiteError: the controller did not answer.
    """
    done = _run(["sbatch", "--test-only"], script)
    lines = (done.stderr or done.stdout).strip().splitlines()
    answer = "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in lines)
    if done.returncode == 0 or _NOT_NOW in answer:
        return answer
    if re.search(r"Unable to contact|timed out|Transport endpoint", answer):
        raise SiteError(f"sbatch --test-only: {answer}")
    raise ConfigError(f"sbatch would refuse the job: {answer}; change the cluster profile")


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


def ask(*command: str) -> str:
    """Output of a command of SLURM.

    Raises:
        NoSlurmError: it is not there.
        SiteError: it failed.
    """
    done = _run(list(command))
    if done.returncode:
        message = (done.stderr or done.stdout).strip()
        raise SiteError(f"`{shlex.join(command)}` failed ({done.returncode}): {message}")
    return done.stdout


def _run(command: list[str], stdin: str = "") -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            command, input=stdin, capture_output=True, text=True, check=False, timeout=_PATIENCE_S
        )
    except FileNotFoundError:
        raise NoSlurmError(
            f"{command[0]} is not on this machine; work on a login node of the cluster, or look at "
            "the script with --dry-run"
        ) from None
    except subprocess.TimeoutExpired:
        raise SiteError(
            f"`{shlex.join(command)}` did not answer within {_PATIENCE_S} s; is slurmctld up?"
        ) from None
