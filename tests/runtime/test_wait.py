"""Waiting for a rank that works for longer than the process group's timeout."""

import sys
from pathlib import Path

import pytest

from tests.support.ranks import finish, start

_RANK = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
import torch.distributed
from pipeline.runtime import dist, watchdog
rank, came = int(os.environ["RANK"]), Path(sys.argv[1])
phases = []
beat = watchdog.heartbeat
watchdog.heartbeat = lambda phase, step=None: (phases.append(phase), beat(phase, step))
torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=4))
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
    output = tmp_path / "out"
    finish(start([sys.executable, "-c", _RANK, str(tmp_path / "came")], 2, output), output)
