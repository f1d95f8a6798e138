"""Compares a cluster profile with the site, before a job is submitted that could never start."""

import difflib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch import site
from launch.cluster import ClusterConfig
from launch.fields import mebibytes
from launch.site import Node, Partition, Site
from launch.slurm import NoSlurmError, SlurmError
from pipeline.errors import ConfigError


def check(cluster: ClusterConfig, kind: str, *, work_dir: str, optional: bool = False) -> str:
    """Compares a profile with the SLURM site of this machine.

    Args:
        cluster: the profile.
        kind: of job: data preparation asks for something else than runs do.
        work_dir: folder that the job starts in.
        optional: whether a machine without SLURM, or whose SLURM does not answer, is no error.

    Returns:
        A line that says what was checked.

    Raises:
        ConfigError: names all that does not fit.
        NoSlurmError: there is no SLURM here.
        NoAnswerError: it did not answer.
    """
    try:
        found, excluded = site.read(), site.host_names(cluster.exclude)
    except (NoSlurmError, SlurmError) as error:
        if not optional:
            raise
        return f"the profile was not checked against the site: {error}"
    ask = _ask(cluster, kind)
    every = [*problems(cluster, kind, found, excluded), *missing_files(cluster, work_dir)]
    if every:
        raise ConfigError(
            f"the cluster profile does not fit this site, {len(every)} problem(s):"
            + "".join(f"\n- {problem}" for problem in every)
        )
    return f"the profile fits the site: partition {ask.partition or found.default}"


def problems(
    cluster: ClusterConfig, kind: str, found: Site, excluded: Sequence[str] = ()
) -> list[str]:
    """All that SLURM would refuse, or never start; empty if there is none.

    Args:
        cluster: the profile.
        kind: of job.
        found: the site.
        excluded: node names that `exclude` stands for.
    """
    ask = _ask(cluster, kind)
    texts = _partition_problems(ask, found, excluded)
    every_node = {node.name for part in found.partitions.values() for node in part.nodes}
    if unknown := [name for name in excluded if name not in every_node]:
        texts.append(f"exclude={cluster.exclude!r}: the site has no {', '.join(unknown)}")
    if ask.reservation:
        texts += _unknown("reservation=", ask.reservation, found.reservations)
    # Without a name SLURM takes the user's default.
    if ask.account and found.accounts is not None:
        texts += _unknown("account=", ask.account, found.accounts)
    if ask.qos and found.qos is not None:
        texts += _unknown("qos=", ask.qos, found.qos)
    most = found.max_array_size
    if kind == "prep" and most and cluster.prep.max_array_size > most:
        texts.append(
            f"prep.max_array_size={cluster.prep.max_array_size} is above MaxArraySize={most} of "
            f"the site; set it to {most}"
        )
    return texts


def missing_files(cluster: ClusterConfig, work_dir: str) -> list[str]:
    """What the profile names and this machine does not have, which shares folders with the nodes.

    Args:
        cluster: the profile.
        work_dir: folder that relative paths start at.
    """
    container = cluster.container
    found = [] if Path(work_dir).is_dir() else [f"the folder to work in, {work_dir}, is not there"]
    python = Path(work_dir, cluster.python)
    # By its mere name it may come from a module; in a container it is the image's.
    is_path = container.kind == "none" and "/" in cluster.python and "$" not in cluster.python
    if is_path and not (python.is_file() and os.access(python, os.X_OK)):
        found.append(
            f"python={cluster.python!r}: {python} is no program; name the interpreter that this "
            "project is installed for"
        )
    if container.image_file and not Path(work_dir, container.image_file).exists():
        found.append(f"container.image={container.image!r} is not there")
    sources = (mount.partition(":")[0] for mount in container.mounts)
    return found + [f"container.mounts: {path} is not there" for path in sources
                    if not Path(path).exists()]  # fmt: skip


@dataclass(frozen=True)
class _Ask:
    """What a job asks for."""

    partition: str
    account: str
    qos: str
    reservation: str
    time: tuple[str, int]
    """Text of the profile, and seconds."""
    nodes: int
    cpus: tuple[str, int]
    memory: tuple[str, float]
    gpus: tuple[str, str, int]
    constraint: str


def _ask(cluster: ClusterConfig, kind: str) -> _Ask:
    prep = cluster.prep
    if kind == "prep":
        return _Ask(
            partition=prep.partition or cluster.partition,
            account=prep.account or cluster.account,
            qos=prep.qos or cluster.qos,
            reservation="",
            time=(f"prep.time_limit={prep.time_limit!r}", prep.time_limit_s),
            nodes=1,
            cpus=(f"prep.cores={prep.cores}", prep.cores),
            memory=(
                f"prep.mem={prep.mem!r}" if prep.mem else "",
                mebibytes(prep.mem or "0", "prep.mem"),
            ),
            gpus=("", "", 0),
            constraint="",
        )
    ranks, memory = cluster.num_ranks_per_node, cluster.mem_per_node
    cpus = f"{ranks} ranks of cpus_per_rank={cluster.cpus_per_rank} on each node"
    gpus = f"gpus_per_node={cluster.gpus_per_node}" if cluster.gpus_per_node else ""
    gpus += f" of gpu_type={cluster.gpu_type!r}" if cluster.gpu_type else ""
    return _Ask(
        partition=cluster.partition,
        account=cluster.account,
        qos=cluster.qos,
        reservation=cluster.reservation,
        time=(f"time_limit={cluster.time_limit!r}", cluster.time_limit_s),
        nodes=cluster.nodes,
        cpus=(cpus, ranks * cluster.cpus_per_rank),
        memory=(
            f"mem_per_node={memory!r}" if memory else "",
            mebibytes(memory or "0", "mem_per_node"),
        ),
        gpus=(gpus, cluster.gpu_type, cluster.gpus_per_node),
        constraint=cluster.constraint,
    )


