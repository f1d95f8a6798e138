"""The folder of a run: which other folders are told from it, its lock and its exit records."""

import fcntl
import json
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.errors import RunFolderError
from pipeline.inspect.status import run_status
from pipeline.runtime.env import process_info_or_alone
from pipeline.runtime.rank import Rank
from pipeline.runtime.run_folder import RunFolder
from tests.support.damage import needs_mount
from tests.support.processes import output, python
from tests.support.run_folder import RunFolder as StartedRun


@pytest.mark.parametrize(("names", "said"), [
    ((), "does not exist.*run_dir"), (("x",), "a file, not a run folder.*run_dir"),
    (("x/",), r"attempts\.jsonl.*run_dir"), (("x/attempts.jsonl",), r"attempts\.jsonl"),
    (("x/config.json", "x/model.safetensors"), "model folder, not a run folder"),
    (("x/index.json",), "dataset, not a run"), (("x/manifest.json",), "checkpoint.*not a run"),
    (("x/launch/0001/submission.json",), "submitted.*postnorm status"),
    (("x/logs/rank-00000.log",), "not started.*x/logs"),
], ids=str)  # fmt: skip
def test_each_other_folder_is_named(tmp_path: Path, names: tuple[str, ...], said: str) -> None:
    for name in names:
        path = tmp_path / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text('{"attempt": 1, "ran')  # half a line
    with pytest.raises(RunFolderError, match=said):
        RunFolder.started(tmp_path / "x")


@pytest.mark.parametrize(("names", "named"), [
    (("a.txt", "b.jsonl.gz"), "a.txt, b.jsonl.gz"), (("index.json", "shards/x.tar"), "index.json"),
    (("config.json", "model.safetensors", "tokenizer.json", "vocab.txt", "a.bin"), "and more"),
    (("task.yaml", "tokenizer.model", "left-out.json"), None),
    (("tokenizer.json", "a.tar"), "a.tar"),
    ((), None), (("train.yaml", "submit.sh", "NOTES.md", "slurm-1.out"), None), ((".x.tmp",), None),
    (("launch/0001/submission.json", "logs/rank-00000.log", "lock", "resolved.yaml"), None),
    (("attempts.jsonl", "anything.bin"), None),
], ids=str)  # fmt: skip
def test_a_folder_of_something_else_is_no_runs(
    tmp_path: Path, names: tuple[str, ...], named: str | None
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"attempt": 1}\n')
    run = RunFolder(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    if named is None:
        run.refuse_foreign()
    else:
        with pytest.raises(RunFolderError, match=f"run_dir=.*{named}.*Choose a new"):
            run.refuse_foreign()
    assert sorted(tmp_path.rglob("*")) == before
    RunFolder(tmp_path / "new").refuse_foreign()


def test_a_refused_start_leaves_its_exit_code_to_a_job_alone(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    for job, left in (("local", ["a.txt"]), ("77", ["a.txt", "exit"])):
        Rank(replace(process_info_or_alone({}), job=job)).leave(tmp_path, 2)
        assert sorted(path.name for path in tmp_path.iterdir()) == left


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
        assert python("-c", code, tmp_path) == "True\n"
    assert not run.is_locked()
    with run.lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    ("jobs", "first_end"),
    [
        (("local-1", "local-2"), "failed, trying again changes nothing"),
        # Written before starts by hand had a job each.
        (("local", "local"), "not known: a later start replaced its exit codes"),
    ],
)
def test_starts_end_as_ranks_say(tmp_path: Path, jobs: tuple[str, str], first_end: str) -> None:
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
    (tmp_path / "new" / "checkpoints").touch()
    with pytest.raises(RunFolderError, match=r"checkpoints is a file\)"):
        RunFolder(tmp_path / "new").create()


@needs_mount
@pytest.mark.usefixtures("processes")
def test_read_only_checkpoints_are_found_at_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    code = (
        "import sys; from pathlib import Path; from pipeline.runtime.run_folder import RunFolder; "
        f"RunFolder(Path({str(tmp_path / 'run')!r})).create()"
    )
    script = f'mount -t tmpfs -o ro none {folder}; exec "$@"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    said = output(*command, sys.executable, "-c", code, code=1)
    assert f"cannot be written ({folder} Permission denied)" in said


def test_paths_begin_where_a_run_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project" / "data").mkdir(parents=True)
    first = json.dumps({"cwd": f"{tmp_path}/project"})
    (tmp_path / "attempts.jsonl").write_text(f'{first}\n{{"attempt": 2, "ran')  # half a line
    run = RunFolder.started(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run.as_started("data") == f"{tmp_path}/project/data"
    monkeypatch.chdir(tmp_path / "project")
    assert run.as_started("data") == "data"
    assert run.as_started("/nowhere/data") == "/nowhere/data"
    assert run.as_started("s3://bucket/data") == "s3://bucket/data"
