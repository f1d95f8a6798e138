"""Reading a SLURM site and comparing a profile with it, on recorded answers of SLURM 22.05."""

import re
from pathlib import Path

import pytest

from launch import site
from launch.cluster import ClusterConfig, ContainerConfig, PrepJobsConfig
from launch.site import profile_here
from launch.slurm import NoAnswerError, NoSlurmError
from pipeline.errors import ConfigError
from tests.support.fake_slurm import FakeSlurm
from tests.support.processes import write_program

# `sinfo --all --noheader --Node --format=...`: a line a node and partition.
SINFO = """\
train*|up|infinite|1-infinite|n1|8|64000|gpu:a100:8|a100,ib
train*|up|infinite|1-infinite|n2|8|64000|gpu:a100:8(S:0-1)|a100,ib
train*|up|infinite|1-infinite|n3|16|32000|gpu:h200:4,nvme:1|h200,ib,rack-2
train*|up|infinite|1-infinite|n4|16|32000|gpu:h200:4(S:0,2),gpu:l4:2|h200,ib,rack-2
short|up|30:00|1|n1|8|64000|gpu:a100:8|a100,ib
short|up|30:00|1|n2|8|64000|gpu:a100:8|a100,ib
week|up|7-00:00:00|2-3|n1|8|64000|gpu:a100:8|a100,ib
week|up|7-00:00:00|2-3|n2|8|64000|gpu:a100:8|a100,ib
closed|drain|infinite|1-infinite|n1|8|64000|gpu:a100:8|a100,ib
plain|up|1-00:00:00|1-infinite|c1|4|8000|(null)|(null)
"""
CONFIG = """\
Configuration data as of 2026-11-21T20:22:53
AccountingStorageEnforce = {enforce}
AccountingStorageType   = accounting_storage/slurmdbd
MaxArraySize            = 1001

Slurmctld(primary) at host is UP
"""
RESERVATIONS = "ReservationName=hold StartTime=2026-11-21T20:22:54 Nodes=n1 State=ACTIVE\n"
ASSOCIATIONS = "lab|normal,long\nroot|normal\n"


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that does not answer is not asked twice."""
    monkeypatch.setattr("launch.slurm._FIRST_WAIT_S", 1000)


def _site(slurm: FakeSlurm, enforce: str) -> None:
    slurm.add("sinfo", f'cat <<"E"\n{SINFO}E')
    slurm.add("sacctmgr", f'cat <<"E"\n{ASSOCIATIONS}E')
    config = CONFIG.format(enforce=enforce)
    slurm.add(
        "scontrol",
        f'case "$*" in\n"show config") cat <<"E"\n{config}E\n;;\n'
        f'"--oneliner show reservation") cat <<"E"\n{RESERVATIONS}E\n;;\n'
        '"show hostnames n[1-2],zz") printf "n1\\nn2\\nzz\\n";;\n'
        "*) echo unexpected: $* >&2; exit 9;;\nesac",
    )


@pytest.fixture
def at_site(slurm: FakeSlurm) -> FakeSlurm:
    _site(slurm, "associations,limits,qos")
    return slurm


def _problems(kind: str = "pretrain", **fields: object) -> list[str]:
    cluster = ClusterConfig(
        **{"nodes": 2, "gpus_per_node": 4, "cpus_per_rank": 2, **fields}  # type: ignore[arg-type]
    )
    return site.problems(cluster, kind, site.read(), site.host_names(cluster.exclude))


def test_site_is_read(at_site: FakeSlurm) -> None:
    found = site.read()
    assert found.default == "train"
    assert {name: len(part.nodes) for name, part in found.partitions.items()} == {
        "train": 4, "short": 2, "week": 2, "closed": 1, "plain": 1,
    }  # fmt: skip
    assert [node.gpus for node in found.partitions["train"].nodes] == [
        {"a100": 8}, {"a100": 8}, {"h200": 4}, {"h200": 4, "l4": 2},
    ]  # fmt: skip
    assert found.partitions["plain"].nodes[0] == site.NodeResources("c1", 4, 8000, {}, frozenset())
    limits = {name: part.time_limit_s for name, part in found.partitions.items()}
    assert limits["train"] == float("inf")
    assert (limits["short"], limits["week"], limits["plain"]) == (1800, 7 * 86400, 86400)
    assert [found.partitions[name].max_nodes for name in ("train", "short", "week")] == [None, 1, 3]
    assert (found.max_array_size, found.reservations) == (1001, {"hold"})
    assert (found.accounts, found.qos) == ({"lab", "root"}, {"normal", "long"})


@pytest.mark.parametrize(
    ("enforce", "accounts", "qos"),
    [("none", False, False), ("associations,limits", True, False), ("qos", True, True)],
)
def test_only_enforced_names_are_asked_for(
    enforce: str, accounts: bool, qos: bool, slurm: FakeSlurm
) -> None:
    _site(slurm, enforce)
    if not accounts:
        slurm.add("sacctmgr", "exit 1")  # as without accounting
    found = site.read()
    assert (found.accounts is not None, found.qos is not None) == (accounts, qos)
    assert bool(_problems(account="nobody")) == accounts
    assert bool(_problems(qos="never")) == qos


@pytest.mark.parametrize(("fields", "expected"), [
    ({}, []),
    ({"partition": "week", "time_limit": "7-0", "gpu_type": "a100", "gpus_per_node": 8,
      "cpus_per_rank": 1}, []),
    ({"partition": "short,train", "nodes": 4}, []), ({"constraint": "a100|h200", "nodes": 4}, []),
    ({"constraint": "[a100|h200]"}, []),
    ({"constraint": "ib&h200", "mem_per_node": "31G", "cpus_per_rank": 4}, []),
    ({"reservation": "hold", "account": "lab", "qos": "long"}, []),
    ({"partition": "plain", "nodes": 1, "gpus_per_node": 0, "ranks_per_node": 2,
      "time_limit": "1-0"}, []),
    # Two types on one node together.
    ({"gpus_per_node": 6, "nodes": 3, "cpus_per_rank": 1}, []),
    ({"partition": "tran"}, ["'tran'.* closed, plain, short, train, week; .*'train'"]),
    ({"partition": "closed", "nodes": 1}, ["closed.*drain"]),
    ({"partition": "short", "nodes": 1, "time_limit": "31"}, ["time_limit='31'.*short, 30:00"]),
    ({"nodes": 5}, ["nodes=5.*train has 4"]),
    ({"partition": "short", "time_limit": "20"}, ["nodes=2.*short.*at most 1"]),
    ({"nodes": 3, "exclude": "n[1-2],zz"}, ["nodes=3.*has 4, 2 of them excluded", "no zz"]),
    ({"gpu_type": "H200"},
     [r"gpu_type='H200'.* 0 .*nodes=2.*: 8 a100 \(2 .*, 4 h200 \(1 .*, 4 h200\+2 l4 \(1 "]),
    ({"gpus_per_node": 8, "cpus_per_rank": 1, "nodes": 3}, ["gpus_per_node=8.* 2 .*nodes=3"]),
    ({"partition": "plain", "nodes": 1, "gpus_per_node": 1}, [r"gpus_per_node=1.* no \(1 "]),
    ({"cpus_per_rank": 5}, [r"cpus_per_rank=5.* 0 .*nodes=2.* 8 cores \(2 .* 16 cores \(2 "]),
    ({"mem_per_node": "70G"}, ["mem_per_node='70G'.* 0 "]),
    ({"constraint": "a100&h20"}, ["'h20'.* a100, h200, ib, rack-2; .*'h200'"]),
    ({"constraint": "a100&h200"}, ["constraint='a100&h200'.* 0 .*nodes=2"]),
    ({"gpu_type": "h200", "mem_per_node": "60G"},
     [".* 0 .*together.*cpus_per_rank=2.*mem_per_node='60G'.*gpu_type='h200'"]),
    ({"reservation": "hol", "account": "lob", "qos": "lang"},
     ["reservation='hol'.* hold", "account='lob'.* lab, root;", "qos='lang'.* long, normal;"]),
], ids=str)  # fmt: skip
def test_what_fits_and_what_does_not(
    at_site: FakeSlurm, fields: dict[str, object], expected: list[str]
) -> None:
    found = _problems(**fields)
    assert len(found) == len(expected), found
    for text, facts in zip(found, expected, strict=True):
        assert re.search(facts, text), text


def test_data_preparation_is_checked_by_what_its_array_tasks_ask_for(at_site: FakeSlurm) -> None:
    prep = PrepJobsConfig(partition="plain", cores=5, mem="9G", time_limit="2-0",
                          max_array_size=2000)  # fmt: skip
    found = _problems("prep", nodes=99, partition="no", gpus_per_node=8, prep=prep)
    assert [text.partition(":")[0] for text in found] == [
        "prep.time_limit='2-0' is above the limit of partition plain, 1-00",
        "prep.cores=5", "prep.mem='9G'",
        "prep.max_array_size=2000 is above MaxArraySize=1001 of the site; set it to 1001",
    ]  # fmt: skip
    assert _problems("prep", prep=PrepJobsConfig(partition="plain", cores=4, mem="7G")) == []


def test_site_without_a_default_partition_wants_a_name(at_site: FakeSlurm) -> None:
    at_site.add("sinfo", f'cat <<"E"\n{SINFO.replace("*", "")}E')
    [problem] = _problems()
    assert "closed, plain, short, train, week" in problem


def test_all_problems_are_named_at_once(at_site: FakeSlurm, tmp_path: Path) -> None:
    cluster = ClusterConfig(nodes=5, cpus_per_rank=1, account="x", python="no/python")
    with pytest.raises(ConfigError) as caught:
        site.check(cluster, "pretrain", work_dir=str(tmp_path / "gone"))
    lines = str(caught.value).splitlines()
    for line, fact in zip(lines[1:], ("nodes=5", "'x'", "gone", "no/python"), strict=True):
        assert fact in line
    python = tmp_path / "python"
    write_program(python, "")
    fitting = ClusterConfig(nodes=4, cpus_per_rank=1, python="./python")
    said = site.check(fitting, "pretrain", work_dir=str(tmp_path))
    assert said == "the profile fits the site: partition train"


def test_missing_files(tmp_path: Path) -> None:
    (tmp_path / "a.sif").touch()
    (tmp_path / "python").touch()  # no program
    image = ContainerConfig(kind="apptainer", image="a.sif", mounts=(f"{tmp_path}:/x", "/no/such"))
    there = ClusterConfig(container=image, python="no/python")  # the image's
    gone = ClusterConfig(container=ContainerConfig(kind="pyxis", image="./b.sqsh"))
    remote = ClusterConfig(container=ContainerConfig(kind="pyxis", image="nvcr.io#a/b:1"))
    pulled, absent = (
        ClusterConfig(container=ContainerConfig(kind="singularity", image=image))
        for image in ("docker://a/b", "images/b.sif")
    )
    for cluster, named in ((there, "/no/such"), (gone, "./b.sqsh"), (remote, ""),
                           (pulled, ""), (absent, "images/b.sif"),
                           (ClusterConfig(python="./python"), f"{tmp_path}/python"),
                           (ClusterConfig(python="python3"), "")):  # fmt: skip
        found = site.missing_files(cluster, str(tmp_path))
        assert len(found) == bool(named)
        assert named in " ".join(found)


def test_machine_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoSlurmError, match=r"sinfo was not found: .* --dry-run"):
        site.check(ClusterConfig(), "pretrain", work_dir=".")
    said = site.check(ClusterConfig(), "pretrain", work_dir=".", optional=True)
    assert said.startswith("the profile was not checked against the site: sinfo was not found")


@pytest.mark.parametrize(("answer", "code", "outcome"), [
    ("sbatch: Job 7 to start at 2026-11-21T20:31:04 using 4 processors", 0, "Job 7 to start"),
    # Also said where nodes are drained or reserved at the moment.
    ("allocation failure: Requested node configuration is not available", 1, "Requested"),
    ("sbatch: error: invalid partition specified: x\nallocation failure: Invalid partition", 1,
     ConfigError),
    ("allocation failure: Unable to contact slurm controller (connect failure)", 1,
     NoAnswerError),
])  # fmt: skip
def test_last_check(
    at_site: FakeSlurm, answer: str, code: int, outcome: str | type[Exception]
) -> None:
    at_site.add("sbatch", f'[ "$*" = --test-only ] && cat >/dev/null; echo "{answer}" >&2\n'
                           f"exit {code}")  # fmt: skip
    if isinstance(outcome, str):
        assert site.ask_sbatch("#!/bin/bash\n").startswith(outcome)
    else:
        with pytest.raises(outcome, match=r"invalid partition|Unable to contact"):
            site.ask_sbatch("#!/bin/bash\n")


@pytest.mark.parametrize(
    ("said", "bind"),
    [("task/none", ""), ("(null)", ""), ("task/affinity,task/cgroup", "cores"), ("", "cores")],
)
def test_ranks_are_bound_if_can_be(slurm: FakeSlurm, tmp_path: Path, said: str, bind: str) -> None:
    (slurm.folder / "config").write_text(f"TaskPlugin              = {said}\n" if said else "")
    assert profile_here(None).cpu_bind == bind
    own = tmp_path / "c.yaml"
    own.write_text("cpu_bind: ''\n")
    assert profile_here(str(own)).cpu_bind == ""


def test_preemption_is_compared_with_the_time_of_a_save() -> None:
    text = (
        "PartitionName=train Default=YES PriorityTier=10 PreemptMode=REQUEUE GraceTime=5 Nodes=a\n"
        "PartitionName=scrap Default=NO PriorityTier=1 PreemptMode=CANCEL GraceTime=60 Nodes=a\n"
        "PartitionName=high Default=NO PriorityTier=100 PreemptMode=OFF GraceTime=0 Nodes=a\n"
    )
    named, wanted = site.parse_preempted(text, "")
    assert (named, wanted) == (
        [("partition train", "REQUEUE", "5"), ("partition scrap", "CANCEL", "60")],
        {"partition train"},
    )
    assert site.parse_preempted(text, "scrap,high")[1] == {"partition scrap", "partition high"}
    cluster = ClusterConfig(stop_before_end_s=90)
    for mode, grace_s, save_s, expected in (
        ("CANCEL", 60, None, "90 s .*`postnorm resume`.*PreemptMode=REQUEUE.*GraceTime >= 90"),
        ("CANCEL", 60, 50.0, "70 s .*a save took 50.0 s.*GraceTime >= 70"),
        ("CANCEL", 60, 39.0, None),
        ("REQUEUE", 5, 1.0, "checkpoint.every_steps.*GraceTime >= 21"),
        ("REQUEUE", 30, 1.0, None),
        ("SUSPEND", 0, 1.0, "train.hang_timeout_s"),
    ):
        found = [site.Preemption("partition p", mode, grace_s)]
        remarks = site.preemption_remarks(found, save_s, cluster)
        assert len(remarks) == (expected is not None)
        assert all(re.search(str(expected), text) for text in remarks), remarks
