"""The SLURM site as its own commands describe it, and whether a cluster profile fits it.

Names of reservations and accounts come from `scontrol` and `sacctmgr`, the latter only where SLURM
enforces them.
"""

import difflib
import getpass
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from launch.cluster import ClusterConfig, cluster_of, mebibytes, seconds
from launch.decide import TO_REQUEUE_S
from launch.slurm import NoAnswerError, NoSlurmError, SlurmError, run_command
from pipeline.errors import ConfigError

logger = logging.getLogger(__name__)

# Text formats with separators are read, which are the same from 22.05 on; `--json` changes between
# versions and leaves options out.
_NODE_FORMAT = "%P|%a|%l|%s|%N|%c|%m|%G|%f"
_NOT_NOW = "Requested node configuration is not available"


@dataclass(frozen=True)
class NodeResources:
    """The resources of a node, whoever uses it now."""

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
    """Time limit in the form that `sinfo` prints."""
    max_nodes: int | None
    """Largest number of nodes of one job; None has no limit."""
    nodes: list[NodeResources] = field(default_factory=list)

    @property
    def time_limit_s(self) -> float:
        """The time limit in seconds."""
        if self.time_limit == "infinite":
            return float("inf")
        return seconds(self.time_limit, f"time limit of partition {self.name}")


@dataclass(frozen=True)
class Site:
    """The names and limits that jobs can ask for."""

    partitions: dict[str, Partition]
    default: str
    """Name of the default partition; empty if there is none."""
    max_array_size: int | None = None
    reservations: frozenset[str] = frozenset()
    accounts: frozenset[str] | None = None
    """Accounts of this user; None if SLURM accepts any."""
    qos: frozenset[str] | None = None
    """QOS of this user; None if SLURM accepts any."""


def read() -> Site:
    """Ask SLURM what the site offers."""
    # --all: hidden partitions take jobs, too.
    partitions, default = parse_nodes(
        run_command(["sinfo", "--all", "--noheader", "--Node", f"--format={_NODE_FORMAT}"])
    )
    settings = _settings()
    enforced = settings.get("AccountingStorageEnforce", "").split(",")
    accounts = qos = None
    if {"associations", "limits", "qos"} & set(enforced):
        own = _accounting("assoc", f"user={getpass.getuser()}", "format=account,qos")
        accounts = frozenset(account for account, _ in own)
        qos = frozenset(name for _, names in own for name in names.split(",") if name)
    reservations = run_command(["scontrol", "--oneliner", "show", "reservation"])
    return Site(
        partitions,
        default,
        max_array_size=_number(settings.get("MaxArraySize", "")),
        reservations=frozenset(re.findall(r"^ReservationName=(\S+)", reservations, re.MULTILINE)),
        accounts=accounts,
        qos=qos if "qos" in enforced else None,
    )


def _settings() -> dict[str, str]:
    """Read `scontrol show config`."""
    lines = run_command(["scontrol", "show", "config"]).splitlines()
    pairs = (line.partition("=") for line in lines)
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


def _setting(name: str) -> str:
    """Read a setting of the site; empty if it has none, or where SLURM cannot be asked."""
    try:
        return _settings().get(name, "")
    except (NoSlurmError, SlurmError):
        return ""


def _accounting(*words: str) -> list[list[str]]:
    """Ask `sacctmgr show`; the fields of each line."""
    lines = run_command(["sacctmgr", "--noheader", "--parsable2", "show", *words]).splitlines()
    return [line.split("|") for line in lines if line]


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def within_site(cluster: ClusterConfig) -> ClusterConfig:
    """Lower `prep.max_array_size` of a profile to the site's MaxArraySize."""
    size = max_array_size()
    # Where SLURM cannot be asked, the profile stays as it is, and sbatch has the last word.
    if size is None or size >= cluster.prep.max_array_size:
        return cluster
    return replace(cluster, prep=replace(cluster.prep, max_array_size=size))


def max_array_size() -> int | None:
    """Ask for the site's MaxArraySize; None where SLURM cannot be asked."""
    return _number(_setting("MaxArraySize"))


def profile_here(path: str | None) -> ClusterConfig:
    """Load a cluster profile and drop settings that this cluster does not support."""
    cluster = cluster_of(path)
    # Without a task plugin srun cannot bind ranks to cores, and says so in every step of a job.
    plugin = _setting("TaskPlugin") if cluster.cpu_bind else ""
    if plugin not in ("task/none", "(null)"):
        return cluster
    logger.info(
        "this cluster binds no ranks to cores (TaskPlugin=%s): cpu_bind is left out", plugin
    )
    return replace(cluster, cpu_bind="")


