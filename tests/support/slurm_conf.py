"""The configuration of a SLURM cluster on one machine (22.05 to 24), as text."""

import os
import pwd
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PARTITIONS = {
    "train": "Default=YES PriorityTier=10 PreemptMode=REQUEUE GraceTime=5",
    "low": "PriorityTier=1 PreemptMode=REQUEUE GraceTime=5",
    "scrap": "PriorityTier=1 PreemptMode=CANCEL GraceTime=60",
    "high": "PriorityTier=100 PreemptMode=OFF",
}
"""Jobs in `high` push jobs in the others back into the queue, those in `scrap` out of it."""

_CPUS = _GPUS = 8  # what each node claims to have
_LONGEST_SOCKET = 107  # bytes of its path; slurmstepd listens on one


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    port: int


def write(
    folder: Path, controller: Host, nodes: Sequence[Host], settings: Mapping[str, object]
) -> None:
    """Writes all files that the daemons read, and makes their folders.

    The controller's host name must be the one that the system gives there; `settings` are lines of
    slurm.conf that differ from those here.
    """
    names = [node.name for node in nodes]
    longest = max(len(f"{folder}/spool/{name}/{name}_0000000.4294967291") for name in names)
    assert longest <= _LONGEST_SOCKET, f"{folder}: {longest - _LONGEST_SOCKET} bytes too long"
    for name in ("state", "log", "gpus", *(f"spool/{node.name}" for node in nodes)):
        (folder / name).mkdir(parents=True, exist_ok=True)
    # Only a link to a device is given to jobs in CUDA_VISIBLE_DEVICES; a GPU without a file makes
    # its node invalid.
    for number in range(_GPUS):
        link = folder / f"gpus/gpu{number}"
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/null")
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpus/gpu[0-{_GPUS - 1}]\n")
    # Named, because finding it out fails where /sys/fs/cgroup is not mounted.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    lines = [f"{name}={value}" for name, value in {**_settings(folder), **settings}.items()]
    lines += [f"SlurmctldHost={controller.name}({controller.address})",
              f"SlurmctldPort={controller.port}",
              # Jobs take a port for their ranks by their number: not those of another cluster.
              f"FirstJobId={controller.port * 100}"]  # fmt: skip
    size = f"Sockets=1 CoresPerSocket={_CPUS} ThreadsPerCore=1 RealMemory=64000"
    lines += [
        f"NodeName={node.name} NodeAddr={node.address} Port={node.port} {size} "
        f"Gres=gpu:{_GPUS} State=UNKNOWN"
        for node in nodes
    ]
    every = "Nodes=ALL MaxTime=INFINITE DefaultTime=10 State=UP"
    lines += [f"PartitionName={name} {every} {how}" for name, how in PARTITIONS.items()]
    (folder / "slurm.conf").write_text("\n".join([*lines, ""]))


def _settings(folder: Path) -> dict[str, object]:
    user = pwd.getpwuid(os.getuid()).pw_name
    return {
        "ClusterName": "tests",
        "SlurmUser": user,
        "SlurmdUser": user,
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool/%n",
        "SlurmctldPidFile": folder / "state/slurmctld.pid",
        "SlurmdPidFile": folder / "spool/%n/slurmd.pid",
        "SlurmctldLogFile": folder / "log/slurmctld.log",
        "SlurmdLogFile": folder / "log/slurmd.%n.log",
        "SlurmctldDebug": "verbose",
        "SlurmdDebug": "verbose",
        # Everyone is believed: no munge with its key and daemon. A requeued job waits cred_expire
        # and a second; fewer than 5 are refused.
        "AuthType": "auth/none",
        "CredType": "cred/none",
        "AuthInfo": "cred_expire=5",
        # Neither systemd nor cgroups are needed: nothing holds a job to its cores and memory.
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SwitchType": "switch/none",
        "MpiDefault": "none",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "PropagateResourceLimits": "NONE",
        "MailProg": "/bin/true",
        "SlurmdParameters": "config_overrides",  # more cores than the machine has
        "GresTypes": "gpu",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "DefMemPerCPU": 100,
        # What a test waits for comes soon.
        "SchedulerType": "sched/backfill",
        "SchedulerParameters":
            "batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1",
        "PriorityType": "priority/basic",
        "ReturnToService": 2,
        "JobRequeue": 1,
        "CompleteWait": 0,
        "KillWait": 5,
        "SlurmdTimeout": 10,
        "TCPTimeout": 2,
        "MessageTimeout": 10,
        "UnkillableStepTimeout": 20,
        "MinJobAge": 3600,  # jobs that ended can be asked for
        "MaxArraySize": 1001,
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
    }  # fmt: skip