def _partition_problems(ask: _Ask, found: Site, excluded: Sequence[str]) -> list[str]:
    """Of the partitions that are named, one has to fit; they are listed as for sbatch."""
    names = ask.partition.split(",") if ask.partition else [found.default]
    if names == [""]:
        return [
            "no partition is named, and the site has no default; set partition to one of "
            f"{', '.join(sorted(found.partitions))}"
        ]
    unknown = [text for name in names for text in _unknown("partition=", name, found.partitions)]
    if unknown:
        return unknown
    return min((_fit(ask, found.partitions[name], excluded) for name in names), key=len)


def _fit(ask: _Ask, partition: Partition, excluded: Sequence[str]) -> list[str]:
    texts, where = [], f"partition {partition.name}"
    if partition.available in ("drain", "inact"):
        texts.append(f"{where} takes no jobs at the moment ({partition.available})")
    text, seconds = ask.time
    if seconds > partition.time_limit_s:
        texts.append(
            f"{text} is above the limit of {where}, {partition.time_limit}; lower it, or take "
            "another partition"
        )
    if partition.max_nodes is not None and ask.nodes > partition.max_nodes:
        texts.append(
            f"nodes={ask.nodes}: {where} gives a job at most {partition.max_nodes}; lower it"
        )
    nodes = [node for node in partition.nodes if node.name not in excluded]
    if ask.nodes > len(nodes):
        left_out = len(partition.nodes) - len(nodes)
        texts.append(
            f"nodes={ask.nodes}: {where} has {len(partition.nodes)}"
            + (f", {left_out} of them excluded" if left_out else "")
            + "; lower it"
        )
        return texts + _feature_problems(ask, nodes, where)
    return texts + _node_problems(ask, nodes, where)


def _node_problems(ask: _Ask, nodes: list[Node], where: str) -> list[str]:
    """What too few nodes offer, each by itself and then together."""
    cpus, memory, (gpus, gpu_type, num_gpus) = ask.cpus, ask.memory, ask.gpus
    needs: list[tuple[str, Callable[[Node], bool], Callable[[Node], str]]] = [
        (cpus[0], lambda node: node.cpus >= cpus[1], lambda node: f"{node.cpus} cores"),
        (memory[0], lambda node: node.memory_mib >= memory[1],
         lambda node: f"{node.memory_mib}M"),
        (gpus, lambda node: _gpus(node, gpu_type) >= num_gpus, _gpu_text),
    ]  # fmt: skip
    texts = _feature_problems(ask, nodes, where)
    constraint = f"constraint={ask.constraint!r}" if ask.constraint else ""
    left = [node for node in nodes if _has_features(node, ask.constraint)]
    if not texts and len(left) < ask.nodes:
        offers = _counted("+".join(sorted(node.features)) or "none" for node in nodes)
        texts.append(_too_few(constraint, left, ask.nodes, where, offers))
    for text, fits, offer in needs:
        fitting = list(filter(fits, nodes))
        left = list(filter(fits, left))
        if len(fitting) < ask.nodes:
            offers = _counted(map(offer, nodes))
            texts.append(_too_few(text, fitting, ask.nodes, where, offers))
    if not texts and len(left) < ask.nodes:
        texts.append(
            f"{where} has {len(left)} node(s) with all of this together, nodes={ask.nodes} are "
            f"asked for: {'; '.join(filter(None, [*(need[0] for need in needs), constraint]))}"
        )
    return texts


def _feature_problems(ask: _Ask, nodes: list[Node], where: str) -> list[str]:
    known = {name for node in nodes for name in node.features}
    return [
        text
        for name in _features(ask.constraint)
        for text in _unknown(f"constraint={ask.constraint!r}: in {where} feature ", name, known)
    ]


def _features(constraint: str) -> list[str]:
    return re.findall(r"[\w.:=-]+", re.sub(r"\*\d+", "", constraint))


def _has_features(node: Node, constraint: str) -> bool:
    """Whether a node can be one of those asked for; brackets and counts are left to sbatch."""
    names = _features(constraint)
    if set("[]()*!") & set(constraint):
        return True
    if "|" in constraint:
        return "&" in constraint or any(name in node.features for name in names)
    return all(name in node.features for name in names)


def _gpus(node: Node, gpu_type: str) -> int:
    return node.gpus.get(gpu_type, 0) if gpu_type else sum(node.gpus.values())


def _gpu_text(node: Node) -> str:
    return "+".join(f"{count} {name}".strip() for name, count in node.gpus.items()) or "no"


def _too_few(text: str, fitting: list[Node], nodes: int, where: str, offers: str) -> str:
    return f"{text}: {where} has {len(fitting)} such node(s), nodes={nodes} are asked for; {offers}"


def _counted(offers: Iterable[str]) -> str:
    """Such as `its nodes have: 8 h200 (2 nodes), no (4 nodes)`."""
    counts = Counter(offers)
    return "its nodes have: " + ", ".join(f"{text} ({n} nodes)" for text, n in counts.items())


def _unknown(label: str, name: str, known: Iterable[str]) -> list[str]:
    names = sorted(known)
    if name in names:
        return []
    near = difflib.get_close_matches(name, names, n=1)
    advice = f"; did you mean {near[0]!r}?" if near else ""
    return [f"{label}{name!r} is not known; expected one of: {', '.join(names) or 'none'}{advice}"]
