"""One output folder has one writer: real processes that race, die, stand still and come again."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from data_prep import lease
from data_prep.lease import Holder, held, holders, this_process
from pipeline.errors import EXIT_FAILED_RETRY, BusyError

_HOLD = """
import sys, time
from pathlib import Path
from data_prep import lease
lease._TOUCHED_EVERY_S = 0.05
part = ("ingest", int(sys.argv[3]), 4) if sys.argv[3] else None
with lease.held(Path(sys.argv[1]), lease.this_process(sys.argv[2], part)):
    print("held", flush=True)
    time.sleep(120)
"""


def _hold(folder: Path, config: str, rank: str = "") -> subprocess.Popen[str]:
    """A process that holds the folder."""
    command = [sys.executable, "-c", _HOLD, str(folder), config, rank]
    found = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert found.stdout
    assert found.stdout.readline() == "held\n"
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data" / "work" / "lease"


def _elsewhere(folder: Path, holder: Holder, age_s: float, number: int = 1) -> Path:
    """Write the files of a process of another machine."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{number:06d}.json").write_text(json.dumps({"group": holder.group}))
    path = folder / f"{number:06d}.{holder.part}.json"
    path.write_text(json.dumps(vars(holder)))
    then = time.time() - age_s
    os.utime(path, (then, then))
    return path


def _remote(config: str = "c") -> Holder:
    return replace(this_process(config, None), host="node7", group="run node7 1 2", job="812_3")


@pytest.mark.usefixtures("processes")
def test_another_run_is_refused_while_one_lives_and_let_in_once_killed(folder: Path) -> None:
    first = _hold(folder, "one config")
    for config in ("one config", "another"):
        busy = pytest.raises(BusyError, match=rf"process {first.pid}.*output_dir")
        with busy, held(folder, this_process(config, None)):
            pass
    assert len(holders(folder)) == 1
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert holders(folder) == []
    with held(folder, this_process("another", None)):
        assert len(holders(folder)) == 1
    assert holders(folder) == []


@pytest.mark.usefixtures("processes")
def test_parts_of_one_array_are_let_in_and_everything_else_is_not(folder: Path) -> None:
    first = _hold(folder, "c", "1")
    with held(folder, this_process("c", ("ingest", 0, 4))) as hosts:
        assert (len(hosts), len(holders(folder))) == (1, 2)
    refused = [("c", ("ingest", 1, 4)), ("c", ("ingest", 0, 3)), ("c", ("shards", 0, 4))]
    for config, part in [*refused, ("other", ("ingest", 0, 4))]:
        with pytest.raises(BusyError), held(folder, this_process(config, part)):
            pass
    first.send_signal(signal.SIGKILL)
    first.wait()
    for part in (("ingest", 1, 4), ("shards", 0, 4)):  # the killed task again, and another stage
        with held(folder, this_process("c", part)):
            pass


def test_another_machine_is_dead_once_silent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> None:
        """Let time pass for the lease alone."""
        waits.append(seconds)
        monkeypatch.setattr(lease, "EXPIRES_S", lease.EXPIRES_S - seconds)

    monkeypatch.setattr(lease.time, "sleep", wait)
    ours = this_process("c", None)
    path = _elsewhere(folder, _remote(), age_s=lease.EXPIRES_S - 20)
    with held(folder, ours):
        # Waited for, because it might have touched its file again.
        assert len(waits) > 10
    assert not path.exists()
    waits.clear()
    _elsewhere(folder, _remote(), age_s=lease.EXPIRES_S + 1, number=2)
    with held(folder, ours):
        assert not waits


def test_another_machine_that_lives_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _elsewhere(folder, _remote(), age_s=20)
    sleep = time.sleep

    def comes_back(seconds: float) -> None:
        os.utime(path)
        sleep(0)

    monkeypatch.setattr(lease.time, "sleep", comes_back)
    busy = pytest.raises(BusyError, match=r"node7, process .*, job 812_3")
    with busy, held(folder, this_process("c", None)):
        pass


@pytest.mark.usefixtures("processes")
def test_a_process_that_stood_still_and_lost_its_folder_ends_at_once(folder: Path) -> None:
    first = _hold(folder, "c")
    _elsewhere(folder, _remote("other"), age_s=0, number=2)
    assert first.wait(timeout=60) == EXIT_FAILED_RETRY
    assert first.stdout
    assert "taken by another run" in first.stdout.read()


_RACE = """
import os, sys, time
from pathlib import Path
from data_prep.lease import held, this_process
from pipeline.errors import BusyError
folder, inside, entered = Path(sys.argv[1]), Path(sys.argv[2]), 0
until = time.monotonic() + 5
while time.monotonic() < until:
    try:
        with held(folder, this_process(sys.argv[3], None)):
            os.close(os.open(inside, os.O_CREAT | os.O_EXCL))  # fails if another one is inside
            time.sleep(0.001)
            inside.unlink()
            entered += 1
    except BusyError:
        pass
print(entered)
"""


@pytest.mark.usefixtures("processes")
def test_of_many_that_come_at_once_one_is_inside(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _RACE, str(folder), str(tmp_path / "inside")]
    racing = [
        subprocess.Popen([*command, f"config {number}"], stdout=subprocess.PIPE, text=True)
        for number in range(4)
    ]
    counts = [int(process.communicate()[0] or -1) for process in racing]
    assert [process.returncode for process in racing] == [0] * 4
    assert sum(counts) > 20, counts


def test_a_live_process_of_the_same_part_keeps_its_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = this_process("c", ("ingest", 1, 4))
    with held(folder, holder):
        # It came between the look at the others and the making of the file.
        monkeypatch.setattr(lease, "_wait_for_death", lambda *_, **__: None)
        with pytest.raises(BusyError):
            lease._acquire(folder, holder)
        assert [path.name for path in folder.glob("*part*")] == ["000001.part-000001.json"]


_TAKEN = """
import json, sys, time
from pathlib import Path
from data_prep import lease
lease._TOUCHED_EVERY_S = 0.05
with lease.held(Path(sys.argv[1]), lease.this_process("c", ("ingest", 1, 4))):
    [path] = Path(sys.argv[1]).glob("*.part-000001.json")
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "process": 1}))
    time.sleep(60)
"""


@pytest.mark.usefixtures("processes")
def test_a_process_whose_file_is_another_ones_ends_at_once(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _TAKEN, str(folder)], timeout=50)
    assert done.returncode == EXIT_FAILED_RETRY