def submit_limit(account: str, qos: str) -> int | None:
    """Ask accounting how many jobs of an account and QOS this user may have in the queue.

    The smallest limit holds; None: there is none, or SLURM cannot be asked. Empty stands for the
    user's own.
    """
    try:
        enforced = _settings().get("AccountingStorageEnforce", "").split(",")
        if not {"limits", "safe"} & set(enforced):
            return None
        user = f"user={getpass.getuser()}"
        own = _accounting("assoc", user, "format=account,qos,maxsubmitjobs")
        of_qos = _accounting("qos", "format=name,maxsubmitjobsperuser")
    except (NoSlurmError, SlurmError):
        return None
    mine = [fields for fields in own if fields[0] == account or not account]
    names = {name for _, listed, _ in mine for name in listed.split(",") if name}
    # Where a user has several QOS, which one SLURM takes is not known, so that none counts.
    taken = {qos} if qos else names if len(names) == 1 else set()
    limits = [limit for _, _, limit in mine] + [limit for name, limit in of_qos if name in taken]
    return min((int(limit) for limit in limits if limit.isdecimal()), default=None)


@dataclass(frozen=True)
class Preemption:
    """What becomes of a job when another one needs its nodes."""

    where: str
    """Such as `partition low`."""
    mode: str
    """REQUEUE, CANCEL or SUSPEND."""
    grace_s: float
    """Seconds between SLURM's word and the end."""


def preemption(cluster: ClusterConfig) -> list[Preemption]:
    """Ask how jobs of a profile are preempted; empty: they are not, or SLURM cannot be asked."""
    try:
        settings = _settings()
        kind, default = settings.get("PreemptType", ""), settings.get("PreemptMode", "")
        if kind.endswith("qos"):
            rows = _accounting("qos", "format=name,preemptmode,gracetime")
            named = [(f"qos {name}", mode, grace) for name, mode, grace in rows if name]
            wanted = {f"qos {cluster.qos}"}
        elif kind.endswith("partition_prio"):
            text = run_command(["scontrol", "--oneliner", "show", "partition"])
            named, wanted = parse_preempted(text, cluster.partition)
        else:
            return []
    except (NoSlurmError, SlurmError):
        return []
    return [
        Preemption(where, mode, seconds(grace, "GraceTime") if ":" in grace else float(grace or 0))
        for where, said, grace in named
        if where in wanted
        and (mode := _mode(default if said.lower() in ("", "cluster") else said)) is not None
    ]


def parse_preempted(text: str, wanted: str) -> tuple[list[tuple[str, str, str]], set[str]]:
    """Read `scontrol --oneliner show partition`.

    Returns:
        Name, PreemptMode and GraceTime of each partition above which there is another one, and the
        names of those that a job asks for: the default one without a name.
    """
    every = [
        dict(word.split("=", 1) for word in line.split() if "=" in word)
        for line in text.splitlines()
        if line.startswith("PartitionName=")
    ]
    highest = max((int(each.get("PriorityTier", "1")) for each in every), default=1)
    named = [
        (f"partition {each['PartitionName']}", each.get("PreemptMode", ""), each["GraceTime"])
        for each in every
        if "GraceTime" in each and int(each.get("PriorityTier", "1")) < highest
    ]
    defaults = [each["PartitionName"] for each in every if each.get("Default") == "YES"]
    return named, {f"partition {name}" for name in (wanted.split(",") if wanted else defaults)}


def _mode(text: str) -> str | None:
    return next((mode for mode in ("CANCEL", "REQUEUE", "SUSPEND") if mode in text.upper()), None)


def preemption_remarks(
    found: Iterable[Preemption], save_s: float | None, cluster: ClusterConfig
) -> list[str]:
    """Say where a preempted job would lose steps, or not come back, and what to do.

    `save_s` is how long a save of the run has taken; None: not measured, so that the profile's
    `stop_before_end_s` stands for what a job needs to save and to go back to the queue.
    """
    needed_s, how = float(cluster.stop_before_end_s), "as stop_before_end_s of the profile says"
    if save_s is not None:
        needed_s, how = save_s + TO_REQUEUE_S, f"of which a save took {save_s:.1f} s"
    texts = []
    for each in found:
        about = (
            f"{each.where} preempts with PreemptMode={each.mode} after GraceTime={each.grace_s:g} s"
        )
        if each.mode == "SUSPEND":
            texts.append(
                f"{about}: a job that stands still for longer than train.hang_timeout_s ends, and "
                "starts again from its last checkpoint"
            )
        elif each.grace_s < needed_s:
            # Measured on 22.05: a job that has saved before the end of it requeues itself in both.
            lost = "the steps since the last checkpoint are lost"
            ask = f"ask the site for GraceTime >= {math.ceil(needed_s)}"
            more = f"save more often (checkpoint.every_steps), or {ask}"
            if each.mode == "CANCEL":
                lost += ", and nothing starts it again but `postnorm resume`"
                more = f"take a partition or QOS with PreemptMode=REQUEUE, or {ask}"
            texts.append(
                f"{about}; a job needs {needed_s:.0f} s to save and go back to the queue, {how}. "
                f"Where that is too long {lost}: {more}"
            )
    return texts


