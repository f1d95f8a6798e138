"""Each kind of file that is written, on storage that fails for a moment, for long, or for good."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed

from data_prep.lease import held, this_process
from data_prep.stage import Stage, StageTask, replacing, run_tasks
from pipeline.checkpoints.background import RankFiles
from pipeline.checkpoints.manifest import remove, state_file
from pipeline.checkpoints.state import KINDS, TensorShard
from pipeline.data.ledger import Diverged, add_to_ledger, read_ledger
from pipeline.data.record import BatchRecord, read_batches
from pipeline.errors import PostnormError, explained
from pipeline.runtime.checkpoints import published
from pipeline.runtime.env import ProcessInfo
from pipeline.runtime.files import (
    PAUSES_S,
    append_json,
    make_folder,
    read_json_lines,
    rename,
    sync_folder,
    write_atomic,
)
from pipeline.runtime.run_folder import record_exit
from pipeline.runtime.tensors import read_file, write_file
from pipeline.train.batch_log import BatchLog
from pipeline.use.folder import publishing
from tests.support.checkpoints import make_checkpoint
from tests.support.storage import FailingStorage


def _state(folder: Path) -> list[object]:
    values = {kind: torch.arange(6.0) for kind in KINDS}
    parts = [TensorShard("weight", (2, 3), 0, values)]
    counters = {"updates": 1, "global_steps": 1, "skipped_steps": 0}
    described = RankFiles(folder / "new", 0, 1, parts, counters, {"index.json": b"{}"}).write()
    for name, entry in described.items():
        assert (folder / "new" / name).stat().st_size == entry["bytes"]
    values = read_file(folder / "new" / state_file(0, 1))
    return [sorted(described), *(values[name].tolist() for name in sorted(values))]


def _removed(folder: Path) -> list[Path]:
    remove([make_checkpoint(folder, 10)])
    return published(folder / "checkpoints") + list((folder / "checkpoints").glob(".*"))


def _renamed(folder: Path) -> bytes:
    (folder / "old").mkdir()
    (folder / "old" / "file").write_bytes(b"content")
    rename(folder / "old", folder / "new")
    return (folder / "new" / "file").read_bytes()


def _ledger(folder: Path) -> list[int]:
    for step in (3, 7):
        add_to_ledger(folder, Diverged(from_step=step, to_step=1, unix_s=1.0, found=["rank 1"]))
    return [each.from_step for each in read_ledger(folder).diverged]


def _batches(folder: Path) -> list[int]:
    meeting = f"file://{folder / 'meeting'}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        log = BatchLog(folder, 0, is_first=True)
        for batch in range(6):
            log.add(BatchRecord(batch, 8 * batch, 8, 64, batch + 1, batch))
            log.flush()
    finally:
        torch.distributed.destroy_process_group()
    return [record.batch for record in read_batches(folder)]


def _exit_code(folder: Path) -> str:
    record_exit(folder, ProcessInfo(1, 1, 2, "host", "7.0"), 75)
    return (folder / "exit" / "7.0" / "rank-00001").read_text()


def _weights(folder: Path) -> list[float]:
    write_file({"weight": torch.arange(3.0)}, folder / "model.safetensors")
    return read_file(folder / "model.safetensors")["weight"].tolist()


def _model(folder: Path) -> list[str]:
    with publishing(folder / "model") as unfinished:
        write_atomic(unfinished / "config.json", b"{}")
    return sorted(path.name for path in (folder / "model").iterdir())


def _task(task: StageTask[int]) -> tuple[dict[str, int], list[Path]]:
    with replacing(task.path(".npy")) as temporary, temporary.open("wb") as file:
        np.save(file, np.arange(task.payload))
    write_atomic(task.path(".json"), b"{}")
    return {"count": task.payload}, [task.path(".npy"), task.path(".json")]


def _stage(folder: Path) -> list[int]:
    tasks = [StageTask(f"{number}", folder / "stage", "key", number) for number in (4, 9)]
    done = run_tasks(Stage("stage", tasks, _task), workers=1)
    assert [record.result["count"] for record in done] == [4, 9]
    return [len(np.load(folder / "stage" / f"{number}.npy")) for number in (4, 9)]


def _lease(folder: Path) -> list[str]:
    with held(folder / "lease", this_process("config", None)):
        return sorted(path.name for path in (folder / "lease").iterdir())


def _line(folder: Path) -> list[dict[str, int]]:
    for number in range(3):
        append_json(folder / "lines.jsonl", {"n": number})
    return read_json_lines(folder / "lines.jsonl")  # type: ignore[return-value]


def _whole(folder: Path) -> bytes:
    write_atomic(folder / "file", b"old")
    write_atomic(folder / "file", b"new")
    return (folder / "file").read_bytes()


def _folder(folder: Path) -> bool:
    make_folder(folder / "a" / "b")
    sync_folder(folder / "a")
    return (folder / "a" / "b").is_dir()


WRITERS: dict[Callable[[Path], object], tuple[str, ...]] = {
    _whole: ("open", "fsync", "replace"),
    _line: ("os_open", "write"),
    _folder: ("mkdir", "fsync"),
    _renamed: ("replace",),
    _state: ("mkdir", "fsync", "open", "replace"),
    _removed: ("replace", "fsync"),
    _ledger: ("open", "fsync", "replace"),
    _batches: ("open", "fsync", "replace"),
    _exit_code: ("mkdir", "open"),
    _weights: ("fsync",),
    _model: ("mkdir", "fsync", "replace"),
    _stage: ("mkdir", "open", "fsync", "replace"),
    _lease: ("mkdir", "open", "link"),
}
CASES = [(writer, call) for writer, calls in WRITERS.items() for call in calls]


def _name(value: object) -> str:
    return getattr(value, "__name__", str(value)).strip("_")


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> FailingStorage:
    return FailingStorage(monkeypatch.setattr)


@pytest.mark.parametrize(("writer", "call"), CASES, ids=_name)
def test_a_moment_s_failure_is_tried_again(
    writer: Callable[[Path], object], call: str, tmp_path: Path, storage: FailingStorage,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    for folder in ("quiet", "failing"):
        (tmp_path / folder).mkdir()
    expected = writer(tmp_path / "quiet")
    for place, number in enumerate((errno.ESTALE, errno.EIO, errno.ETIMEDOUT)):
        (tmp_path / "failing" / str(place)).mkdir()
        storage.fail(call, number, 2, where="")
        before = len(storage.pauses)
        assert writer(tmp_path / "failing" / str(place)) == expected
        assert storage.pauses[before:] == list(PAUSES_S[:2])
        assert os.strerror(number) in caplog.text
    assert not list(tmp_path.rglob(".*.tmp"))


@pytest.mark.parametrize(("writer", "call"), CASES, ids=_name)
def test_what_lasts_ends_it_after_40_s_and_a_full_disk_at_once(
    writer: Callable[[Path], object], call: str, tmp_path: Path, storage: FailingStorage
) -> None:
    storage.fail(call, errno.EDQUOT, 1)
    with pytest.raises((OSError, PostnormError)) as caught:
        writer(tmp_path)
    assert storage.pauses == []
    assert _told(caught.value).exit_code == 2
    (tmp_path / "again").mkdir()
    storage.fail(call, errno.ESTALE, 99)
    with pytest.raises((OSError, PostnormError)) as caught:
        writer(tmp_path / "again")
    # Once: what has tried in vain is not tried again by those who called it.
    assert storage.pauses == list(PAUSES_S)
    assert _told(caught.value).exit_code == 1


def _told(error: BaseException) -> PostnormError:
    return explained(error) if isinstance(error, OSError) else error


def test_a_rename_that_was_done_without_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: FailingStorage
) -> None:
    real, (source, target) = os.replace, (tmp_path / "a", tmp_path / "b")

    def silent(*paths: Path) -> None:
        real(*paths)
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    source.write_text("content")
    monkeypatch.setattr(os, "replace", silent)
    rename(source, target)
    assert target.read_text() == "content"
    assert storage.pauses == list(PAUSES_S[:1])
    monkeypatch.setattr(os, "replace", real)
    with pytest.raises(FileNotFoundError):
        rename(source, target)


def test_a_last_line_is_repaired(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    cases: list[tuple[bytes, list[int]]] = [
        (b'{"n": 1}\n{"n": 2}', [1, 2]),
        (b'{"n": 1}\n{"n": 2', [1]),
        (b'{"n": 1}\n\xff\xfe{"', [1]),
        (b'{"n": 1}', [1]),
        (b"\xff", []),
    ]
    for torn, kept in cases:
        path.write_bytes(torn)
        append_json(path, {"n": 9})
        assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [*kept, 9]
