"""Nothing is left of a test cluster, however its owner ends."""

import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.leftovers import environment_of
from tests.support.processes import Processes, wait_until
from tests.support.slurm_machines import Machines, Namespaces, Ports, can_unshare

ROOT = Path(__file__).parents[2]
_SLEEPING = "#!/bin/bash\nsrun sleep 1000\n"
_OWNER = """
import sys
from pathlib import Path
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
        with suppress(OSError, psutil.Error):
            texts = [*process.cmdline(), *environment_of(process).values()]
            if any(str(folder) in text for text in texts):
                found.append(process.cmdline())
    return found


def _traces(folder: Path) -> list[object]:
    """What a cluster must not leave behind."""
    names = [*psutil.net_if_addrs(), *(path.name for path in Path("/run").glob("netns/*"))]
    texts = Path("/etc/hosts").read_text() + Path("/proc/mounts").read_text()
    lines = [line for line in texts.splitlines() if "10.0.0." in line or str(folder) in line]
    return [*_of(folder), *lines, *(n for n in names if re.match(r"bridge|node\d|n\db\d", n))]


def test_nothing_is_left_of_it(folder: Path, kind: type[Machines], processes: Processes) -> None:
    program = _OWNER.format(kind=kind.__name__, script=_SLEEPING)
    owner = processes.start(
        [sys.executable, "-c", program, str(folder)], stdin=subprocess.PIPE, stderr=None, cwd=ROOT
    )
    assert owner.stdout.readline() == "ready\n"
    assert len(_of(folder)) > 3
    owner.kill()
    owner.communicate()
    wait_until(lambda: not _traces(folder))