def host_names(host_list: str) -> list[str]:
    """Expand a list of nodes such as `node[1-3],node9`."""
    return run_command(["scontrol", "show", "hostnames", host_list]).split() if host_list else []


def ask_sbatch(script: str) -> str:
    """Ask sbatch whether it would accept a script (`--test-only`), and return its answer.

    It knows what only the controller knows, such as partitions that an account may not use.
    """
    try:
        # sbatch answers on standard error.
        command = "SLURM_TIME_FORMAT=standard exec sbatch --test-only 2>&1"
        answer = run_command(["bash", "-c", command], script)
    except NoAnswerError:
        raise
    except SlurmError as error:
        # Measured on SLURM 22.05: nodes that are drained or reserved at the moment make it refuse
        # what sbatch itself would queue, so that this is only reported. Where EnforcePartLimits=NO
        # it lets pass what never starts: `check` compares limits and nodes.
        if _NOT_NOW not in str(error):
            raise ConfigError(
                f"sbatch would refuse the job: {error}; change the cluster profile"
            ) from None
        return _NOT_NOW
    return answer.strip().removeprefix("sbatch: ")


def parse_nodes(text: str) -> tuple[dict[str, Partition], str]:
    """Read `sinfo --Node` in this module's format: partitions by name, and the default's name."""
    partitions: dict[str, Partition] = {}
    default = ""
    for line in text.splitlines():
        name, available, limit, job_nodes, node, cpus, memory, gres, features = line.split("|")
        if name.endswith("*"):
            name = default = name.removesuffix("*")
        most = job_nodes.rpartition("-")[2]
        partition = partitions.setdefault(name, Partition(name, available, limit, _number(most)))
        names = frozenset(features.split(",")) - {"(null)"}
        partition.nodes.append(NodeResources(node, int(cpus), int(memory), parse_gpus(gres), names))
    return partitions, default


def parse_gpus(gres: str) -> dict[str, int]:
    """Read the GPUs by type from a node's GRES, such as `gpu:h200:8(S:0-1),nvme:1`."""
    counts: dict[str, int] = {}
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):
        kind, *rest = item.split(":")
        if kind == "gpu":
            *types, count = rest
            name = types[0] if types else ""
            counts[name] = counts.get(name, 0) + int(count)
    return counts


def check(cluster: ClusterConfig, kind: str, *, work_dir: str, optional: bool = False) -> str:
    """Compare a profile with the SLURM site of this machine, before a job could pend forever.

    Return a line that says what was checked, or raise a ConfigError with everything that does not
    fit. With `optional` it is not an error that there is no SLURM or that it does not answer.
    """
    try:
        site, excluded = read(), host_names(cluster.exclude)
    except (NoSlurmError, SlurmError) as error:
        if not optional:
            raise
        return f"the profile was not checked against the site: {error}"
    every = [*problems(cluster, kind, site, excluded), *missing_files(cluster, work_dir)]
    if every:
        raise ConfigError(
            f"the cluster profile does not fit this site, {len(every)} problem(s):"
            + "".join(f"\n- {problem}" for problem in every)
        )
    return (
        f"the profile fits the site: partition {_request(cluster, kind).partition or site.default}"
    )


