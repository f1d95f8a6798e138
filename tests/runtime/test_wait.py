"""Waiting for a rank that works for longer than the process group's timeout."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, free_port

_RANK = """
import sys, time
from datetime import timedelta
from pathlib import Path
import torch.distributed
from pipeline.runtime import dist, watchdog
rank, port, came = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
phases = []
beat = watchdog.heartbeat
watchdog.heartbeat = lambda phase, step=None: (phases.append(phase), beat(phase, step))
torch.distributed.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2,
    timeout=timedelta(seconds=4),
)
dist.barrier()
if rank == 1:
    time.sleep(3)
    dist.heartbeat_all("copying")
    time.sleep(3)
    came.touch()
dist.wait_for([0, 1], "copying")
if rank == 0:
    assert came.exists(), "it did not wait"
    waiting = phases.count("waiting for other ranks: copying")
    assert waiting > 1, "the other rank's progress was no beat"
dist.wait_for([0], "nothing")
assert dist.gather(rank) == [0, 1]
dist.barrier()
# Otherwise gloo's threads abort a process on its way out now and then.
torch.distributed.destroy_process_group()
"""


@pytest.mark.usefixtures("processes")
def test_a_rank_is_waited_for_as_long_as_it_gets_on(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-c", _RANK]
    words = [port, str(tmp_path / "came")]
    ranks = [subprocess.Popen([*command, str(rank), *words], cwd=ROOT) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
