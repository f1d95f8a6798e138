"""The folder of a run: which other folders are told from it, its lock and its exit records."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.errors import RunFolderError
from pipeline.inspect.status import run_status
from pipeline.runtime.env import process_info
from pipeline.runtime.run_folder import RunFolder, record_exit
from tests.support.run_folder import RunFolder as StartedRun

_PASS = r"Pass the run_dir of a started run\."


def _touch(*names: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for name in names:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    return make


def _half_a_line(folder: Path) -> None:
    folder.mkdir()
    (folder / "attempts.jsonl").write_text('{"attempt": 1, "ran')


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, rf"x does not exist\. {_PASS}"),
        (lambda folder: folder.touch(), rf"x is a file, not a run folder\. {_PASS}"),
        (lambda folder: folder.mkdir(), rf"x is not a run folder \(no attempts\.jsonl\)\. {_PASS}"),
        (_half_a_line, r"x is not a run folder \(no attempts\.jsonl\)"),
        (
            _touch("config.json", "model.safetensors"),
            rf"x is a model folder, not a run folder \(no attempts\.jsonl\)\. {_PASS}",
        ),
        (_touch("index.json"), "x is a dataset, not a run folder"),
        (_touch("manifest.json"), "x is a checkpoint of a run, not a run folder"),
        (
            _touch("launch/0001/submission.json"),
            r"was submitted but has not started \(no attempts\.jsonl\)\. `python -m launch status",
        ),
        (_touch("logs/rank-00000.log"), r"has not started .*x/logs holds the messages"),
    ],
    ids=[
        "missing", "file", "empty", "torn", "model", "dataset", "checkpoint", "submitted", "failed"
    ],
)  # fmt: skip
def test_each_other_folder_is_named(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    make(tmp_path / "x")
    with pytest.raises(RunFolderError, match=message):
        RunFolder.started(tmp_path / "x")


def test_a_started_run_opens_whatever_follows_its_first_start(tmp_path: Path) -> None:
    (tmp_path / "attempts.jsonl").write_text('{"attempt": 1}\n{"attempt": 2, "ran')
    assert RunFolder.started(tmp_path).path == tmp_path


def test_the_message_says_what_the_caller_takes(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"\. Pass a run or a model\.$"):
        RunFolder.started(tmp_path, "a run or a model")


@pytest.mark.usefixtures("processes")
def test_the_lock_of_another_process_is_seen_and_not_kept(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert not run.is_locked()
    with run.lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code = (
            "import sys; from pathlib import Path; from pipeline.runtime.run_folder import *;"
            "print(RunFolder(Path(sys.argv[1])).is_locked())"
        )
        command = [sys.executable, "-c", code, tmp_path]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout == "True\n"
    assert not run.is_locked()
    with run.lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_exit_records_are_kept_apart_by_attempt(tmp_path: Path) -> None:
    group = {
        "RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host",
        "MASTER_PORT": "29500", "SLURM_JOB_ID": "17",
    }  # fmt: skip
    for restarts, code in (("0", 75), ("1", 0)):
        record_exit(tmp_path, process_info({**group, "SLURM_RESTART_COUNT": restarts}), code)
    assert (tmp_path / "exit/17.0/rank-00001").read_text() == "75\n"
    assert (tmp_path / "exit/17.1/rank-00001").read_text() == "0\n"


@pytest.mark.parametrize(
    ("jobs", "first_end"),
    [
        (("local-1", "local-2"), "failed, trying again changes nothing"),
        # Written before starts by hand had a job each.
        (("local", "local"), "not known: a later start replaced its exit codes"),
    ],
)
def test_each_start_ends_as_its_own_ranks_say(
    tmp_path: Path, jobs: tuple[str, str], first_end: str
) -> None:
    run = StartedRun(tmp_path / "run")
    # The node's clock is ahead of that of the file server, which sets the files' times.
    now = time.time() + (3600 if len(set(jobs)) > 1 else -3600)
    for job, code in zip(jobs, (2, 75), strict=True):
        run.started(job, now)
        shutil.rmtree(run.folder / "exit" / job, ignore_errors=True)
        run.exited(job, code, code)
        now += 10
    ends = [start.end for start in run_status(run.folder).starts]
    assert ends == [first_end, "stopped on request, saved"]


def test_a_folder_that_cannot_be_written_is_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "locked" / "run" / "logs").mkdir(parents=True)
    refused = [tmp_path / "file", tmp_path / "file" / "run"]
    refused += [tmp_path / "locked" / "run", tmp_path / "locked" / "new"]
    for path in (tmp_path / "locked" / "run", tmp_path / "locked"):
        path.chmod(0o555)
    is_root = os.geteuid() == 0
    try:
        if is_root:  # who may write everywhere
            os.seteuid(65534)
        for path in refused:
            with pytest.raises(RunFolderError, match=r"run_dir=.* cannot be written \(") as caught:
                RunFolder(path).create()
            assert caught.value.exit_code == 2
    finally:
        if is_root:
            os.seteuid(0)
    RunFolder(tmp_path / "new").create()


def test_paths_of_a_config_begin_where_the_run_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project" / "data").mkdir(parents=True)
    (tmp_path / "attempts.jsonl").write_text(json.dumps({"cwd": f"{tmp_path}/project"}) + "\n")
    run = RunFolder.started(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run.as_started("data") == f"{tmp_path}/project/data"
    monkeypatch.chdir(tmp_path / "project")
    assert run.as_started("data") == "data"
    assert run.as_started("/nowhere/data") == "/nowhere/data"
    assert run.as_started("s3://bucket/data") == "s3://bucket/data"