def problems(
    cluster: ClusterConfig, kind: str, site: Site, excluded: Sequence[str] = ()
) -> list[str]:
    """List everything that SLURM would refuse or never start; empty if there is nothing.

    `excluded` are the node names that `exclude` stands for.
    """
    request = _request(cluster, kind)
    texts = _partition_problems(request, site, excluded)
    every_node = {node.name for part in site.partitions.values() for node in part.nodes}
    if unknown := [name for name in excluded if name not in every_node]:
        texts.append(f"exclude={cluster.exclude!r}: the site has no {', '.join(unknown)}")
    if request.reservation:
        texts += _unknown("reservation=", request.reservation, site.reservations)
    # Without a name SLURM takes the user's default.
    if request.account and site.accounts is not None:
        texts += _unknown("account=", request.account, site.accounts)
    if request.qos and site.qos is not None:
        texts += _unknown("qos=", request.qos, site.qos)
    most = site.max_array_size
    if kind == "prep" and most and cluster.prep.max_array_size > most:
        texts.append(
            f"prep.max_array_size={cluster.prep.max_array_size} is above MaxArraySize={most} of "
            f"the site; set it to {most}"
        )
    return texts


def missing_files(cluster: ClusterConfig, work_dir: str) -> list[str]:
    """List files that the profile names and this machine, which shares folders, lacks."""
    container = cluster.container
    texts = [] if Path(work_dir).is_dir() else [f"the working folder {work_dir} does not exist"]
    python = Path(work_dir, cluster.python)
    # A bare name may come from a module; in a container the interpreter is the image's.
    is_path = container.kind == "none" and "/" in cluster.python and "$" not in cluster.python
    if is_path and not (python.is_file() and os.access(python, os.X_OK)):
        texts.append(
            f"python={cluster.python!r}: {python} is not a program; name the interpreter that this "
            "project is installed for"
        )
    if container.image_file and not Path(work_dir, container.image_file).exists():
        texts.append(f"container.image={container.image!r} does not exist")
    sources = (mount.partition(":")[0] for mount in container.mounts)
    return texts + [
        f"container.mounts: {path} does not exist" for path in sources if not Path(path).exists()
    ]


@dataclass(frozen=True)
class _Request:
    """The resources that a job asks for; the texts name the fields of the profile."""

    partition: str
    account: str
    qos: str
    reservation: str
    time: tuple[str, int]
    nodes: int
    cpus: tuple[str, int]
    memory: tuple[str, float]
    gpus: tuple[str, str, int]
    constraint: str


def _request(cluster: ClusterConfig, kind: str) -> _Request:
    prep = cluster.prep
    if kind == "prep":
        memory = f"prep.mem={prep.mem!r}" if prep.mem else ""
        return _Request(
            partition=prep.partition or cluster.partition,
            account=prep.account or cluster.account,
            qos=prep.qos or cluster.qos,
            reservation="",
            time=(f"prep.time_limit={prep.time_limit!r}", prep.time_limit_s),
            nodes=1,
            cpus=(f"prep.cores={prep.cores}", prep.cores),
            memory=(memory, mebibytes(prep.mem or "0", "prep.mem")),
            gpus=("", "", 0),
            constraint="",
        )
    ranks = cluster.num_ranks_per_node
    cpus = f"{ranks} ranks of cpus_per_rank={cluster.cpus_per_rank} on each node"
    memory = f"mem_per_node={cluster.mem_per_node!r}" if cluster.mem_per_node else ""
    gpus = f"gpus_per_node={cluster.gpus_per_node}" if cluster.gpus_per_node else ""
    gpus += f" of gpu_type={cluster.gpu_type!r}" if cluster.gpu_type else ""
    return _Request(
        partition=cluster.partition,
        account=cluster.account,
        qos=cluster.qos,
        reservation=cluster.reservation,
        time=(f"time_limit={cluster.time_limit!r}", cluster.time_limit_s),
        nodes=cluster.nodes,
        cpus=(cpus, ranks * cluster.cpus_per_rank),
        memory=(memory, mebibytes(cluster.mem_per_node or "0", "mem_per_node")),
        gpus=(gpus, cluster.gpu_type, cluster.gpus_per_node),
        constraint=cluster.constraint,
    )


def _partition_problems(request: _Request, site: Site, excluded: Sequence[str]) -> list[str]:
    """List the problems of the partition that fits best; several are listed as for sbatch."""
    names = request.partition.split(",") if request.partition else [site.default]
    if names == [""]:
        return [
            "no partition is named, and the site has no default; set partition to one of "
            f"{', '.join(sorted(site.partitions))}"
        ]
    unknown = [text for name in names for text in _unknown("partition=", name, site.partitions)]
    if unknown:
        return unknown
    return min((_misfits(request, site.partitions[name], excluded) for name in names), key=len)


