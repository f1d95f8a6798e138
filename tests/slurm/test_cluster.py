"""The test cluster does what the tests of the launcher rest on."""

import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.leftovers import environment_of
from tests.support.processes import Processes
from tests.support.slurm import SlurmCluster
from tests.support.slurm_machines import Machines, Namespaces, Ports, can_unshare

ROOT = Path(__file__).parents[2]
_TELLING = """#!/bin/bash
srun bash -c 'echo $SLURM_PROCID $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
  getent ahostsv4 "$node" | head -n 1
done
"""
_SLEEPING = "#!/bin/bash\nsrun sleep 1000\n"
_ON_TWO_NODES = ("--nodes=2", "--ntasks-per-node=2", "--requeue", "--gpus-per-node=2")
_OWNER = """
import sys
from pathlib import Path
from tests.support.processes import Processes
from tests.support.slurm import SlurmCluster
from tests.support.slurm_machines import Namespaces, Ports
folder = Path(sys.argv[1])
with SlurmCluster(folder, machines={kind}(folder, 1)) as cluster:
    cluster.wait_for_tasks(cluster.sbatch({script!r}, "--output=/dev/null"), 1)
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a short name: paths of sockets below it have at most 107 bytes."""
    return tmp_path_factory.mktemp("c")


@pytest.fixture(params=[Namespaces, Ports])
def kind(request: pytest.FixtureRequest) -> type[Machines]:
    if request.param is Namespaces and not can_unshare():
        pytest.skip("needs iproute2 and the right to make namespaces")
    return request.param  # type: ignore[no-any-return]


def _of(folder: Path) -> list[list[str]]:
    """Commands of all processes that name a folder or have it in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            texts = [*process.cmdline(), *environment_of(process).values()]
            if any(str(folder) in text for text in texts):
                found.append(process.cmdline())
        except (OSError, psutil.Error):
            continue
    return found


def _traces(folder: Path) -> list[object]:
    """What a cluster must not leave behind."""
    names = [*psutil.net_if_addrs(), *(path.name for path in Path("/run").glob("netns/*"))]
    texts = Path("/etc/hosts").read_text() + Path("/proc/mounts").read_text()
    lines = [line for line in texts.splitlines() if "10.0.0." in line or str(folder) in line]
    return [*_of(folder), *lines, *(n for n in names if re.match(r"bridge|node\d|n\db\d", n))]


@pytest.mark.slow
def test_tasks_run_on_two_nodes_and_are_lost_with_one(folder: Path, kind: type[Machines]) -> None:
    log = folder / "job.log"
    with SlurmCluster(folder, machines=kind(folder, 2)) as cluster:
        job = cluster.sbatch(_TELLING, *_ON_TWO_NODES, f"--output={log}")
        cluster.wait_for(job, "COMPLETED")
        first, second = cluster.nodes
        lines = log.read_text().splitlines()
        assert sorted(lines[:4]) == [f"0 {first} 0,1", f"1 {first} 0,1", f"2 {second} 0,1",
                                     f"3 {second} 0,1"]  # fmt: skip
        assert len(lines) == 6, lines  # either node's name was found

        job = cluster.sbatch(_SLEEPING, *_ON_TWO_NODES, "--output=/dev/null")
        cluster.wait_for_tasks(job, 4)
        cluster.poweroff(2)
        assert not cluster.processes(2)
        cluster.declare_down(2)
        cluster.wait_for(job, "PENDING")
        assert cluster.job(job)["Restarts"] == "1"
        cluster.boot(2)
        cluster.wait_for_nodes()
        assert _of(folder)
    assert not _traces(folder)


def test_nothing_is_left_of_a_cluster_whose_owner_is_killed(
    folder: Path, kind: type[Machines], processes: Processes
) -> None:
    program = _OWNER.format(kind=kind.__name__, script=_SLEEPING)
    owner = processes.start(
        [sys.executable, "-c", program, str(folder)], stdin=subprocess.PIPE, stderr=None, cwd=ROOT
    )
    assert owner.stdout
    assert owner.stdout.readline() == "ready\n"
    assert len(_of(folder)) > 3
    owner.kill()
    owner.communicate()
    deadline = time.monotonic() + 30
    while left := _traces(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
