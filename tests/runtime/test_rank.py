"""Running as a rank: exit records, a lost rank, and errors and signals that ranks agree on."""

import sys
from pathlib import Path

import pytest

from pipeline.errors import BusyError, ConfigError, LostRankError
from pipeline.runtime.env import ProcessInfo
from pipeline.runtime.rank import Rank, run_as_rank
from tests.support.processes import python
from tests.support.ranks import finish, start

PROCESS = ProcessInfo(0, 0, 2, "here", "17.0")


def _raising(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "code"),
    [(None, 75), (ConfigError(), 2), (BusyError(), 1), (ValueError(), 1), (SystemExit(), 1)],
)
def test_the_exit_code_is_recorded(error: BaseException | None, code: int, tmp_path: Path) -> None:
    def work(rank: Rank) -> int:
        # As a run does, whose config names another folder than the launcher.
        rank.run_dir = tmp_path / "run"
        return 75 if error is None else _raising(error)

    if error is None:
        assert run_as_rank(work, PROCESS, str(tmp_path / "launched")) == code
    else:
        with pytest.raises(type(error)):
            run_as_rank(work, PROCESS, str(tmp_path / "launched"))
    assert (tmp_path / "run/exit/17.0/rank-00000").read_text() == f"{code}\n"
    assert not (tmp_path / "launched").exists()


def test_a_folder_that_cannot_be_written_hides_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="the reason"):
        run_as_rank(lambda _: _raising(ConfigError("the reason")), PROCESS, str(tmp_path / "file"))


def test_a_lost_rank_is_told_from_other_errors(tmp_path: Path) -> None:
    def work(rank: Rank) -> int:
        rank.if_lost = "Look at b2"
        raise RuntimeError("[/pytorch/third_party/gloo/gloo/pair.cc:1] Connection closed\nmore")

    with pytest.raises(LostRankError, match=r"rank 0 .*closed\. .* Look at b2"):
        run_as_rank(work, PROCESS, str(tmp_path))
    assert (tmp_path / "exit/17.0/rank-00000").read_text() == "1\n"
    with pytest.raises(RuntimeError, match="out of memory"):
        run_as_rank(lambda _: _raising(RuntimeError("out of memory")), PROCESS)


_AGREEING = """
import os
from pipeline.errors import DataError, PostnormError
from pipeline.runtime import dist, env, rank
process = env.process_info()
def say(text):
    os.write(1, f"{process.rank} {text}\\n".encode())  # at once: both ranks have this file
dist.open_group(process, dist.own_device(process), 30)
with dist.raise_on_all_ranks():
    value = "no error"
for failing in (1, 0):
    try:
        with dist.raise_on_all_ranks([0, 1], "reading"):
            if process.rank >= failing:
                raise DataError(f"shard of rank {process.rank}")
        say("nothing was raised")
    except DataError as error:
        say(error)
say(dist.on_first(lambda: 7, "counting"))
signals = rank.StopRequest()
say(repr(rank.agreed_signal(signals)))
signals.signal_name = "SIGUSR1" if process.rank == 1 else ""
say(rank.agreed_signal(signals))
dist.close_group()
"""


@pytest.mark.usefixtures("processes")
def test_ranks_agree_on_errors_and_signals(tmp_path: Path) -> None:
    output = tmp_path / "out"
    finish(start([sys.executable, "-c", _AGREEING], 2, output), output)
    text = output.read_text()
    for rank in (0, 1):
        assert [line[2:] for line in text.splitlines() if line.startswith(f"{rank} ")] == [
            "shard of rank 1", "shard of rank 0", "7", "''", "SIGUSR1"
        ]  # fmt: skip
    assert "nothing was raised" not in text


@pytest.mark.usefixtures("processes")
def test_a_rank_alone_is_refused_among_tasks_of_srun(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"run_dir: {tmp_path}/run\ndata: {{dir: {tmp_path}}}\n")
    for verb in ("pretrain", "profile"):
        environment = {"PATH": "/usr/bin:/bin", "SLURM_NTASKS": "4", "SLURM_PROCID": "3"}
        said = python("-m", "pipeline", verb, config, code=2, cwd=None, env=environment)
        assert "SLURM has 4 tasks" in said
    assert not (tmp_path / "run").exists()