def _misfits(request: _Request, partition: Partition, excluded: Sequence[str]) -> list[str]:
    texts, where = [], f"partition {partition.name}"
    if partition.available in ("drain", "inact"):
        texts.append(f"{where} takes no jobs at the moment ({partition.available})")
    text, limit_s = request.time
    if limit_s > partition.time_limit_s:
        texts.append(
            f"{text} is above the limit of {where}, {partition.time_limit}; lower it, or take "
            "another partition"
        )
    if partition.max_nodes is not None and request.nodes > partition.max_nodes:
        texts.append(
            f"nodes={request.nodes}: {where} gives a job at most {partition.max_nodes}; lower it"
        )
    nodes = [node for node in partition.nodes if node.name not in excluded]
    if request.nodes > len(nodes):
        left_out = len(partition.nodes) - len(nodes)
        texts.append(
            f"nodes={request.nodes}: {where} has {len(partition.nodes)}"
            + (f", {left_out} of them excluded" if left_out else "")
            + "; lower it"
        )
        return texts + _feature_problems(request, nodes, where)
    return texts + _node_problems(request, nodes, where)


def _node_problems(request: _Request, nodes: list[NodeResources], where: str) -> list[str]:
    """List resources that too few nodes offer, one by one and then together."""
    cpus, memory, (gpus, gpu_type, num_gpus) = request.cpus, request.memory, request.gpus
    needs: list[tuple[str, Callable[[NodeResources], bool], Callable[[NodeResources], str]]] = [
        (cpus[0], lambda node: node.cpus >= cpus[1], lambda node: f"{node.cpus} cores"),
        (memory[0], lambda node: node.memory_mib >= memory[1], lambda node: f"{node.memory_mib}M"),
        (gpus, lambda node: _num_gpus(node, gpu_type) >= num_gpus, _gpu_text),
    ]
    texts = _feature_problems(request, nodes, where)
    constraint = f"constraint={request.constraint!r}" if request.constraint else ""
    left = [node for node in nodes if _has_features(node, request.constraint)]
    if not texts and len(left) < request.nodes:
        offers = _counted("+".join(sorted(node.features)) or "none" for node in nodes)
        texts.append(_too_few(constraint, left, request.nodes, where, offers))
    for text, fits, offer in needs:
        fitting = list(filter(fits, nodes))
        left = list(filter(fits, left))
        if len(fitting) < request.nodes:
            offers = _counted(map(offer, nodes))
            texts.append(_too_few(text, fitting, request.nodes, where, offers))
    if not texts and len(left) < request.nodes:
        every = filter(None, [*(need[0] for need in needs), constraint])
        texts.append(
            f"{where} has {len(left)} node(s) with all of these together, nodes={request.nodes} "
            f"are asked for: {'; '.join(every)}"
        )
    return texts


def _feature_problems(request: _Request, nodes: list[NodeResources], where: str) -> list[str]:
    known = {name for node in nodes for name in node.features}
    label = f"constraint={request.constraint!r}: in {where} feature "
    names = _features(request.constraint)
    return [text for name in names for text in _unknown(label, name, known)]


def _features(constraint: str) -> list[str]:
    return re.findall(r"[\w.:=-]+", re.sub(r"\*\d+", "", constraint))


def _has_features(node: NodeResources, constraint: str) -> bool:
    """Whether a node can be one of those asked for; brackets and counts are left to sbatch."""
    names = _features(constraint)
    if set("[]()*!") & set(constraint):
        return True
    if "|" in constraint:
        return "&" in constraint or any(name in node.features for name in names)
    return all(name in node.features for name in names)


def _num_gpus(node: NodeResources, gpu_type: str) -> int:
    return node.gpus.get(gpu_type, 0) if gpu_type else sum(node.gpus.values())


def _gpu_text(node: NodeResources) -> str:
    return "+".join(f"{count} {name}".strip() for name, count in node.gpus.items()) or "no"


def _too_few(text: str, fitting: list[NodeResources], nodes: int, where: str, offers: str) -> str:
    return f"{text}: {where} has {len(fitting)} such node(s), nodes={nodes} are asked for; {offers}"


def _counted(offers: Iterable[str]) -> str:
    """Count equal offers, such as `its nodes have: 8 h200 (2 nodes), no (4 nodes)`."""
    counts = Counter(offers)
    return "its nodes have: " + ", ".join(f"{text} ({n} nodes)" for text, n in counts.items())


def _unknown(label: str, name: str, known: Iterable[str]) -> list[str]:
    names = sorted(known)
    if name in names:
        return []
    near = difflib.get_close_matches(name, names, n=1)
    advice = f"; did you mean {near[0]!r}?" if near else ""
    return [f"{label}{name!r} is not known; expected one of: {', '.join(names) or 'none'}{advice}"]
